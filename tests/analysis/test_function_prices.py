"""What exact GELU and tanh cost in a fused kernel: more than their bytes, where those are 2 a number."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from graphoffload.analysis.costs import NodeCost, node_costs
from graphoffload.analysis.fusion import fusion_of
from graphoffload.hardware.profile import PROFILES, HardwareProfile

RESULTS = Path(__file__).parents[2] / "docs" / "results"
FUSED = {row["kernel"]: row["ms"] for row in json.loads((RESULTS / "fused-kernels.json").read_text())["rows"]}
EXACT = json.loads((RESULTS / "convnext-kernels.json").read_text())["gelu"]
HARDWARE = replace(PROFILES["h200-sxm"], device_bandwidth_bytes_per_s=2 * 2**28 / (1e-3 * FUSED["copy add one 256 MiB"]))
NUMBERS = 2**26  # of fused-kernels.json


def milliseconds(function: Callable[..., Any], numbers: int, count: int, dtype: torch.dtype = torch.bfloat16) -> float:
    return 1e3 * sum(cost.time_s for cost in costs_of(function, numbers, count, dtype, HARDWARE))


def costs_of(
    function: Callable[..., Any], numbers: int, count: int, dtype: torch.dtype, hardware: HardwareProfile
) -> list[NodeCost]:
    def call(*given: Tensor) -> Tensor:  # what is traced has no defaults
        return function(*given)

    inputs = [torch.empty(numbers, dtype=dtype, device="meta") for _ in range(count)]
    graph = make_fx(call, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs).graph
    return node_costs(fusion_of(graph, fuses=True), hardware)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    return torch.nn.functional.gelu(x, approximate=approximate)


def backward(gradient: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    return torch.ops.aten.gelu_backward(gradient, x, approximate=approximate)


@pytest.mark.parametrize("row", EXACT, ids=lambda row: f"{row['kernel']} of {row['numbers']}")
def test_exact_gelu_is_priced_as_it_was_measured(row: dict[str, Any]) -> None:
    function, count = (backward, 2) if "backward" in row["kernel"] else (gelu, 1)
    assert milliseconds(function, row["numbers"], count) == pytest.approx(row["ms"], rel=0.08)


@pytest.mark.parametrize(("kernel", "function", "count"), [("forward", gelu, 1), ("backward", backward, 2)])
def test_tanh_is_priced_as_it_was_measured(kernel: str, function: Callable[..., Any], count: int) -> None:
    found = milliseconds(lambda *inputs: function(*inputs, approximate="tanh"), NUMBERS, count)
    assert found == pytest.approx(FUSED[f"gelu tanh {kernel}"], rel=0.1)


def test_more_bytes_hide_it() -> None:
    bytes_s = 2 * 4 * NUMBERS / HARDWARE.device_bandwidth_bytes_per_s + HARDWARE.kernel_launch_s
    assert milliseconds(gelu, NUMBERS, 1, torch.float32) == pytest.approx(1e3 * bytes_s, rel=0.001)


def test_a_plan_for_a_cpu_knows_no_functions() -> None:
    costs = costs_of(gelu, NUMBERS, 1, torch.bfloat16, replace(HARDWARE, source="cpu"))
    bytes_s = 2 * 2 * NUMBERS / HARDWARE.device_bandwidth_bytes_per_s + HARDWARE.kernel_launch_s
    assert sum(cost.time_s for cost in costs) == pytest.approx(bytes_s, rel=0.001)
