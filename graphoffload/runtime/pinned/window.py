"""How much host memory training needed lately, and when memory that it did not need goes back to the system.

    turn      |1|2|3|  ...  |64|1|2|  ...            training goes from a backward to a forward
    window    |<--- one -------->|<--- the next      its peak: the most that was in use at one time, or was asked for in advance
                                 ^
                                 idle memory beyond the peak goes back, the least recently used first

The largest goal or shape is given memory in few large slabs, and a smaller one uses some of each. If what stays is more than
`MOST` times the window's peak, idle slabs are replaced by one of what is needed, as a slab goes back as a whole only.

To take memory again costs page-locking it again: a quarter of a second to a second per GiB. A window therefore lasts at least
`_PATIENCE` times as long as page-locking took: whatever comes next, page-locking again takes at most 1 % of the time (the rule
of ski rental; Karlin et al., Competitive snoopy caching, Algorithmica 1988), and at most 2 % where slabs are replaced. A shape
that comes once in a few steps is in every window, and its memory stays. Where the system is short of memory, a few turns are
enough, and nothing is replaced.

Slabs that training uses are closed or replaced once for a need. If sizes then fit in pieces only and more memory is taken, it
stays: else it would go and come back with every window.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence

from graphoffload.hardware import host_memory
from graphoffload.runtime.pinned.slabs import HostBuffer, Slab, rounded

TURNS, TURNS_IF_SHORT = 64, 8
MOST = 1.3
"""Bytes held, as a multiple of the most that was needed lately, beyond which half-used slabs are replaced."""
_PATIENCE = 100
_SHORT_SHARE = 0.05  # of the system's memory: with less available, others need it


class Window:
    """Some turns of training. peak_bytes: the most that they needed at one time."""

    __slots__ = ("_began_s", "number", "peak_bytes", "turns")

    def __init__(self, needed_bytes: int, number: int = 0) -> None:
        self.turns, self.peak_bytes, self.number = 0, needed_bytes, number
        self._began_s = time.monotonic()

    def turn(self) -> bool:
        """Count a turn; returns whether it is one to look at what is not needed."""
        self.turns += 1
        return self.turns % TURNS_IF_SHORT == 0

    def is_over(self, pinning_s: float) -> bool:
        """Whether memory that took so long to page-lock goes back now, if nothing in this window needed it."""
        if self.turns >= TURNS and time.monotonic() - self._began_s >= _PATIENCE * pinning_s:
            return True
        ram = host_memory.for_this_process()
        return ram.available_bytes < _SHORT_SHARE * ram.total_bytes


def not_needed(slabs: Sequence[Slab], idle: Iterable[list[HostBuffer]], window: int, excess_bytes: float) -> list[Slab]:
    """Slabs that a window did not use, and others as far as it used less than all: the least recently used first.

    None with memory in use, or in a copy that is not over.
    """
    at_rest = _at_rest(slabs, idle)
    found = []
    for slab in sorted(slabs, key=lambda slab: (slab.last_window, slab.nbytes)):
        if id(slab) in at_rest and (slab.last_window < window or slab.nbytes <= excess_bytes):
            found.append(slab)
            excess_bytes -= slab.nbytes
    return found


def half_used(slabs: Sequence[Slab], idle: Iterable[list[HostBuffer]], needed_bytes: int) -> list[Slab]:
    """Slabs of one kind that are replaced by one of what is needed, where all of these hold much more than that.

    None with memory in use, or in a copy that is not over.
    """
    if sum(slab.nbytes for slab in slabs) <= MOST * needed_bytes or len({slab.kind for slab in slabs}) != 1:
        return []
    at_rest = _at_rest(slabs, idle)
    return [slab for slab in slabs if id(slab) in at_rest]


def _at_rest(slabs: Sequence[Slab], idle: Iterable[list[HostBuffer]]) -> set[int]:
    """Ids of the slabs of which nothing is in use, or in a copy that is not over."""
    unused = Counter({id(slab): sum(length for _, length in slab.free) for slab in slabs})
    for buffers in idle:
        for buffer in buffers:
            if buffer.last_copy is None or buffer.last_copy.query():
                unused[id(buffer.slab)] += rounded(buffer.nbytes)
    return {id(slab) for slab in slabs if unused[id(slab)] == slab.nbytes}
