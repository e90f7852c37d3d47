"""Programs written to break the rewrite: wrong gradients, lost updates, silent recompiles. Each found something, or could."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

import graphoffload
from graphoffload.analysis.saved_values import GraphPair
from graphoffload.compiler import pipeline
from graphoffload.facts.plan import Plan
from graphoffload.facts.saved_tensors import SavedTensor
from graphoffload.passes import once
from graphoffload.testing import (
    ZOO,
    Scattered,
    assert_equal_bits,
    compiled,
    draw,
    run_case,
    run_step,
    weighted_loss,
    whole_gradient_error,
)
from graphoffload.testing.case import batches, of


def steps(function: Any, backend: Any, *shapes: tuple[int, ...], count: int = 2) -> list[Any]:
    """Outputs and gradients of a function of leaves of these shapes, for `count` steps."""
    torch._dynamo.reset()
    compiled = function if backend is None else torch.compile(function, backend=backend)
    found = []
    for seed in range(count):
        leaves = [
            draw(*shape, device="cpu", dtype=torch.float32, seed=10 * seed + at, requires_grad=True)
            for at, shape in enumerate(shapes)
        ]
        torch.manual_seed(seed)
        output = compiled(*leaves)
        weighted_loss(output).backward()
        found.append([leaf.detach() for leaf in pytree.tree_leaves(output)] + [leaf.grad for leaf in leaves])
    return found


def assert_same(function: Any, policy: Any, *shapes: tuple[int, ...], inner: str = "aot_eager") -> None:
    """To the bit under aot_eager; under Inductor as exact as float32 is, compared with eager."""
    backend = graphoffload.OffloadBackend(policy=policy, min_tensor_bytes=0, verify="checksum", inner=inner)
    got, expected = steps(function, backend, *shapes), steps(function, None if inner == "inductor" else inner, *shapes)
    rounding = {"rtol": 1e-4, "atol": 1e-5} if inner == "inductor" else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(got, expected, **rounding)


def written_behind_a_break(x: Tensor, y: Tensor) -> Tensor:
    """The second graph writes to its input, which needs a gradient: AOTAutograd does that behind the graph."""
    z = x * 2
    torch._dynamo.graph_break()
    z.mul_(3)
    w = z * y
    torch._dynamo.graph_break()
    return w * z.sin()


@pytest.mark.parametrize("policy", ["recompute", "offload", Scattered(seed=3)])
def test_inputs_that_are_written_to_behind_the_graph(policy: Any) -> None:
    """What reads the old value is saved: recomputing it in backward would read the new one (torch raises)."""
    assert_same(written_behind_a_break, policy, (4, 16), (4, 16))


class Parts(torch.nn.Module):
    """Backward reads a product's result through many views, some early and some late."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        a, b, c, d = torch.tanh(y).chunk(4, dim=-1)
        q = torch.cat([a * b, c * d, a * d, b * c], -1)
        out: Tensor = self.last(q * sum(part.cos() * part for part in y.unbind(1)).unsqueeze(1))  # type: ignore[union-attr]
        return out


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_memory_that_is_saved_through_several_views(inner: str) -> None:
    """torch donates each saved view on its own: Inductor wrote over the product's result with six of its views unread."""
    keep = {"op:aten.addmm*": "keep", "*": "recompute"}
    inputs = (draw(4, 6, 16, device="cpu", dtype=torch.float32, seed=0, requires_grad=True),)
    backend = graphoffload.OffloadBackend(policy=keep, min_tensor_bytes=0, inner=inner)
    got, expected = (run_step(compiled(Parts(), chosen), inputs) for chosen in (backend, "aot_eager"))
    assert whole_gradient_error(got, expected) < 1e-6
    plan = graphoffload.last_plans()[-1]
    assert len(plan.saved["addmm"].views) > 1, "a case where torch saves no views side by side shows nothing"


def test_saved_views_of_one_storage_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the pass the graph is not run: the rule sees what torch would donate twice."""
    monkeypatch.setattr(pipeline, "save_memory_once", lambda graphs, plan: graphs)
    policy = {"op:aten.addmm*": "keep", "*": "recompute"}
    backend = graphoffload.OffloadBackend(policy=policy, min_tensor_bytes=0, inner="aot_eager")
    inputs = (draw(4, 6, 16, device="cpu", dtype=torch.float32, seed=0, requires_grad=True),)
    with pytest.raises(BackendCompilerFailed, match=r"donated: .* are saved side by side and share memory"):
        run_step(compiled(Parts(), backend), inputs)


@pytest.mark.parametrize("known", [True, False])
def test_views_of_symbolic_size_are_taken_again_or_copied(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes come from backward's own inputs; where they are unknown there, forward saves a copy."""
    if not known:
        monkeypatch.setattr(once, "symbol_sources", lambda graph: {})
        monkeypatch.setattr(once, "_views", lambda source, node, root: None)
    policy = {"op:aten.addmm*": "keep", "*": "recompute"}
    case = replace(ZOO["dynamic_views"], build=of(Parts), inputs=batches(6, 16))
    backend = graphoffload.OffloadBackend(policy=policy, min_tensor_bytes=0, inner="aot_eager")
    got, expected = (run_case(case, chosen, "cpu", seeds=(0, 1)) for chosen in (backend, "aot_eager"))
    for one, other in zip(got, expected, strict=True):
        assert_equal_bits(one, other)


class Pooled(torch.nn.Module):
    """A pooling kernel has two results; the product with one of them is fused into it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        out: Tensor = self.last(torch.nn.functional.max_pool1d(y, 3, stride=1, padding=1) * y)
        return out


def test_a_kernel_that_stores_a_result_before_what_it_is_computed_from() -> None:
    """Planning follows kernels, recomputation the graph: the two orders differed, and the plan was refused."""
    config = graphoffload.OffloadConfig(policy="recompute", min_tensor_bytes=0, inner="inductor")
    report = graphoffload.explain(Pooled(), config)(torch.randn(4, 6, 16))
    assert report.recomputed_bytes > 0


def largest(x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of a maximum compares the values with the maximum."""
    z = torch.tanh(x @ weight)
    index = (torch.arange(16) * 7 % 16).expand(4, 6, 16)
    most = torch.zeros_like(x).scatter_reduce(2, index, z, "amax")
    return (most * z + z.amax(-1, keepdim=True)) @ weight


@pytest.mark.slow
def test_what_is_compared_with_a_saved_value_is_saved() -> None:
    """Inductor vectorises tanh the second time: no element was the maximum any more, and the gradient was NaN."""
    assert_same(largest, keep_maximum, (4, 6, 16), (16, 16), inner="inductor")
    plan = graphoffload.last_plans()[-1]
    assert plan.action("tanh") == "keep"
    assert plan.recomputed_bytes > 0


def keep_maximum(tensor: SavedTensor) -> str | None:
    """Recompute all that may be, but scatter_reduce's result."""
    return "keep" if "scatter_reduce" in tensor.op or not tensor.recomputable else "recompute"


def test_a_release_right_behind_the_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else in forward reads a mask: the release came before its own offload, and the graph was refused."""
    original, moved = pipeline.insert_offloads, []

    def insert(graphs: GraphPair, plan: Plan) -> GraphPair:
        unread = {t.name for t in plan.saved.tensors if t.last_forward_position <= t.produced_position}
        moved.extend(t.tensor for t in plan.transfers if t.tensor in unread)
        early = (replace(t, release_after=t.offload_after) if t.tensor in unread else t for t in plan.transfers)
        return original(graphs, replace(plan, transfers=tuple(early)))

    monkeypatch.setattr(pipeline, "insert_offloads", insert)
    assert_same(lambda x: torch.nn.functional.dropout(torch.tanh(x).sin(), 0.5).cos(), "offload", (4, 16))
    assert moved


def empty_in_front(x: Tensor) -> Tensor:
    """As Transformers' DynamicCache begins."""
    keys = torch.cat([torch.tensor([]), (x * 2).sin()], dim=-1)
    return keys @ keys.transpose(0, 1)


def constant_factor(x: Tensor) -> Tensor:
    factor = torch.tensor([1.0, 2.0, 3.0, 4.0] * 4)
    return ((x * x) * factor).sin().mul(factor).exp()


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("function", [empty_in_front, constant_factor])
@pytest.mark.parametrize("policy", ["recompute", "offload"])
def test_constants_of_the_graph_stay(function: Any, policy: str, inner: str) -> None:
    """What is recomputed may read a constant; torch saves it then, and planning was a KeyError."""
    grads = []
    for backend in (inner, graphoffload.OffloadBackend(policy=policy, min_tensor_bytes=0, inner=inner)):  # type: ignore[arg-type]
        torch._dynamo.reset()
        torch.manual_seed(0)
        x = torch.randn(4, 16, requires_grad=True)
        torch.compile(function, backend=backend, fullgraph=True)(x).sum().backward()
        assert x.grad is not None
        grads.append(x.grad)
    torch.testing.assert_close(*grads)
