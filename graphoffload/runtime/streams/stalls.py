"""Stalls of compute by tensor, timed on the device on request.

    with trace_stalls() as stalls:                    # graphoffload.runtime.trace_stalls
        step()
    print(stalls.by_tensor_ms, stalls.early_ms)

Each wait gets a timing event before and after it, and each copy one after it. This costs some microseconds an op, so it is not
always on. A device without side streams copies synchronously and has no waits: nothing is recorded there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from graphoffload.runtime.counters import COUNTERS
from graphoffload.runtime.hooks import switched


class Stalls:
    """Milliseconds that compute waited, filled when the block ends.

    release_ms, wait_ms: totals, for copies to the host in forward and for copies back in backward. by_tensor_ms: both together,
    by tensor. early_ms: for each tensor that came back, how long before its first use it was ready, the least over all steps;
    near 0 if compute had to wait.
    """

    def __init__(self) -> None:
        self.release_ms = 0.0
        self.wait_ms = 0.0
        self.by_tensor_ms: dict[str, float] = {}
        self.early_ms: dict[str, float] = {}
        self._copied: dict[int, tuple[Any, Any]] = {}
        self._waits: list[tuple[str, str, Any, Any, Any]] = []

    def copied(self, done: Any, side: Any) -> None:
        """Note a copy on `side` whose event is `done`."""
        timed = torch.cuda.Event(enable_timing=True)
        timed.record(side)
        self._copied[id(done)] = done, timed

    def around(self, op: str, name: str, done: Any, compute: Any) -> None:
        """Let `compute` wait for `done` between two timing events."""
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(compute)
        done.wait(compute)
        after.record(compute)
        self._waits.append((op, name, before, after, self._copied.get(id(done), (None, None))[1]))

    def close(self) -> None:
        """Wait for the recorded events and add up their times."""
        for op, name, before, after, ready in self._waits:
            after.synchronize()
            stalled_ms = before.elapsed_time(after)
            self.by_tensor_ms[name] = self.by_tensor_ms.get(name, 0.0) + stalled_ms
            if op == "release":
                self.release_ms += stalled_ms
                continue
            self.wait_ms += stalled_ms
            if ready is not None:
                early_ms = ready.elapsed_time(after)
                self.early_ms[name] = min(early_ms, self.early_ms.get(name, early_ms))
        self._waits, self._copied = [], {}
        COUNTERS.stalled(self.release_ms, self.wait_ms, self.by_tensor_ms)


@contextlib.contextmanager
def trace_stalls() -> Iterator[Stalls]:
    """Time the stalls of compute in the code inside; stats() counts them as well."""
    stalls = Stalls()
    try:
        with switched("stalls", stalls):
            yield stalls
    finally:
        stalls.close()
