"""Two processes train together on two GPUs (NCCL): what tests/test_distributed.py shows on a CPU, with copies beside compute.

All cases of an inner compiler run in one pair of processes; each test reads what the two saw.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import CASES, GPUS, WAYS, check_case, check_profile, check_surroundings, read, spawned, train

PLACE = GPUS
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


def test_the_ranks_came_to_the_end(outcome: Outcome) -> None:
    """No rank raised anything or hung."""
    assert not outcome.failure, outcome.failure


@pytest.mark.parametrize("how", WAYS)
def test_copies_ran_beside_compute(outcome: Outcome, how: str) -> None:
    """Of each rank, in both directions, from page-locked memory; NCCL's kernels do not count as compute.

    Only some of it: a block's copies take longer than its products. Block by block from graph to graph, as by default: DDP cuts
    blocks into graphs that end at what they offload, so that within one of them a copy has 0.03 ms of gelu beside it.
    """
    if outcome.inner != "aot_eager":
        pytest.skip("profiled under aot_eager alone")
    name = f"{how} beside compute"
    for rank, seen in enumerate(outcome.needs(name)):
        got = seen[name]
        print(f"rank {rank}, {how}: {got}")
        assert got["pageable"] == 0, (rank, got)
        assert got["d2h_beside_ms"] >= 0.05 * got["d2h_ms"] > 0, (rank, got)
        assert got["h2d_beside_ms"] >= 0.05 * got["h2d_ms"] > 0, (rank, got)
