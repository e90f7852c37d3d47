"""plan_flight(): a step of which several microbatches are in flight, as in a stage of a pipeline.

    |f0|f1|b0|f2|b1|...        2 in flight: while f2 runs, all that f1 keeps for its backward is held as well

All microbatches run by one plan. What the others keep is memory outside, and it follows from the plan:

    outside = measured without them + others * kept(plan)       the most over the moments of a step

A plan beside microbatches that keep more keeps less itself. So what one keeps is searched for by bisection: too small, and the
plan keeps more than was assumed; too large, and no plan meets the budget, or only a slower one does.

Wrong when: copies of one microbatch run beside those of another. Both are then later than predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from graphoffload.errors import BudgetError
from graphoffload.facts.goals import KeepIfFits, MeetBudget
from graphoffload.planner.step.errors import flight_infeasible
from graphoffload.planner.step.events import CallSchedule
from graphoffload.planner.step.facts import StepFacts, StepProblem, beside
from graphoffload.planner.step.runs import Names, Runs
from graphoffload.planner.step.solve import StepSolution, follow_step, plan_step

_HALVINGS = 6
_NEAR = 0.01  # of what keep-all keeps


def plan_flight(problem: StepProblem) -> StepSolution:
    """The best plan found for a step, however many microbatches of it are in flight.

    Raises:
        BudgetError: no plan was found within the budget.
    """
    if problem.facts.in_flight == 1:
        return plan_step(problem)
    one = _alone(problem)
    keep = _with_others(problem, plan_step(replace(one, goal=KeepIfFits(None))))
    budget = problem.goal.device_budget_bytes
    if budget is None:
        return _with_others(problem, plan_step(one))
    limit = budget - problem.reserve_bytes
    if keep.timeline.peak_bytes <= limit:
        return keep
    tried = list(_tried(problem, one, kept_bytes(problem.facts, keep)))
    within = [solution for solution in tried if solution.timeline.peak_bytes <= limit]
    if within:
        return min(within, key=lambda solution: solution.timeline.time_s)
    least = min(tried, key=lambda solution: solution.timeline.peak_bytes)
    if not problem.or_least:
        raise flight_infeasible(problem, least.timeline, least.keep_timeline)
    return least


def _alone(problem: StepProblem) -> StepProblem:
    """The same step of one microbatch, with its share of host memory."""
    host = problem.host_budget_bytes
    share = None if host is None else host // problem.facts.in_flight
    return replace(problem, facts=replace(problem.facts, in_flight=1), host_budget_bytes=share)


def _tried(problem: StepProblem, one: StepProblem, most_bytes: int) -> Iterator[StepSolution]:
    """Plans beside microbatches that keep so much or so much, with what they come to; at last the one that takes least."""
    low, high = 0, most_bytes
    for _ in range(_HALVINGS):
        assumed = (low + high) // 2
        try:
            solution = plan_step(replace(one, facts=beside(problem.facts, assumed), or_least=False))
        except BudgetError:
            high = assumed
            continue
        yield _with_others(problem, solution)
        if kept_bytes(problem.facts, solution) > assumed:
            low = assumed
        else:
            high = assumed
        if high - low <= _NEAR * most_bytes:
            break
    yield _with_others(problem, plan_step(replace(one, goal=MeetBudget(1), or_least=True)))


def kept_bytes(facts: StepFacts, solution: StepSolution) -> int:
    """Device bytes that a microbatch holds between its forward and its backward, beside those that were measured."""
    saved = (
        candidate.nbytes
        for at, (chosen, actions) in enumerate(zip(solution.chosen, solution.actions, strict=True))
        for candidate, action in zip(facts.variant(at, chosen).program.candidates, actions, strict=True)
        if action == "keep"
    )
    return sum(saved) + _saved_more(facts, solution.chosen)


def _saved_more(facts: StepFacts, chosen: Sequence[int]) -> int:
    """Bytes of inputs that these variants hold more than those that ran when the step was measured."""
    return sum(
        facts.variant(at, variant).saved_input_bytes - facts.variant(at, call.ran).saved_input_bytes
        for at, (call, variant) in enumerate(zip(facts.calls, chosen, strict=True))
    )


def _offloads(facts: StepFacts, solution: StepSolution) -> list[list[str]]:
    return [
        [c.name for c, action in zip(facts.variant(at, chosen).program.candidates, actions, strict=True) if action == "offload"]
        for at, (chosen, actions) in enumerate(zip(solution.chosen, solution.actions, strict=True))
    ]


def follow_flight(
    problem: StepProblem,
    chosen: Sequence[int],
    calls: Sequence[CallSchedule],
    reload_steps: Mapping[tuple[int, int], Mapping[str, int]],
    offloads: Names,
    solver: str,
) -> StepSolution:
    """`follow_step` for a step of which several microbatches may be in flight.

    Raises:
        PlanError: as follow_step.
    """
    found = follow_step(_alone(problem), chosen, calls, reload_steps, offloads, solver)
    return found if problem.facts.in_flight == 1 else _with_others(problem, found)


def _with_others(problem: StepProblem, solution: StepSolution) -> StepSolution:
    """What a plan of one microbatch comes to where all of them run by it."""
    facts = problem.facts
    there = replace(_alone(problem), facts=beside(facts, kept_bytes(facts, solution)))
    offloads = _offloads(facts, solution)
    found = follow_step(there, solution.chosen, solution.calls, solution.reload_steps, offloads, solution.solver)
    all_kept = sum(c.nbytes for at in range(len(facts.calls)) for c in facts.variant(at, 0).program.candidates)
    kept = replace(there, facts=beside(facts, all_kept + _saved_more(facts, [0] * len(facts.calls))))
    return replace(
        found,
        in_flight=facts.in_flight,
        timeline=replace(found.timeline, host_bytes=facts.in_flight * found.timeline.host_bytes),
        keep_timeline=Runs(kept).keep.timeline,
        lower_bound_s=None,
        lower_bound_peak_bytes=None,
    )
