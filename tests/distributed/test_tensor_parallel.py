"""Collectives inside compiled graphs, on two processes: losses and gradients are plain torch's to the bit, under any plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch is built without torch.distributed or gloo", allow_module_level=True)

from distributed.several import OFFLOAD, Found, check, trained

MODULE = "distributed.tensor_parallel"
WAYS = (
    "tensor_parallel_blocks",
    "tensor_parallel_whole",
    "sequence_parallel_whole",
    "loss_parallel_whole",
    "gathered_parameters",
    "checkpointed_collectives",
    "expert_parallel_whole",
    "expert_parallel_blocks",
)
TIGHT = {"tight": {"device_budget": "90KiB"}}
UNEVEN: dict[str, Any] = {
    "recomputes on one rank": [{"policy": "recompute"}, {"policy": "offload"}],
    "budget on one rank": [{"device_budget": "1GiB"}, {"policy": "keep"}],
}
SHORT: dict[str, Any] = {
    "tensor_parallel_blocks": TIGHT,
    "sequence_parallel_whole": {"recomputes on one rank": UNEVEN["recomputes on one rank"]},
}


def test_two_processes(tmp_path: Path) -> None:
    """Each rank runs the same collectives in the same order, whatever it offloads or recomputes."""
    found = trained(MODULE, SHORT, tmp_path)
    _check_step(found, "tensor_parallel_blocks tight")
    _check_uneven(found, "sequence_parallel_whole")


def _check_step(found: Found, case: str) -> None:
    """Blocks with collectives are planned as a step, on both ranks alike."""
    check(found, case, moves=False)
    assert len({str(seen[case]["transfers"]) for seen in found}) == 1
    for seen in found:
        assert set(seen[case]["variants"]) - {""}, f"no plan of a step: {seen[case]}"


def _check_uneven(found: Found, way: str) -> None:
    case = f"{way} recomputes on one rank"
    check(found, case, moves=False)
    assert sum(found[0][case]["recomputed"]) > 0
    assert found[0][case]["offloads"] == 0
    assert found[1][case]["offloads"] > 0


@pytest.mark.long
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_every_way(tmp_path: Path, inner: str) -> None:
    """Under Inductor to rounding: plain torch's kernels are other ones. How much they round is the CPU's, also with everything
    kept."""
    exact = inner == "aot_eager"
    variants = {**OFFLOAD, **(UNEVEN if exact else {"keep": {"policy": "keep"}})}
    found = trained(MODULE, {way: variants for way in WAYS}, tmp_path, inner=inner)  # noqa: C420
    for way in WAYS:
        check(found, f"{way} offload", exact=exact, beside="" if exact else f"{way} keep")
        assert not any(seen[f"{way} offload"]["warnings"] for seen in found)
        for variant in UNEVEN if exact else ():
            check(found, f"{way} {variant}", moves=False)
