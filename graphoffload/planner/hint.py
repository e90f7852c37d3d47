"""A hint for a plan that keeps everything: the memory that a little time would save, where that is found at once."""

from __future__ import annotations

import time

from graphoffload.hardware.profile import HardwareProfile
from graphoffload.planner.arrays import arrays_of
from graphoffload.planner.goals import Evaluator, WithinSlowdown
from graphoffload.planner.problem import Program
from graphoffload.planner.strategies.greedy import greedy_moves

PATIENCE_S = 0.1
_TARGETS = 6


def saved_within(
    program: Program,
    hardware: HardwareProfile,
    max_slowdown: float,
    *,
    host_budget_bytes: int | None = None,
    patience_s: float = PATIENCE_S,
) -> int | None:
    """Bytes that come off the peak within `max_slowdown`, as far as the greedy solver sees them; None when time ran out.

    The whole planner starts from greedy, so it saves at least as much. The search stops between two simulations once
    `patience_s` is over, so it takes one simulation longer at most.
    """
    evaluator = _Hurried(program, hardware, WithinSlowdown(max_slowdown), host_budget_bytes, time.perf_counter() + patience_s)
    keep_bytes = best_bytes = evaluator.evaluate(evaluator.keep)[0].peak_bytes
    low, high = 0, keep_bytes
    for _ in range(_TARGETS):
        middle = (low + high) // 2
        actions = greedy_moves(evaluator, evaluator.keep, middle, limit_s=evaluator.limit_s)
        if evaluator.exhausted:
            return None
        found = evaluator.propose(actions, "greedy")
        peak_bytes = evaluator.evaluate(actions)[0].peak_bytes
        if found.feasible:
            best_bytes = min(best_bytes, peak_bytes)
        low, high = (low, min(middle, peak_bytes)) if peak_bytes <= middle else (middle, high)
    return keep_bytes - best_bytes


class _Hurried(Evaluator):
    """An evaluator that stops solvers at a moment, not after a number of evaluations."""

    def __init__(
        self, program: Program, hardware: HardwareProfile, goal: WithinSlowdown, host_bytes: int | None, deadline_s: float
    ) -> None:
        super().__init__(arrays_of(program, hardware), goal, host_budget_bytes=host_bytes)
        self.deadline_s = deadline_s

    @property
    def exhausted(self) -> bool:
        """Time is over."""
        return time.perf_counter() > self.deadline_s
