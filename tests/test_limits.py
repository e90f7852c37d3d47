"""What the host allows: RAM, control groups, memlock, and the ranks that share it."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch

import graphoffload
from graphoffload.compiler import device_limits as limits
from graphoffload.options.config import OffloadConfig

GIB = 2**29 * 2


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
    assert sorted(limits._cgroup_limits(table, root)) == [2500, 3000, 9000]


def test_version_1_and_a_container(tmp_path: Path) -> None:
    """The table names a path of the host; only the root is there."""
    table, root = tmp_path / "cgroup", tmp_path / "fs"
    table.write_text("9:name=systemd:/\n4:cpu,memory:/docker/abc\n3:pids:/docker/abc\n")
    write(root / "memory", "memory.limit_in_bytes", "4000")
    write(root / "pids" / "docker" / "abc", "memory.limit_in_bytes", "1")
    assert list(limits._cgroup_limits(table, root)) == [4000]
    assert list(limits._cgroup_limits(tmp_path / "nothing", root)) == []


@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"])
def test_ranks_share_what_the_host_has(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks, an eighth each; a number that the user gives is meant for each."""
    for each in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setattr(limits, "_host_memory_bytes", lambda: 100 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert limits._host_budget(OffloadConfig()) == 80 * GIB
    monkeypatch.setenv(name, "8")
    assert limits._host_budget(OffloadConfig()) == 10 * GIB
    assert limits._host_budget(OffloadConfig(host_budget="30GiB")) == 30 * GIB
    assert limits._host_budget(OffloadConfig(host_budget="50%")) == 50 * GIB


@pytest.mark.parametrize(("user", "expected"), [(1000, GIB), (0, 80 * GIB)])
def test_memlock_limits_whoever_is_not_root(user: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process's own limit, on a machine where memory is to be page-locked."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(limits, "_host_memory_bytes", lambda: 100 * GIB)
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

    from graphoffload.compiler import partitioner

    seen: list[list[tuple[int, ...]]] = []

    class Watching(graphoffload.OffloadPartitioner):
        def __call__(self, gm: torch.fx.GraphModule, joint_inputs: object, **kwargs: object) -> object:  # type: ignore[override]
            seen.append([tuple(value.shape) for value in partitioner._inputs(gm) if isinstance(value, torch.Tensor)])
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
