"""Kernels that grow never close a cycle: on their own, in graphs of many operations, and in the model that once never ended."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import graphoffload
from graphoffload.analysis.fusion import fusion_of
from graphoffload.analysis.kernels import Kernel, add_needs, in_order, runs_after
from graphoffload.analysis.storages import fake, storage_id


def before(kernels: list[Kernel], number: int) -> set[int]:
    """All that must run before a kernel, found by walking."""
    found: set[int] = set()
    pending = [number]
    while pending:
        for other in kernels[pending.pop()].needs - found:
            found.add(other)
            pending.append(other)
    return found


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(5, 40))
def test_kernels_that_grow_in_any_order_know_all_that_runs_before_them(seed: int, operations: int) -> None:
    pick = random.Random(seed)
    kernels: list[Kernel] = []
    for operation in range(operations):
        needs = set(pick.sample(range(len(kernels)), min(len(kernels), pick.randint(0, 3))))
        wanted = pick.randrange(len(kernels)) if kernels else 0
        joins = bool(kernels) and pick.random() < 0.7 and not runs_after(kernels, wanted, needs)
        if not joins:
            kernels.append(Kernel(len(kernels), pick.randint(0, operation), operation, 1))
        add_needs(kernels, kernels[wanted if joins else -1], needs)
    for kernel in kernels:
        known = {number for number in range(len(kernels)) if kernel.ancestors >> number & 1}
        assert known == before(kernels, kernel.number)
        assert kernel.number not in known
    sequence, turns = in_order(kernels)
    at = {kernel.number: place for place, kernel in enumerate(sequence)}
    assert len(at) == len(kernels)
    assert all(at[need] < at[kernel.number] for kernel in kernels for need in kernel.needs)
    assert [count for _, count in turns] == sorted(count for _, count in turns)


def a_tangle(seed: int, operations: int, *inputs: Tensor) -> list[Tensor]:
    """Pointwise operations, reductions and products of what was computed lately, with several results."""
    pick, values = random.Random(seed), list(inputs)
    for _ in range(operations):
        one, two = pick.choice(values[-8:]), pick.choice(values[-8:])
        makes = (one * two, one + two.sin(), one - two.sum(0, keepdim=True), one + two.sum(1, keepdim=True), one @ two)
        values.append(pick.choice(makes))
    return pick.sample(values, len(values) // 2)


@pytest.mark.parametrize("seed", range(12))
def test_kernels_of_any_graph_run_in_a_topological_order(seed: int) -> None:
    graph = make_fx(lambda *x: a_tangle(seed, 60, *x), tracing_mode="fake")(*(torch.randn(8, 8) for _ in range(3))).graph
    fusion = fusion_of(graph, fuses=True)
    assert sorted(node.name for node in fusion.order) == sorted(node.name for node in graph.nodes)
    makers: dict[int, int] = {}
    for at, node in enumerate(fusion.order):
        value = fake(node)
        if node in fusion.spans and value is not None:
            makers.setdefault(storage_id(value), at)
    for at, node in enumerate(fusion.order):
        if node in fusion.spans:
            assert all(makers[read] < at for read in fusion.read_by(node) if read in makers), node


def test_the_state_space_model_whose_kernels_needed_each_other_is_planned() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 1, "num_heads": 4, "head_dim": 16, "chunk_size": 16}
    model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(vocab_size=256, n_groups=1, **sizes))
    ids = torch.zeros(2, 32, dtype=torch.int64)
    explained = graphoffload.explain(model, hardware="h100-sxm", max_slowdown=0.05, min_tensor_bytes=1024)
    report = explained(ids, labels=ids)
    assert 0 < report.predicted_peak_bytes < report.keep_peak_bytes
