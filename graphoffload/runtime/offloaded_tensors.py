"""Offloaded tensors: a state machine for each, from `offload` until its handle is dropped.

Methods of OffloadedTensor are the events, and the only code that changes its state. TRANSITIONS lists the states that each
event may come in and the state that it leads to; in any other state the event raises.

         start_copy           release              start_reload           start_reload
    new ------------> copying -------> on host ------------------> reloading --------> reloading (a backward stopped)
     |                   |              ^ | ^ ^        wait            | ^
     |                   |       settle | | | +------------------------+ | take_prefetched
     |                   +--------> release | +-- drop_prefetched --+    |
     |  leave_release_pending       pending +------- prefetch ----> prefetched
     |
     |  let_stay          become_resident            lend          lend
     +-----------> staying -----------> resident ----------> lent -----> lent (to the next backward)
                                          |   ^      wait     | |
                                          |   +---------------+ |
                                          |       hand_over     |                   wait
                                          +---------------------+---> handing over -----> handed over

    close leads from every state to closed, and nothing leads from there.

Upper half: the bytes go to the host and come back. Lower half: there is room for them on the device (step/between_graphs.py).
Memory is let go by release, settle, wait, drop_prefetched, start_reload and close, each after the compute stream that owns
the memory waits for its copy, and by hand_over, where there is no copy.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from graphoffload.errors import RuntimeStateError
from graphoffload.runtime.layouts import Layout
from graphoffload.runtime.pinned.pool import POOL
from graphoffload.runtime.pinned.slabs import HostBuffer
from graphoffload.runtime.registry import RunPlan
from graphoffload.runtime.streams.copy_streams import streams_of
from graphoffload.torch_internals.autograd import version, with_its_version
from graphoffload.torch_internals.storages import identity, owners

if TYPE_CHECKING:
    from graphoffload.runtime.step.between_graphs import Call
    from graphoffload.runtime.step.call import StepCall

_OWNERS = 2  # References to a storage that one tensor has: the tensor's, and the Python object that asks.

LOCK = threading.RLock()
"""Guards handles and everything pending: forward, backward and the clearing of dead handles run on different threads."""


class State(enum.IntEnum):
    """What an offloaded tensor is doing; the diagram above has the ways between them."""

    NEW = enum.auto()  # nothing was done yet
    COPYING = enum.auto()  # the copy to the host may be running, and the source is held
    RELEASE_PENDING = enum.auto()  # the graph no longer reads the source, and a later graph's compute waits for its copy
    ON_HOST = enum.auto()  # only the host has the bytes, as far as the compute stream can tell
    PREFETCHED = enum.auto()  # a copy to memory that no backward has asked for yet may be running
    RELOADING = enum.auto()  # backward has the target, and the copy to it may be running
    STAYING = enum.auto()  # not copied, and the graph still reads the source
    RESIDENT = enum.auto()  # not copied, and no operation may write to the source any more
    LENT = enum.auto()  # a backward has a copy of the source, and another backward may come
    HANDING_OVER = enum.auto()  # a backward has the source, or a copy of it, and no other backward may come
    HANDED_OVER = enum.auto()  # that backward waited for it: nothing is left
    CLOSED = enum.auto()  # its handle was dropped

    @property
    def words(self) -> str:
        """The state's name for messages."""
        return self.name.lower().replace("_", " ")


# Names of the module: looking a member up in its class costs more than comparing it.
(
    NEW, COPYING, RELEASE_PENDING, ON_HOST, PREFETCHED, RELOADING,
    STAYING, RESIDENT, LENT, HANDING_OVER, HANDED_OVER, CLOSED,
) = State  # fmt: skip

TRANSITIONS: dict[str, dict[State, State]] = {
    "start_copy": {NEW: COPYING},
    "release": {COPYING: ON_HOST},
    "leave_release_pending": {COPYING: RELEASE_PENDING},
    "settle": {RELEASE_PENDING: ON_HOST},
    "prefetch": {ON_HOST: PREFETCHED},
    "take_prefetched": {PREFETCHED: RELOADING},
    "drop_prefetched": {PREFETCHED: ON_HOST},
    "start_reload": {ON_HOST: RELOADING, RELOADING: RELOADING},
    "let_stay": {NEW: STAYING},
    "become_resident": {STAYING: RESIDENT},
    "lend": {RESIDENT: LENT, LENT: LENT},
    "hand_over": {RESIDENT: HANDING_OVER, LENT: HANDING_OVER},
    "wait": {RELOADING: ON_HOST, LENT: RESIDENT, HANDING_OVER: HANDED_OVER},
    "close": {state: CLOSED for state in State if state is not CLOSED},
}
"""For each event: the states that it may come in, and the state that it leads to from each."""

(
    _START_COPY, _RELEASE, _LEAVE_RELEASE_PENDING, _SETTLE, _PREFETCH, _TAKE_PREFETCHED, _DROP_PREFETCHED, _START_RELOAD,
    _LET_STAY, _BECOME_RESIDENT, _LEND, _HAND_OVER, _WAIT, _CLOSE,
) = TRANSITIONS.values()  # fmt: skip

_STAYING = (STAYING, RESIDENT, LENT, HANDING_OVER, HANDED_OVER)


class HostCopy:
    """The bytes of one offloaded tensor on the host, and the last copies to and from them.

    clone: instead of a buffer, under twin_copies(). written, read: events of the copy to the host and of the last one back;
    None if copies are synchronous, and in captures of CUDA graphs, which have their own.
    """

    __slots__ = ("buffer", "clone", "read", "written")

    def __init__(self, buffer: HostBuffer | None, clone: torch.Tensor | None = None) -> None:
        self.buffer, self.clone = buffer, clone
        self.written: Any = None
        self.read: Any = None


def is_sole_owner(x: torch.Tensor) -> bool:
    """Whether no other tensor, and nothing else, uses its storage."""
    return owners(identity(x.untyped_storage())) == _OWNERS


class Ticket(NamedTuple):
    """The number written into a handle that may be copied, and the turn from forward to backward in which it was written."""

    number: int
    turn: int


class OffloadedTensor:
    """One tensor that a plan offloads, from `offload` until its handle is dropped.

    source: in NEW, COPYING, RELEASE_PENDING, STAYING, RESIDENT, LENT; source_ptr: its address at the offload. target: in
    PREFETCHED, RELOADING, LENT, HANDING_OVER. stream: the compute stream that either's memory belongs to, once a copy other
    than the first may be waited for. host: what start_copy leads to, except for tensors without bytes. version: of the source,
    from RESIDENT on. reloads: how often a backward asked. weak, ticket: what the handle is found by, one of the two.
    """

    __slots__ = (
        "call", "digest", "host", "id", "layout", "reloads", "run", "source", "source_ptr", "state", "stream", "streams",
        "target", "ticket", "version", "weak",
    )  # fmt: skip

    stream: Any  # these two are not there before the states that they belong to
    version: int

    def __init__(self, source: torch.Tensor, layout: Layout, run: RunPlan, id: int) -> None:
        self.state = NEW
        self.run = run
        self.id = id
        self.layout = layout
        self.streams = streams_of(layout.device)
        self.source: torch.Tensor | None = source
        self.source_ptr = source.data_ptr()
        self.target: torch.Tensor | None = None
        self.host: HostCopy | None = None
        self.digest: torch.Tensor | None = None
        self.reloads = 0
        self.call: Call | StepCall | None = None
        self.weak = 0
        self.ticket: Ticket | None = None
        if id in run.inputs:
            self.source = with_its_version(source)
            self.version = version(source)

    @property
    def name(self) -> str:
        """The tensor's name and its module, for messages."""
        return self.run.name(self.id)

    @property
    def stays(self) -> bool:
        """Whether it was not copied, since the device had room for it, or the host had none."""
        return self.state in _STAYING

    @property
    def in_flight(self) -> bool:
        """Whether it is copied to the host and its source is not free yet."""
        return self.state is COPYING or self.state is RELEASE_PENDING

    @property
    def settled(self) -> bool:
        """Whether it holds no device memory, and compute has waited for every copy."""
        return self.state is ON_HOST or self.state is HANDED_OVER or self.state is CLOSED

    def refusal(self, event: str) -> RuntimeStateError:
        """The error of an event that the present state does not allow."""
        ways = [f"{before.words} to {after.words}" for before, after in TRANSITIONS[event].items()]
        return RuntimeStateError(
            f"{self.name}: {event} leads from {' or from '.join(ways)}, but this tensor is {self.state.words} (plan "
            f"{self.run.key}). Its ops ran in an order that no plan has; please report this with a graph dump "
            "(GRAPHOFFLOAD_DUMP_DIR)."
        )

    def start_copy(self) -> None:
        """Its copy to the host starts next."""
        if (after := _START_COPY.get(self.state)) is None:
            raise self.refusal("start_copy")
        self.state = after

    def release(self) -> None:
        """Compute waits for the copy to the host, and the source is free."""
        if (after := _RELEASE.get(self.state)) is None:
            raise self.refusal("release")
        host = self.host
        if host is not None and host.written is not None:
            assert self.streams is not None
            self.streams.compute_waits_for("release", self, host.written)
        written = self._was_written()
        self.state = after
        self.source = None
        if written:
            raise self._refuse_written()

    def leave_release_pending(self, stream: Any) -> None:
        """The graph on `stream` no longer reads the source, and does not wait for its copy."""
        if (after := _LEAVE_RELEASE_PENDING.get(self.state)) is None:
            raise self.refusal("leave_release_pending")
        self.stream = stream
        self.state = after

    def settle(self, *, waited: bool = False) -> torch.Tensor | None:
        """Compute waits for the copy to the host, unless it `waited` for a later one. Returns the source, then free."""
        if (after := _SETTLE.get(self.state)) is None:
            raise self.refusal("settle")
        host = self.host
        if host is not None and host.written is not None and not waited:
            assert self.streams is not None
            self.streams.compute_waits_for("release", self, host.written, self.stream)
        written = self._was_written()
        self.state = after
        source, self.source = self.source, None
        if written:
            raise self._refuse_written()
        return source

    def prefetch(self, y: torch.Tensor, copy: Callable[[torch.Tensor, OffloadedTensor], Any]) -> None:
        """`copy(y, self)` starts the copy back before a backward asks for it; y belongs to the current compute stream."""
        if (after := _PREFETCH.get(self.state)) is None:
            raise self.refusal("prefetch")
        assert self.streams is not None
        copy(y, self)
        self.stream = self.streams.compute()
        self.target = y
        self.state = after

    def take_prefetched(self) -> None:
        """Backward asks for the target."""
        if (after := _TAKE_PREFETCHED.get(self.state)) is None:
            raise self.refusal("take_prefetched")
        self.state = after

    def drop_prefetched(self) -> None:
        """The target is dropped, after the stream that owns its memory has waited for the copy."""
        if (after := _DROP_PREFETCHED.get(self.state)) is None:
            raise self.refusal("drop_prefetched")
        self._finish_reading()
        self.target = None
        self.state = after

    def start_reload(self, y: torch.Tensor) -> None:
        """The copy back to y starts next. Memory of an earlier, interrupted backward is free after its own copy."""
        if (after := _START_RELOAD.get(self.state)) is None:
            raise self.refusal("start_reload")
        if self.state is RELOADING:
            self._finish_reading()
        self.target = y
        self.state = after

    def let_stay(self, stream: Any) -> None:
        """It is not copied; the source belongs to `stream`."""
        if (after := _LET_STAY.get(self.state)) is None:
            raise self.refusal("let_stay")
        self.stream = stream
        self.state = after

    def become_resident(self, version: int) -> None:
        """The graph no longer reads the source, which has this version and stays on the device."""
        if (after := _BECOME_RESIDENT.get(self.state)) is None:
            raise self.refusal("become_resident")
        self.version = version
        self.state = after

    def lend(self, y: torch.Tensor) -> None:
        """Backward gets y, a copy of the source; the source stays for the next one."""
        if (after := _LEND.get(self.state)) is None:
            raise self.refusal("lend")
        self.target = y
        self.state = after

    def hand_over(self, y: torch.Tensor) -> None:
        """Backward gets y, the source or a copy of it; no other backward comes."""
        if (after := _HAND_OVER.get(self.state)) is None:
            raise self.refusal("hand_over")
        self.source, self.target = None, y
        self.state = after

    def wait(self) -> None:
        """Compute waits for the copy back, and only backward owns the target from then on."""
        if (after := _WAIT.get(self.state)) is None:
            raise self.refusal("wait")
        host = self.host
        if host is not None and host.read is not None:
            assert self.streams is not None
            self.streams.compute_waits_for("wait", self, host.read)
        self.target = None
        self.state = after

    def close(self) -> None:
        """The handle is dropped: memory on the device and on the host is freed, each after a copy that may be running."""
        if (after := _CLOSE.get(self.state)) is None:
            raise self.refusal("close")
        host = self.host
        if self.state is PREFETCHED or self.state is RELOADING:
            self._finish_reading()
        elif host is not None and host.written is not None:
            if self.state is RELEASE_PENDING:
                host.written.wait(self.stream)
            elif self.state is COPYING:
                assert self.streams is not None
                self.streams.compute_waits(host.written)
        self.source = self.target = self.host = None
        self.state = after
        if host is None or host.buffer is None:
            return
        last = host.read if host.read is not None else host.written
        if last is not None:  # else no copy came about, and one of its last user may still be under way
            host.buffer.last_copy = last
        POOL.give_back(host.buffer)
        if self.streams is not None and host.read is not None:
            self.streams.recycle(host.written)

    def _was_written(self) -> bool:
        """Whether an input of the graph, which is its caller's as well, was written to while it was copied."""
        return self.id in self.run.inputs and self.source is not None and version(self.source) != self.version

    def _refuse_written(self) -> RuntimeStateError:
        """The error for that. autograd has one as well, in backward, where the tensor is saved and not copied."""
        return RuntimeStateError(
            f"{self.name}: this input of a compiled graph is needed for backward and was modified in place while it was "
            f"copied to the host (plan {self.run.key}). The gradient would be wrong, so the step is stopped. Write to a "
            "copy of it."
        )

    def _finish_reading(self) -> None:
        if self.host is not None and self.host.read is not None:
            self.host.read.wait(self.stream)
