"""Custom operations of known libraries: they run again as torch's own do, and cost what they compute.

No library is needed: operations like theirs are defined here, under a name that is made known, or under one that is none.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.library import Library, register_autograd, register_fake

import graphoffload
from graphoffload.analysis import chains
from graphoffload.analysis.costs import Operation, work_of
from graphoffload.compiler.backend import OffloadBackend

WIDTH = 32


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    """`product` of floats, and `codes`, which are whole numbers."""
    made = Library("quantlib", "DEF")
    made.define("product(Tensor x, Tensor w) -> Tensor")
    made.define("codes(Tensor x) -> Tensor")
    made.define("gemm_4bit(Tensor A, Tensor B, int[] shapeB) -> Tensor")
    made.impl("product", lambda x, w: x @ w, "CPU")
    made.impl("codes", lambda x: (x * 8).to(torch.int8), "CPU")
    register_fake("quantlib::product", lambda x, w: x.new_empty(*x.shape[:-1], w.shape[1]), lib=made)
    register_fake("quantlib::codes", lambda x: torch.empty_like(x, dtype=torch.int8), lib=made)
    register_autograd(
        "quantlib::product",
        lambda ctx, grad: (grad @ ctx.saved_tensors[0].t(), None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
        lib=made,
    )
    yield
    made._destroy()


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "LIBRARIES", frozenset({"quantlib"}))


class Frozen(nn.Module):
    """A product with a weight that is not trained, as of a quantized base, and what backward needs of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.base = nn.LayerNorm(WIDTH), nn.Buffer(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.quantlib.product(self.norm(x), self.base)
        return x + torch.sin(y) * torch.sigmoid(y)


class Coded(Frozen):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.quantlib.codes(self.norm(x)).float()
        return x + torch.sin(x * y)


def trained(net: nn.Module, x: Tensor) -> list[Tensor | None]:
    leaf = x.clone().requires_grad_()
    net.zero_grad()
    net(leaf).sum().backward()
    return [leaf.grad, *(None if p.grad is None else p.grad.clone() for p in net.parameters())]


def reasons(net: nn.Module, x: Tensor) -> dict[str, str]:
    """Why saved results of custom operations cannot be recomputed, by their operation."""
    options = {"policy": "recompute", "inner": "aot_eager", "min_tensor_bytes": 1, "hardware": "h200-sxm"}
    expected = trained(net, x)
    compiled = torch.compile(net, backend=OffloadBackend(**options))
    found = trained(compiled, x)
    assert all(a is b or torch.equal(a, b) for a, b in zip(found, expected, strict=True) if a is not None and b is not None)
    (plan,) = graphoffload.last_plans()
    return {tensor.op: tensor.why_not_recompute for tensor in plan.saved.tensors}


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    graphoffload.runtime.registry.forget()


def test_an_operation_of_no_known_library_runs_once() -> None:
    found = reasons(nn.Sequential(Frozen(), Frozen()), torch.randn(8, WIDTH))
    assert "quantlib.product.default, whose effects are unknown" in found["quantlib.product.default"]


@pytest.mark.usefixtures("known")
def test_an_operation_of_a_known_library_runs_again() -> None:
    found = reasons(nn.Sequential(Frozen(), Frozen()), torch.randn(8, WIDTH))
    assert not any("effects are unknown" in why for why in found.values()), found
    (plan,) = graphoffload.last_plans()
    assert any(decision.action == "recompute" for decision in plan.decisions)


@pytest.mark.usefixtures("known")
def test_whole_numbers_are_a_decision() -> None:
    """Other last bits of what they are made of may turn them."""
    found = reasons(nn.Sequential(Coded(), Coded()), torch.randn(8, WIDTH))
    assert any("quantlib.codes.default, whose effects are unknown" in why for why in found.values()), found


def test_a_product_with_packed_weights_costs_its_flops() -> None:
    a, packed = torch.empty(2, 64, WIDTH, device="meta"), torch.empty(WIDTH * 8, 1, device="meta", dtype=torch.uint8)
    out = torch.empty(2, 64, 16, device="meta")
    operation = Operation(torch.ops.quantlib.gemm_4bit.default, (a, packed, [16, WIDTH]), {}, out)
    assert work_of(operation, 1).flops == 2 * 2 * 64 * WIDTH * 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.bool])
def test_a_kernel_of_the_users_own(dtype: torch.dtype) -> None:
    """Functional: it writes to copies. Floats repeat; whole numbers are a decision."""
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional

    node = torch.fx.Graph().call_function(triton_kernel_wrapper_functional, ())
    node.meta["val"] = {"out": torch.empty(4, dtype=dtype, device="meta"), "other": torch.empty(4, device="meta")}
    assert chains.may_run_again(node) == dtype.is_floating_point


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash_attn defines its operations itself")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_flash_attention_is_attention(packed: bool, dropout: float) -> None:
    """It runs again with a whole block, without dropout, and costs what attention costs; heads come after rows."""
    made = Library("flash_attn", "FRAGMENT")
    name = "_flash_attn_varlen_forward" if packed else "_flash_attn_forward"
    lengths = "int max_seqlen_q, int max_seqlen_k, " if packed else ""
    made.define(f"{name}(Tensor q, Tensor k, Tensor v, {lengths}float dropout_p, float softmax_scale, bool causal) -> Tensor[]")
    try:
        shape = (96, 4, 16) if packed else (2, 48, 4, 16)
        q = torch.empty(shape, device="meta")
        target = getattr(torch.ops.flash_attn, name).default
        rest = (48, 48, dropout, 0.25, True) if packed else (dropout, 0.25, True)
        operation = Operation(target, (q, q, q, *rest), {}, [q])
        work = work_of(operation, 1)
        assert work.flops == 4 * 2 * 4 * 48 * 48 * 16 // 2
        assert work.share < 1.0
        graph = torch.fx.Graph()
        node = graph.call_function(target, (*(graph.placeholder(each) for each in "qkv"), *rest))
        node.meta["val"] = [q]
        assert chains.may_run_again(node) == (dropout == 0.0)
        assert "may draw random numbers" in chains._refusal(node)
    finally:
        made._destroy()
