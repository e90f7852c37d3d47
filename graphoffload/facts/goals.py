"""What is asked of a plan, as a value: the planner solves it, a trial is scored by it, messages name it.

    KeepIfFits(80 GB)        nobody gave a number: everything is kept where that fits, else as MeetBudget
    MeetBudget(40 GB)        the least time at a peak of at most 40 GB
    WithinSlowdown(0.05)     the least peak in at most 1.05 times keep-all's time

A peak is compared with the budget after the reserve is added: the reserve is memory that the plan must leave free.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from graphoffload.units import format_bytes

Score: TypeAlias = tuple[float, float, float]
"""(by how much the goal is missed, what is made small, tie-break); less is better."""

UNMEASURABLE = 0.005
"""Share of a step below which its time does not repeat: what costs less is free."""
_AS_SMALL = 0.002  # plans whose peaks differ by less than this share of keep-all's are as small as each other
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class MeetBudget:
    """Least time with a peak, reserve included, of at most this many bytes."""

    device_budget_bytes: int
    explicit: ClassVar[bool] = True

    def __str__(self) -> str:
        return format_bytes(self.device_budget_bytes)

    def excess(self, peak_bytes: int, time_s: float, keep_s: float) -> float:
        """Bytes by which a peak, reserve included, is above the budget; negative below."""
        return float(peak_bytes - self.device_budget_bytes)

    def score(self, excess: float, peak_bytes: int, time_s: float, keep_peak_bytes: int) -> Score:
        """Less is better: what misses the budget least, then what is fastest."""
        return max(0.0, excess), 0, time_s

    def tightened(self, excess: float) -> MeetBudget:
        """The budget lowered by this many bytes."""
        return MeetBudget(self.device_budget_bytes - int(excess))

    def missed(self, peak_bytes: int, slowdown: float) -> tuple[str, str]:
        """What was asked and what is predicted, for a message."""
        return f"device_budget={self}", f"predicted peak {format_bytes(peak_bytes)}"


@dataclass(frozen=True, slots=True)
class KeepIfFits:
    """Nobody gave a number: keep everything where it fits these bytes (None: nothing has to fit), else as MeetBudget."""

    device_budget_bytes: int | None
    explicit: ClassVar[bool] = False

    def __str__(self) -> str:
        return format_bytes(self.device_budget_bytes)

    def excess(self, peak_bytes: int, time_s: float, keep_s: float) -> float:
        """As MeetBudget's; -1 where nothing has to fit."""
        return -1.0 if self.device_budget_bytes is None else float(peak_bytes - self.device_budget_bytes)

    def score(self, excess: float, peak_bytes: int, time_s: float, keep_peak_bytes: int) -> Score:
        """As MeetBudget's."""
        return max(0.0, excess), 0, time_s

    def tightened(self, excess: float) -> KeepIfFits:
        """The budget lowered by this many bytes."""
        budget = self.device_budget_bytes
        return self if budget is None else KeepIfFits(budget - int(excess))

    def missed(self, peak_bytes: int, slowdown: float) -> tuple[str, str]:
        """As MeetBudget's."""
        return f"device_budget={self}", f"predicted peak {format_bytes(peak_bytes)}"


@dataclass(frozen=True, slots=True)
class WithinSlowdown:
    """Least peak at a time of at most (1 + max_slowdown) times keep-all's. `asked`: what a message calls it; None: that."""

    max_slowdown: float
    asked: float | None = field(default=None, compare=False)
    explicit: ClassVar[bool] = True
    device_budget_bytes: ClassVar[None] = None

    def __str__(self) -> str:
        return f"max_slowdown={self.max_slowdown if self.asked is None else self.asked:g}"

    def excess(self, peak_bytes: int, time_s: float, keep_s: float) -> float:
        """Seconds by which a time is above what is allowed; negative below."""
        return time_s - (1.0 + self.max_slowdown) * keep_s * (1.0 + _ROUNDING)

    def score(self, excess: float, peak_bytes: int, time_s: float, keep_peak_bytes: int) -> Score:
        """Less is better: what misses the slowdown least, then the fastest of the smallest."""
        return max(0.0, excess), round(peak_bytes / (_AS_SMALL * keep_peak_bytes)), time_s

    def tightened(self, excess: float) -> WithinSlowdown:
        """The slowdown lowered by this share of keep-all's time."""
        return WithinSlowdown(max(0.0, self.max_slowdown - excess))

    def allowed(self, keep_s: float, own_keep_s: float) -> float:
        """The slowdown of a program that keeps everything in `own_keep_s`, where keep-all takes `keep_s`; negative: none."""
        return (1.0 + self.max_slowdown) * keep_s / own_keep_s - 1.0

    def missed(self, peak_bytes: int, slowdown: float) -> tuple[str, str]:
        """What was asked and what is predicted, for a message."""
        return str(self), f"predicted slowdown {slowdown:+.1%}"


Goal: TypeAlias = KeepIfFits | MeetBudget | WithinSlowdown
