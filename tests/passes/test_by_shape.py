"""Views by strides become views by shape: the same values, whatever layout a compiler gives what they are of."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

import graphoffload
from graphoffload.passes.by_shape import view_by_shape
from graphoffload.runtime.layouts import same_layout

aten = torch.ops.aten


class Elsewhere(Interpreter):
    """Runs a graph as a compiler would that gives each result of a sine other strides; views by shape copy if they must."""

    def __init__(self, module: Any, order: list[int]) -> None:
        super().__init__(module)
        self.order = order

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = super().call_function(aten.reshape.default if target is aten.view.default else target, args, kwargs)
        if target is not aten.sin.default:
            return result
        back = [self.order.index(dim) for dim in range(result.dim())]
        return result.permute(self.order).contiguous().permute(back)


def laid_out(sizes: list[int], order: list[int]) -> Tensor:
    """Different numbers in a dense tensor whose memory is in this order of its dimensions."""
    back = [order.index(dim) for dim in range(len(order))]
    x = torch.arange(math.prod(sizes), dtype=torch.float64).view([sizes[dim] for dim in order])
    return x.permute(back)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    orders = st.permutations(range(len(sizes)))
    return sizes, list(draw(orders)), list(draw(orders))


@st.composite
def windows(draw: st.DrawFn, whole: int) -> tuple[list[int], list[int], int]:
    """Sizes, strides and an offset inside a memory of so many elements; elements may be in a window several times."""
    offset, room = draw(st.integers(0, whole - 1)), whole
    room -= offset + 1
    sizes, steps = [], []
    for _ in range(draw(st.integers(0, 3))):
        step = draw(st.integers(0, max(1, room)))
        size = draw(st.integers(1, 1 + min(4, room // step if step else 4)))
        sizes.append(size)
        steps.append(step)
        room -= step * (size - 1)
    return sizes, steps, offset


@settings(max_examples=150, deadline=None)
@given(layouts(), st.data())
def test_a_view_sees_the_same_in_any_layout(layout: tuple[list[int], list[int], list[int]], data: st.DataObject) -> None:
    sizes, order, elsewhere = layout
    x = laid_out(sizes, order)
    whole = data.draw(st.booleans())
    size, step, offset = ([x.numel()], [1], 0) if whole else data.draw(windows(x.numel()))

    def function(x: Tensor) -> Tensor:
        return torch.sin(x).as_strided(size, step, offset) + 1

    module = make_fx(function, tracing_mode="fake")(x)
    assert view_by_shape(module) == 1
    assert torch.equal(module(x), function(x))
    assert torch.equal(Elsewhere(module, elsewhere).run(x), function(x))


@settings(max_examples=75, deadline=None)
@given(layouts(), st.data())
def test_so_does_a_write(layout: tuple[list[int], list[int], list[int]], data: st.DataObject) -> None:
    sizes, order, elsewhere = layout
    x = laid_out(sizes, order)
    size, offset = data.draw(st.integers(1, x.numel())), 0
    step = (x.numel() - 1) // (size - 1) if size > 1 else 1

    def function(x: Tensor) -> Tensor:
        source = torch.full((size,), -7.0, dtype=x.dtype)
        return aten.as_strided_scatter(torch.sin(x), source, [size], [step], offset) * 2

    module = make_fx(function, tracing_mode="fake")(x)
    assert view_by_shape(module) == 1
    assert torch.equal(module(x), function(x))
    assert same_layout(x.shape, module(x).stride(), function(x).stride())
    assert torch.equal(Elsewhere(module, elsewhere).run(x), function(x))


def test_what_is_not_all_of_its_memory_stays() -> None:
    """An input of the graph, and a part of what is computed."""

    def function(x: Tensor) -> Tensor:
        return x.as_strided((4,), (2,)) + torch.sin(x)[2:].as_strided((4,), (1,), 2) + torch.sin(x).expand(3, 8)[0].sum()

    x = torch.arange(8.0)
    module = make_fx(function, tracing_mode="fake")(x)
    assert view_by_shape(module) == 0
    assert torch.equal(module(x), function(x))


class Normed(nn.Module):
    """What is recomputed from the reciprocal of a deviation, which Inductor gives other strides, is viewed by strides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        deviation = x.view(2, 1, 8, 64).var((2, 3), correction=0, keepdim=True)
        scale = torch.rsqrt(deviation + 1e-5) * self.weight.view(1, 1, 8, 1)
        return (x * scale.as_strided((2, 8), (8, 1))[:, :, None, None]).sin().cos().square().sum()


class Convolved(nn.Module):
    """Inductor has convolutions' channels last, and so what is recomputed from one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).sin()
        rows = y.as_strided((2, 16 * 64), (16 * 64, 1)) * torch.arange(16 * 64.0)
        return rows.cos().sum() + self.second(y).square().sum()


@pytest.mark.parametrize(("kind", "policy"), [(Normed, "offload"), (Convolved, "recompute")])
def test_gradients_under_inductor(kind: Any, policy: Any) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(2, 8, 8, 8) * torch.tensor([1.0, 3.0])[:, None, None, None]

    def gradients(function: Any) -> list[Tensor]:
        model.zero_grad()
        given = x.clone().requires_grad_()
        function(given).backward()
        return [value.grad for value in (given, *model.parameters()) if value.grad is not None]

    expected = [gradient.clone() for gradient in gradients(model)]
    torch._dynamo.reset()
    options: dict[str, Any] = {"min_tensor_bytes": 0, "hardware": "h200-sxm", "reserve": 0, "inner": "inductor"}
    backend: Any = graphoffload.OffloadBackend(policy=policy, **options)
    for ours, theirs in zip(gradients(torch.compile(model, backend=backend, dynamic=False)), expected, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-4
