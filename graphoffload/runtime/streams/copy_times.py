"""How fast copies are: each is timed on the device, between two events on its stream, while someone asks for it.

    streams.times = times = CopyTimes()   ... a run issues its copies ...   streams.times = None   ... times.rates()
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import Any

LARGE_BYTES = 8 * 2**20
"""Smaller copies are not timed: their latency counts."""
_MOST = 4096


class CopyTimes:
    """The copies that were issued while this was a device's `times`."""

    def __init__(self) -> None:
        self._copies: list[tuple[str, int, Any, Any]] = []

    def wants(self, nbytes: int) -> bool:
        """Whether a copy of so many bytes is to be timed."""
        return nbytes >= LARGE_BYTES and len(self._copies) < _MOST

    def note(self, direction: str, nbytes: int, begin: Any, end: Any) -> None:
        """A copy, and the events around it."""
        self._copies.append((direction, nbytes, begin, end))

    def rates(self, latency_s: float) -> dict[str, float] | None:
        """Bytes a second by direction, beside a copy's latency: half of the bytes were copied as fast or faster.

        None: some copies still run. A direction in which nothing was timed is not in it.
        """
        if not all(end.query() for *_, end in self._copies):
            return None
        found: dict[str, list[tuple[float, int]]] = {}
        for direction, nbytes, begin, end in self._copies:
            seconds = begin.elapsed_time(end) / 1e3 - latency_s
            if seconds > 0.0:
                found.setdefault(direction, []).append((nbytes / seconds, nbytes))
        return {direction: _middle(copies) for direction, copies in found.items()}


def _middle(copies: list[tuple[float, int]]) -> float:
    """The rate that half of the bytes reach."""
    fastest_first = sorted(copies, reverse=True)
    sums = list(accumulate(nbytes for _, nbytes in fastest_first))
    return fastest_first[bisect_left(sums, sums[-1] / 2)][0]
