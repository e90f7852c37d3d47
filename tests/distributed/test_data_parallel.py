"""FSDP2 and DDP in the ways that trainers use them: losses and gradients are plain torch's to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch is built without torch.distributed or gloo", allow_module_level=True)

from distributed.several import OFFLOAD, check, trained

MODULE = "distributed.data_parallel"
BUDGET: dict[str, Any] = {"budget": {"device_budget": "150KiB"}}
BOTH = {**OFFLOAD, **BUDGET}
SHORT: dict[str, Any] = {"fsdp2": BUDGET, "ddp_accumulated": OFFLOAD}
WAYS: dict[str, Any] = {
    "fsdp2": BOTH,
    "fsdp2_mixed_precision": {**OFFLOAD, "budget": {"device_budget": "80KiB"}},
    "fsdp2_accumulated": BOTH,
    "fsdp2_from_meta": BOTH,
    "ddp_static_graph": BOTH,
    "ddp_accumulated": BOTH,
    "ddp_unused_parameters": BOTH,
    "ddp_whole_buckets": OFFLOAD,
}


def _check(folder: Path, ways: dict[str, Any], *, inner: str = "aot_eager", ranks: int = 2) -> None:
    found = trained(MODULE, ways, folder, inner=inner, ranks=ranks)
    for way, variants in ways.items():
        for variant in variants:
            case = f"{way} {variant}"
            check(found, case, exact=inner == "aot_eager" and "whole" not in way)
            assert not any(seen[case]["warnings"] for seen in found), [seen[case]["warnings"] for seen in found]
            assert len({str(seen[case]["transfers"]) for seen in found}) == 1, "the ranks have other plans"
            if variant == "budget":
                assert all(set(seen[case]["variants"]) - {""} for seen in found), "no plan of a step"


def test_two_processes(tmp_path: Path) -> None:
    """A budget over evaluation and a checkpoint that is saved and resumed; microbatches under no_sync()."""
    _check(tmp_path, SHORT)


@pytest.mark.long
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_every_way(tmp_path: Path, inner: str) -> None:
    """Under Inductor to rounding."""
    ways = {way: each for way, each in WAYS.items() if inner == "aot_eager" or "mixed" not in way}
    _check(tmp_path, ways, inner=inner)


@pytest.mark.long
def test_four_processes(tmp_path: Path) -> None:
    """HSDP on a mesh of two by two."""
    _check(tmp_path, {"hybrid_sharded": BOTH}, ranks=4)
