"""What reads a tensor runs before its release, as the graph has it."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InductorError
from torch._inductor.scheduler import Scheduler
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from graphoffload.compiler.inner_compile import AS_PLANNED, RELEASES
from graphoffload.torch_internals import inductor

ENOUGH = "the order is known"
OURS = torch.ops.graphoffload
SHAPES = (2, 4, 16), (16, 8)


def of_a_product(x: Tensor, w: Tensor) -> tuple[Tensor]:
    """A product's result is read, pointwise, for another product."""
    y = (x.view(8, 16) @ w).view(2, 4, 8)
    return ((y.tanh() * y).view(8, 8) @ w.t(),)


def of_two_outputs(x: Tensor, w: Tensor) -> tuple[Tensor]:
    """The same of an operator that Inductor has no code for, and that has two outputs."""
    y, _ = torch.linalg.qr(x)
    return ((y.tanh() * y).reshape(-1, 4) @ w.view(4, 32),)


def of_a_part(x: Tensor, w: Tensor) -> tuple[Tensor]:
    """A part of it is read."""
    y, _ = torch.linalg.qr(x)
    return ((y[:, 1:].tanh() * 2).reshape(-1, 4) @ w.view(4, 32),)


def with_its_release(module: GraphModule) -> GraphModule:
    """Offload what the first pointwise operation reads, and release it behind the last one that does."""
    graph = module.graph
    tanh = next(node for node in graph.nodes if node.target is torch.ops.aten.tanh.default)
    source, last = tanh.args[0], tanh.next if tanh.next.target is torch.ops.aten.mul.Tensor else tanh
    assert isinstance(source, Node)
    with graph.inserting_before(tanh), source.meta["val"].fake_mode:
        handle = graph.call_function(OURS.offload.default, (source, "plan", 0))
        handle.meta["val"] = torch.empty(1, dtype=torch.int64)
    with graph.inserting_after(last):
        graph.call_function(OURS.release.default, (source, handle, "plan", 0)).meta["val"] = None
    return GraphModule(module, graph)


def order(module: GraphModule, inputs: list[Tensor]) -> list[str]:
    """What Inductor runs, by the names in the graph, of operations that were fused as well."""
    found: list[str] = []

    def noting(scheduler: Scheduler) -> None:
        for node in (part.node for whole in scheduler.nodes for part in whole.get_nodes()):
            target = getattr(node, "op_overload", None)
            origin = None if node is None else node.get_origin_node()
            found.append(str(target) if target is not None and target.namespace == "graphoffload" else str(origin))
        raise RuntimeError(ENOUGH)

    settings = torch._inductor.config.patch({**AS_PLANNED, "fx_graph_cache": False})
    with settings, mock.patch.object(Scheduler, "codegen", noting), pytest.raises(InductorError, match=ENOUGH):
        compile_fx_inner(module, inputs)
    return found


@pytest.mark.parametrize("function", [of_a_product, of_two_outputs, of_a_part])
def test_readers_run_before_the_release(function: object) -> None:
    inputs = [torch.randn(shape) for shape in SHAPES]
    module = with_its_release(make_fx(function, select_decomp_table(), tracing_mode="fake")(*inputs))
    with inductor.reads_before(*RELEASES):
        ran = order(module, inputs)
    assert "mul" in ran, ran
    assert ran.index("mul") < ran.index("graphoffload.release.default"), ran
