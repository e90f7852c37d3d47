"""A goal's limits, and how two proposals compare. Every strategy sees instances through an Evaluator only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graphoffload.facts.goals import MeetBudget, Score, WithinSlowdown
from graphoffload.facts.plan import Action
from graphoffload.patience import Patience
from graphoffload.planner.arrays import Arrays
from graphoffload.planner.simulator import Evaluation, evaluate

__all__ = ["Evaluator", "Goal", "MeetBudget", "Proposal", "WithinSlowdown"]

Goal = MeetBudget | WithinSlowdown
"""What can be solved: KeepIfFits is MeetBudget once it is known that not everything fits."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Actions, the window they run in, and their score: (by how much limits are broken, cost, tie-break); less is better."""

    actions: tuple[Action, ...]
    window_bytes: int | None
    score: Score
    solver: str

    @property
    def feasible(self) -> bool:
        """Within all limits."""
        return self.score[0] <= 0.0


class Evaluator:
    """Evaluates proposals for one goal, remembers them, and counts: `budget` evaluations are what a solver may spend.

    lost: no plan that meets the budget is known. A proposal above the budget is then scored by the sum over all steps of the
        bytes above it, and not by its time: one move seldom lowers all of several equal peaks.
    patience: the clock that ends the search; None: there is none.
    smallest: actions and window with the least peak, among the evaluations within the host budget.

    Score, budget goal: (bytes over the budget, time, peak). Slowdown goal: (seconds over the limit, peak, time). Bytes over the
    host budget count as broken limit in both.
    """

    def __init__(
        self,
        arrays: Arrays,
        goal: Goal,
        *,
        host_budget_bytes: int | None = None,
        window_bytes: int | None = None,
        budget: int = 400,
        lost: bool = False,
        patience: Patience | None = None,
    ) -> None:
        self.arrays, self.goal, self.budget, self.lost, self.patience = arrays, goal, budget, lost, patience
        self._given = budget
        self.host_budget_bytes, self.window_bytes = host_budget_bytes, window_bytes
        self.keep = tuple(arrays.program.keep_actions())
        self.count = 1
        least_time_s = evaluate(arrays, self.keep, max_inflight_bytes=window_bytes).time_s
        slack = goal.max_slowdown if isinstance(goal, WithinSlowdown) else 0.0
        self.limit_s = max((1.0 + slack) * arrays.compute_s, least_time_s) * (1.0 + 1e-9)
        self.smallest: tuple[tuple[Action, ...], int | None] | None = None
        self._smallest_bytes = 1 << 62
        self._known: dict[tuple[tuple[Action, ...], int | None], tuple[Evaluation, Score]] = {}

    def at(self, goal: MeetBudget, *, lost: bool = False) -> Evaluator:
        """An evaluator of the same instance for another budget, with as many evaluations, or three times as many if `lost`."""
        return Evaluator(
            self.arrays,
            goal,
            host_budget_bytes=self.host_budget_bytes,
            window_bytes=self.window_bytes,
            budget=self._given * (3 if lost else 1),
            lost=lost,
            patience=self.patience,
        )

    @property
    def hurried(self) -> bool:
        """No time."""
        return self.patience is not None and self.patience.over()

    @property
    def limit_bytes(self) -> int:
        """Peak that the budget allows, the reserve taken off; a large number without one."""
        if isinstance(self.goal, MeetBudget):
            return self.goal.device_budget_bytes - self.arrays.program.reserve_bytes
        return 1 << 62

    @property
    def exhausted(self) -> bool:
        """No evaluations left, or no time."""
        return self.count >= self.budget or self.hurried

    def evaluate(self, actions: Sequence[Action], window_bytes: int | None = None) -> tuple[Evaluation, Score]:
        """Evaluation and score; a window given for the whole solve wins."""
        window_bytes = self.window_bytes if self.window_bytes is not None else window_bytes
        key = (tuple(actions), window_bytes)
        if key not in self._known:
            self.count += 1
            result = evaluate(self.arrays, actions, max_inflight_bytes=window_bytes)
            if len(self._known) > 4000:
                self._known.clear()
            self._known[key] = result, self._score(result)
            within = self.host_budget_bytes is None or result.host_bytes <= self.host_budget_bytes
            if within and result.peak_bytes < self._smallest_bytes:
                self.smallest, self._smallest_bytes = key, result.peak_bytes
        return self._known[key]

    def propose(self, actions: Sequence[Action], solver: str, window_bytes: int | None = None) -> Proposal:
        """Actions with their score."""
        window_bytes = self.window_bytes if self.window_bytes is not None else window_bytes
        return Proposal(tuple(actions), window_bytes, self.evaluate(actions, window_bytes)[1], solver)

    def _score(self, result: Evaluation) -> Score:
        broken = max(0.0, result.host_bytes - self.host_budget_bytes) if self.host_budget_bytes is not None else 0.0
        if isinstance(self.goal, MeetBudget):
            over = max(0, result.peak_bytes - self.limit_bytes)
            if over and self.lost:
                return broken + over, float(np.maximum(result.memory - self.limit_bytes, 0).sum()), result.peak_bytes
            return broken + over, result.time_s, result.peak_bytes
        over_s = max(0.0, result.time_s - self.limit_s)
        return broken + over_s, result.peak_bytes, result.time_s
