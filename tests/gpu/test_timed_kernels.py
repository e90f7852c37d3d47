"""Kernels that are timed on a GPU: attention with dropout among them, and nobody's random numbers change by that."""

from __future__ import annotations

from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

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
