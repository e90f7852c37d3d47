"""Casts to the type that a value has: which are left out, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import graphoffload
from graphoffload.analysis.storages import fake, storage_id
from graphoffload.passes.casts import leave_out_casts

CAST = torch.ops.prims.convert_element_type.default


def cast(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.ops.prims.convert_element_type(x, dtype)


def traced(function: Callable[..., object], *inputs: Tensor) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def casts_left(function: Callable[..., object]) -> int:
    """How many casts of a graph are left; what it computes is the same."""
    x, w = torch.randn(4, 6).bfloat16(), torch.randn(6, 6).bfloat16()
    module = traced(function, x, w)
    expected = module(x.clone(), w)
    leave_out_casts(module)
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(module(x.clone(), w), expected, rtol=0, atol=0)
    return len(module.graph.find_nodes(op="call_function", target=CAST))


def between_products(x: Tensor, w: Tensor) -> Tensor:
    product = (x * 2).sin()
    return product @ w + cast(product) @ w


def viewed(x: Tensor, w: Tensor) -> Tensor:
    product = (x * 2).sin()
    return product @ w + cast(product).view(2, 2, 6).transpose(0, 1).reshape(4, 6) @ w


def twice(x: Tensor, w: Tensor) -> Tensor:
    return cast(cast((x * 2).sin())) @ w


def of_an_input(x: Tensor, w: Tensor) -> Tensor:
    return cast(x) @ w


def of_a_view_of_an_input(x: Tensor, w: Tensor) -> Tensor:
    return cast(x.view(6, 4).view(4, 6)) @ w


def returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    product = (x * 2).sin()
    return product @ w, cast(product)


def of_what_is_returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    product = (x * 2).sin()
    return product, cast(product) @ w


def of_what_is_written_to(x: Tensor, w: Tensor) -> Tensor:
    product = (x * 2).sin()
    copied = cast(product)
    product.mul_(2)
    return copied @ w + product


def written_to(x: Tensor, w: Tensor) -> Tensor:
    product = (x * 2).sin()
    copied = cast(product)
    copied.mul_(2)
    return copied @ w + product


def of_a_part(x: Tensor, w: Tensor) -> Tensor:
    return cast((x * 2)[1:3]) @ w


def of_an_expanded_value(x: Tensor, w: Tensor) -> Tensor:
    return cast((x[:, :1] * 2).expand(4, 6)) @ w


def seen_in_another_type(x: Tensor, w: Tensor) -> Tensor:
    product = (x * 2).sin()
    return product @ w + cast(product).view(torch.int16).view(torch.bfloat16) @ w


def to_another_type(x: Tensor, w: Tensor) -> Tensor:
    return cast((x * 2).sin(), torch.float32) @ w.float()


@pytest.mark.parametrize("function", [between_products, viewed, twice])
def test_casts_that_change_nothing_are_left_out(function: Callable[..., object]) -> None:
    assert casts_left(function) == 0


STAY = [
    of_an_input, of_a_view_of_an_input, returned, of_what_is_returned, of_what_is_written_to, written_to, of_a_part,
    of_an_expanded_value, to_another_type, seen_in_another_type,
]  # fmt: skip


@pytest.mark.parametrize("function", STAY)
def test_a_copy_that_can_be_told_from_its_operand_stays(function: Callable[..., object]) -> None:
    assert casts_left(function) > 0


def viewed_copy_of_an_input(x: Tensor, w: Tensor) -> Tensor:
    return cast(x.clone().view(6, 4).view(4, 6)) @ w


def viewed_copy_of_a_result(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    product = (x * 2).sin()
    return product, cast(product.clone().view(6, 4).view(4, 6)) @ w


@pytest.mark.parametrize("function", [viewed_copy_of_an_input, viewed_copy_of_a_result])
def test_a_cast_of_a_copy_that_was_removed_stays(function: Callable[..., object]) -> None:
    """Inductor has removed the copy, and its views keep its fake storage."""
    module = traced(function, torch.randn(4, 6).bfloat16(), torch.randn(6, 6).bfloat16())
    (copied,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    copied.replace_all_uses_with(copied.args[0])
    module.graph.erase_node(copied)
    leave_out_casts(module)
    assert len(module.graph.find_nodes(op="call_function", target=CAST)) == 1


def test_a_cast_of_what_a_users_kernel_reads_stays() -> None:
    """It may write to it: it is no operator with a schema."""
    module = traced(between_products, torch.randn(4, 6).bfloat16(), torch.randn(6, 6).bfloat16())
    (sine,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    with module.graph.inserting_after(sine):
        module.graph.call_function(lambda memory: memory.zero_(), (sine,))
    leave_out_casts(module)
    assert len(module.graph.find_nodes(op="call_function", target=CAST)) == 1


def test_a_cast_that_the_user_tags_stays() -> None:
    module = traced(between_products, torch.randn(4, 6).bfloat16(), torch.randn(6, 6).bfloat16())
    (node,) = module.graph.find_nodes(op="call_function", target=CAST)
    node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
    leave_out_casts(module)
    assert node in module.graph.nodes


def test_views_of_a_cast_are_views_of_its_operand() -> None:
    module = traced(viewed, torch.randn(4, 6).bfloat16(), torch.randn(6, 6).bfloat16())
    leave_out_casts(module)

    def memory(node: Node) -> int:
        value = fake(node)
        assert value is not None
        return storage_id(value)

    (sine,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    (turned,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.transpose.int)
    assert memory(sine) == memory(turned) == memory(turned.args[0])  # type: ignore[arg-type]
    assert fake(turned).stride() == (6, 12, 1)  # type: ignore[union-attr]


class Adapted(nn.Module):
    """A frozen linear layer and an adapter in float32, which casts what it reads, as peft does."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64, bias=False).to(torch.bfloat16).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.up(self.down(x.to(self.down.weight.dtype)))
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Adapted(), Adapted()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            result: Tensor = x + self.other(nn.functional.silu(self.one(x)))
            return result


def test_what_an_adapter_casts_is_the_value_itself() -> None:
    """Of the input it is a copy, in plain Inductor as well."""
    x = torch.randn(32, 64).bfloat16().requires_grad_()
    report = graphoffload.explain(Block(), hardware="h100-sxm", min_tensor_bytes=0, policy="keep", inner="inductor")(x)
    wide = {tensor.module for tensor in report.plans[0].saved.tensors if tensor.shape == (32, 64)}
    assert wide == {"one.down", "one", ""}, "the input's copy, what silu reads, and what it writes"


def gradients(block: nn.Module, x: Tensor, compiled: Callable[[Tensor], Tensor]) -> list[Tensor]:
    trained = [x, *(p for p in block.parameters() if p.requires_grad)]
    return list(torch.autograd.grad(compiled(x).float().square().sum(), trained))


@pytest.mark.parametrize(("policy", "error"), [("offload", 0.0), ("recompute", 0.02)])
def test_gradients_of_adapters_are_those_of_plain_inductor(policy: str, error: float) -> None:
    """What is computed again is read as it was rounded, in plain Inductor as well."""
    torch.manual_seed(0)
    block, x = Block(), torch.randn(32, 64).bfloat16().requires_grad_()
    expected = gradients(block, x, torch.compile(block))
    torch._dynamo.reset()
    options = {"hardware": "h100-sxm", "min_tensor_bytes": 0, "policy": policy}
    found = gradients(block, x, torch.compile(block, backend="graphoffload", options=options))
    for one, other in zip(found, expected, strict=True):
        assert float((one.float() - other.float()).norm()) <= error * float(other.float().norm())
