"""Sizes that divide and round: nodes that compute them, and training with an activation that has one.

The statistics of memory-efficient attention have 32 * ceil(tokens / 32) numbers a head, on a GPU.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.utils._sympy.functions import CeilToInt, FloorToInt, IntTrueDiv, Max, ModularIndexing, RoundToInt, TruncToInt

import graphoffload
from graphoffload.analysis import symbols
from graphoffload.torch_internals.graphs import can_be_written, write_out

N = sympy.Symbol("s7", integer=True, positive=True)
EXPRESSIONS = {
    "ceil": (32 * CeilToInt(IntTrueDiv(N, 32)), lambda n: 32 * math.ceil(n / 32)),
    "floor": (FloorToInt(IntTrueDiv(N, 3)) + 1, lambda n: n // 3 + 1),
    "trunc": (TruncToInt(IntTrueDiv(N, 3)), lambda n: math.trunc(n / 3)),
    "round": (RoundToInt(IntTrueDiv(N, 4)), lambda n: round(n / 4)),
    "modular": (ModularIndexing(N, 3, 5) + 2, lambda n: n // 3 % 5 + 2),
    "larger": (Max(N, 9) * 2, lambda n: max(n, 9) * 2),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_nodes_compute_what_the_expression_says(name: str) -> None:
    expression, expected = EXPRESSIONS[name]
    graph = Graph()
    result = write_out(expression, {N: graph.placeholder("n")})
    graph.output(result.node)
    run = GraphModule(nn.Module(), graph)
    assert [run(n) for n in (1, 7, 32, 33, 70)] == [expected(n) for n in (1, 7, 32, 33, 70)]


def test_two_symbols_are_of_one_graph() -> None:
    other, graph = sympy.Symbol("s8", integer=True, positive=True), Graph()
    expression = Max(N, other) + CeilToInt(IntTrueDiv(other, 2))
    result = write_out(expression, {N: graph.placeholder("n"), other: graph.placeholder("m")})
    graph.output(result.node)
    assert can_be_written(expression)
    assert GraphModule(nn.Module(), graph)(5, 9) == 9 + 5


def test_a_function_that_is_not_known_is_no_size_to_reload() -> None:
    assert all(can_be_written(expression) for expression, _ in EXPRESSIONS.values())
    assert not can_be_written(sympy.Function("new")(N))


@torch.library.custom_op("graphoffload_tests::rows", mutates_args=())
def rows(x: Tensor) -> Tensor:
    """log(sum(exp(x))) of each row, and zeros up to a multiple of 32."""
    result = x.new_zeros(x.shape[0], math.ceil(x.shape[1] / 32) * 32)
    result[:, : x.shape[1]] = x.logsumexp(2)
    return result


@rows.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], math.ceil(x.shape[1] / 32) * 32)


@torch.library.custom_op("graphoffload_tests::rows_backward", mutates_args=())
def rows_backward(gradient: Tensor, x: Tensor, result: Tensor) -> Tensor:
    """The gradient of x."""
    return torch.exp(x - result[:, : x.shape[1], None]) * gradient[:, : x.shape[1], None]


@rows_backward.register_fake
def _(gradient: Tensor, x: Tensor, result: Tensor) -> Tensor:
    return torch.empty_like(x)


rows.register_autograd(
    lambda ctx, gradient: rows_backward(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output),
)


class Rows(nn.Module):
    """Saves a tensor of 32 * ceil(tokens / 32) numbers a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = rows(torch.tanh(self.one(x))).mean() + torch.tanh(self.other(x)).mean()
        return result


def test_a_size_that_cannot_be_written_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbols, "can_be_written", lambda expression: "Ceil" not in str(expression))
    options: dict[str, Any] = {"inner": "aot_eager", "policy": "offload", "min_tensor_bytes": 0, "hardware": "h200-sxm"}
    torch.compile(Rows(), backend="graphoffload", dynamic=True, options=options)(torch.randn(4, 70, 16)).backward()
    (plan,) = graphoffload.last_plans()[-1:]
    refused = [tensor.why_not for tensor in plan.saved.tensors if not tensor.eligible]
    assert any("is not known in backward" in why and "Ceil" in why for why in refused), refused
    assert plan.offloaded_bytes > 0


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("policy", ["offload", "recompute"])
def test_any_number_of_tokens(inner: str, policy: str) -> None:
    torch.manual_seed(0)
    model = Rows()
    options: dict[str, Any] = {"inner": inner, "policy": policy, "min_tensor_bytes": 0, "hardware": "h200-sxm"}
    compiled = torch.compile(model, backend="graphoffload", dynamic=True, options=options)
    graphoffload.reset_stats()
    for tokens in (70, 33, 130):
        x, found = torch.randn(4, tokens, 16), []
        for run in (compiled, model):
            model.zero_grad()
            run(x).backward()
            found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        for ours, eager in zip(*found, strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-7)
    if policy == "offload":
        sizes = [tensor.shape for plan in graphoffload.last_plans() for tensor in plan.saved.tensors]
        assert any("ceil" in str(size).lower() for shape in sizes for size in shape), sizes
        assert graphoffload.stats()["offloads"] >= 3 * 3
