"""The goal of a plan, as a value. The planner solves for it, trials are scored by it, and messages name it.

    KeepIfFits(80 GB)        the user gave no number: keep everything if it fits, else as MeetBudget
    MeetBudget(40 GB)        the least time at a peak of at most 40 GB
    WithinSlowdown(0.05)     the least peak in at most 1.05 times keep-all's time

A score orders trials, and less is better. With a budget of 40 GB, a plan of 39 GB in 103 ms scores (0, 0, 0.103). It beats one
of 30 GB in 104 ms, which scores (0, 0, 0.104). A plan of 41 GB scores (1e9, 0, its time) and loses to both.

The budget is compared with the peak plus the reserve, since the plan must leave the reserve free.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeAlias, TypeVar

from graphoffload.units import format_bytes

Score: TypeAlias = tuple[float, float, float]
"""(excess above the goal's limit, peak in coarse steps or 0, time); less is better."""

UNMEASURABLE = 0.005
"""Share of a step below which its time is not reproducible. A cost below it counts as none."""
FAR = 0.03
"""Share of a time or of a peak. Of a plan that is so far above its bound other ways are tried, and one whose figures are less
certain is taken if it is better by as much."""
_AS_SMALL = 0.002  # peaks that differ by less than this share of keep-all's count as equal
_ROUNDING = 1e-9
_BudgetT = TypeVar("_BudgetT", bound="_Budget")


@dataclass(frozen=True, slots=True)
class _Budget:
    """The least time with a peak, reserve included, of at most this many bytes; None: there is nothing to fit."""

    device_budget_bytes: int | None

    def __str__(self) -> str:
        return format_bytes(self.device_budget_bytes)

    def excess(self, peak_bytes: int, time_s: float, keep_s: float) -> float:
        """Bytes by which a peak, reserve included, is above the budget; negative below, and -1 if there is nothing to fit."""
        return -1.0 if self.device_budget_bytes is None else float(peak_bytes - self.device_budget_bytes)

    def score(self, excess: float, peak_bytes: int, time_s: float, keep_peak_bytes: int) -> Score:
        """Less is better: the excess above the budget, then the time."""
        return max(0.0, excess), 0, time_s

    def tightened(self: _BudgetT, excess: float) -> _BudgetT:
        """The budget lowered by this many bytes."""
        budget = self.device_budget_bytes
        return self if budget is None else replace(self, device_budget_bytes=budget - int(excess))

    def missed(self, peak_bytes: int, slowdown: float) -> tuple[str, str]:
        """The goal and the prediction that misses it, as texts for a message."""
        return f"device_budget={self}", f"predicted peak {format_bytes(peak_bytes)}"


@dataclass(frozen=True, slots=True)
class MeetBudget(_Budget):
    """The user's budget: the least time with a peak, reserve included, of at most this many bytes."""

    device_budget_bytes: int
    explicit: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class KeepIfFits(_Budget):
    """The user gave no number: keep everything if it fits these bytes (None: there is nothing to fit), else as MeetBudget."""

    explicit: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class WithinSlowdown:
    """The least peak at a time of at most (1 + max_slowdown) times keep-all's.

    `asked` is the slowdown that the user asked for, which messages show; None: max_slowdown.
    """

    max_slowdown: float
    asked: float | None = field(default=None, compare=False)
    explicit: ClassVar[bool] = True
    device_budget_bytes: ClassVar[None] = None

    def __str__(self) -> str:
        return f"max_slowdown={self.max_slowdown if self.asked is None else self.asked:g}"

    def excess(self, peak_bytes: int, time_s: float, keep_s: float) -> float:
        """Seconds by which a time is above the allowed time; negative below."""
        return time_s - (1.0 + self.max_slowdown) * keep_s * (1.0 + _ROUNDING)

    def score(self, excess: float, peak_bytes: int, time_s: float, keep_peak_bytes: int) -> Score:
        """Less is better: the excess above the slowdown, then the peak, then the time."""
        return max(0.0, excess), round(peak_bytes / (_AS_SMALL * keep_peak_bytes)), time_s

    def tightened(self, excess: float) -> WithinSlowdown:
        """The slowdown lowered by this share of keep-all's time."""
        return WithinSlowdown(max(0.0, self.max_slowdown - excess))

    def allowed(self, keep_s: float, own_keep_s: float) -> float:
        """This slowdown of `keep_s`, relative to a program's own keep-all time `own_keep_s`.

        Negative if even that program's keep-all takes too long.
        """
        return (1.0 + self.max_slowdown) * keep_s / own_keep_s - 1.0

    def missed(self, peak_bytes: int, slowdown: float) -> tuple[str, str]:
        """The goal and the prediction that misses it, as texts for a message."""
        return str(self), f"predicted slowdown {slowdown:+.1%}"


Goal: TypeAlias = KeepIfFits | MeetBudget | WithinSlowdown
