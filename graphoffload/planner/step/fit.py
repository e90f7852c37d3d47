"""A variant for one step: which activations a graph computes again, where it is called once in it.

    many calls    keep | light | light | smallest     the mix of variants is the choice, call by call
    one call      light                               one variant is all there is: a fifth of its activations or none at all
                  fitted                              each activation by itself, as for a graph that is planned alone

The choice is that of the planner for the joint program in which such graphs have all their chains, and the other calls what
they run by the plan that there is. What it comes to is known once the graph is partitioned by it, so it is one more variant.

It is chosen for a slower link. Such a choice fits so well that copies fill the forward to its end, and one that comes late is
waited for; a variant that leaves a little less to copy costs less than that.
"""

from __future__ import annotations

from collections import Counter

from graphoffload.errors import BudgetError
from graphoffload.facts.goals import MeetBudget, WithinSlowdown
from graphoffload.planner.simulator import Timeline
from graphoffload.planner.solver import solve
from graphoffload.planner.step.facts import StepFacts, StepProblem, Variant
from graphoffload.planner.step.joint import join_programs
from graphoffload.planner.step.solve import StepSolution

_WORTH = 0.01  # of keep-all's time: a variant is a trace of its graph, and the plan is solved again
_LINK = 0.9  # of the link, which a choice is made for
_LARGE = 0.25  # of all activations of a step: of many small graphs, none has a variant of its own


def choices_of(problem: StepProblem, solution: StepSolution) -> dict[int, frozenset[str]]:
    """For each large graph that is called once, what it should compute again, by name; {} where that is not clearly faster.

    Steps of several microbatches in flight, and plans for a slowdown, have none.
    """
    facts, budget = problem.facts, problem.goal.device_budget_bytes
    kept, free = solution.keep_timeline, _alone_and_large(facts)
    near = solution.lower_bound_s is not None and solution.timeline.time_s - solution.lower_bound_s <= _WORTH * kept.time_s
    goal_fits = budget is not None and not isinstance(problem.goal, WithinSlowdown)
    if not goal_fits or near or facts.in_flight > 1 or not any(free):
        return {}
    ran = [facts.variant(at, chosen) for at, chosen in enumerate(solution.chosen)]
    variants = [
        Variant("free", frozenset(), facts.bounds[call.graph], facts.variant(at, 0).saved_input_bytes) if free[at] else ran[at]
        for at, call in enumerate(facts.calls)
    ]
    joined = join_programs(facts, variants)
    try:
        found = solve(
            joined.program,
            problem.hardware.scaled(link=_LINK),
            MeetBudget((budget or 0) - problem.reserve_bytes),
            host_budget_bytes=problem.host_budget_bytes,
            patience=problem.patience,
            descend=False,
        )
    except BudgetError:
        return {}
    if not _is_faster(found.timeline, solution.timeline, kept):
        return {}
    again: dict[int, set[str]] = {call.graph: set() for at, call in enumerate(facts.calls) if free[at]}
    for (at, index), action in zip(joined.of, found.actions, strict=True):
        if free[at] and action == "recompute":
            again[facts.calls[at].graph].add(variants[at].program.candidates[index].name)
    return {graph: frozenset(names) for graph, names in again.items() if names}


def _alone_and_large(facts: StepFacts) -> list[bool]:
    """For each call whether it is the only one of its graph, and holds a large share of all activations."""
    count = Counter(call.graph for call in facts.calls)
    held = [sum(candidate.nbytes for candidate in bound.candidates) for bound in facts.bounds]
    least = _LARGE * sum(held[call.graph] for call in facts.calls) if facts.bounds else 0.0
    return [bool(facts.bounds) and count[call.graph] == 1 and held[call.graph] >= least for call in facts.calls]


def is_worth(problem: StepProblem, found: StepSolution, before: StepSolution) -> bool:
    """Whether a plan with such variants replaces the one before: it meets the budget, and is clearly faster."""
    most = (problem.goal.device_budget_bytes or 0) - problem.reserve_bytes
    return found.timeline.peak_bytes <= most and _is_faster(found.timeline, before.timeline, before.keep_timeline)


def _is_faster(one: Timeline, other: Timeline, keep: Timeline) -> bool:
    return other.time_s - one.time_s > _WORTH * keep.time_s
