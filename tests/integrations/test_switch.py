"""GRAPHOFFLOAD=1, install() and `python -m graphoffload run`: what Inductor compiles is planned, and nothing else changes."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import graphoffload
from graphoffload.cli import run as commands
from graphoffload.errors import ConfigError, NotOffloadedWarning
from graphoffload.integrations import autoload, switch
from graphoffload.runtime import registry
from graphoffload.torch_internals import inductor
from graphoffload.torch_internals.inductor_calls import take_over

ROOT = Path(__file__).resolve().parents[2]
BUDGET = {"device_budget": "3.4MiB", "hardware": "h200-sxm", "min_tensor_bytes": 1, "reserve": 0, "inner": "aot_eager"}


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        """Of width 64."""
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        """Of a batch of rows."""
        result: Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return result


@pytest.fixture(autouse=True)
def _off(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("GRAPHOFFLOAD") and not name.endswith("CACHE_DIR")]:
        monkeypatch.delenv(name)
    torch._dynamo.reset()
    yield
    switch.uninstall()
    torch._dynamo.reset()


def trained(steps: int = 5, **compile_options: Any) -> tuple[list[float], list[Tensor], list[tuple[str, str]], dict[str, int]]:
    """Losses, the last gradients, the decisions of the plans that ran, and what the ops did, of three blocks compiled one by
    one."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block())
    for block in model:
        block.compile(**compile_options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(512, 64)
    graphoffload.reset_stats()
    registry.forget()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    decisions = [(d.name, d.action) for plan in graphoffload.last_plans() for d in plan.decisions]
    return losses, [p.grad.clone() for p in model.parameters() if p.grad is not None], decisions, dict(graphoffload.stats())


def set_environment(monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    for name, value in values.items():
        monkeypatch.setenv(f"GRAPHOFFLOAD_{name.upper()}", str(value))


def test_as_by_name(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """An untouched script has the plan of its step, the losses and the gradients of the backend by name; one line says it."""
    by_name = trained(backend="graphoffload", options=BUDGET)
    plain = trained(backend="aot_eager")
    set_environment(monkeypatch, **BUDGET)
    switch.turn_on_by_environment("1")
    capfd.readouterr()
    switched = trained()
    assert switched[0] == by_name[0] == plain[0]
    for one, other, kept in zip(switched[1], by_name[1], plain[1], strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, kept)
    assert switched[2] == by_name[2] != []
    assert switched[3]["offloads"] == by_name[3]["offloads"] > 0 == plain[3]["offloads"]
    lines = [line for line in capfd.readouterr().err.splitlines() if "GRAPHOFFLOAD=1: on for" in line]
    assert len(lines) == 1
    assert "device_budget=3.40 MiB, reserve=0 B" in lines[0]


@pytest.mark.usefixtures("kernels_that_do_nothing")
def test_install_and_uninstall() -> None:
    """From code, with options; a second call's options hold from then on; afterwards Inductor is as it was."""
    before = torch._TorchCompileInductorWrapper.__call__
    graphoffload.install(policy="offload", min_tensor_bytes=1)
    assert trained(2)[3]["offloads"] > 0
    graphoffload.install(policy="keep")
    _, _, decisions, counts = trained(2)
    assert {action for _, action in decisions} <= {"keep"}
    assert counts["offloads"] == 0
    graphoffload.uninstall()
    graphoffload.uninstall()
    assert torch._TorchCompileInductorWrapper.__call__ is before
    assert trained(2)[2] == []


@pytest.mark.usefixtures("kernels_that_do_nothing")
def test_a_mode_and_options_of_inductor_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.compile was given for Inductor reaches it."""
    seen: list[dict[str, Any]] = []
    compile_graph = inductor.compile_graph

    def watched(gm: Any, inputs: Any, *, settings: dict[str, Any], **kwargs: Any) -> Any:
        seen.append(settings)
        return compile_graph(gm, inputs, settings=settings, **kwargs)

    monkeypatch.setattr(inductor, "compile_graph", watched)
    graphoffload.install(policy="offload", min_tensor_bytes=1)
    trained(1, options={"epilogue_fusion": False})
    assert seen
    assert all(settings["epilogue_fusion"] is False for settings in seen)
    seen.clear()
    trained(1, mode="max-autotune-no-cudagraphs")
    assert seen
    assert all(settings["max_autotune"] is True for settings in seen)


@pytest.mark.usefixtures("kernels_that_do_nothing")
def test_inference_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph without gradients is Inductor's own, to its last option; at the end of the process one line says so."""
    said: list[str] = []
    monkeypatch.setattr(switch, "say", said.append)
    monkeypatch.setattr("graphoffload.runtime.registry.last_plans", list)
    graphoffload.install()
    (active,) = switch._ACTIVE
    block = Block()
    block.compile()
    with torch.no_grad():
        block(torch.randn(4, 64))
    active._at_exit()
    assert said == [active._nothing("the process ends")]
    assert "1 without gradients" in said[0]


@pytest.mark.usefixtures("kernels_that_do_nothing")
def test_another_partitioner_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sets Inductor's custom_partitioner_fn keeps it, by an option or for the whole process."""
    said: list[str] = []
    monkeypatch.setattr(switch, "say", said.append)
    other = graphoffload.OffloadPartitioner(graphoffload.OffloadConfig(policy="offload", min_tensor_bytes=1))
    graphoffload.install(policy="keep")
    assert trained(1, options={"custom_partitioner_fn": other})[3]["offloads"] > 0
    with inductor.config.patch(custom_partitioner_fn=other):
        assert trained(1)[3]["offloads"] > 0
    assert said == ["graphoffload.install(): graphs with another custom_partitioner_fn are left to it"]


@pytest.mark.parametrize(
    ("text", "variables", "parts"),
    [
        ("40GiB", {}, ("GRAPHOFFLOAD='40GiB'", "GRAPHOFFLOAD_DEVICE_BUDGET=40GiB")),
        ("1", {"DEVICE_BUGDET": "1GiB"}, ("GRAPHOFFLOAD_DEVICE_BUGDET", "GRAPHOFFLOAD_DEVICE_BUDGET?")),
        ("on", {"DEVICE_BUDGET": "lots"}, ("GRAPHOFFLOAD_DEVICE_BUDGET", "lots")),
    ],
)
def test_a_bad_environment_stops_the_first_compile(
    monkeypatch: pytest.MonkeyPatch, text: str, variables: dict[str, str], parts: tuple[str, ...]
) -> None:
    """With the option's name, as a ConfigError of ours; importing torch goes on, and so does inference."""
    set_environment(monkeypatch, **variables)
    monkeypatch.setenv("GRAPHOFFLOAD", text)
    autoload.at_import()
    block = Block()
    block.compile()
    with torch.no_grad():
        block(torch.randn(4, 64))
    with pytest.raises(ConfigError) as info:
        block(torch.randn(4, 64))
    for part in parts:
        assert part in str(info.value)


@pytest.mark.parametrize("text", ["", "0", "off", "False", " no "])
def test_off(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Nothing happens."""
    before = torch._TorchCompileInductorWrapper.__call__
    monkeypatch.setenv("GRAPHOFFLOAD", text)
    autoload.at_import()
    assert torch._TorchCompileInductorWrapper.__call__ is before
    assert switch._ACTIVE == []


def test_import_torch_never_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever turning it on meets is one line."""

    def broken(text: str) -> None:
        raise ImportError("no such name in this torch")

    monkeypatch.setenv("GRAPHOFFLOAD", "1")
    monkeypatch.setattr(switch, "turn_on_by_environment", broken)
    autoload.at_import()
    assert "GRAPHOFFLOAD=1 has no effect: ImportError: no such name in this torch" in capsys.readouterr().err


def test_nothing_compiled_is_said_by_the_second_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a process, and only where nothing is planned in any other way."""
    monkeypatch.setattr("graphoffload.runtime.registry.last_plans", list)
    graphoffload.install()
    model = Block()
    one, two = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)

    def step(optimizer: torch.optim.Optimizer) -> list[str]:
        model(torch.randn(4, 64)).sum().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        return [str(w.message) for w in caught if w.category is NotOffloadedWarning]

    assert [step(one), step(two)] == [[], []]
    (text,) = step(one)
    for part in ("graphoffload.install() has no effect", "stepped 2 times", "no graph at all", "docs/trainers.md"):
        assert part in text
    assert [step(one), step(two), step(two)] == [[], [], []]


def test_eager_that_is_asked_for_is_no_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps under set_stance("force_eager") do not count, and what is compiled afterwards is planned."""
    monkeypatch.setattr("graphoffload.runtime.registry.last_plans", list)
    graphoffload.install(inner="aot_eager")
    (active,) = switch._ACTIVE
    block = Block()
    block.compile()
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotOffloadedWarning)
        for stance in ("force_eager", "default"):
            with torch.compiler.set_stance(stance):
                for _ in range(3):
                    block(torch.randn(4, 64)).sum().backward()
                    optimizer.step()
            assert active._planned == (stance == "default")


def compiled_optimizer() -> tuple[int, int]:
    """Breaks and graphs of an optimizer's step that torch compiles, in three steps."""
    torch.compiler.reset()
    counters.clear()
    net = nn.Linear(4, 4)
    step = torch.compile(torch.optim.SGD(net.parameters(), lr=0.1).step, backend="eager")
    for _ in range(3):
        net(torch.randn(2, 4)).sum().backward()
        step()
    return sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]


def test_a_compiled_optimizer_is_as_without() -> None:
    """Dynamo traces what runs after a step: nothing of ours is compiled with it, nor breaks its graph."""
    plain = compiled_optimizer()
    switch.turn_on_by_environment("1")
    assert compiled_optimizer() == plain
    assert plain[1] > 0


def test_a_planned_model_has_no_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor has one that is planned by the backend's name while the switch is on."""
    said: list[str] = []
    monkeypatch.setattr(switch, "say", said.append)
    for options in ({}, {"backend": "graphoffload"}):
        graphoffload.install(inner="aot_eager")
        (active,) = switch._ACTIVE
        with warnings.catch_warnings():
            warnings.simplefilter("error", NotOffloadedWarning)
            trained(3, **options)
        said.clear()
        active._at_exit()
        assert said == []


def test_undoing_leaves_a_later_taker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever took over after us is not undone by us."""
    monkeypatch.setattr(torch._TorchCompileInductorWrapper, "__call__", torch._TorchCompileInductorWrapper.__call__)
    undo = take_over(lambda gm, inputs, settings, as_before: as_before())
    later = lambda self, model_, inputs_, **kwargs: None  # noqa: E731
    torch._TorchCompileInductorWrapper.__call__ = later  # type: ignore[method-assign]
    undo()
    assert torch._TorchCompileInductorWrapper.__call__ is later


def test_undoing_holds_where_somebody_wrapped_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper that calls on reaches Inductor."""
    wrapper = torch._TorchCompileInductorWrapper
    monkeypatch.setattr(wrapper, "__call__", lambda self, model_, inputs_, **kwargs: "Inductor")
    undo = take_over(lambda gm, inputs, settings, as_before: "ours")
    ours = wrapper.__call__
    monkeypatch.setattr(wrapper, "__call__", lambda self, *args: f"wrapped {ours(self, *args)}")
    call = wrapper(None, None, None)
    assert call(None, []) == "wrapped ours"
    undo()
    assert call(None, []) == "wrapped Inductor"


# In processes of their own


SCRIPT = """
import sys, torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return self.down(torch.relu(self.up(x)))
net = Net()
if "eager" not in sys.argv:
    net.compile()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.randn(8, 64)).sum().backward()
optimizer.step()
import graphoffload
print(sys.argv[1:], graphoffload.stats()["offloads"])
"""


def ran(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GRAPHOFFLOAD")}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**kept, "PYTHONPATH": path, "GRAPHOFFLOAD_CACHE_DIR": str(cwd), **environment}
    return subprocess.run([*command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_off_imports_nothing(tmp_path: Path) -> None:
    """`import torch` imports the entry point's own file and its two packages, which are empty."""
    code = "import sys, torch; print([name for name in sys.modules if name.startswith('graphoffload')])"
    done = ran(sys.executable, "-c", code, cwd=tmp_path)
    names = {"graphoffload", "graphoffload.integrations", "graphoffload.integrations.autoload"}
    assert set(ast.literal_eval(done.stdout)) == names, done.stderr


@pytest.mark.slow
def test_run_a_script(tmp_path: Path) -> None:
    """`run` gives the script its arguments and the options; the exit status is the script's."""
    (tmp_path / "train.py").write_text(SCRIPT + "sys.exit(7)")
    options = ("--policy", "offload", "--min-tensor-bytes", "1", "--inner", "aot_eager")
    done = ran(sys.executable, "-m", "graphoffload", "run", *options, "train.py", "--lr", "2", cwd=tmp_path)
    assert done.returncode == 7, done.stderr
    arguments, _, offloads = done.stdout.strip().rpartition(" ")
    assert arguments == "['--lr', '2']"
    assert int(offloads) > 0
    assert "GRAPHOFFLOAD=1: on for" in done.stderr


@pytest.mark.slow
def test_a_script_that_compiles_nothing(tmp_path: Path) -> None:
    """It takes one step of its optimizer: the line comes at its end. One that never trains says nothing."""
    (tmp_path / "train.py").write_text(SCRIPT)
    done = ran(sys.executable, "train.py", "eager", cwd=tmp_path, GRAPHOFFLOAD="1")
    assert done.returncode == 0, done.stderr
    assert "GRAPHOFFLOAD=1 has no effect: the process ends" in done.stderr
    quiet = ran(sys.executable, "-c", "import torch", cwd=tmp_path, GRAPHOFFLOAD="1", GRAPHOFFLOAD_NONSENSE="1")
    assert (quiet.returncode, quiet.stderr) == (0, "")


# Commands


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts and modules by this Python, anything else from the PATH."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert commands.full_command(["train.py", "--lr", "1"]) == [sys.executable, "train.py", "--lr", "1"]
    assert commands.full_command(["--", "train.py"]) == [sys.executable, "train.py"]
    assert commands.full_command(["-m", "pkg", "x"]) == [sys.executable, "-m", "pkg", "x"]
    assert commands.full_command(["env", "python"]) == ["env", "python"]


@pytest.mark.parametrize(
    ("command", "part"),
    [([], "no command"), (["gone.py"], "gone.py does not exist"), (["no-such-command"], "on the PATH"), (["--x"], "--x is no")],
)
def test_bad_commands(command: list[str], part: str) -> None:
    """Each says what was meant to be run."""
    with pytest.raises(ConfigError, match=part):
        commands.full_command(command)


def test_an_environment_in_which_it_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before the command runs: torch calls no entry points, or finds none of ours. An option wins over a variable."""
    assert commands.with_switch({"A": "b"}, {"policy": "offload"}) == {
        "A": "b", "GRAPHOFFLOAD": "1", "GRAPHOFFLOAD_POLICY": "offload",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="TORCH_DEVICE_BACKEND_AUTOLOAD=0"):
        commands.with_switch({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, {})
    budget, slowdown = {"GRAPHOFFLOAD_DEVICE_BUDGET": "40GiB"}, {"GRAPHOFFLOAD_MAX_SLOWDOWN": "0.02"}
    on = {"GRAPHOFFLOAD": "1"}
    assert commands.with_switch(budget, {"max_slowdown": "2%"}) == {**on, "GRAPHOFFLOAD_MAX_SLOWDOWN": "2%"}
    assert commands.with_switch(slowdown, {"device_budget": "1GiB"}) == {**on, "GRAPHOFFLOAD_DEVICE_BUDGET": "1GiB"}
    assert commands.with_switch(slowdown, {"policy": "auto"}) == {**on, **slowdown, "GRAPHOFFLOAD_POLICY": "auto"}
    monkeypatch.setattr(commands, "_GROUP", "no.such.group")
    with pytest.raises(ConfigError, match="not installed"):
        commands.with_switch({}, {})
