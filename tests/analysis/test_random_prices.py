"""What random numbers cost in a fused kernel: they are computed, which the bytes of the kernel do not show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch._inductor import inductor_prims
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from graphoffload.analysis.costs import NodeCost, node_costs
from graphoffload.analysis.fusion import fusion_of
from graphoffload.hardware.profile import PROFILES

ATEN = torch.ops.aten
MEASURED = Path(__file__).parents[2] / "docs" / "results" / "fused-kernels.json"
SHAPE = [16384, 4096]


def dropout() -> tuple[Graph, Node]:
    """native_dropout as Inductor has it: its graph, and the random numbers in it."""
    graph, mode = Graph(), FakeTensorMode()
    with mode:
        values = [torch.empty(SHAPE, dtype=torch.bfloat16, device="meta"), torch.empty((), dtype=torch.int64, device="meta")]
        numbers = torch.empty(SHAPE, device="meta")
        x, seed = (graph.placeholder(name) for name in ("x", "seed"))
        random = graph.call_function(inductor_prims.random, (SHAPE, seed, "rand"))
        kept = graph.call_function(ATEN.gt.Scalar, (random, 0.1))
        scaled = graph.call_function(ATEN.mul.Tensor, (x, kept))
        graph.output((scaled, kept))
        for node, value in zip((x, seed, random, kept, scaled), (*values, numbers, numbers > 0.1, values[0] * 1), strict=True):
            node.meta["val"] = value
    return graph, random


def costs_on(hardware: str) -> tuple[list[NodeCost], int]:
    graph, random = dropout()
    fusion = fusion_of(graph, fuses=True)
    return node_costs(fusion, PROFILES[hardware]), fusion.order.index(random)


def test_a_mask_is_priced_as_it_was_measured() -> None:
    rows = {row["kernel"]: row for row in json.loads(MEASURED.read_text())["rows"]}
    costs, _ = costs_on("h200-sxm")
    measured = rows["dropout mask made"]
    assert 1e3 * sum(cost.time_s for cost in costs) == pytest.approx(measured["ms"], rel=0.05)
    assert measured["ms"] > 2 * measured["bytes_once_ms"], "its bytes alone are less than half of it"


def test_numbers_that_are_in_no_memory_take_time_all_the_same() -> None:
    costs, at = costs_on("h200-sxm")
    assert costs[at].moved_bytes == 0
    assert costs[at].time_s > 1e-4
    costs, at = costs_on("cpu")
    assert costs[at].time_s == 0.0
