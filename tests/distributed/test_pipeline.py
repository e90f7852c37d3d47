"""Pipelines on two processes: several microbatches in flight, backwards in any order, some of them twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch is built without torch.distributed or gloo", allow_module_level=True)

from distributed.several import OFFLOAD, check, trained

MODULE = "distributed.pipelines"
BUDGET: dict[str, Any] = {"budget": {"device_budget": "180KiB"}}
BOTH = {**OFFLOAD, **BUDGET}
SHORT = {"one_forward_one_backward_blocks": BUDGET, "zero_bubble_blocks": OFFLOAD}
WAYS = {
    "gpipe_blocks": BOTH,
    "one_forward_one_backward_blocks": BOTH,
    "one_forward_one_backward_stages": {**OFFLOAD, "budget": {"device_budget": "330KiB"}},
    "interleaved_blocks": BOTH,
    "zero_bubble_blocks": BOTH,
}


def _check(folder: Path, ways: dict[str, Any], *, inner: str = "aot_eager") -> list[dict[str, Any]]:
    found = trained(MODULE, ways, folder, inner=inner)
    for way, variants in ways.items():
        for variant in variants:
            recomputes = way.endswith("stages") and variant == "budget" and inner == "inductor"  # the least plan copies nothing
            check(found, f"{way} {variant}", exact=inner == "aot_eager", moves=not recomputes)
    return found


def test_two_processes(tmp_path: Path) -> None:
    """Gradients are plain torch's to the bit. Both stages of 1F1B are planned: the first for two microbatches in flight."""
    found = _check(tmp_path, SHORT)
    stages = [seen["one_forward_one_backward_blocks budget"] for seen in found]
    for stage, flight in zip(stages, (True, False), strict=True):
        assert any("keep" in variant for variant in stage["variants"])
        assert not stage["warnings"]
        assert any("2 microbatches in flight" in text for text in stage["summaries"]) == flight, stage["summaries"]
    for seen in found:
        twice = seen["zero_bubble_blocks offload"]
        assert twice["reloads"] > twice["offloads"] + twice["stays"], "what was offloaded is read once for each backward"


@pytest.mark.long
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_every_schedule(tmp_path: Path, inner: str) -> None:
    """Under Inductor to rounding."""
    _check(tmp_path, WAYS, inner=inner)
