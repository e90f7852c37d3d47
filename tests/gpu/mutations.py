"""Every ordering rule, broken on purpose. Each is a context manager; inside it a test or a check has to fail.

At run time (ops and streams), with the disturbance under which the missing order shows:

    release_without_wait    compute goes on before D2H has read the source
    wait_without_wait       compute reads the reloaded tensor before H2D has written it
    d2h_without_compute     D2H reads the source before compute has written it
    h2d_without_compute     H2D writes the target while compute still uses that memory
    flat_in_wrong_strides   bytes are copied in logical order, and their strides recorded as physical
    offload_a_temporary     offload reads a copy of the tensor that release names
    reload_nothing          the copy back is forgotten
    settle_without_wait     a source that was left to the next graph goes before D2H has read it

In the graph (what the verifier must refuse, and what runs wrong without it):

    drop_release, release_at_once, drop_wait, wait_after_readers
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from gpu.races import with_compiled_copies
from torch import Tensor

from graphoffload.analysis.saved_values import GraphPair
from graphoffload.compiler import pipeline
from graphoffload.facts.plan import Plan
from graphoffload.runtime import ops
from graphoffload.runtime.step import between_graphs as between
from graphoffload.runtime.streams import copy_streams as streams
from graphoffload.testing.faults import _implementation

Mutation = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def _op_without_wait(name: str, original: Callable[..., None]) -> Iterator[None]:
    def careless(*args: Any) -> None:
        with mock.patch.object(streams.DeviceStreams, "compute_waits_for", return_value=None):
            original(*args)

    with _implementation(name, careless):
        yield


def release_without_wait() -> contextlib.AbstractContextManager[None]:
    """The source may be overwritten while D2H still reads it."""
    return _op_without_wait("release", ops.release)


def wait_without_wait() -> contextlib.AbstractContextManager[None]:
    """The reloaded tensor is read while H2D still writes it."""
    return _op_without_wait("wait", ops.wait)


@contextlib.contextmanager
def _side_stream_does_not_wait(direction: str) -> Iterator[None]:
    """On both ways to copy. In the compiled one the event that stands for compute is recorded on the side stream itself."""
    original = streams.DeviceStreams.copy
    of_device = with_compiled_copies()
    compiled = of_device._whole

    def copy(self: Any, towards: str, entry: Any, after: tuple[Any, ...], *how: Any) -> Any:
        if towards != direction:
            return original(self, towards, entry, after, *how)
        with mock.patch.object(streams.Event, "wait", return_value=None):
            return original(self, towards, entry, (), *how)

    def whole(target: int, source: int, nbytes: int, kind: int, compute: int, side: int, *events: int) -> int:
        waits_for = side if kind == streams.KINDS[direction] else compute
        return int(compiled(target, source, nbytes, kind, waits_for, side, *events))

    with mock.patch.object(streams.DeviceStreams, "copy", copy), mock.patch.object(of_device, "_whole", whole):
        yield


def d2h_without_compute() -> contextlib.AbstractContextManager[Any]:
    """The copy to the host starts at once."""
    return _side_stream_does_not_wait("d2h")


def h2d_without_compute() -> contextlib.AbstractContextManager[Any]:
    """The copy from the host starts at once."""
    return _side_stream_does_not_wait("h2d")


@contextlib.contextmanager
def flat_in_wrong_strides() -> Iterator[None]:
    """Row-major bytes under the physical strides of a tensor that is not row-major."""
    original, alive = ops._copy_to_host, []

    def copy_to_host(x: Tensor, entry: Any, **kwargs: Any) -> None:
        alive.append(x.contiguous())  # no second fault: the temporary outlives its copy
        original(alive[-1], entry, **kwargs)

    with mock.patch.object(ops, "_copy_to_host", copy_to_host):
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()


@contextlib.contextmanager
def offload_a_temporary() -> Iterator[None]:
    """What a compiler does that inserts a copy for an op's argument."""
    alive: list[Tensor] = []

    def offload(x: Tensor, plan: str, id: int) -> Tensor:
        alive.append(x.clone())
        return ops.offload(alive[-1], plan, id)

    with _implementation("offload", offload):
        yield


def reload_nothing() -> contextlib.AbstractContextManager[Any]:
    """The target keeps whatever its memory held."""
    return mock.patch.object(ops, "_copy_to_device", return_value=None)


@contextlib.contextmanager
def settle_without_wait() -> Iterator[None]:
    """What was pending from an earlier graph goes at once."""
    original = between._settle

    def careless(*args: Any) -> None:
        with mock.patch.object(streams.DeviceStreams, "compute_waits_for", return_value=None):
            original(*args)

    with mock.patch.object(between, "_settle", careless):
        yield


Edit = Callable[[torch.fx.Graph], None]


@contextlib.contextmanager
def _edited(which: str, edit: Edit) -> Iterator[None]:
    """Change the graph behind the pass `which`, before the verifier sees it."""
    original = getattr(pipeline, which)

    def mutated(graphs: GraphPair, plan: Plan) -> GraphPair:
        graphs = original(graphs, plan)
        module = graphs.forward if which == "insert_offloads" else graphs.backward
        edit(module.graph)
        module.recompile()
        return graphs

    with mock.patch.object(pipeline, which, mutated):
        yield


def _calls(graph: torch.fx.Graph, name: str) -> list[torch.fx.Node]:
    return graph.find_nodes(op="call_function", target=getattr(torch.ops.graphoffload, name).default)


def _drop(name: str) -> Edit:
    def edit(graph: torch.fx.Graph) -> None:
        for node in _calls(graph, name):
            graph.erase_node(node)

    return edit


def _release_behind_offload(graph: torch.fx.Graph) -> None:
    for node in _calls(graph, "release"):
        node.args[1].append(node)


def _wait_at_the_end(graph: torch.fx.Graph) -> None:
    output = next(iter(reversed(graph.nodes)))
    for node in _calls(graph, "wait"):
        output.prepend(node)


def drop_release() -> contextlib.AbstractContextManager[None]:
    """Nothing tells when the source is free."""
    return _edited("insert_offloads", _drop("release"))


def release_at_once() -> contextlib.AbstractContextManager[None]:
    """The source dies before its last reader."""
    return _edited("insert_offloads", _release_behind_offload)


def drop_wait() -> contextlib.AbstractContextManager[None]:
    """Nothing tells when the target is there."""
    return _edited("insert_reloads", _drop("wait"))


def wait_after_readers() -> contextlib.AbstractContextManager[None]:
    """The target is read before it is there."""
    return _edited("insert_reloads", _wait_at_the_end)


@contextlib.contextmanager
def source_dies_early() -> Iterator[None]:
    """Released right behind its offload, without waiting: its memory goes to the next tensor while D2H still reads it."""
    with release_at_once(), release_without_wait():
        yield
