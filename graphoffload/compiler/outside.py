"""What is allocated beside the activations of a graph that is planned alone, as its runs showed it (alone.py)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

LATEST = 8
"""Runs."""


@dataclass(slots=True)
class Outside:
    """Bytes of a device that no plan of the graph moves.

    turn_bytes: between forward and backward, above what lives throughout and what the graph leaves; None: not measured.
    static_bytes: throughout the run that was measured; None: not measured. start_bytes: allocated when that run began.
    reserve_bytes: of state that optimizers were still to make then.
    grown_bytes: more than static_bytes, which the present plan counts. more_bytes: what the latest runs began with above
    start_bytes.
    again: how often the graph was compiled again for it. given_up: it will not be until less is allocated.
    looks: how often it was asked whether it has to be. is_least: the present plan exceeds the budget, and none takes less.
    """

    turn_bytes: int | None = None
    static_bytes: int | None = None
    start_bytes: int = 0
    reserve_bytes: int = 0
    grown_bytes: int = 0
    more_bytes: deque[int] = field(default_factory=lambda: deque(maxlen=LATEST))
    again: int = 0
    given_up: bool = False
    looks: int = 0
    is_least: bool = False

    def begins_with(self, allocated_bytes: int) -> None:
        """A run begins, with so much allocated."""
        self.more_bytes.append(allocated_bytes - self.start_bytes)

    @property
    def lasting_bytes(self) -> int:
        """What runs begin with above start_bytes, seen twice in the latest ones. Once it may be garbage; and of several
        microbatches the first one finds no gradients."""
        return max(0, sorted(self.more_bytes)[-2]) if len(self.more_bytes) > 1 else 0

    @property
    def freed_bytes(self) -> int:
        """What the plan counts, and none of the latest runs began with."""
        return self.grown_bytes - max(self.more_bytes) if len(self.more_bytes) == LATEST else 0

    def grown(self, reserve_bytes: int) -> int:
        """What lives throughout now above static_bytes: what runs began with, or state that is made by now. reserve_bytes: of
        state that is still to be made."""
        return max(self.lasting_bytes, self.reserve_bytes - reserve_bytes)
