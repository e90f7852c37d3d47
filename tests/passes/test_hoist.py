"""What forward computes for backward alone is computed where its operands are: the same values, in another order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from graphoffload.analysis.saved_values import GraphPair
from graphoffload.passes.hoist import as_torch_has_it, hoist_saved

aten = torch.ops.aten
N = 16
OPERATIONS = ("sin", "relu", "le", "t", "add_", "add", "zeros")


def hoisted(function: Callable[..., Any], *inputs: Tensor, returned: int = 1) -> list[str]:
    """The operations of a forward graph in their order afterwards; its values are those of before. returned: outputs that are
    the model's; the others are saved."""
    torch.manual_seed(0)
    module = make_fx(function, tracing_mode="fake")(*(value.clone() for value in inputs))
    names = [node.name for node in module.graph.nodes]
    torch.manual_seed(0)
    before = module(*(value.clone() for value in inputs))
    pair = hoist_saved(GraphPair(module, module, returned))
    pair.forward.graph.lint()
    pair.forward.recompile()
    torch.manual_seed(0)
    after = pair.forward(*(value.clone() for value in inputs))
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    nodes = [node for node in pair.forward.graph.nodes if node.op == "call_function"]
    as_torch_has_it(pair)
    assert [node.name for node in module.graph.nodes] == names, "undone"
    return [str(node.target).removeprefix("aten.").split(".")[0] for node in nodes]


def x(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(N, N, generator=torch.Generator().manual_seed(1)).to(dtype)


def test_a_mask_is_computed_where_its_operand_is() -> None:
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        relu = aten.relu(x.sin())
        return relu.exp().cos(), relu <= 0

    assert hoisted(forward, x()) == ["sin", "relu", "le", "exp", "cos"]


def test_what_a_mask_is_computed_from_comes_along() -> None:
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        z = y.exp()
        return z.cos(), (y.abs() <= 0).logical_not()

    assert hoisted(forward, x()) == ["sin", "abs", "le", "logical_not", "exp", "cos"]


def test_a_constant_comes_along() -> None:
    """It reads nothing, so it stands where the first that needs it can."""

    def forward(x: Tensor) -> tuple[Tensor, ...]:
        y = x.sin()
        z = y.exp()
        cos, tan = z.cos(), z.tan()
        zeros = torch.zeros(N, N)
        return cos, y <= zeros, tan <= zeros

    assert hoisted(forward, x()) == ["sin", "zeros", "le", "exp", "tan", "le", "cos"]


def test_a_view_of_what_is_computed_is_taken_there() -> None:
    """Its memory counts as saved from there on."""

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        return y.exp(), y.t()

    assert hoisted(forward, x()) == ["sin", "t", "exp"]


def test_a_view_of_an_equal_value_stays() -> None:
    """Of two equal values torch leaves out one. The view of it, which is saved, then shows what a later product reads."""

    def forward(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        one, other = aten.sin(w), aten.sin(w)
        return x @ one @ x @ one, aten.t(other)

    module = make_fx(forward, tracing_mode="fake")(x(), x())
    one, other = module.graph.find_nodes(op="call_function", target=aten.sin.default)
    other.replace_all_uses_with(one)
    module.graph.erase_node(other)
    names = [node.name for node in module.graph.nodes]
    hoist_saved(GraphPair(module, module, 1))
    assert [node.name for node in module.graph.nodes] == names


@pytest.mark.parametrize(
    "what", ["a view of an input", "an operand that is saved", "a wider result", "random", "returned", "read"]
)
def test_what_frees_no_memory_stays(what: str) -> None:
    def forward(x: Tensor) -> tuple[Tensor, ...]:
        y = x.sigmoid()
        z = y.exp()
        if what == "a view of an input":
            return z, x.t()
        if what == "an operand that is saved":
            return z, y, y <= 0
        if what == "a wider result":
            return z, y.double()
        if what == "random":
            return z, aten.bernoulli(y)
        if what == "returned":
            return z, y <= 0
        mask = y <= 0
        return z * mask, mask

    graph = make_fx(forward, tracing_mode="fake")(x()).graph
    as_written = [str(node.target).removeprefix("aten.").split(".")[0] for node in graph.nodes if node.op == "call_function"]
    assert hoisted(forward, x(), returned=2 if what == "returned" else 1) == as_written


def test_nothing_passes_a_write() -> None:
    def forward(x: Tensor) -> tuple[Tensor, ...]:
        y = x.sin()
        z = y.exp()
        y.add_(1)
        return z, y <= 0

    assert hoisted(forward, x()) == ["sin", "exp", "add_", "le"]


@given(st.data())
def test_any_graph_computes_the_same(data: st.DataObject) -> None:
    numbers = st.integers(0, 50)
    steps = data.draw(st.lists(st.tuples(st.sampled_from(OPERATIONS), numbers, numbers), max_size=16))
    saved = data.draw(st.lists(numbers, max_size=5))

    def forward(x: Tensor) -> tuple[Tensor, ...]:
        values = [x, x.cos()]
        for name, at, also in steps:
            value, other = values[at % len(values)], values[also % len(values)]
            if name == "add_":
                if value is not x and value.is_floating_point():
                    value.add_(1)
            elif name == "zeros":
                values.append(torch.zeros(N, N))
            elif name in ("le", "add"):
                values.append(value <= other if name == "le" else value + other)
            else:
                values.append(getattr(value.float(), name)())
        return values[-1].float().exp(), *(values[at % len(values)] for at in dict.fromkeys(saved))

    hoisted(forward, x())
