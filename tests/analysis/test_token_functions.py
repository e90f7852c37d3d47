"""Linears of packed weights, which are functions of autograd: MLPs of them are computed in slices of the tokens as well."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from analysis.test_token_regions import TOKENS, WIDE, WIDTH, found
from torch import Tensor, nn

from graphoffload.analysis.token_functions import tokens_of
from graphoffload.analysis.token_regions import regions_by_token


def product(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    ctx.save_for_backward(codes, scale)
    return F.linear(x, codes.to(x.dtype) * scale)


def gradient_of_tokens(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    codes, scale = ctx.saved_tensors
    return torch.matmul(gradient, codes.to(gradient.dtype) * scale), None, None


class Packed(torch.autograd.Function):
    """A product of tokens and a matrix of small integers, which is not trained."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        return product(ctx, x, codes, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradient_of_tokens(ctx, gradients[0])


class Normed(Packed):
    """Its gradient depends on that of all tokens."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradient_of_tokens(ctx, gradients[0] / gradients[0].norm())


class Centred(Packed):
    """Its result depends on all tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        return product(ctx, x - x.mean(1, keepdim=True), codes, scale)


class Scaled(torch.autograd.Function):
    """The scale is trained: its gradient is a sum over tokens, which is not looked into."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, codes, scale)
        return F.linear(x, codes.to(x.dtype) * scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, codes, scale = ctx.saved_tensors
        matrix = torch.matmul(gradients[0].flatten(0, 1).t(), x.flatten(0, 1))
        return torch.matmul(gradients[0], codes.to(x.dtype) * scale), None, (matrix * codes).sum()


class Noisy(Packed):
    """Each token's result depends on where a generator stands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        return product(ctx, x, codes, scale * torch.rand_like(scale))


class Stacked(Packed):
    """Tokens in a list."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        return product(ctx, torch.cat([x, x], dim=1)[:, : x.shape[1]], codes, scale)


class Named(Packed):
    """Everything by name, which is not looked into."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scale)
        return F.linear(input=x, weight=codes.to(x.dtype) * scale)


class Linear(nn.Module):
    def __init__(self, function: Any, inward: int, outward: int, trained: bool = False) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("codes", torch.randint(-8, 8, (outward * inward,), dtype=torch.int8))
        self.scale = nn.Parameter(torch.tensor(0.05), requires_grad=trained)
        self.shape = (outward, inward)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.function.apply(x, self.codes.view(self.shape), self.scale)
        return y


class Gated(nn.Module):
    """A gated MLP with an adapter beside its last linear."""

    def __init__(self, function: Any, trained: bool = False) -> None:
        super().__init__()
        self.gate, self.up = (Linear(function, WIDTH, WIDE, trained) for _ in range(2))
        self.down = Linear(function, WIDE, WIDTH, trained)
        self.one, self.other = nn.Linear(WIDE, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(x)
        wide = F.silu(self.gate(y)) * self.up(y)
        return y + self.down(wide).clone() + self.other(self.one(wide))


@pytest.mark.parametrize("shape", [(1, TOKENS), (TOKENS,), (3, 5)])
def test_packed_linears_are_in_slices(shape: tuple[int, ...]) -> None:
    """Matrices in another shape stand between the operations; they go before them."""
    torch.manual_seed(0)
    regions, whole, sliced = found(Gated(Packed), torch.randn(*shape, WIDTH))
    assert len(regions) == 1
    assert len(sliced) == 4  # of the result, the input, and both parameters of the adapter
    for ours, theirs in zip(sliced, whole, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("function", [Normed, Centred, Noisy, Stacked, Named])
def test_functions_that_look_at_all_tokens_are_not(function: Any) -> None:
    torch.manual_seed(0)
    regions, whole, sliced = found(Gated(function), torch.randn(2, TOKENS, WIDTH))
    assert regions == []
    assert all(map(torch.equal, sliced, whole))


def test_a_function_with_a_gradient_for_a_parameter_is_not() -> None:
    torch.manual_seed(0)
    regions, whole, sliced = found(Gated(Scaled, trained=True), torch.randn(2, TOKENS, WIDTH))
    assert regions == []
    torch.testing.assert_close(sliced, whole)


def test_four_bits_of_bitsandbytes() -> None:
    """A layer of a Llama with adapters on weights of four bits has one region."""
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    from graphoffload.bench.models import build
    from graphoffload.bench.variants import layers_of

    workload = build("llama3-8b-lora", "cpu", {"layers": 1, "tokens": 64, "batch": 1, "bits": 4}, tiny=True)
    layer = layers_of(workload)[0].mlp
    regions, whole, sliced = found(layer, torch.randn(1, 64, 64, dtype=torch.bfloat16), slices=8)
    assert len(regions) == 1
    for ours, theirs in zip(sliced, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)


def test_the_form_of_torch_2_11() -> None:
    """There forward returns a matrix beside the product, and backward takes a gradient of it that it does not read."""
    seen: list[Any] = []
    regions: list[Any] = []

    def backend(gm: Any, _: Any) -> Any:
        for node in gm.graph.nodes:
            if tokens_of(node) is None:
                continue
            forward, backward = (getattr(gm, given.target) for given in node.args[:2])
            end = next(iter(forward.graph.find_nodes(op="output")))
            outputs, saved = end.args[0]
            takes = backward.graph.find_nodes(op="placeholder")
            if len(outputs) == 1:
                end.args = (((*outputs, saved[0]), saved),)
                with backward.graph.inserting_after(takes[0]):
                    backward.graph.placeholder("unused_0")
            seen.append(tokens_of(node))
            with gm.graph.inserting_after(node):
                beside = gm.graph.call_function(operator.getitem, (node, 1))
            beside.meta["example_value"] = torch.empty(WIDE, WIDTH)
            unread = backward.graph.find_nodes(op="placeholder")[1]
            with backward.graph.inserting_after(backward.graph.find_nodes(op="placeholder")[-1]):
                read = backward.graph.call_function(torch.neg, (unread,))
            seen.append(tokens_of(node))
            backward.graph.erase_node(read)
        regions.extend(regions_by_token(gm.graph, 4))
        for node in gm.graph.find_nodes(op="call_function", target=operator.getitem):
            if not node.users:
                gm.graph.erase_node(node)
        return gm.forward

    torch._dynamo.reset()
    model = Gated(Packed)
    torch.compile(model, backend=backend, dynamic=False)(torch.randn(2, TOKENS, WIDTH, requires_grad=True))
    assert len(seen) == 6
    assert None not in seen[::2]
    assert seen[1::2] == [None] * 3
    assert len(regions) == 1, "what nobody reads beside a product does not matter"
