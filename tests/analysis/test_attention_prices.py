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
from graphoffload.analysis.timing import may_run, with_seeds_of_forward
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


HEADS = torch.empty(1, 2, 64, 32, device="meta", dtype=torch.bfloat16)
BACKWARDS: dict[str, tuple[str, ...]] = {
    "efficient": ("grad", "q", "k", "v", "", "out", "rows", "seed", "offset", "0.1", "mask", "causal"),
    "cudnn": ("grad", "q", "k", "v", "out", "rows", "seed", "offset", "", "", "", "64", "64", "0.1", "causal"),
    "flash": ("grad", "q", "k", "v", "out", "rows", "", "", "64", "64", "0.1", "causal", "seed", "offset"),
}


@pytest.mark.parametrize("kind", BACKWARDS)
def test_an_attentions_backward_reads_the_seeds_that_its_forward_makes(kind: str) -> None:
    """Memory-efficient attention reads them on the host. Its fake tensors say that they are on the device."""
    values = {"": None, "mask": [True, True, True, False], "causal": False, "rows": torch.empty(1, 2, 64, device="meta"),
              "64": 64, "0.1": 0.1}  # fmt: skip
    values |= {name: torch.zeros((), dtype=torch.int64, device="meta") for name in ("seed", "offset")}
    args = [values.get(name, HEADS) for name in BACKWARDS[kind]]
    target = getattr(ATEN, f"_scaled_dot_product_{kind}_attention_backward").default
    made, kwargs = with_seeds_of_forward(target, args, {})
    for name, before, after in zip(BACKWARDS[kind], args, made, strict=True):
        assert (after is before) is (name not in ("seed", "offset"))
    assert not kwargs
    target(*made)
    assert with_seeds_of_forward(ATEN.mm.default, [HEADS, HEADS], {}) == ([HEADS, HEADS], {})


def test_the_seeds_are_where_forward_leaves_them() -> None:
    library = torch.library.Library("graphoffload_seeds", "DEF")
    library.define("attention(Tensor query, float dropout_p=0.) -> (Tensor output, Tensor seed)")
    library.define("attention_backward(Tensor grad, Tensor query, Tensor seed, float dropout_p) -> Tensor")
    library.define("other_backward(Tensor grad, Tensor query, Tensor seed, Tensor offset, float dropout_p) -> Tensor")
    library.define("other(Tensor query, float dropout_p=0.) -> (Tensor output, Tensor seed)")
    for name in ("attention", "other"):
        library.impl(name, lambda query, dropout_p=0.0: (query.clone(), torch.tensor(7)), "CompositeExplicitAutograd")
    ops, wrong = torch.ops.graphoffload_seeds, torch.zeros((), dtype=torch.int64, device="meta")
    x = torch.zeros(2)
    args, _ = with_seeds_of_forward(ops.attention_backward.default, [x, x, wrong, 0.1], {})
    assert (args[2].device.type, int(args[2])) == ("cpu", 7)
    args, kwargs = with_seeds_of_forward(ops.attention_backward.default, [x, x], {"seed": wrong, "dropout_p": 0.1})
    assert (len(args), int(kwargs["seed"]), kwargs["dropout_p"]) == (2, 7, 0.1)
    with pytest.raises(LookupError, match="makes 1 seeds"):
        with_seeds_of_forward(ops.other_backward.default, [x, x, wrong, wrong, 0.1], {})
