"""Side streams for a CPU on which nothing is copied before somebody waits for it: a missing wait is a wrong number at once.

    with lazy_streams() as lazy:      # copies of blocks are raw: they read and write what lies at their addresses when they run
        step()
    lazy.complaints                   # copies that ran when the memory of their tensor was free already

With `overwrite`, a source is filled with ones (NaN) when it is released: a copy that is still to come reads that.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from graphoffload.compiler.step_runs import _PLANNER, OVERRIDE
from graphoffload.runtime import host_memory, release_hook
from graphoffload.runtime.handles import ENTRIES
from graphoffload.runtime.pinned.pool import POOL
from graphoffload.runtime.step import between_graphs as between
from graphoffload.runtime.step.calls import LATEST, STEPS
from graphoffload.runtime.streams import copy_streams as streams

CPU = torch.device("cpu")


class LazyEvent:
    """Reached when its copy, and all before it on the same stream, were made."""

    def __init__(self, queue: list[LazyEvent], after: tuple[LazyEvent | None, ...], work: Callable[[], None]) -> None:
        self.queue, self.after, self.work, self.done = queue, after, work, False

    def synchronize(self) -> None:
        """Make the copy now."""
        while not self.done:
            first = self.queue.pop(0)
            for event in first.after:
                if event is not None:
                    event.synchronize()
            first.work()
            first.done = True

    def wait(self, stream: Any) -> None:
        """Compute is synchronous: whoever waits for a copy has it made."""
        self.synchronize()

    def query(self) -> bool:
        """Whether it was made."""
        return self.done


class LazyTime:
    """A moment; nothing takes any time."""

    def synchronize(self) -> None:
        """Already there."""

    def elapsed_time(self, other: LazyTime) -> float:
        """Milliseconds."""
        return 0.0


class LazyStreams:
    """What DeviceStreams offers, as far as the ops ask."""

    def __init__(self) -> None:
        self.index = -1
        self.queues: dict[str, list[LazyEvent]] = {"d2h": [], "h2d": []}
        self.stream: Any = object()
        self.headroom = 2**40
        self.allocated = 0, 0
        self.captures = False
        self.complaints: list[str] = []
        self.log: list[str] = []

    def timed_event(self) -> LazyTime:
        """This moment."""
        return LazyTime()

    def copy(self, direction: str, entry: Any, after: tuple[Any, ...], run: Callable[[], None], block: Any = None) -> Any:
        """Put the copy into its queue."""
        work = run if block is None else self._raw(direction, entry, run, block)
        self.log.append(f"{direction} {entry.name}")
        self.queues[direction].append(event := LazyEvent(self.queues[direction], after, work))
        return event

    def _raw(self, direction: str, entry: Any, run: Any, block: tuple[int, int, int]) -> Callable[[], None]:
        target, source, nbytes = block
        cells = [cell.cell_contents for cell in run.__closure__]
        device = next(x for x in cells if isinstance(x, Tensor) and x.data_ptr() in (target, source))
        weak, name = device.untyped_storage()._weak_ref(), entry.name
        del cells, device, run  # held by nobody but the runtime, as on a device

        def work() -> None:
            if torch.UntypedStorage._expired(weak):
                self.complaints.append(f"{direction} of {name} ran on free memory")
            else:
                ctypes.memmove(target, source, nbytes)
            torch.UntypedStorage._free_weak_ref(weak)

        return work

    def compute(self) -> Any:
        """The current stream."""
        return self.stream

    def compute_waits(self, event: LazyEvent) -> None:
        """As DeviceStreams."""
        event.synchronize()

    def compute_waits_for(self, op: str, entry: Any, event: LazyEvent, compute: Any = None) -> None:
        """As DeviceStreams."""
        self.log.append(f"{op} {entry.name}")
        event.synchronize()

    def recycle(self, event: Any) -> None:
        """Events are not reused here."""

    def capturing(self) -> bool:
        """Whether a capture is pretended."""
        return self.captures

    def headroom_bytes(self) -> int:
        """As much as the test says."""
        return self.headroom

    def retries(self) -> int:
        """Nothing is ever short."""
        return 0

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def allocated_bytes(self) -> tuple[int, int]:
        """As much as the test says: now, and at the peak."""
        return self.allocated

    def finish(self) -> None:
        """Make every copy that is left."""
        for queue in self.queues.values():
            while queue:
                queue[-1].synchronize()


def overwrite(source: Tensor, name: str) -> None:
    """Whoever gets a released source's memory writes to it."""
    source.untyped_storage().fill_(0xFF)


@contextlib.contextmanager
def lazy_streams() -> Iterator[LazyStreams]:
    """Every offload on the CPU goes through lazy streams; sources are overwritten when released, buffers when given back."""
    lazy = LazyStreams()
    with (
        mock.patch.dict(streams._STREAMS, {CPU: lazy}),
        mock.patch("graphoffload.runtime.pinned.slabs._page_lock", return_value=False),
        mock.patch.object(POOL, "poison", True),
        release_hook(overwrite),
    ):
        yield lazy
        lazy.finish()


@pytest.fixture(scope="module", autouse=True)
def once() -> Iterator[None]:
    """For a file that imports this and clean_slate: models with the same options are compiled once, in whichever test is first.

    torch takes equal backends for the same one, so that a model hits what an equal one was compiled to, without any limit here.
    """
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=10_000):
        yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def clean_slate() -> None:
    """In place of the one for all tests: what is compiled stays, the random state does not."""
    torch.manual_seed(0)


@pytest.fixture
def afresh() -> Iterator[None]:
    """For a test that compiles something else out of the same options, by a variable or a patch, or looks at the plan made."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def learned() -> Iterator[None]:
    """For a file that imports this: graphs join no step. What one leaves to the next is learned (step/between_graphs.py), as
    for graphs that cannot be traced again."""
    with mock.patch("graphoffload.compiler.backend.may_join", return_value=False):
        yield


def forget_steps() -> None:
    """This thread has run nothing, and nobody has asked for another goal."""
    between._TRACKS.of.clear()
    STEPS.runs.clear()
    STEPS.call = None
    LATEST.clear()
    _PLANNER.known.clear()
    _PLANNER.last.clear()
    _PLANNER.went_as_planned.clear()
    _PLANNER.irregular, _PLANNER.warned = 0, False
    OVERRIDE.options, OVERRIDE.configs, OVERRIDE.version = {}, frozenset(), 0


@contextlib.contextmanager
def lazy_steps() -> Iterator[LazyStreams]:
    """The same for a test of whole training steps: nothing of one is left for the next, and no copy ran on free memory."""
    forget_steps()
    with lazy_streams() as lazy:
        yield lazy
        forget_steps()
        gc.collect()
        ENTRIES.sweep()
    assert lazy.complaints == []
    assert host_memory().in_use_bytes == 0
