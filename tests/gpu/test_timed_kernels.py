"""Kernels that are timed on a GPU: attention with dropout among them, and nobody's random numbers change by that."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphoffload.analysis.costs import argument_of
from graphoffload.analysis.timing import kernel_times, signature


def attention(dropout: float) -> Node:
    """cuDNN's attention of 16 heads over 1024 tokens, causal, as a partitioned graph has it."""
    graph, values = Graph(), [graph_input(name) for name in "qkv"]
    inputs = [graph.placeholder(name) for name in "qkv"]
    for node, value in zip(inputs, values, strict=True):
        node.meta["val"] = value
    target = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    node = graph.call_function(target, (*inputs, None, True, dropout, True))
    with values[0].fake_mode:
        node.meta["val"] = target(*values, None, True, dropout, True)
    return node


def backward(kind: str, dropout: float, dtype: torch.dtype) -> Node:
    """The backward of one of torch's attentions, as torch itself records it."""

    def loss(*inputs: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(getattr(SDPBackend, kind)):
            return torch.nn.functional.scaled_dot_product_attention(*inputs, dropout_p=dropout).sum()  # an expanded gradient

    inputs = [torch.zeros(4, 8, 256, 64, dtype=dtype, device="cuda", requires_grad=True) for _ in range(3)]
    traced = make_fx(torch.func.grad(loss, (0, 1, 2)), tracing_mode="fake")(*inputs)
    return next(node for node in traced.graph.nodes if "attention_backward" in str(node.target))


_mode = FakeTensorMode()


def graph_input(_: str) -> torch.Tensor:
    with _mode:
        return torch.empty(16, 16, 1024, 64, dtype=torch.bfloat16, device="cuda")


def test_attention_with_dropout_costs_what_it_takes_and_draws_nobodys_numbers(tmp_path: Path) -> None:
    torch.cuda.manual_seed(7)
    torch.rand(3, device="cuda")
    before, host = torch.cuda.get_rng_state(), torch.get_rng_state()
    seconds = {}
    for dropout in (0.0, 0.1):
        node = attention(dropout)
        name = signature(node)
        assert name is not None
        seconds[dropout] = kernel_times([node.graph], torch.device("cuda", 0), tmp_path)[name].time_s
    assert torch.equal(before, torch.cuda.get_rng_state())
    assert torch.equal(host, torch.get_rng_state())
    assert seconds[0.1] > 1.2 * seconds[0.0], seconds


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("EFFICIENT_ATTENTION", torch.float32), ("EFFICIENT_ATTENTION", torch.bfloat16), ("FLASH_ATTENTION", torch.bfloat16),
     ("CUDNN_ATTENTION", torch.bfloat16)],
)  # fmt: skip
def test_backwards_with_dropout_are_timed(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Efficient attention reads its seeds on the host; the address of device memory there ended the process."""
    for dropout in (0.0, 0.1):
        node = backward(kind, dropout, dtype)
        assert argument_of(node, ("dropout_p",)) == dropout
        assert kernel_times([node.graph], torch.device("cuda", 0), tmp_path)[signature(node) or ""].time_s > 0.0
