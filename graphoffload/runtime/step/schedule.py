"""What happens in a call of a compiled graph, what a planned call does then, and what is noted of a recorded one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Event = tuple[str, int]
"""What happens in a call: ("start", -1), or one of "offload", "release", "reload" and "wait" with the id of its transfer."""
START: Event = ("start", -1)


class Schedule(NamedTuple):
    """What one call of a planned step does.

    goes: ids that are copied to the host; the others stay. settle: after an event of forward, how many of the step's copies, in
    the order in which they start, compute has waited for. prefetch: at an event of backward, the copies back that start, as
    (call, id).
    """

    goes: frozenset[int]
    settle: Mapping[Event, int]
    prefetch: Mapping[Event, tuple[tuple[int, int], ...]]


@dataclass(slots=True)
class Room:
    """What may stay on the device in calls that are not planned: so many bytes of what they computed, and of their inputs that
    other graphs computed (None: all of these)."""

    own_bytes: int = 0
    input_bytes: int | None = None

    def take(self, nbytes: int) -> bool:
        """Whether so much more stays of what a call computed; it is counted if it does."""
        fits = nbytes <= self.own_bytes
        self.own_bytes -= nbytes if fits else 0
        return fits

    def take_input(self, nbytes: int) -> bool:
        """The same for an input."""
        if self.input_bytes is None:
            return True
        fits = nbytes <= self.input_bytes
        self.input_bytes -= nbytes if fits else 0
        return fits


class Mark(NamedTuple):
    """A moment of a recorded run: bytes allocated on the device, their peak so far, and the part that our graphs hold.

    kind: "forward", "forward end", "backward", "backward end". event: of the compute stream, where there are streams. time_us:
    of the wall clock, on the host. beside: other microbatches of the step whose forward is over and whose backward is not.
    soon_bytes: of allocated_bytes, those that are allocated right after it.
    """

    kind: str
    call: int
    allocated_bytes: int
    peak_bytes: int
    ours_bytes: int
    event: Any
    time_us: int = 0
    beside: int = 0
    soon_bytes: int = 0
