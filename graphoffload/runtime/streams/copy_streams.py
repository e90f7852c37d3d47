"""One D2H and one H2D side stream a device, and events from a pool. A device without streams copies synchronously.

The compute stream is the current stream of the tensor's device when an op is called. A plain copy names its stream and switches
nothing. Code that needs the side stream to be current (torch's own copies, hooks, a caller on another device) runs inside
`torch.cuda.stream`, which restores stream and device. Under a profiler (or `emit_nvtx`) each copy is a range with its tensor's
name.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from graphoffload.errors import CaptureError, NoStreamsWarning, RuntimeStateError, warn
from graphoffload.log import log
from graphoffload.runtime.hooks import ACTIVE
from graphoffload.runtime.streams.copy_times import CopyTimes
from graphoffload.runtime.streams.memcpy import KINDS, find_copy, find_memcpy, forget_last_error, relaxed_capture
from graphoffload.runtime.streams.protocol import Block, CaptureStreams, CopyStreams, Named
from graphoffload.torch_internals import autograd, streams

_MOST_STREAMS = 64
_HOLD_CYCLES = 2_000_000
_CAPTURED = (
    "{name}: its {direction} copy was called inside the capture of a CUDA graph. Every replay would use the host buffer of the "
    "capture again, and microbatches in flight would overwrite each other, so the capture was stopped. Leave the capture to "
    'mode="reduce-overhead", which captures the parts between the copies, or capture a model with policy="keep".'
)
_NOTHING = contextlib.nullcontext()

_IN_C = {name: method for name in ("record", "wait") if (method := getattr(torch.cuda.Event.__base__, name, None)) is not None}
Event: Any = type("Event", (torch.cuda.Event,), {**_IN_C, "seen_by": None, "raw": 0})
"""torch.cuda.Event without the Python around its two methods, which always get their stream here.

seen_by: a compute stream that waits for the last record; work that it issues afterwards runs after it. raw: the driver's own
event, if the compiled copy uses it.
"""


class DeviceStreams:
    """Side streams of one CUDA device; `captured`: for copies inside captures of CUDA graphs, and only for those."""

    __slots__ = (
        "_compute", "_events", "_memcpy", "_raw", "_reading", "_whole", "captured", "d2h", "device", "h2d", "index", "times",
    )  # fmt: skip

    def __init__(self, device: torch.device, *, captured: bool = False) -> None:
        self.device = device
        self.captured = captured
        self.times: CopyTimes | None = None
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self.d2h = torch.cuda.Stream(device)
        self.h2d = torch.cuda.Stream(device)
        self._reading = torch.cuda.Stream(device) if captured else self.h2d
        self._raw = {"d2h": self.d2h.cuda_stream, "h2d": self.h2d.cuda_stream}
        self._events: list[Any] = []
        self._compute: dict[int, torch.cuda.Stream] = {}
        self._memcpy = find_memcpy()
        self._whole = None if captured else find_copy()

    def compute(self) -> torch.cuda.Stream:
        """The stream that the caller computes on: torch.cuda.current_stream without its checks; each object is made once."""
        id, index, type = streams.current_stream(self.index)
        stream = self._compute.get(id)
        if stream is None:
            if len(self._compute) >= _MOST_STREAMS:
                self._compute = {}
            stream = self._compute[id] = torch.cuda.Stream(stream_id=id, device_index=index, device_type=type)
        return stream

    def event(self) -> Any:
        """An event that no stream waits for any more."""
        try:
            return self._events.pop()
        except IndexError:
            event = Event()
            if self._whole is not None:
                event.record(self.d2h)  # which makes the driver's event
                event.raw = event.cuda_event
            return event

    def timed_event(self) -> Any:
        """An event recorded on the compute stream now, with its time."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.compute())
        return event

    def hold_compute(self) -> None:
        """Keep compute busy for about a millisecond."""
        with torch.cuda.stream(self.compute()):
            streams.busy_wait(_HOLD_CYCLES)

    def recycle(self, event: Any) -> None:
        """Give an event back. A wait enqueued on it earlier is unaffected by its next record."""
        if event is not None:
            self._events.append(event)

    def copy(
        self,
        direction: str,
        entry: Named,
        after: tuple[Any, ...],
        run: Callable[[], None],
        block: Block | None = None,
        *,
        first: Callable[[], None] | None = None,
    ) -> Any:
        """Copy on the side stream of `direction` after compute's work so far and the events `after`; returns the copy's event.

        An event that this compute stream has waited for is skipped: the driver's call costs as much as all of Python.

        `block` says that the copy is of one block of bytes; `run` does the same by torch's means, with the side stream current.
        `first` runs before either, with the side stream current. If anything is raised no copy is running any more.

        Raises:
            CaptureError: the compute stream is being captured: every replay would copy to or from this one host buffer.
        """
        side = self.d2h if direction == "d2h" else self.h2d
        if torch.cuda.is_current_stream_capturing() and not self.captured:
            raise CaptureError(_CAPTURED.format(direction=direction, name=entry.name))
        issued, compute = self.event(), self.compute()
        waits = [event for event in after if event is not None and event.seen_by is not compute]
        asked = ACTIVE.copy is not None or self.times is not None
        watched = asked or autograd.profiler_is_on() or log.isEnabledFor(logging.DEBUG)
        whole = None if watched or first is not None or streams.current_device() != self.index else self._whole
        try:
            if whole is not None and block is not None:
                done, raw = self.event(), self._raw[direction]
                events = (issued.raw, done.raw, *[event.raw for event in waits])
                if code := whole(*block, KINDS[direction], compute.cuda_stream, raw, *events):
                    raise self._refused(direction, side, entry, block[2], code)
                self._events.append(issued)
            else:
                issued.record(compute)
                issued.wait(side)
                self._events.append(issued)
                for event in waits:
                    event.wait(side)
                self._start(direction, side, entry, run, block, first)
                done = self.event()
                done.record(side)
            done.seen_by = None
            if ACTIVE.stalls is not None and not self.captured:
                ACTIVE.stalls.copied(done, side)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error counts; if it ended a capture, no copy is running
                if not self.captured:
                    side.synchronize()
            raise
        return done

    def _start(
        self,
        direction: str,
        side: torch.cuda.Stream,
        entry: Named,
        run: Callable[[], None],
        block: Block | None,
        first: Callable[[], None] | None,
    ) -> None:
        """A copy that is not one call of the driver's: or it is timed, or runs with hooks, a profiler's range or a log line."""
        hook, profiled = ACTIVE.copy, autograd.profiler_is_on()
        times = self.times  # of this device: another thread may set it
        if times is not None and (block is None or not times.wants(block[2])):
            times = None
        if first is not None:
            with torch.cuda.stream(side):
                first()
        log.debug("%s of %s starts%s", direction, entry.name, "" if block is None else f": {block[2]} bytes")
        with torch.profiler.record_function(f"graphoffload::{direction} {entry.name}") if profiled else _NOTHING:
            if hook is not None:
                with torch.cuda.stream(side):
                    hook(direction, "before", entry.name)
            if times is not None:
                begin = torch.cuda.Event(enable_timing=True)
                begin.record(side)
            if block is None or self._memcpy is None or streams.current_device() != self.index:
                with torch.cuda.stream(side):
                    run()
            elif code := self._memcpy(*block, KINDS[direction], self._raw[direction]):
                raise self._refused(direction, side, entry, block[2], code)
            if times is not None and block is not None:
                end = torch.cuda.Event(enable_timing=True)
                end.record(side)
                times.note(direction, block[2], begin, end)
            if hook is not None:
                with torch.cuda.stream(side):
                    hook(direction, "after", entry.name)

    def _refused(self, direction: str, side: torch.cuda.Stream, entry: Named, nbytes: int, code: int) -> RuntimeStateError:
        """The error of a copy that the driver refused.

        Raises:
            RuntimeError: torch's own, if an earlier kernel failed: the driver refuses every call after it.
        """
        forget_last_error()
        if not self.captured:
            side.synchronize()
        return RuntimeStateError(f"{entry.name}: the {direction} copy of {nbytes} bytes was refused (CUDA error {code}).")

    def compute_waits(self, event: Any) -> None:
        """Order all later work of the compute stream after `event`."""
        event.wait(self.compute())

    def compute_waits_for(self, op: str, entry: Named, event: Any, compute: Any = None) -> None:
        """compute_waits for the op `release` or `wait`, timed if that was requested; `compute`: None for the current stream."""
        if compute is None:
            compute = self.compute()
        if ACTIVE.stalls is None:
            event.wait(compute)
        else:
            ACTIVE.stalls.around(op, entry.name, event, compute)
        event.seen_by = compute

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured: no wait may leave it, and nothing may be deferred."""
        return torch.cuda.is_current_stream_capturing()

    def read(self, number: torch.Tensor) -> int:
        """An int64 of shape (1,) on the device, read while the compute stream is being captured. Its writer has finished."""
        host = torch.zeros(1, dtype=torch.int64)
        stream = self._reading
        with relaxed_capture():
            if self._memcpy is None or self._memcpy(host.data_ptr(), number.data_ptr(), 8, KINDS["d2h"], stream.cuda_stream):
                raise RuntimeStateError("A handle could not be read while a CUDA graph is captured. Compile with mode=None.")
            stream.synchronize()
        return int(host)

    def empty_cache(self) -> None:
        """Let torch's allocator give back the memory that it caches."""
        torch.cuda.empty_cache()

    def allocated_bytes(self) -> tuple[int, int]:
        """Bytes allocated on the device now, and their peak so far."""
        allocated = streams.memory_stats(self.index)["allocated_bytes"]["all"]
        return int(allocated["current"]), int(allocated["peak"])

    def retries(self) -> int:
        """How often torch's allocator gave back what it caches to serve an allocation."""
        return int(streams.memory_stats(self.index).get("num_alloc_retries", 0))

    def headroom_bytes(self) -> int:
        """Bytes that can be allocated without a new peak."""
        current, peak = self.allocated_bytes()
        return peak - current


_STREAMS: dict[torch.device, CopyStreams | None] = {}
_LOCK = threading.Lock()


def streams_of(device: torch.device) -> CopyStreams | None:
    """Side streams of `device`; None if copies are synchronous (a CPU, or a device without streams)."""
    try:
        return _STREAMS[device]
    except KeyError:
        with _LOCK:
            return _STREAMS.setdefault(device, _make(device))


_CAPTURE_STREAMS: dict[int, CaptureStreams] = {}


def capture_streams_of(device: torch.device) -> CaptureStreams | None:
    """The same for copies inside captures; None where there are no streams, or no way to read a number during a capture."""
    streams = streams_of(device)
    if streams is None or find_memcpy() is None:
        return None
    with _LOCK:
        if streams.index not in _CAPTURE_STREAMS:
            _CAPTURE_STREAMS[streams.index] = DeviceStreams(torch.device("cuda", streams.index), captured=True)
        return _CAPTURE_STREAMS[streams.index]


def _make(device: torch.device) -> DeviceStreams | None:
    if device.type == "cuda":
        return DeviceStreams(device)
    if device.type not in ("cpu", "meta"):
        warn(
            NoStreamsWarning,
            f"graphoffload has no side streams for device {device}: copies to the host run synchronously there and cost their "
            "whole time. Supported with streams: cuda.",
        )
    return None
