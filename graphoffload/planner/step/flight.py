"""plan_flight(): a step of which several microbatches are in flight, as in a stage of a pipeline.

    |f0|f1|b0|f2|b1|...        2 in flight: while f2 runs, all that f1 keeps for its backward is held as well

All microbatches run by one plan. What the others keep is memory outside, and it follows from the plan:

    outside = measured without them + others * kept(plan)       the most over the moments of a step

The planner sees one microbatch whose activations are as large as those of all in flight, and copies that are as much faster.
At the end of its forward, where most is held, that is the memory of all of them. Elsewhere it is not, so the plan is looked at
with what it keeps as memory outside, and made again for more or less until it is at the budget.

Wrong when: copies of one microbatch run beside those of another. Both are then later than predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from graphoffload.errors import BudgetError
from graphoffload.facts.goals import KeepIfFits, MeetBudget
from graphoffload.planner.step.errors import flight_infeasible
from graphoffload.planner.step.events import CallSchedule
from graphoffload.planner.step.facts import StepFacts, StepProblem, Variant, beside
from graphoffload.planner.step.parts import Wider, widened, without_slices
from graphoffload.planner.step.runs import Names, Runs
from graphoffload.planner.step.solve import StepSolution, follow_step, in_all, plan_step

_ROUNDS = 4
_NEAR = 0.02  # of the budget: what may be left of it
_SLOW = 0.1  # a plan that costs more is compared with the one that takes least, which takes long to find


def plan_flight(problem: StepProblem, wider: Wider | None = None) -> StepSolution:
    """The best plan found for a step, however many microbatches of it are in flight.

    Args:
        wider: as in plan_step().

    Raises:
        BudgetError: no plan was found within the budget.
    """
    if problem.facts.in_flight == 1:
        return plan_step(problem, wider)
    at_once = without_slices(problem.facts)
    if wider is None and at_once.graphs == problem.facts.graphs:
        return _plan_flight(problem)
    try:
        return in_all(_plan_flight(replace(problem, facts=at_once, or_least=False)), at_once, problem.facts)
    except BudgetError:
        problem = widened(problem, wider)
        if problem.facts.graphs == at_once.graphs and not problem.or_least:
            raise
        return _plan_flight(problem)


def _plan_flight(problem: StepProblem) -> StepSolution:
    one = _alone(problem)
    keep = _with_others(problem, plan_step(replace(one, goal=KeepIfFits(None))))
    budget = problem.goal.device_budget_bytes
    if budget is None:
        return _with_others(problem, plan_step(one))
    limit = budget - problem.reserve_bytes
    if keep.timeline.peak_bytes <= limit:
        return keep
    tried = list(_tried(problem, limit))
    if all(found.timeline.peak_bytes > limit or found.slowdown > _SLOW for found in tried):
        tried.append(_with_others(problem, plan_step(replace(one, goal=MeetBudget(1), or_least=True))))
    within = [found for found in tried if found.timeline.peak_bytes <= limit]
    if within:
        return min(within, key=lambda found: found.timeline.time_s)
    least = min(tried, key=lambda found: found.timeline.peak_bytes)
    if not problem.or_least:
        raise flight_infeasible(problem, least.timeline, least.keep_timeline)
    return least


def _alone(problem: StepProblem) -> StepProblem:
    """The same step of one microbatch, with its share of host memory."""
    host = problem.host_budget_bytes
    share = None if host is None else host // problem.facts.in_flight
    return replace(problem, facts=replace(problem.facts, in_flight=1), host_budget_bytes=share)


def _tried(problem: StepProblem, limit_bytes: int) -> Iterator[StepSolution]:
    """Plans of the large microbatch, with what they come to: for the limit, then for what brings them to it."""
    large, aim = _large(problem), limit_bytes
    for _ in range(_ROUNDS):
        planned = plan_step(replace(large, goal=MeetBudget(aim), reserve_bytes=0, or_least=True))
        found = _with_others(problem, planned)
        yield found
        excess = found.timeline.peak_bytes - limit_bytes
        if -_NEAR * limit_bytes <= excess <= 0 or planned.timeline.peak_bytes > aim:
            return
        aim -= excess


def _large(problem: StepProblem) -> StepProblem:
    """One microbatch that saves as much as all of them."""
    count, facts = problem.facts.in_flight, beside(problem.facts, 0)

    def large(variant: Variant) -> Variant:
        candidates = tuple(replace(c, nbytes=count * c.nbytes) for c in variant.program.candidates)
        program = replace(variant.program, candidates=candidates)
        return replace(variant, program=program, saved_input_bytes=count * variant.saved_input_bytes)

    hardware = replace(
        problem.hardware,
        d2h_bytes_per_s=count * problem.hardware.d2h_bytes_per_s,
        h2d_bytes_per_s=count * problem.hardware.h2d_bytes_per_s,
    )
    graphs = tuple(tuple(large(variant) for variant in variants) for variants in facts.graphs)
    return replace(problem, facts=replace(facts, graphs=graphs, bounds=()), hardware=hardware)


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


def offloads_of(facts: StepFacts, solution: StepSolution) -> tuple[tuple[str, ...], ...]:
    """By call, the names of the activations that a plan offloads."""
    return tuple(
        tuple(
            candidate.name
            for candidate, action in zip(facts.variant(at, chosen).program.candidates, actions, strict=True)
            if action == "offload"
        )
        for at, (chosen, actions) in enumerate(zip(solution.chosen, solution.actions, strict=True))
    )


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
    offloads = offloads_of(facts, solution)
    found = follow_step(there, solution.chosen, solution.calls, solution.reload_steps, offloads, solution.solver)
    all_kept = sum(c.nbytes for at in range(len(facts.calls)) for c in facts.variant(at, 0).program.candidates)
    kept = replace(_alone(problem), facts=beside(facts, all_kept + _saved_more(facts, [0] * len(facts.calls))))
    return replace(
        found,
        in_flight=facts.in_flight,
        timeline=replace(found.timeline, host_bytes=facts.in_flight * found.timeline.host_bytes),
        keep_timeline=Runs(kept).reference,
        lower_bound_s=None,
        lower_bound_peak_bytes=None,
    )
