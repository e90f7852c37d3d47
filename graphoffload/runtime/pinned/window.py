"""How much host memory training needed lately, and when memory that it did not need goes back to the system.

    turn      |1|2|3|  ...  |64|1|2|  ...            training goes from a backward to a forward
    window    |<--- one -------->|<--- the next      its peak: the most that was in use at one time, or was asked for in advance
                                 ^
                                 idle memory beyond the peak goes back, the least recently used first

To take memory again costs page-locking it again: a quarter of a second to a second per GiB. A window therefore lasts at least
`_PATIENCE` times as long as page-locking took: whatever comes next, page-locking again takes at most 1 % of the time (the rule
of ski rental; Karlin et al., Competitive snoopy caching, Algorithmica 1988). A shape that comes once in a few steps is in every
window, and its memory stays. Where the system is short of memory, a few turns are enough.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence

from graphoffload.hardware import host_memory
from graphoffload.runtime.pinned.slabs import HostBuffer, Slab, rounded

TURNS, TURNS_IF_SHORT = 64, 8
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
    at_rest = Counter({id(slab): sum(length for _, length in slab.free) for slab in slabs})
    for buffers in idle:
        for buffer in buffers:
            if buffer.last_copy is None or buffer.last_copy.query():
                at_rest[id(buffer.slab)] += rounded(buffer.nbytes)
    found = []
    for slab in sorted(slabs, key=lambda slab: (slab.last_window, slab.nbytes)):
        if at_rest[id(slab)] == slab.nbytes and (slab.last_window < window or slab.nbytes <= excess_bytes):
            found.append(slab)
            excess_bytes -= slab.nbytes
    return found
