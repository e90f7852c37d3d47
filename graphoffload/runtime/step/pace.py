"""How fast a run is issued by the host, and run by the device: seen while someone looks at it.

    run.pace = pace = Pace(streams)   ... forwards and backwards begin and end ...   pace.found()

Where the host is the limit, the device has reached what was there one moment ago by the time that the next forward or backward
begins or ends: it is less than one call behind. Where the device is the limit, or waits for a copy, it is further behind.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from graphoffload.runtime.streams.protocol import CopyStreams, Moment


class Issued(NamedTuple):
    """step_s: from the first forward to the end of the last backward, on the device. host_s: what the host took to issue that.
    idle: the share of moments at which the device was less than one call behind. ran_s, issued_s: as step_s and host_s, of the
    forwards and backwards alone, without what lies between them."""

    step_s: float
    host_s: float
    idle: float
    ran_s: float = 0.0
    issued_s: float = 0.0


class Pace:
    """What is seen of one run."""

    def __init__(self, streams: CopyStreams) -> None:
        self._streams = streams
        self._begun: list[tuple[Moment, float]] = []
        self._ended: list[tuple[Moment, float]] = []
        self._last: Moment | None = None
        self._moments = self._idle = 0
        self._whole = False

    def mark(self, kind: str, call: int) -> None:
        """A forward or backward begins or ends, as `Mark.kind` has it. What comes later, or in a capture, is no part of it."""
        if self._whole or self._streams.capturing():
            return
        now_s, last = time.perf_counter(), self._last
        if last is not None:
            self._moments += 1
            self._idle += last.query()
        self._last = self._streams.timed_event()
        (self._ended if kind.endswith("end") else self._begun).append((self._last, now_s))
        self._whole = kind == "backward end" and call == 0

    @property
    def is_reached(self) -> bool:
        """Whether the device has run all of it. False during a capture, which asking an event would end."""
        return not self._streams.capturing() and (self._last is None or self._last.query())

    def found(self) -> Issued | None:
        """What was seen; None for a run that left its plan, or did not come to its end."""
        if not self._whole or not self._begun or self._last is None:
            return None
        (first, began_s), (last, ended_s) = self._begun[0], self._ended[-1]
        parts = list(zip(self._begun, self._ended, strict=False))
        return Issued(
            step_s=first.elapsed_time(last) / 1e3,
            host_s=ended_s - began_s,
            idle=self._idle / self._moments,
            ran_s=sum(begin.elapsed_time(end) for (begin, _), (end, _) in parts) / 1e3,
            issued_s=sum(end_s - begin_s for (_, begin_s), (_, end_s) in parts),
        )
