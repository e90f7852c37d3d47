"""One D2H and one H2D side stream a device, and events from a pool. A device without streams copies synchronously.

The compute stream is whatever stream is current when an op is called; it is read before any switch, and a switch is undone in
try/finally.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from graphoffload.errors import NoStreamsWarning, warn
from graphoffload.runtime.hooks import ACTIVE


class DeviceStreams:
    """Side streams of one CUDA device."""

    __slots__ = ("_events", "d2h", "device", "h2d")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.d2h = torch.cuda.Stream(device)
        self.h2d = torch.cuda.Stream(device)
        self._events: list[Any] = []

    def compute(self) -> torch.cuda.Stream:
        """The stream that the caller computes on."""
        return torch.cuda.current_stream(self.device)

    def event(self) -> Any:
        """An event nobody waits for any more."""
        return self._events.pop() if self._events else torch.cuda.Event()

    def recycle(self, event: Any) -> None:
        """Give an event back. A wait enqueued on it earlier is unaffected by its next record."""
        if event is not None:
            self._events.append(event)

    def copy(self, direction: str, name: str, after: tuple[Any, ...], run: Callable[[], None]) -> Any:
        """Run `run` on the side stream of `direction` once compute so far and the events `after` are done; gives its event."""
        side = self.d2h if direction == "d2h" else self.h2d
        compute = self.compute()
        issued = self.event()
        issued.record(compute)
        side.wait_event(issued)
        self.recycle(issued)
        for event in after:
            if event is not None:
                side.wait_event(event)
        hook = ACTIVE.copy
        torch.cuda.set_stream(side)
        try:
            if hook is not None:
                hook(direction, "before", name)
            run()
            if hook is not None:
                hook(direction, "after", name)
            done = self.event()
            done.record(side)
        finally:
            torch.cuda.set_stream(compute)
        return done

    def compute_waits(self, event: Any) -> None:
        """Order everything issued to the compute stream from now on after `event`."""
        self.compute().wait_event(event)


_STREAMS: dict[torch.device, DeviceStreams | None] = {}
_LOCK = threading.Lock()


def streams_of(device: torch.device) -> DeviceStreams | None:
    """Side streams of `device`; None where copies are synchronous (a CPU, or a device without streams)."""
    try:
        return _STREAMS[device]
    except KeyError:
        with _LOCK:
            return _STREAMS.setdefault(device, _make(device))


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
