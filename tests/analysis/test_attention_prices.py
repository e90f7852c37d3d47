"""What attention costs where it is estimated, and which of its operations are timed on a GPU."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from graphoffload.analysis.costs import Operation, work_of
from graphoffload.analysis.timing import may_run
from graphoffload.hardware.profile import PROFILES

ATEN = torch.ops.aten
MEASURED = Path(__file__).parents[2] / "docs" / "results" / "attention-dropout.json"


def seconds(backward: bool, dropout: float) -> float:
    """cuDNN's attention of 16 heads over 1024 tokens, not causal."""
    x, rows = (torch.empty(16, 16, 1024, width, device="meta", dtype=torch.bfloat16) for width in (64, 1))
    if backward:
        state = torch.empty((), dtype=torch.int64, device="meta")
        args: tuple[Any, ...] = (x, x, x, x, x, rows, state, state, None, None, None, 1024, 1024, dropout, False)
        target = ATEN._scaled_dot_product_cudnn_attention_backward.default
    else:
        args, target = (x, x, x, None, True, dropout, False), ATEN._scaled_dot_product_cudnn_attention.default
    return work_of(Operation(target, args, {}, x), 1).time_s(PROFILES["h200-sxm"])


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_dropout_is_priced_as_it_was_measured(direction: str) -> None:
    rows = [row for row in json.loads(MEASURED.read_text())["rows"] if row["kernels"] == "cudnn"]
    assert len(rows) == 12
    measured = statistics.median(row[f"{direction}_dropout_ms"] / row[f"{direction}_ms"] for row in rows)
    backward = direction == "backward"
    assert seconds(backward, 0.1) / seconds(backward, 0.0) == pytest.approx(measured, rel=0.05)


def node(target: Any, *values: Any) -> Node:
    graph, args = Graph(), list[Any]()
    for value in values:
        args.append(value)
        if isinstance(value, torch.Tensor):
            args[-1] = graph.placeholder(f"x{len(args)}")
            args[-1].meta["val"] = value
    return graph.call_function(target, tuple(args))


def test_attention_with_dropout_is_timed_and_what_follows_random_bounds_is_not() -> None:
    x = torch.empty(1, 2, 8, 16, device="meta")
    flat, bounds = torch.empty(8, 2, 16, device="meta"), torch.empty(3, dtype=torch.int32, device="meta")
    assert may_run(node(ATEN._scaled_dot_product_cudnn_attention.default, x, x, x, None, True, 0.1, False))
    assert not may_run(node(ATEN._flash_attention_forward.default, flat, flat, flat, bounds, bounds, 8, 8, 0.0, True, False))
    assert may_run(node(ATEN.mm.default, x[0, 0], x[0, 0]))
    assert not may_run(node(ATEN.bernoulli.p, x, 0.5)), "the user's random numbers stay as they are"
    assert not may_run(node(ATEN.embedding.default, x[0, 0], bounds)), "random indices are out of range"
