"""Inductor's code has the order that a plan needs: readers, release; wait, readers. Code that has another is not run."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InductorError
from torch._inductor.scheduler import Scheduler, SchedulerNode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from graphoffload.analysis.storages import storage_id
from graphoffload.compiler.inner_compile import AS_PLANNED
from graphoffload.compiler.written_order import OFFLOADS, RELEASES, check_written_order, in_order
from graphoffload.torch_internals import inductor

OURS = torch.ops.graphoffload
ROWS, WIDTH = 24, 64

pytestmark = pytest.mark.usefixtures("kernels_that_do_nothing")


def graph_of(function: Callable[..., object], *shapes: tuple[int, ...]) -> tuple[GraphModule, list[Tensor]]:
    """As Inductor gets it, and inputs."""
    inputs = [torch.randn(shape) for shape in shapes]
    return make_fx(function, select_decomp_table(), tracing_mode="fake")(*inputs), inputs


def ran(module: GraphModule, inputs: list[Tensor], check: Callable[[Any], object] = check_written_order) -> list[inductor.Ran]:
    """What Inductor's code runs."""
    found: list[inductor.Ran] = []
    settings = torch._inductor.config.patch({**AS_PLANNED, "fx_graph_cache": False})
    noting = inductor.watching_codegen(after=lambda lowering: found.extend(inductor.operations_of(lowering)))
    with settings, noting, inductor.watching_codegen(after=check):
        compile_fx_inner(module, inputs)
    return found


# Release


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


def of_a_kernel(x: Tensor, w: Tensor) -> tuple[Tensor]:
    """What is offloaded comes from a kernel of Inductor's own, and is read with another."""
    y = x.sin()
    return ((y.tanh() * y).view(8, 16) @ w,)


def with_release(module: GraphModule) -> GraphModule:
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


@pytest.mark.parametrize("function", [of_a_product, of_two_outputs, of_a_part, of_a_kernel])
def test_readers_run_before_the_release(function: Callable[..., object]) -> None:
    module, inputs = graph_of(function, (2, 4, 16), (16, 8))
    with inductor.reads_before(*RELEASES), inductor.reads_fused(*RELEASES):
        operations = ran(with_release(module), inputs)
    at = next(at for at, operation in enumerate(operations) if operation.target is OURS.release.default)
    released = operations[at].operand
    assert sum(released in operation.reads for operation in operations[:at]) > 1, "the copy, and what reads it"
    assert not any(released in operation.reads for operation in operations[at + 1 :])


OPS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, y: x.tanh() * y, lambda x, y: (x + y).softmax(-1), lambda x, y: x @ x.mT @ y, lambda x, y: x.roll(1, 1) - y,
    lambda x, y: (y.sin()[:, ::2] + x[:, 1::2]).repeat_interleave(2, 1), lambda x, y: torch.linalg.qr(x)[0] * y,
    lambda x, y: torch.slice_scatter(x, y[:, ::2] * 3, 1, 0, ROWS, 2), lambda x, y: x - y.mean(1, keepdim=True),
    lambda x, y: x.sort(-1)[0] + y,
]  # fmt: skip


def random_chain(x: Tensor, choice: random.Random) -> tuple[Tensor]:
    """Each operation reads the last result and some earlier one. Without cat, whose parts Inductor writes into its memory."""
    values = [x.exp()]
    for _ in range(10):
        values.append(choice.choice(OPS)(values[-1], choice.choice(values)))
    return (values[-1],)


def with_all_releases(module: GraphModule, choice: random.Random) -> GraphModule:
    """Half of what operations make is offloaded, and released right behind what reads it last, through views as well."""
    graph = module.graph
    nodes = [node for node in graph.nodes if node.op == "call_function" and isinstance(node.meta["val"], Tensor)]
    memory = {node: storage_id(node.meta["val"]) for node in graph.nodes if isinstance(node.meta.get("val"), Tensor)}
    returned = {memory[node] for node in graph.find_nodes(op="output")[0].all_input_nodes}
    makers = {memory[node]: node for node in reversed(nodes)}
    for number, (identity, maker) in enumerate(makers.items()):
        readers = [node for node in graph.nodes if any(memory.get(source) == identity for source in node.all_input_nodes)]
        if identity in returned or not readers or choice.random() < 0.5:
            continue
        with graph.inserting_after(maker), maker.meta["val"].fake_mode:
            handle = graph.call_function(OURS.offload.default, (maker, "plan", number))
            handle.meta["val"] = torch.empty(1, dtype=torch.int64)
        with graph.inserting_after(readers[-1]):
            graph.call_function(OURS.release.default, (maker, handle, "plan", number)).meta["val"] = None
    return GraphModule(module, graph)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 60))])
def test_readers_of_any_graph_run_before_the_releases(seed: int) -> None:
    choice = random.Random(seed)
    module, inputs = graph_of(lambda x: random_chain(x, choice), (2, ROWS, ROWS))
    with in_order():
        operations = ran(with_all_releases(module, choice), inputs)
    releases = [(at, operation.operand) for at, operation in enumerate(operations) if operation.target is RELEASES[0]]
    assert releases
    offloaded = {operation.constants: operation.operand for operation in operations if operation.target in OFFLOADS}
    assert offloaded == {operation.constants: operation.operand for operation in operations if operation.target in RELEASES}
    assert not [(at, name) for at, name in releases if any(name in later.reads for later in operations[at + 1 :])]


def of_a_view(x: Tensor, w: Tensor) -> tuple[Tensor]:
    """Padded strides make a view that is no block of its tensor's memory, and each operator that needs one gets a copy."""
    y = x.sin().view(34, 85)
    return ((y.tanh() * y) @ w,)


@torch.library.custom_op("graphoffload_tests::seven", mutates_args=())
def seven() -> Tensor:
    """An operator without operands."""
    return torch.full((8, 16), 7.0)


@seven.register_fake
def _() -> Tensor:
    return torch.empty(8, 16)


def beside_an_operator_without_operands(x: Tensor, w: Tensor) -> tuple[Tensor]:
    """Inductor makes it in the same way as ours."""
    y = x.sin().view(8, 16)
    return ((y.tanh() * y + torch.ops.graphoffload_tests.seven()) @ w,)


@pytest.mark.parametrize("function", [of_a_view, of_a_part, of_a_kernel, beside_an_operator_without_operands])
def test_what_is_offloaded_is_released(function: Callable[..., object]) -> None:
    module, inputs = graph_of(function, *(((2, 17, 85), (85, 8)) if function is of_a_view else ((2, 4, 16), (16, 8))))
    padded = torch._inductor.config.patch(comprehensive_padding=True, disable_padding_cpu=False)
    with padded, in_order():
        operations = ran(with_release(module), inputs)
    (offloaded,) = (operation.operand for operation in operations if operation.target in OFFLOADS)
    (released,) = (operation.operand for operation in operations if operation.target in RELEASES)
    assert offloaded == released


# Wait


def beside_other_loops(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """What y is multiplied with is written by loops of another form; one kernel has both."""
    t = torch.slice_scatter(x * 2, x[:, ::2] * 3, 1, 0, ROWS, 2)
    return t @ w, (t * y).view(-1, WIDTH) @ w


def read_with_itself(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The same, where it is returned."""
    t = torch.slice_scatter(x, x[:, ::2] * 3, 1, 0, ROWS, 2)
    return (t + t.sin() * y).view(-1, WIDTH) @ w, t


def with_wait(module: GraphModule) -> GraphModule:
    """Y comes back at the start of the graph, and is waited for right before its first use."""
    graph = module.graph
    nodes = list(graph.nodes)
    y, first = nodes[1], next(node for node in nodes if node.op == "call_function")
    value, users = y.meta["val"], sorted(y.users, key=nodes.index)
    with graph.inserting_before(first), value.fake_mode:
        handle = graph.call_function(torch.ops.aten.empty.memory_format, ([1],), {"dtype": torch.int64, "device": value.device})
        handle.meta["val"] = torch.empty(1, dtype=torch.int64)
        asked = handle, "plan", 0, list(value.shape), list(value.stride()), value.dtype
        back = graph.call_function(OURS.reload.default, asked)
        back.meta["val"] = torch.empty_like(value)
    for user in users:
        user.replace_input_with(y, back)
    with graph.inserting_before(users[0]):
        graph.call_function(OURS.wait.default, (back, handle, "plan", 0)).meta["val"] = None
    return GraphModule(module, graph)


def forgetful(node: Any, *args: Any, **kwargs: Any) -> None:
    """As torch has it before 2.15: loops that are made anew forget what was written to."""
    node._compute_attrs(*args, **kwargs)


FORMS = [beside_other_loops, read_with_itself]
SHAPES = (2, ROWS, WIDTH), (2, ROWS, WIDTH), (WIDTH, WIDTH)


@pytest.mark.parametrize("function", FORMS)
def test_readers_run_behind_the_wait(function: Callable[..., object]) -> None:
    module, inputs = graph_of(function, *SHAPES)
    with mock.patch.object(SchedulerNode, "recompute_size_and_body", forgetful), inductor.writes_remembered():
        operations = ran(with_wait(module), inputs)
    at = next(at for at, operation in enumerate(operations) if operation.target is OURS.wait.default)
    assert any(operations[at].operand in operation.reads for operation in operations[at + 1 :])


@pytest.mark.parametrize("function", FORMS)
def test_code_that_reads_before_the_wait_is_not_run(function: Callable[..., object]) -> None:
    module, inputs = graph_of(function, *SHAPES)
    forgotten = mock.patch.object(SchedulerNode, "recompute_size_and_body", forgetful)
    with forgotten, pytest.raises(InductorError, match=r"VerifyError: Inductor's code reads tensor 0 in op\d+, before the"):
        ran(with_wait(module), inputs)


def test_code_that_cannot_be_looked_through_is_run(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "graphoffload"):
        check_written_order(object())
    assert "the order of Inductor's code was not checked: AttributeError" in caplog.text


class Operation:
    """What Inductor's scheduler sorts, as far as it is asked."""

    def __init__(self, name: str, *needs: str) -> None:
        self.name, self.unmet_dependencies = name, [SimpleNamespace(name=need) for need in needs]

    def get_buffer_names(self) -> list[str]:
        return [self.name]


def names_in_order(*operations: Operation) -> list[str]:
    with inductor.in_graph_order():
        ordered = Scheduler.topological_sort_schedule(mock.Mock(), list(operations))  # type: ignore[arg-type]
    return [operation.name for operation in ordered]  # type: ignore[attr-defined]


def test_an_operation_that_is_not_ready_waits_and_nothing_runs_early_for_it() -> None:
    """Labels and their place in the logits, one kernel, stand first; the release stays between the head and the maximum."""
    looked_up, maximum = Operation("looked up", "head", "maximum"), Operation("maximum", "head")
    assert names_in_order(looked_up, Operation("head", "weight"), Operation("release"), maximum) == [
        "head", "release", "maximum", "looked up",
    ]  # fmt: skip


def test_operations_that_need_each_other_are_sorted_as_inductor_does() -> None:
    assert names_in_order(Operation("a", "b"), Operation("b", "a"), Operation("c")) == ["b", "a", "c"]
