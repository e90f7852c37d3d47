"""Side streams for a CPU on which nothing is copied before somebody waits for it: a missing wait is a wrong number at once.

    lazy = LazyStreams()              # in the place of what streams_of() finds for the device
    step()
    lazy.complaints                   # copies that ran when the memory of their tensor was free already
    lazy.waits                        # who waited for which copy, in order

Copies of blocks are raw: they read and write what lies at their addresses when they run. Where the test says that a CUDA graph
is captured, streams for captures record what they are given and run nothing; a test runs the record again, as a replay would.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from graphoffload.runtime.streams.copy_times import CopyTimes
from graphoffload.runtime.streams.protocol import Block, CaptureStreams, CopyEvent, Moment, Named
from graphoffload.torch_internals import storages


@final  # or mypy would not say that a method is missing
class LazyEvent(CopyEvent):
    """Reached when its copy, and all before it on the same stream, were made.

    recorded: in a capture, inside of which no event from outside may be waited for.
    """

    def __init__(
        self, streams: LazyStreams, name: str, queue: list[LazyEvent], after: tuple[Any, ...], copy: Callable[[], None]
    ) -> None:
        self.streams, self.name, self.queue, self.after, self.copy = streams, name, queue, after, copy
        self.done = self.recorded = False

    def synchronize(self) -> None:
        """Make the copy now. Threads share the queues."""
        with self.streams.lock:
            while not self.done:
                first = self.queue.pop(0)
                for event in first.after:
                    if event is not None:
                        event.synchronize()
                first.copy()
                first.done = True

    def wait(self, stream: Any) -> None:
        """Compute is synchronous: whoever waits for a copy has it made."""
        assert not self.recorded, "only what ran outside of captures is waited for by a stream of its own"
        if self.streams.refuses is not None:
            error, self.streams.refuses = self.streams.refuses, None
            raise error
        self.streams.waits.append(f"{stream} waits for {self.name}")
        self.synchronize()

    def query(self) -> bool:
        """Whether it was made."""
        return self.done


@final
class LazyTime(Moment):
    """A moment; nothing takes any time."""

    def query(self) -> bool:
        """Already there."""
        return True

    def synchronize(self) -> None:
        """Already there."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds."""
        return 0.0


@final
class LazyStreams(CaptureStreams):
    """Streams of a CPU that a test looks into and sets.

    Attributes:
        stream: the current one. captures: whether a capture is pretended. headroom, allocated: what the allocator says.
        held: how often compute was held. refuses: the error of the next wait; None: it succeeds.
        waits: "STREAM waits for COPY", of every wait. log: "DIRECTION NAME" of every copy and "OP NAME" of every op's wait.
        complaints: copies that ran on free memory. record: what a capture is to run. joined: recorded copies that were joined.
    """

    def __init__(self, *, for_captures: bool = False) -> None:
        self.index = -1
        self.times: CopyTimes | None = None
        self.device = torch.device("cpu")
        self.for_captures = for_captures
        self.lock = threading.RLock()
        self.queues: dict[str, list[LazyEvent]] = {"d2h": [], "h2d": []}
        self.stream: Any = "compute"
        self.headroom = 10**12
        self.held = 0
        self.allocated = 0, 0
        self.captures = False
        self.refuses: Exception | None = None
        self.complaints: list[str] = []
        self.waits: list[str] = []
        self.log: list[str] = []
        self.record: list[Callable[[], None]] = []
        self.joined: list[LazyEvent] = []

    def compute(self) -> Any:
        """The current stream."""
        return self.stream

    def timed_event(self) -> LazyTime:
        """This moment."""
        return LazyTime()

    def hold_compute(self) -> None:
        """Nothing takes any time here; it is counted."""
        self.held += 1

    def made(self, name: str) -> LazyEvent:
        """The event of a copy that was made already."""
        event = LazyEvent(self, name, [], (), lambda: None)
        event.done = True
        return event

    def recycle(self, event: CopyEvent | None) -> None:
        """Events are not reused here."""

    def copy(
        self,
        direction: str,
        entry: Named,
        after: tuple[Any, ...],
        run: Callable[[], None],
        block: Block | None = None,
        *,
        first: Callable[[], None] | None = None,
    ) -> LazyEvent:
        """Put the copy into its queue, or into the record of a capture."""
        self.log.append(f"{direction} {entry.name}")
        if self.for_captures and self.captures:
            self.record += [part for part in (first, run) if part is not None]
            event = self.made(f"{direction} of {entry.name}")
            event.recorded = True
            return event
        assert first is None, "only captures have something to run before a copy"
        copy = run if block is None else self._raw(direction, entry.name, run, block)
        event = LazyEvent(self, f"{direction} of {entry.name}", self.queues[direction], after, copy)
        with self.lock:
            self.queues[direction].append(event)
        return event

    def _raw(self, direction: str, name: str, run: Any, block: Block) -> Callable[[], None]:
        target, source, nbytes = block
        cells = [cell.cell_contents for cell in run.__closure__]
        device = next(x for x in cells if isinstance(x, Tensor) and x.data_ptr() in (target, source))
        weak = storages.weak_ref(device.untyped_storage())
        del cells, device, run  # held by nobody but the runtime, as on a device

        def copy() -> None:
            if storages.expired(weak):
                self.complaints.append(f"{direction} of {name} ran on free memory")
            else:
                ctypes.memmove(target, source, nbytes)
            storages.free_weak_ref(weak)

        return copy

    def compute_waits(self, event: LazyEvent) -> None:
        """The current stream waits, or a branch of a capture joins."""
        if not self.for_captures:
            event.wait(self.stream)
            return
        assert event.recorded == self.captures, "a wait may neither leave a capture nor enter one"
        if event.recorded:
            self.joined.append(event)
        else:
            event.wait(self.stream)

    def compute_waits_for(self, op: str, entry: Named, event: LazyEvent, compute: Any = None) -> None:
        """The same for an op, outside of captures."""
        self.log.append(f"{op} {entry.name}")
        event.wait(self.stream if compute is None else compute)

    def capturing(self) -> bool:
        """As the test says."""
        return self.captures

    def read(self, number: torch.Tensor) -> int:
        """As after a replay."""
        return int(number)

    def taken(self) -> list[Callable[[], None]]:
        """End of a capture: what it recorded."""
        found, self.record = self.record, []
        return found

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def allocated_bytes(self) -> tuple[int, int]:
        """As the test says: now, and at the peak."""
        return self.allocated

    def retries(self) -> int:
        """Nothing is ever short."""
        return 0

    def headroom_bytes(self) -> int:
        """As the test says."""
        return self.headroom

    def finish(self) -> None:
        """Make every copy that is left."""
        for queue in self.queues.values():
            while queue:
                queue[-1].synchronize()
