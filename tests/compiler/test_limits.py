"""What the host allows: RAM, control groups, memlock, and the ranks that share it."""

from __future__ import annotations

import gc
import os
import resource
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

import graphoffload
from graphoffload.compiler import device_limits as limits
from graphoffload.hardware import host_memory
from graphoffload.hardware.host_memory import HostRam
from graphoffload.options.config import OffloadConfig
from graphoffload.runtime.pinned.pool import HostPool

GIB = 2**29 * 2
RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def write(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text + "\n")


def test_every_group_around_the_process_counts(tmp_path: Path) -> None:
    """Version 2: a job's group has no limit of its own, the one around it has; "max" is none."""
    table, root = tmp_path / "cgroup", tmp_path / "fs"
    table.write_text("0::/slurm/job_7/step_0\n")
    write(root / "slurm" / "job_7" / "step_0", "memory.max", "max")
    write(root / "slurm" / "job_7", "memory.max", "3000")
    write(root / "slurm" / "job_7", "memory.high", "2500")
    write(root / "slurm", "memory.max", "9000")
    write(tmp_path, "memory.max", "1")  # outside of the root
    write(root / "slurm", "memory.current", "8000")
    write(root / "slurm", "memory.stat", "anon 500\nfile 7500\nactive_file 3000\ninactive_file 2500\nslab_reclaimable 100")
    found = sorted((ram.total_bytes, ram.available_bytes) for ram in host_memory.control_groups(table, root))
    assert found == [(2500, 2500), (3000, 3000), (9000, 9000 - (8000 - 5600))], "files in the page cache can be taken back"


def test_version_1_and_a_container(tmp_path: Path) -> None:
    """The table names a path of the host; only the root is there."""
    table, root = tmp_path / "cgroup", tmp_path / "fs"
    table.write_text("9:name=systemd:/\n4:cpu,memory:/docker/abc\n3:pids:/docker/abc\n")
    write(root / "memory", "memory.limit_in_bytes", "4000")
    write(root / "memory", "memory.usage_in_bytes", "5000")
    write(root / "memory", "memory.stat", "inactive_file 1\ntotal_inactive_file 600\ntotal_active_file 900")
    write(root / "pids" / "docker" / "abc", "memory.limit_in_bytes", "1")
    assert list(host_memory.control_groups(table, root)) == [HostRam(4000, 500)]
    write(root / "memory", "memory.usage_in_bytes", "9000")
    assert list(host_memory.control_groups(table, root)) == [HostRam(4000, 0)]
    assert list(host_memory.control_groups(tmp_path / "nothing", root)) == []


def test_what_others_take_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine as psutil sees it, and the tightest group around the process, each for itself."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=100 * GIB, available=30 * GIB))
    for groups, total, available in (
        ([], 100, 30),
        ([HostRam(50 * GIB, 40 * GIB)], 50, 30),
        ([HostRam(90 * GIB, 7 * GIB), HostRam(60 * GIB, 20 * GIB)], 60, 7),
    ):
        monkeypatch.setattr(host_memory, "control_groups", lambda *_, groups=groups: iter(groups))
        assert host_memory.for_this_process() == HostRam(total * GIB, available * GIB)


def test_without_psutil_all_memory_counts(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As a last resort, and the log says so."""
    monkeypatch.setitem(sys.modules, "psutil", None)
    with caplog.at_level("DEBUG", logger=host_memory.log.name):
        found = host_memory.machine()
    assert found.available_bytes == found.total_bytes > GIB
    assert "psutil" in caplog.text


@pytest.fixture
def ram(monkeypatch: pytest.MonkeyPatch) -> HostPool:
    """A host of 200 GiB of which 100 are available, for one process whose pool holds nothing."""
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(host_memory, "for_this_process", lambda: HostRam(200 * GIB, 100 * GIB))
    monkeypatch.setattr(limits, "POOL", HostPool())
    return limits.POOL


def test_what_the_pool_holds_is_this_process_s_own(ram: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second compile, and each of two ranks, has as much as the first before anything was taken."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for ranks in (1, 2):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        first = limits._host_budget(OffloadConfig())
        held = SimpleNamespace(held_bytes=10 * GIB)
        with monkeypatch.context() as later:
            later.setattr(ram, "snapshot", lambda held=held: held)
            left = HostRam(200 * GIB, (100 - 10 * ranks) * GIB)
            later.setattr(host_memory, "for_this_process", lambda left=left: left)
            assert limits._host_budget(OffloadConfig()) == first == 80 * GIB // ranks


@pytest.mark.usefixtures("ram")
@pytest.mark.parametrize("name", RANKS)
def test_ranks_share_what_the_host_has(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks, an eighth each; a number that the user gives is meant for each."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert limits._host_budget(OffloadConfig()) == 80 * GIB
    monkeypatch.setenv(name, "8")
    assert limits._host_budget(OffloadConfig()) == 10 * GIB
    assert limits._host_budget(OffloadConfig(host_budget="30GiB")) == 30 * GIB
    assert limits._host_budget(OffloadConfig(host_budget="50%")) == 100 * GIB, "of all there is"


@pytest.mark.usefixtures("ram")
@pytest.mark.parametrize(("user", "expected"), [(1000, GIB), (0, 80 * GIB)])
def test_memlock_limits_whoever_is_not_root(user: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process's own limit, on a machine where memory is to be page-locked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (GIB, resource.RLIM_INFINITY))
    assert limits._host_budget(OffloadConfig()) == expected
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert limits._host_budget(OffloadConfig()) == 80 * GIB


def test_gradients_of_outputs_do_not_count_as_living_throughout() -> None:
    """They are placeholders of the joint graph: a laptop's plan had the logits' gradient twice."""
    import torch
    from functorch.compile import make_boxed_func
    from torch._functorch.aot_autograd import aot_module_simplified

    from graphoffload.compiler import session

    seen: list[list[tuple[int, ...]]] = []

    class Watching(graphoffload.OffloadPartitioner):
        def __call__(self, gm: torch.fx.GraphModule, joint_inputs: object, **kwargs: object) -> object:  # type: ignore[override]
            seen.append([tuple(value.shape) for value in session._inputs(gm) if isinstance(value, torch.Tensor)])
            return super().__call__(gm, joint_inputs, **kwargs)  # type: ignore[arg-type]

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        compiler = lambda graph, _: make_boxed_func(graph.forward)  # noqa: E731
        return aot_module_simplified(
            gm, inputs, fw_compiler=compiler, bw_compiler=compiler,
            partition_fn=Watching(graphoffload.OffloadConfig(inner="aot_eager", policy="keep")),
        )  # fmt: skip

    weight = torch.randn(3, 5, requires_grad=True)
    torch.compile(lambda x: (x @ weight).sin(), backend=backend)(torch.randn(7, 3)).sum().backward()
    assert len(seen) == 1
    assert sorted(seen[0]) == [(3, 5), (7, 3)]


class Squares(torch.nn.Module):
    """What a batch of any size is multiplied with is small."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x).tanh()).square()
        return out


def test_inputs_of_symbolic_size_count_as_those_of_this_call() -> None:
    """A batch that takes memory takes it whether or not torch makes its size symbolic; nothing is guarded on for that."""
    peaks: list[int] = []
    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(
            Squares(), backend=graphoffload.OffloadBackend(policy="keep", inner="aot_eager"), dynamic=dynamic
        )
        compiled(torch.randn(1000, 8)).sum().backward()
        peaks.append(graphoffload.last_plans()[-1].prediction.predicted_peak_bytes)
    assert peaks[0] == peaks[1]
    plans = len(graphoffload.last_plans())
    compiled(torch.randn(500, 8)).sum().backward()
    assert len(graphoffload.last_plans()) == plans


class Cycle:
    """What only Python's garbage collector frees."""

    def __init__(self) -> None:
        self.me = self


def test_what_only_garbage_holds_is_not_planned_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that was deleted. Nothing is collected where the graph's inputs are all there is."""
    device, inputs = torch.device("cuda"), [torch.empty(250_000)]
    monkeypatch.setattr(limits, "device_of", lambda _: device)
    cycle = Cycle()
    alive = weakref.ref(cycle)
    monkeypatch.setattr(limits, "_allocate_workspaces", lambda _: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 10**9 if alive() else 10**6)
    gc.disable()
    try:
        del cycle
        assert alive() is not None
        assert limits._static_bytes(device, inputs) == 10**9, "what is planned again counts it: it may come back"
        limits.free_garbage(inputs)
        assert limits._static_bytes(device, inputs) == 10**6
        monkeypatch.setattr(gc, "collect", lambda: pytest.fail("there is nothing to collect"))
        limits.free_garbage(inputs)
        assert limits._static_bytes(device, inputs) == 10**6
    finally:
        gc.enable()
