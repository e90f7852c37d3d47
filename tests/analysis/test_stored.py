"""Which values Inductor stores since too many operations compute them, and where their kernels run then: as on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from analysis.as_on_a_gpu import THRESHOLDS, copied, exists, writing_triton
from torch import Tensor, nn
from torch._inductor import config, ir
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.scheduler import Scheduler
from torch._inductor.virtualized import V
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import graphoffload
from graphoffload.analysis import fusion as rules
from graphoffload.analysis.fusion import Fusion, fusion_of
from graphoffload.analysis.program import build_program
from graphoffload.analysis.storages import fake, storage_id
from graphoffload.analysis.stored import Operations, operations_of
from graphoffload.bench.nets import ResidualConv
from graphoffload.compiler import trial as trials
from graphoffload.torch_internals.inductor import most_operations

CHANNELS, SIDE = 128, 8  # 16 channels a group: Inductor writes out sums of fewer than 8


def backward_of(module: nn.Module, *inputs: Tensor) -> GraphModule:
    """The backward graph of a module in bfloat16."""
    found: list[GraphModule] = []

    def noting(pair: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(pair.backward)
        return build_program(pair, *args, **kwargs)

    with mock.patch.object(trials, "build_program", noting):
        graphoffload.explain(module.to(torch.bfloat16), policy="keep", hardware="h100-sxm", min_tensor_bytes=0)(*inputs)
    return found[-1]


@pytest.fixture(scope="module")
def backward() -> Iterator[GraphModule]:
    """The backward graph of a U-Net's block with a shortcut."""
    images = torch.empty(2, 2 * CHANNELS, SIDE, SIDE, dtype=torch.bfloat16, requires_grad=True)
    graph = backward_of(ResidualConv(2 * CHANNELS, CHANNELS), images)
    with config.patch(THRESHOLDS):
        yield graph


def named(fusion: Fusion, name: str) -> Node:
    """A node by its name."""
    return next(node for node in fusion.order if node.name == name)


def scheduled(module: GraphModule) -> tuple[list[list[str]], dict[str, int]]:
    """What Inductor runs, as its scheduler for Triton orders and fuses it: of each kernel, the nodes that it stores. And how
    many operations it counts for each pointwise value that it has not stored."""
    kernels: list[list[str]] = []
    counts: dict[str, int] = {}
    exceeded = ir.StorageBox.has_exceeded_max_reads

    def counting(box: Any) -> bool:
        if isinstance(box.data, ir.Pointwise):
            counts[V.current_node.name] = box.data.inner_fn_opcount().num_ops
        return exceeded(box)

    def noting(scheduler: Scheduler) -> None:
        for whole in scheduler.nodes:
            origins = (part.node.get_origin_node() for part in whole.get_nodes() if part.node is not None)
            kernels.append([origin.name for origin in origins if origin is not None])
        raise StopIteration

    count = mock.patch.object(ir.StorageBox, "has_exceeded_max_reads", counting)
    stop = mock.patch.object(Scheduler, "codegen", noting)
    graph = copied(module)
    inputs = [fake(node) for node in graph.find_nodes(op="placeholder")]
    with writing_triton(), count, stop, contextlib.suppress(Exception):
        compile_fx_inner(GraphModule({}, graph), inputs, is_backward=True)
    return kernels, counts


def counted(module: GraphModule) -> tuple[Fusion, dict[str, int], dict[str, int]]:
    """A graph's fusion, how many operations it counts for each value, and how many Inductor does for those that both count."""
    found: dict[str, int] = {}

    def noting(node: Node, computed: Any) -> Operations:
        found[node.name] = len(operations := operations_of(node, computed))
        return operations

    with mock.patch.object(rules, "operations_of", noting):
        fusion = fusion_of(module.graph, fuses=True)
    _, counts = scheduled(module)
    return fusion, found, {name: counts[name] for name in found.keys() & counts.keys()}


def test_operations_are_counted_as_inductor_counts_them(backward: GraphModule) -> None:
    fusion, found, counts = counted(backward)
    assert len(counts) > 80
    assert {name: found[name] for name in counts} == counts
    large = {name for name, number in counts.items() if number > most_operations("cuda")}
    stored = {node.name for node in fusion.large.values()}
    assert {name for name in stored if found[name] > most_operations("cuda")} == large == {"add_10", "add_13"}


class Loss(nn.Module):
    """The loss of a head whose logits are an output as well."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.head = nn.Linear(16, words, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(logits := self.head(x), labels), logits


@pytest.mark.parametrize("noted", [True, False], ids=["as it is", "as torch 2.11 notes it"])
def test_a_loss_gradient_that_is_noted_narrower_than_it_is_computed(noted: bool) -> None:
    """torch 2.11 has no cast behind the float32 `where` of a loss's gradient, and says bfloat16 of the product with it."""
    x = torch.empty(64, 16, dtype=torch.bfloat16, requires_grad=True)
    graph = copied(module := backward_of(Loss(50), x, torch.zeros(64, dtype=torch.int64)))
    casts = [node for node in graph.nodes if str(node.target) == "prims.convert_element_type.default"]
    behind = [node for node in casts if "where" in node.args[0].name and any("mul" in user.name for user in node.users)]
    if not noted:
        for node in behind:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    module = GraphModule(module, graph)
    with config.patch(THRESHOLDS):
        _, found, counts = counted(module)
    assert len(counts) > 10
    assert {name: found[name] for name in counts} == counts


def test_a_large_value_runs_at_its_own_turn_and_is_not_written(backward: GraphModule) -> None:
    """The gradient of a convolution's output is computed before the shortcut's backward, and not at the reader behind it."""
    fusion = fusion_of(backward.graph, fuses=True)
    kernels, _ = scheduled(backward)
    gradient, large = named(fusion, "convert_element_type_20"), named(fusion, "add_10")
    assert fusion.spans[gradient] == fusion.spans[large]
    assert exists(fusion, gradient)
    assert not exists(fusion, large)
    order = [node.name for node in fusion.order]
    assert order.index("add_10") < order.index("convolution_backward_1") < order.index("convolution_backward_2")
    at = next(place for place, kernel in enumerate(kernels) if "add_10" in kernel)
    shortcut = next(place for place, kernel in enumerate(kernels) if "getitem_7" in kernel)
    assert at < shortcut
    assert any({"add_13", "add_15"} <= set(kernel) for kernel in kernels), "so the first is not written either"
    assert not exists(fusion, named(fusion, "add_13"))
    storages = {storage_id(value) for node in fusion.order if (value := fake(node)) is not None and exists(fusion, node)}
    assert all(fusion.read_by(node) <= storages for node in fusion.spans)


def test_a_norms_input_is_not_stored_in_float32_and_its_result_is(backward: GraphModule) -> None:
    """Two sums and a pointwise operation compute the cast themselves. The result takes five reads, and is read twice."""
    fusion = fusion_of(backward.graph, fuses=True)
    kernels, _ = scheduled(backward)
    stored = {name for kernel in kernels for name in kernel}
    for name, is_stored in (("convert_element_type", False), ("convert_element_type_4", True)):
        assert exists(fusion, named(fusion, name)) is (name in stored) is is_stored


class Chains(nn.Module):
    """Two results of one long chain of operations, with a product in between that reads another one."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        long = x
        for _ in range(20):
            long = (long * y).sin()
        return long.cos() @ x, (y @ (x @ (long + 1)))


def test_a_large_value_that_distant_kernels_read_is_in_memory() -> None:
    graph = make_fx(Chains(), tracing_mode="fake")(torch.empty(32, 32), torch.empty(32, 32)).graph
    with config.patch(THRESHOLDS):
        fusion = fusion_of(graph, fuses=True)
    (large,) = fusion.large.values()
    assert fusion.spans[large][0] < fusion.spans[next(node for node in graph.nodes if node.name == "mm")][0]
    assert all(len(reads := fusion.read_by(node)) <= 2 for node in fusion.spans), reads
