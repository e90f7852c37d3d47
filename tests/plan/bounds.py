"""Lower bounds: the value of the LP relaxation (strategies/relaxation.py), without a plan.

    lower_bound_s             least time under a device budget and a host budget
    lower_bound_peak_bytes    least peak within a slowdown

A bound is never above the simulated figure of a feasible plan. It is loose where the relaxation splits a tensor that cannot be
split (one large tensor), and where compute that waits for a window of copies frees memory in the middle of the forward.
"""

from __future__ import annotations

from graphoffload.hardware.profile import HardwareProfile
from graphoffload.planner.arrays import arrays_of
from graphoffload.planner.goals import Evaluator, MeetBudget, WithinSlowdown
from graphoffload.planner.problem import Program
from graphoffload.planner.strategies.relaxation import Relaxation


def lower_bound_s(
    program: Program, hardware: HardwareProfile, *, device_budget_bytes: int | None = None, host_budget_bytes: int | None = None
) -> float:
    """Seconds that every plan within the budgets takes at least; infinity when it is certain that there is none."""
    budget = 1 << 60 if device_budget_bytes is None else device_budget_bytes
    arrays = arrays_of(program, hardware)
    found = Relaxation(arrays, MeetBudget(budget), host_budget_bytes, float("inf")).solve()
    return float("inf") if found.value is None else found.value


def lower_bound_peak_bytes(
    program: Program, hardware: HardwareProfile, *, max_slowdown: float = float("inf"), host_budget_bytes: int | None = None
) -> int:
    """Peak bytes, without the reserve, that every plan within (1 + max_slowdown) times keep-all's time has at least."""
    arrays = arrays_of(program, hardware)
    goal = WithinSlowdown(min(max_slowdown, 1e6))
    found = Relaxation(arrays, goal, host_budget_bytes, Evaluator(arrays, goal).limit_s).solve()
    return int(found.value or 0.0)
