"""Two processes train together on two GPUs (NCCL): what tests/test_distributed.py shows on a CPU, with copies beside compute.

All cases of an inner compiler run in one pair of processes; each test reads what the two saw.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import platform
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_soak import check_soak, soak
from ranks import CASES, GPUS, WAYS, check_case, check_profile, check_surroundings, read, spawned, train

from graphoffload.hardware import numa
from graphoffload.hardware.measurement import resolve_hardware
from graphoffload.hardware.profile import LINK_RATES, HardwareProfile
from graphoffload.runtime.pinned.slabs import Slab

PLACE = GPUS
MOVE_PAGES = 279
SOAK_STEPS = int(os.environ.get("SOAK_STEPS", "500"))
GPUS_HERE = torch.cuda.device_count()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(GPUS_HERE < 2, reason=f"needs two CUDA GPUs in one machine, which has {GPUS_HERE}"),
    pytest.mark.skipif(not (dist.is_available() and dist.is_nccl_available()), reason="this torch is built without NCCL"),
]


@dataclass(frozen=True)
class Outcome:
    """What the ranks saw, and what ended them early ("" if nothing did)."""

    inner: str
    found: list[dict[str, Any]]
    failure: str

    def needs(self, *names: str) -> list[dict[str, Any]]:
        """What was seen, if both ranks came as far as these cases."""
        missing = [name for name in names if not all(name in seen for seen in self.found)]
        assert not missing, f"the ranks did not come as far as {missing}:\n{self.failure}"
        return self.found


@pytest.fixture(scope="module", params=["aot_eager", "inductor"])
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One pair of processes."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    failure = ""
    try:
        spawned(train, folder, PLACE, request.param)
    except Exception as error:  # the tests say which cases it took away
        failure = f"{type(error).__name__}: {error}"
    return Outcome(request.param, read(folder), failure)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_gradients_are_those_of_keep_all(outcome: Outcome, case: tuple[str, str]) -> None:
    """On both ranks, of every step: to the bit, under Inductor to rounding."""
    found = outcome.needs(" ".join(case))
    check_case(found, case, PLACE, outcome.inner)
    for rank, seen in enumerate(found):
        got = seen[" ".join(case)]
        print(f"rank {rank}: {got['d2h_bytes'] / 1e9:.2f} GB out, {got['seconds']} s, error {got['error']:.3g}: {got}")


def test_processes_share_what_is_there(outcome: Outcome) -> None:
    """One warning a process, half of the host memory for each, a link that both measured at the same time."""
    found = outcome.needs("hardware", "host_budget", "profiles")
    check_surroundings(found)
    check_profile(found, PLACE)


def test_the_link_is_slower_for_two_or_the_same(outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What both measured at the same time, beside what one of them measures alone: never faster, beyond noise."""
    monkeypatch.setenv("GRAPHOFFLOAD_CACHE_DIR", str(tmp_path))
    together = HardwareProfile.from_json(outcome.needs("hardware")[0]["hardware"]["profile"])
    alone = resolve_hardware("measure", "cuda:0")
    print("\n".join([*together.table_lines(), *alone.table_lines()]))
    assert (together.measured_by_ranks, alone.measured_by_ranks) == (2, 1)
    for field in LINK_RATES:
        assert 0.2 * getattr(alone, field) < getattr(together, field) < 1.1 * getattr(alone, field), field
    assert alone.both_ways_bytes_per_s > 1.1 * max(alone.d2h_bytes_per_s, alone.h2d_bytes_per_s)


@pytest.mark.parametrize("device", [0, 1])
def test_slabs_lie_on_the_node_of_their_gpu(device: int) -> None:
    """Of each slab 90 % of the pages at least; the kernel takes another node's only where memory is short."""
    node = numa.node_of(device)
    if node is None or not os.sched_getaffinity(0) & node.cpus:
        pytest.skip(f"cuda:{device}: {node or 'no NUMA node is known'}, or its CPUs are not this process's")
    before = os.sched_getaffinity(0)
    slab = Slab(256 * 2**20, (True, device))
    nodes = nodes_of_pages(slab.address, slab.nbytes)
    slab.close()
    print(f"cuda:{device}, {node}: {dict(nodes)}")
    assert os.sched_getaffinity(0) == before
    assert nodes[node.number] >= 0.9 * nodes.total()


def nodes_of_pages(address: int, nbytes: int, step: int = 2**16) -> Counter[int]:
    """How many of some pages are on each node, as the kernel says."""
    if platform.machine() != "x86_64":
        pytest.skip("the number of move_pages is known for x86_64 alone")
    pages = [address + offset for offset in range(0, nbytes, step)]
    status = (ctypes.c_int * len(pages))()
    given = (ctypes.c_void_p * len(pages))(*pages)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(MOVE_PAGES, 0, ctypes.c_ulong(len(pages)), given, None, status, 0) != 0:
        pytest.skip(f"move_pages: {os.strerror(ctypes.get_errno())}")
    return Counter(status)


def test_the_ranks_came_to_the_end(outcome: Outcome) -> None:
    """No rank raised anything or hung."""
    assert not outcome.failure, outcome.failure


@pytest.mark.parametrize("how", WAYS)
def test_copies_ran_beside_compute(outcome: Outcome, how: str) -> None:
    """Of each rank, in both directions, from page-locked memory; NCCL's kernels do not count as compute.

    Only some of it: a block's copies take longer than its products. Block by block from graph to graph, as by default: DDP cuts
    blocks into graphs that end at what they offload, so that within one of them a copy has 0.03 ms of gelu beside it. Reloads
    of a block begin after the last one of the block behind it, whose products are nearly done by then: 3 % under FSDP2.
    """
    if outcome.inner != "aot_eager":
        pytest.skip("profiled under aot_eager alone")
    name = f"{how} beside compute"
    for rank, seen in enumerate(outcome.needs(name)):
        got = seen[name]
        print(f"rank {rank}, {how}: {got}")
        assert got["pageable"] == 0, (rank, got)
        assert got["d2h_beside_ms"] >= 0.05 * got["d2h_ms"] > 0, (rank, got)
        assert got["h2d_beside_ms"] >= 0.02 * got["h2d_ms"] > 0, (rank, got)


def test_a_long_run_under_fsdp2(tmp_path: Path) -> None:
    """500 steps, copies of one rank delayed: losses and weights are plain torch's to the bit."""
    found = spawned(soak, tmp_path, dataclasses.replace(PLACE, limit_s=240.0), SOAK_STEPS)
    for rank, seen in enumerate(found):
        print(f"rank {rank}: {seen}")
    check_soak(found, SOAK_STEPS)
