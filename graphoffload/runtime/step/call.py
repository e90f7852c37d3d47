"""One call of a compiled graph in a running step, and how it is told of its backward.

A call's autograd node holds the call: if the node dies before a backward came, the forward was dropped. AOTAutograd's backward
of a compiled graph gets the node, and tells its call when it begins and ends (`told`). Hooks on the node do the same for 7 us
a call. They are set in recorded runs, which need the gradients that only hooks are given, and after a run whose backwards did
not come that way: compiled autograd runs another function.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from graphoffload.errors import RuntimeStateError
from graphoffload.runtime.counters import COUNTERS
from graphoffload.runtime.offloaded_tensors import LOCK, PREFETCHED, RELEASE_PENDING, OffloadedTensor
from graphoffload.runtime.step.schedule import Schedule
from graphoffload.torch_internals import autograd, pytrees, storages

if TYPE_CHECKING:
    from graphoffload.runtime.step.calls import StepRun

_NONE: Mapping[int, int] = {}


class StepCall:
    """One call of a compiled graph, from its forward to the end of its backward.

    index: its place in the run. graph: number of the graph. key: of the plan that it runs. kept_bytes: what its variant saves
    without an op. is_variant: it is one of several, whose tensors may stay if nothing is planned. entries: its offloaded
    tensors by id; None for one that is closed. In a recorded run: inputs, memory of those that other graphs computed; by id,
    (memory, bytes) of those that went to the host (gone) and of those that others held until its backward (held);
    output_bytes, of what it returned, by output of its autograd node; returned, the bytes of its outputs by their memory, and
    let_go, (bytes, moment) of those that nobody held any more at a moment before its backward ended. schedule: None where
    nothing is planned for it. hooked: hooks tell it of its backward. node: its autograd node.
    """

    __slots__ = (
        "began", "ended", "entries", "gone", "graph", "held", "hooked", "index", "inputs", "is_variant", "kept_bytes", "key",
        "let_go", "node", "output_bytes", "returned", "run", "schedule", "variant",
    )  # fmt: skip

    def __init__(self, run: StepRun, index: int, graph: int) -> None:
        self.run, self.index, self.graph = run, index, graph
        self.key = ""
        self.variant = 0
        self.kept_bytes = 0
        self.inputs: tuple[Any, ...] = ()
        self.gone: dict[int, Any] = {}  # a display: `dict[int, Any]()` takes ten times as long, and there is one of each a call
        self.held: dict[int, Any] = {}
        self.output_bytes = _NONE
        self.returned: dict[Any, int] = {}
        self.let_go: list[tuple[int, tuple[str, int]]] = []
        self.schedule: Schedule | None = None
        self.entries: dict[int, OffloadedTensor | None] = {}
        self.began = self.ended = self.hooked = self.is_variant = False
        self.node: weakref.ref[Any] | None = None

    @property
    def dropped(self) -> bool:
        """Whether no backward can come any more, and none came."""
        return not self.began and self.node is not None and self.node() is None

    @property
    def waits(self) -> bool:
        """Whether its backward is still to come, and may."""
        return not self.began and self.node is not None and self.node() is not None

    def returns(self, outputs: Any) -> None:
        """What its forward returned."""
        for value in pytrees.tree_leaves(outputs):
            if type(value) is torch.Tensor:  # what a subclass holds is not known
                memory = value.untyped_storage()
                self.returned[storages.lasting(memory)] = memory.nbytes()

    def look_at_outputs(self, moment: tuple[str, int]) -> None:
        """Note which outputs nobody holds any more."""
        for memory in [memory for memory in self.returned if storages.is_gone(memory)]:
            self.let_go.append((self.returned.pop(memory), moment))

    def begin(self, gradients: Sequence[Any] = ()) -> None:
        """Its backward starts."""
        self.run.backward_began(self, gradients)

    def end(self, *_: Any) -> None:
        """Its backward is issued."""
        self.run.backward_ended(self)

    def leave(self, entry: OffloadedTensor) -> None:
        """A tensor of this call is closed: its pending source and its early copy are freed, each after its copy."""
        with LOCK:
            if entry.state is RELEASE_PENDING:
                with contextlib.suppress(RuntimeStateError):  # nobody reads it any more
                    entry.settle()
                COUNTERS.released(entry.layout.nbytes)
            elif entry.state is PREFETCHED:
                self.run.drop(entry)
            if self.entries.get(entry.id) is entry:
                self.entries[entry.id] = None
            entry.call = None

    def held_bytes(self) -> int:
        """Device bytes that the call holds for its backward, other than inputs, which count as outside."""
        entries = [e for e in list(self.entries.values()) if e is not None and e.id not in e.run.inputs]
        held = sum(e.layout.nbytes for e in entries if e.source is not None or e.target is not None)
        return held + (0 if self.ended else self.kept_bytes)


def told(backward: Callable[[Any, list[Any]], Any]) -> Callable[[Any, list[Any]], Any]:
    """AOTAutograd's backward of a compiled graph, which tells the call that its node holds."""

    @functools.wraps(backward)
    def run(ctx: Any, args: list[Any]) -> Any:
        call: StepCall | None = autograd.left_with_node(ctx)
        if call is None:
            return backward(ctx, args)
        step, call.run.tells = call.run, True
        if call.hooked:
            return backward(ctx, args)
        step.backward_began(call)
        gradients = backward(ctx, args)
        step.backward_ended(call)
        return gradients

    return run
