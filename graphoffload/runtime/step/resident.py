"""One device budget over many graphs: how many of the bytes that their plans offload stay on the device.

    forward    |== graph 0 ==|== graph 1 ==|~~ graph 2 ~~|~~ last graph ~~|     == to the host   ~~ stays
    backward                                                               last graph, 2, 1, 0: resident tensors come first

A graph that is one of many cannot know how much of a budget the others use. Its plan therefore offloads what it can, and the
runtime keeps what fits: of all bytes that a forward offers, in their order, the last `bytes`. The number is learned from the
step before. n more resident bytes raise the peak by at most n. So if s bytes stayed in a step whose peak was at most p, then s
+ budget - p bytes may stay. Example: 2 GB stayed, the peak was 9 GB and the budget is 10 GB: 3 GB may stay. The peak that torch
reports may be older than the step; then fewer bytes stay than could, never more.

The bytes and their order must be those of the last two forwards. The first offload that differs ends it for this forward.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import accumulate
from typing import NamedTuple

from graphoffload.errors import SharedBudgetWarning, warn
from graphoffload.units import format_bytes

_SEQUENCES = 16  # different sequences of forwards that are remembered: buckets of shapes


class Budget(NamedTuple):
    """Device bytes of this process; `reserve_bytes` are for memory that did not exist when `static_bytes` were measured."""

    device_bytes: int
    reserve_bytes: int
    static_bytes: int

    def limit_bytes(self, between_steps_bytes: int) -> int:
        """The peak that a step may reach. Reserve that was used since, by optimizer state for example, need not be left free
        any more."""
        taken = max(0, between_steps_bytes - self.static_bytes)
        return self.device_bytes - max(0, self.reserve_bytes - taken)


class Share:
    """The share of one sequence of forwards that may stay. `bytes`: counted from the last that is offered."""

    __slots__ = ("_steps", "bytes")

    def __init__(self) -> None:
        self.bytes = 0
        self._steps = 0

    def learn(self, stayed_bytes: int, room_bytes: int, *, certain: bool) -> bool:
        """Learn from a step: the peak left `room_bytes` free, or exceeded the budget if that is negative.

        certain: the peak was this step's. An older one that was too high says nothing. True if nothing can make it fit.
        """
        self._steps += 1
        if room_bytes >= 0:
            self.bytes = max(self.bytes, stayed_bytes + room_bytes)
        elif certain:
            self.bytes = max(0, stayed_bytes + room_bytes)
            return stayed_bytes == 0 and self._steps > 1
        return False


class Staying:
    """The shares of one thread's forwards on one device, and the byte of the present forward from which tensors stay."""

    __slots__ = (
        "_at_start", "_before", "_behind", "_last", "_most", "_now", "_room", "_shares", "_stayed", "_warned", "budget",
    )  # fmt: skip

    def __init__(self) -> None:
        self.budget: Budget | None = None
        self._shares: OrderedDict[tuple[tuple[str, ...], tuple[int, ...]], Share] = OrderedDict()
        self._now: list[int] = []
        self._last: tuple[int, ...] = ()
        self._before: list[int] = []
        self._behind = -1
        self._stayed = self._room = 0
        self._at_start = 0
        self._most = 0
        self._warned = False

    def set_budget(self, budget: Budget | None) -> None:
        """A graph with this budget takes part; the smallest counts."""
        if budget is not None and (self.budget is None or budget.device_bytes < self.budget.device_bytes):
            self.budget = budget

    def sample(self, peak_bytes: int) -> None:
        """Note torch's peak at some moment of the step: it may be reset before the next forward."""
        self._most = max(self._most, peak_bytes)

    def end_forward(self) -> None:
        """The first reload: all bytes of this forward were offered."""
        self._last, self._now = tuple(self._now), []
        self._behind = -1

    def begin_forward(self, calls: tuple[str, ...], current_bytes: int, peak_bytes: int, *, as_before: bool) -> None:
        """A forward starts after a step that made these calls; `as_before`: so did the step before that."""
        assert self.budget is not None
        self.sample(peak_bytes)
        key = (calls, self._last)
        share = self._shares.pop(key, None) or Share()
        self._shares[key] = share
        if len(self._shares) > _SEQUENCES:
            self._shares.popitem(last=False)
        offered = sum(self._last)
        room = self.budget.limit_bytes(current_bytes) - self._most
        if offered and share.learn(self._stayed, room, certain=self._most > self._at_start):
            self._complain(-room, offered)
        self._now, self._stayed = [], 0
        self._behind = -1
        if as_before and share.bytes:
            self._before = [0, *accumulate(self._last)]
            self._behind = max(0, offered - share.bytes)
            self._room = min(share.bytes, offered)
        self._at_start, self._most = peak_bytes, 0

    def left_bytes(self) -> int:
        """Bytes that may still stay in this forward; until they do, copies that are running may use their room."""
        return max(0, self._room - self._stayed) if self._behind >= 0 else 0

    def offer(self, nbytes: int, *, may_stay: bool = True) -> bool:
        """An offload of `nbytes` comes; whether it stays."""
        at = len(self._now)
        self._now.append(nbytes)
        if self._behind < 0:
            return False
        if at >= len(self._last) or self._last[at] != nbytes:
            self._behind = -1
            return False
        stays = may_stay and self._before[at] >= self._behind
        self._stayed += nbytes * stays
        return stays

    def _complain(self, excess_bytes: int, offered_bytes: int) -> None:
        if self._warned or self.budget is None:
            return
        self._warned = True
        warn(
            SharedBudgetWarning,
            f"device_budget={format_bytes(self.budget.device_bytes)} is shared by several graphs and was exceeded by "
            f"{format_bytes(excess_bytes)} with all {format_bytes(offered_bytes)} offloaded that their plans can offload. "
            "Raise device_budget by that, make the batch smaller, or compile the whole model as one graph, which can also "
            "recompute.",
        )
