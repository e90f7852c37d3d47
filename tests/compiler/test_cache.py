"""torch's compile caches: nothing that changes a plan may hit an old one, and a hit still tells what was decided.

torch's key holds the partitioner's uuid(), not module names nor annotations; on a hit the partitioner is not called at all.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from forked import run_script
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import graphoffload
from graphoffload.cache_files import keep_newest
from graphoffload.compiler import cache_key, device_limits
from graphoffload.errors import NotOffloadedWarning
from graphoffload.facts.plan import FORMAT, Action, Plan, Prediction
from graphoffload.facts.saved_tensors import SavedTable, SavedTensor
from graphoffload.hardware import host_memory
from graphoffload.log import log
from graphoffload.report.offload_report import plan_table
from graphoffload.runtime import registry
from graphoffload.runtime.pinned.pool import HostPool
from graphoffload.testing import compiled, draw, observe, run_step
from graphoffload.testing.structure import tag_everything

WIDTH = 16


class Named(nn.Module):
    """The same computation under any module names, with or without annotations."""

    def __init__(self, names: tuple[str, ...] = ("alpha", "beta"), annotated: dict[str, str] | None = None) -> None:
        super().__init__()
        self.names, self.annotated = names, annotated
        for name in names:
            self.add_module(name, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid()))

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = self.get_submodule(name)(x)
        return x


@dataclass(frozen=True)
class ByModule:
    """Offload what a module of this name produces."""

    module: str

    def __call__(self, tensor: SavedTensor) -> Action | None:
        return "offload" if self.module in tensor.module and tensor.eligible else "keep"


pytestmark = pytest.mark.usefixtures("kernels_that_do_nothing")  # keys, plans and copies do not depend on what is computed


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Empty caches of torch and of graphoffload for each test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("GRAPHOFFLOAD_CACHE_DIR", str(tmp_path / "graphoffload"))
    registry.forget()
    yield
    registry.forget()


def run(module: nn.Module | None = None, **options: Any) -> tuple[Plan, int, int]:
    """One training step in a new compile: (plan, bytes copied, hits of torch's cache)."""
    counters.clear()
    torch.manual_seed(0)
    module = Named() if module is None else module
    config = graphoffload.OffloadConfig(**{"policy": "offload", "min_tensor_bytes": 0, "verify": "checksum", **options})
    with observe() as seen:
        inputs = (draw(4, WIDTH, device="cpu", dtype=torch.float32, seed=0, requires_grad=True),)
        run_step(compiled(module, graphoffload.OffloadBackend(config)), inputs)
    (plan,) = seen.plans
    hits = counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
    return plan, seen.copied_bytes, hits


@pytest.mark.slow
def test_the_same_again_hits_and_still_has_its_report() -> None:
    """Same everything in a new compile: a hit, with the same plan shown and the same copies made."""
    first, copied, hits = run()
    assert hits == 0
    assert copied == first.offloaded_bytes > 0
    again, copied_again, hits = run()
    assert hits > 0, "no cache hit: the other tests of this file would prove nothing"
    assert (again.key, again.decisions, again.transfers) == (first.key, first.decisions, first.transfers)
    assert copied_again == copied


@pytest.mark.slow
def test_a_second_compile_is_shown_as_the_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The table is logged for a hit as well; a folder for dumps is filled each time, where a hit would have no graphs."""
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(10, logger=log.name):
            plan, _, hits = run()
        assert any(plan_table(plan) in record.getMessage() for record in caplog.records)
    assert hits > 0
    for folder in (tmp_path / "dumps", tmp_path / "dumps"):
        shutil.rmtree(folder, ignore_errors=True)
        run(dump_dir=str(folder))
        assert list(folder.glob("*forward.after.txt"))


CHANGES: dict[str, Callable[[], tuple[Plan, int, int]]] = {
    "policy": lambda: run(policy="keep"),
    "policy_object": lambda: run(policy=ByModule("beta")),
    "policy_mapping": lambda: run(policy={"*beta*": "offload", "*": "keep"}),
    "min_tensor_bytes": lambda: run(min_tensor_bytes="1GiB"),
    "offload_fraction": lambda: run(offload_fraction=0.5),
    "offload_modules": lambda: run(offload_modules=("beta",)),
    "verify": lambda: run(verify="graph"),
}


@pytest.mark.slow
def test_a_changed_configuration_never_reuses_a_plan() -> None:
    """Each change after the same first compile, all against one warm cache."""
    first, copied, _ = run()
    keys = {first.key}
    for name, change in CHANGES.items():
        plan, moved, _ = change()
        assert plan.key not in keys, name
        keys.add(plan.key)
        assert moved == plan.offloaded_bytes, name
        assert moved == copied if name == "verify" else moved < copied, name


@pytest.mark.slow
def test_a_policy_object_with_another_field_is_another_policy() -> None:
    """Equal classes, different values; and an equal value in a new object is the same."""
    alpha, _, _ = run(policy=ByModule("alpha"))
    beta, _, _ = run(policy=ByModule("beta"))
    again, _, hits = run(policy=ByModule("alpha"))
    assert hits > 0
    assert alpha.key == again.key != beta.key
    assert {t.module.split(".")[0] for t in beta.saved.tensors if beta.action(t.name) == "offload"} == {"beta"}


@pytest.mark.slow
def test_changed_module_names_never_reuse_a_plan() -> None:
    """The same graph text, the names exchanged: the plan follows the names."""
    policy = {"*alpha*": "offload", "*": "keep"}
    first, _, _ = run(Named(("alpha", "beta")), policy=policy)
    swapped, copied, _ = run(Named(("beta", "alpha")), policy=policy)
    assert first.key != swapped.key
    assert copied == swapped.offloaded_bytes
    where = [[plan.action(t.name) for t in plan.saved.tensors] for plan in (first, swapped)]
    assert where[0] != where[1]
    assert {t.module.split(".")[0] for t in swapped.saved.tensors if swapped.action(t.name) == "offload"} >= {"alpha"}


@pytest.mark.slow
def test_a_changed_annotation_never_reuses_a_plan() -> None:
    """A boundary name moved from one module to the other: torch's key does not see it."""
    found = []
    for marked in ("alpha", "beta"):
        module = Named()
        graphoffload.mark_boundary(module.get_submodule(marked), name="chosen")
        found.append(run(module, policy={"chosen": "offload", "*": "keep"})[0])
    first, second = found
    assert first.key != second.key
    assert [first.action(t.name) for t in first.saved.tensors] != [second.action(t.name) for t in second.saved.tensors]


class Region(nn.Module):
    """A checkpoint region between two layers: its body is a subgraph, which the text of the outer graph does not show."""

    def __init__(self, *, inside: str = "inside", op: str = "tanh", policy: Any = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.name, self.op, self.policy = inside, op, policy
        self.add_module(inside, nn.Linear(WIDTH, WIDTH))

    def body(self, x: Tensor) -> Tensor:
        y: Tensor = getattr(torch, self.op)(self.get_submodule(self.name)(x))
        return y * y

    def forward(self, x: Tensor) -> Tensor:
        extra = {} if self.policy is None else {"context_fn": partial(create_selective_checkpoint_contexts, self.policy)}
        out: Tensor = self.last(checkpoint(self.body, self.first(x), use_reentrant=False, **extra))
        return out


REGIONS = {
    "as it is": Region,
    "another operation": partial(Region, op="sigmoid"),
    "another module name": partial(Region, inside="other"),
    "tagged to save": partial(Region, policy=tag_everything(CheckpointPolicy.MUST_SAVE)),
    "tagged to offload": partial(Region, policy=tag_everything(CheckpointPolicy.MUST_CPU_OFFLOAD)),
    "tagged to recompute": partial(Region, policy=tag_everything(CheckpointPolicy.MUST_RECOMPUTE)),
}


def test_what_is_inside_a_checkpoint_region_is_part_of_the_key() -> None:
    """Body, module names and tags of a region; the same region twice is the same."""
    keys = {name: run(build(), inner="aot_eager", policy="auto")[0].key for name, build in REGIONS.items()}
    assert len(set(keys.values())) == len(REGIONS), keys
    again = {name: run(build(), inner="aot_eager", policy="auto")[0].key for name, build in REGIONS.items()}
    assert again == keys


def test_two_models_alive_at_once_keep_their_own_plans() -> None:
    """Forward of one, forward of the other, backward of both: nothing that the ops look up may have been overwritten."""
    inputs = (draw(4, WIDTH, device="cpu", dtype=torch.float32, seed=0, requires_grad=True),)
    config = graphoffload.OffloadConfig(policy="offload", inner="aot_eager", min_tensor_bytes=0, verify="checksum")
    torch._dynamo.reset()
    modules = [build() for build in REGIONS.values()]
    for module in modules:
        module.compile(backend=graphoffload.OffloadBackend(config))
    losses = [module(*inputs).sum() for module in modules]
    for loss in reversed(losses):
        loss.backward()
    found = [[parameter.grad.clone() for parameter in module.parameters()] for module in modules]
    for module, grads in zip(modules, found, strict=True):
        module.zero_grad()
        type(module).forward(module, *inputs).sum().backward()
        torch.testing.assert_close(grads, [parameter.grad for parameter in module.parameters()])


SCRIPT = """
import json
import torch
import torch._inductor.config
from torch import nn
from torch._dynamo.utils import counters
import graphoffload

torch._inductor.config.cpp.vec_isa_ok = False  # where its cache is empty, Inductor takes ten seconds to find out


class Model(nn.Module):  # a bare nn.Sequential is not compiled in place: torch skips its own modules' code
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Sigmoid())

    def forward(self, x):
        return self.layers(x)


torch.manual_seed(0)
model = Model()
config = graphoffload.OffloadConfig(policy="offload", min_tensor_bytes=0, verify="checksum")
model.compile(backend=graphoffload.OffloadBackend(config))
model(torch.ones(4, 16)).sum().backward()
print(json.dumps({
    "plans": [json.loads(plan.to_json()) for plan in graphoffload.last_plans()],
    "hits": counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"],
    "copied": graphoffload.stats()["d2h_bytes"],
    "checked": graphoffload.stats()["checked"],
    "grad": model.layers[0].weight.grad.double().sum().item(),
}))
"""


def printed(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What SCRIPT says of its step."""
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_second_process_hits_and_still_has_its_report(tmp_path: Path) -> None:
    """The plan comes from the store beside torch's cache; a lost store costs a compile, never a wrong step."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    first = printed(run_script(script, folder=tmp_path, environment=environment))
    assert first["hits"] == 0
    assert first["copied"] > 0
    # From scratch: Python hashes with another seed there.
    second = printed(subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300))
    assert second["hits"] > 0
    for what in ("plans", "copied", "checked", "grad"):
        assert second[what] == first[what], what
    environment["GRAPHOFFLOAD_CACHE_DIR"] = str(tmp_path / "empty")
    lost = printed(run_script(script, folder=tmp_path, environment=environment))
    for what in ("copied", "checked", "grad"):
        assert lost[what] == first[what], what
    assert [plan["decisions"] for plan in lost["plans"]] == [plan["decisions"] for plan in first["plans"]]


def test_explain_stores_no_plan(tmp_path: Path) -> None:
    """Its keys are made up and never asked for again; what is compiled is stored, by its own key and by its graph's."""
    x = draw(4, WIDTH, device="cpu", dtype=torch.float32, seed=0)
    graphoffload.explain(Named(), inner="aot_eager")(x)
    assert list(tmp_path.rglob("plans/*")) == []
    model = Named()
    model.compile(backend=graphoffload.OffloadBackend(inner="aot_eager"))
    model(x)
    (plan,) = graphoffload.last_plans()[-1:]
    assert {path.name for path in tmp_path.rglob("plans/*")} == {f"{plan.key}.json", f"{plan.key.partition('-')[0]}.json"}


@pytest.mark.parametrize("found", [None, 0, 1, FORMAT + 1, str(FORMAT)])
def test_a_plan_of_another_format_is_none(found: object, tmp_path: Path) -> None:
    """Another release wrote it: it is planned again, without a word; who reads it by hand is told."""
    plan = Plan(key="k", graph="g")
    path = tmp_path / "graphoffload" / "plans" / "k.json"
    path.parent.mkdir(parents=True)
    path.write_text(plan.to_json())
    assert registry.stored("k") == plan
    data = json.loads(plan.to_json())
    path.write_text(json.dumps({**data, "format": found}))
    assert registry.stored("k") is None
    with pytest.raises(ValueError, match=f"has format {found}, and format {FORMAT} is read"):
        Plan.from_json(path.read_text())
    path.write_text("[]")
    assert registry.stored("k") is None


def test_only_the_newest_plans_stay_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By number and by size; what a process left that was killed in writing goes as well."""
    folder = tmp_path / "plans"
    folder.mkdir()
    for age, name in enumerate(("new.json", "mid.json", "old.json", ".old.json.1234")):
        (folder / name).write_text("x" * 10)
        os.utime(folder / name, (1e9 - age, 1e9 - age))
    (folder / "folder").mkdir()
    os.utime(folder / "folder", (1, 1))

    def left(**most: int) -> set[str]:
        keep_newest(folder, **most)
        return {path.name for path in folder.iterdir()} - {"folder"}

    with FileLock(tmp_path / "plans.lock"):
        assert len(left(files=0, nbytes=0)) == 4, "another process is at it"
    assert left(files=3, nbytes=1000) == {"new.json", "mid.json", "old.json"}
    assert left(files=3, nbytes=29) == {"new.json", "mid.json"}
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: unlink(Path("/nowhere")))
    assert left(files=0, nbytes=0) == {"new.json", "mid.json"}, "it cannot be deleted, and nothing is raised"
    keep_newest(tmp_path / "nowhere" / "plans", files=0, nbytes=0)


def test_plans_are_pruned_where_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first that a process writes, and now and then."""
    monkeypatch.setattr(registry, "_MOST_FILES", 3)
    monkeypatch.setattr(registry, "_PRUNED_EVERY", 2)
    monkeypatch.setattr(registry, "_written", itertools.count())
    monkeypatch.setattr(registry, "_BASES", {})
    for number in range(9):
        registry.remember(f"k{number}", Plan(key=f"p{number}", graph="g"))
        os.utime(tmp_path / "graphoffload" / "plans" / f"k{number}.json", (1e9 + number, 1e9 + number))
    names = {path.name for path in tmp_path.rglob("plans/*")}
    assert "k8.json" in names
    assert len(names) == 3


def planned_with(gib: float, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Plan:
    """The plan of a new process in which the host has so much memory available."""
    ram = host_memory.HostRam(2**40, int(gib * 2**30))
    monkeypatch.setattr(host_memory, "for_this_process", lambda: ram)
    monkeypatch.setattr(device_limits, "POOL", HostPool())
    monkeypatch.setattr(registry, "_PLANS", {})
    monkeypatch.setattr(registry, "_BASES", {})
    return run(inner="aot_eager", **options)[0]


def test_what_the_host_has_available_is_in_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """It differs by GiBs from run to run; as long as the plan has room the plan is found again."""
    first = planned_with(100, monkeypatch)
    assert first.host_budget_bytes == int(0.8 * 100 * 2**30)
    for gib in (20, 500, 3):
        assert planned_with(gib, monkeypatch).key == first.key


def test_a_stored_plan_that_has_no_room_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With less memory than it needs, and, once it was made for want of memory, with more."""
    first = planned_with(100, monkeypatch)
    with pytest.warns(NotOffloadedWarning, match="host_budget=") as caught:
        poor = planned_with(0.5e-6, monkeypatch)
    assert len(caught) == 1
    assert 0 < poor.offloaded_bytes <= (poor.host_budget_bytes or 0) < first.offloaded_bytes
    assert poor.key != first.key
    rich = planned_with(100, monkeypatch)
    assert (rich.decisions, rich.offloaded_bytes) == (first.decisions, first.offloaded_bytes)
    assert rich.key not in (poor.key, first.key)


@pytest.mark.parametrize(
    ("now", "suits"), [(None, False), (59, False), (60, True), (79, True), (80, True), (88, True), (89, False), (500, False)]
)
def test_a_plan_suits_a_host(now: int | None, suits: bool) -> None:
    """Made within 80 bytes, of which it takes 60, where 100 are saved."""
    saved = SavedTable((SavedTensor(name="a", views=("a",), op="", shape=(100,), strides=(1,), dtype="uint8", nbytes=100),))
    plan = Plan(key="", graph="", saved=saved, prediction=Prediction(host_bytes=60), host_budget_bytes=80)
    assert plan.suits_host(now) == suits
    roomy = replace(plan, host_budget_bytes=100)
    assert roomy.suits_host(now) == (now is not None and now >= 60), "nothing was refused for want of memory"
    assert replace(plan, host_budget_bytes=None).suits_host(None)


def test_the_source_digest_reads_every_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes, which are a link in a checkout, and packages inside packages: what it leaves out would be a stale plan."""
    read: set[str] = set()
    package, plain = Path(cache_key.__file__).resolve().parent.parent, Path.read_bytes

    def reading(path: Path) -> bytes:
        read.add(path.relative_to(package).as_posix())
        return plain(path)

    monkeypatch.setattr(Path, "read_bytes", reading)
    cache_key.source_digest.__wrapped__()
    assert {"passes/reload.py", "planner/strategies/greedy.py", "compiler/backend.py", "units.py"} <= read
    assert {path.relative_to(package).as_posix() for path in package.rglob("*.py")} <= read
