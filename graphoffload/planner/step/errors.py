"""The error for a budget that no plan of a step meets: the least one that is met, and what holds it up."""

from __future__ import annotations

from graphoffload.errors import BudgetError
from graphoffload.planner.arrays import arrays_of
from graphoffload.planner.bottleneck import describe, held_at
from graphoffload.planner.simulator import Timeline
from graphoffload.planner.step.facts import StepProblem
from graphoffload.planner.step.runs import Run, Runs
from graphoffload.units import format_bytes


def step_infeasible(runs: Runs, least: Run) -> BudgetError:
    """Names the budget, the least feasible one, the step with its peak, and the largest of what is held there."""
    timeline, program, problem = least.timeline, least.joined.program, runs.problem
    arrays = arrays_of(program, problem.hardware)
    held = describe(held_at(arrays, least.actions, least.result, timeline.peak_step))
    reserve = f" and {format_bytes(problem.reserve_bytes)} in reserve" if problem.reserve_bytes else ""
    least_bytes = timeline.peak_bytes + problem.reserve_bytes
    keep_s = runs.reference.time_s
    slowdown = timeline.time_s / keep_s - 1.0 if keep_s else 0.0
    host = problem.host_budget_bytes
    within = "" if host is None else f" with host_budget {format_bytes(host)}"
    error = BudgetError(
        f"device_budget {format_bytes(problem.goal.device_budget_bytes)}: no plan of the training step was found that meets "
        f"it{within}. The least feasible one found is {format_bytes(least_bytes)} ({least_bytes} bytes) at {slowdown:+.1%} "
        f"time; its peak is at {program.step_name(timeline.peak_step)!r} and holds {held}{reserve}. Raise device_budget to "
        "that, or make the batch or sequence smaller."
    )
    error.least_bytes = least_bytes
    return error


def flight_infeasible(problem: StepProblem, least: Timeline, keep: Timeline) -> BudgetError:
    """The same where several microbatches are in flight; `least`: of the plan that takes least for all of them."""
    least_bytes = least.peak_bytes + problem.reserve_bytes
    slowdown = least.time_s / keep.time_s - 1.0 if keep.time_s else 0.0
    host = problem.host_budget_bytes
    within = "" if host is None else f" with host_budget {format_bytes(host)}"
    count = problem.facts.in_flight
    error = BudgetError(
        f"device_budget {format_bytes(problem.goal.device_budget_bytes)}: no plan of the training step was found that meets "
        f"it{within}, with {count} microbatches in flight at a time. The least feasible one found is "
        f"{format_bytes(least_bytes)} ({least_bytes} bytes) at {slowdown:+.1%} time. Raise device_budget to that, make "
        "microbatches smaller, or have a schedule with fewer of them in flight."
    )
    error.least_bytes = least_bytes
    return error
