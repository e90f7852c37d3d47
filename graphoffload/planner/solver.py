"""solve(): from a goal to the best plan that the solvers find, its lower bound and a reason for every candidate.

    keep-all fits? ── yes ──▶ keep all
        │ no
    one search (search.py) ── near its bound ──▶ Solution
        │ above the budget, or far from the bound
    scored by where memory is over, and for lower budgets ──▶ from the least peak, and from tighter budgets ──▶ Solution
        │ none meets the budget
    a descent from the least peak ──▶ Solution, or BudgetError

Every proposal is scored by the simulator, so a bad estimate in a solver costs quality, never truth. The gap to the lower bound
says how much can be lost at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from graphoffload.errors import BudgetError
from graphoffload.facts.plan import Action
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.patience import Patience
from graphoffload.planner.arrays import arrays_of
from graphoffload.planner.bottleneck import describe, held_at
from graphoffload.planner.goals import Evaluator, Goal, MeetBudget, Proposal, WithinSlowdown
from graphoffload.planner.problem import Program
from graphoffload.planner.reasons import reasons_for
from graphoffload.planner.search import FEWEST, SMALL, evaluations_for, search_once, where_lost
from graphoffload.planner.simulator import Timeline, timeline_of
from graphoffload.planner.strategies.local_search import improve
from graphoffload.planner.strategies.relaxation import Relaxation, Relaxed
from graphoffload.units import format_bytes

__all__ = ["Goal", "MeetBudget", "Solution", "WithinSlowdown", "least_budget_bytes", "solve"]

_FAR = 0.015
_RUNG = 1.005
_RUNGS = 4
_DESCENTS = 8
_LESS = 0.99
_LOWER = 0.999


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A plan for one goal.

    Attributes:
        max_inflight_bytes: window that the timeline was made with; None: unbounded.
        lower_bound_s: no plan within the budgets is faster (budget goal; None for the other).
        lower_bound_peak_bytes: no plan within the slowdown has a smaller peak (slowdown goal; None for the other).
        solver: who proposed it. reasons: one a candidate, keeps included. evaluations: simulations it took.
    """

    actions: tuple[Action, ...]
    timeline: Timeline
    solver: str
    reasons: tuple[str, ...]
    max_inflight_bytes: int | None = None
    lower_bound_s: float | None = None
    lower_bound_peak_bytes: int | None = None
    evaluations: int = 0


@dataclass(slots=True)
class Least:
    """What is known of the least peak of an instance, whatever the budget.

    first: the first plan found, and its peak. descended: the last of a descent from it, whose peak is the least budget that is
    met. None: not looked for yet.
    """

    program: Program
    hardware: HardwareProfile
    first: Proposal | None = None
    first_bytes: int = 0
    descended: Proposal | None = None


def least_of(known: list[Least], program: Program, hardware: HardwareProfile) -> Least:
    """What is known of this instance, remembered in `known` from now on."""
    for least in known:
        if least.program == program and least.hardware == hardware:
            return least
    known.append(Least(program, hardware))
    return known[-1]


def like(known: list[Least], program: Program) -> Least | None:
    """What is known of another instance with the same steps: in it, other things are in memory."""
    steps = program.forward, program.backward
    others = (one for one in known if one.program is not program)
    return next((one for one in others if (one.program.forward, one.program.backward) == steps), None)


def solve(
    program: Program,
    hardware: HardwareProfile,
    goal: Goal,
    *,
    host_budget_bytes: int | None = None,
    max_inflight_bytes: int | None = None,
    evaluations: int | None = None,
    patience: Patience | None = None,
    least: Least | None = None,
    descend: bool = True,
    like: Least | None = None,
) -> Solution:
    """The best plan found for `goal`; the best until `patience` ends.

    With a number of `evaluations` there is one search that spends no more, and its plan may be above a budget. `least` is what
    earlier calls found of the least peak of this instance, and what this one finds. Without `descend`, a budget below the first
    plan with the least peak is refused; descending from it may reach one that is six percent lower, and takes most of the time.
    `like` is the same of an instance that differs little: where the first plan with the least peak is no lower here, and above
    the budget, nothing more is searched.

    Raises:
        BudgetError: no plan was found within the budgets; the message has the least budget found feasible and what holds it up.
            Or what is fixed to offload exceeds the host budget.
    """
    arrays = arrays_of(program, hardware)
    small = len(program.candidates) <= SMALL
    evaluator = Evaluator(
        arrays,
        goal,
        host_budget_bytes=host_budget_bytes,
        window_bytes=max_inflight_bytes,
        budget=evaluations or (6000 if small else evaluations_for(program)),
        patience=patience,
    )
    keep = evaluator.propose(evaluator.keep, "fits")
    fixed_bytes = evaluator.evaluate(evaluator.keep)[0].host_bytes
    if host_budget_bytes is not None and fixed_bytes > host_budget_bytes:
        raise host_infeasible(host_budget_bytes, fixed_bytes)
    if isinstance(goal, MeetBudget) and keep.feasible:
        return _solution(evaluator, keep, None)
    relaxed = Relaxation(arrays, goal, host_budget_bytes, evaluator.limit_s).solve()
    least = Least(program, hardware) if least is None else least
    known = None if least.descended is None else _again(evaluator, least.descended)
    if isinstance(goal, MeetBudget) and known is not None and not known.feasible:
        raise _infeasible(evaluator, goal, relaxed, known)
    if not isinstance(goal, MeetBudget) or evaluations is not None:
        return _solution(evaluator, search_once(evaluator, keep, relaxed), relaxed)
    is_impossible = relaxed.value is None  # then nothing but the least budget is searched
    best = keep if is_impossible else search_once(evaluator, keep, relaxed)
    return _solution(evaluator, _nearer(evaluator, goal, best, relaxed, least, descend, like), relaxed)


def host_infeasible(host_budget_bytes: int, fixed_bytes: int) -> BudgetError:
    """The error where what is fixed to offload finds no room on the host."""
    return BudgetError(
        f"host_budget {format_bytes(host_budget_bytes)}: what is fixed to offload needs {format_bytes(fixed_bytes)}. "
        f"Raise host_budget to that, or fix fewer tensors."
    )


def _nearer(
    evaluator: Evaluator,
    goal: MeetBudget,
    best: Proposal,
    relaxed: Relaxed,
    least: Least,
    descend: bool,
    like: Least | None,
) -> Proposal:
    """`best`, or what is found by other ways where it is above the budget or far from its bound.

    Raises:
        BudgetError: nothing meets the budget.
    """
    if not best.feasible and like is not None and like.first_bytes:
        first = _first(evaluator, least)
        if not first.feasible and least.first_bytes > _LOWER * like.first_bytes:
            raise _infeasible(evaluator, goal, relaxed, first)
    if not best.feasible and relaxed.value is not None:
        best = min((best, *where_lost(evaluator, goal)), key=lambda p: p.score)
    if best.feasible and not _is_far(evaluator, best, relaxed):
        return best
    first = _first(evaluator, least)
    best = min((best, *_from_below(evaluator, first)), key=lambda p: p.score)
    if not best.feasible:
        if descend:
            least.descended = least.descended or _descended(evaluator, first)
        best = _again(evaluator, least.descended or first)
        if not best.feasible:
            raise _infeasible(evaluator, goal, relaxed, best)
    return best


def _first(evaluator: Evaluator, least: Least) -> Proposal:
    """The first plan found with the least peak, which is remembered in `least`, by the score of this budget."""
    if least.first is None:
        least.first = _least(evaluator)
        least.first_bytes = _peak_bytes(evaluator, least.first)
    return _again(evaluator, least.first)


def _again(evaluator: Evaluator, found: Proposal) -> Proposal:
    """What was found for another budget, by the score of this one."""
    return evaluator.propose(found.actions, found.solver, found.window_bytes)


def _peak_bytes(evaluator: Evaluator, found: Proposal) -> int:
    return evaluator.evaluate(found.actions, found.window_bytes)[0].peak_bytes


def _is_far(evaluator: Evaluator, best: Proposal, relaxed: Relaxed) -> bool:
    """Whether a plan may be much slower than it has to be. One that is not is as good as any for a tighter budget, too: the
    bound of that is no lower."""
    compute_s = evaluator.arrays.compute_s
    return best.score[1] - (compute_s if relaxed.value is None else relaxed.value) > _FAR * compute_s


def _from_below(evaluator: Evaluator, least: Proposal) -> Iterator[Proposal]:
    """Plans for tighter budgets, which meet this one as well, and what local search makes of them here: the one with the least
    peak, and those for budgets on a grid that is the same for all budgets, so that neighbours look at the same ones."""
    program = evaluator.arrays.program
    least_bytes = _peak_bytes(evaluator, least)
    starts = [least]
    rung = math.ceil(math.log(max(2, evaluator.limit_bytes), _RUNG)) - 1
    for bytes_below in (int(_RUNG ** (rung - step)) for step in range(_RUNGS)):
        if bytes_below < least_bytes or evaluator.hurried:
            break
        other = evaluator.at(MeetBudget(bytes_below + program.reserve_bytes))
        relaxed = Relaxation(evaluator.arrays, other.goal, evaluator.host_budget_bytes, evaluator.limit_s).solve()
        starts.append(search_once(other, other.propose(other.keep, "fits"), relaxed))
    for found in starts:
        start = _again(evaluator, found)
        if start.feasible:
            evaluator.budget = evaluator.count + FEWEST
            yield improve(evaluator, start, small=False)


def _solution(evaluator: Evaluator, best: Proposal, relaxed: Relaxed | None) -> Solution:
    result = evaluator.evaluate(best.actions, best.window_bytes)[0]
    timeline = timeline_of(evaluator.arrays, result)
    bound = relaxed.value if relaxed is not None else None
    budget_goal = isinstance(evaluator.goal, MeetBudget)
    return Solution(
        actions=best.actions,
        timeline=timeline,
        solver=best.solver,
        reasons=reasons_for(evaluator.arrays, best.actions, result, fits=best.solver == "fits"),
        max_inflight_bytes=best.window_bytes,
        lower_bound_s=(evaluator.arrays.compute_s if bound is None else min(bound, timeline.time_s)) if budget_goal else None,
        lower_bound_peak_bytes=None if budget_goal else min(int(bound or 0.0), timeline.peak_bytes),
        evaluations=evaluator.count,
    )


def least_budget_bytes(
    program: Program,
    hardware: HardwareProfile,
    *,
    host_budget_bytes: int | None = None,
    max_inflight_bytes: int | None = None,
    patience: Patience | None = None,
) -> Solution:
    """The plan with the least peak that is found at any time; its peak plus the reserve is the least feasible budget."""
    evaluator = Evaluator(
        arrays_of(program, hardware),
        WithinSlowdown(1e6),
        host_budget_bytes=host_budget_bytes,
        window_bytes=max_inflight_bytes,
        budget=evaluations_for(program),
        patience=patience,
    )
    relaxed = Relaxation(evaluator.arrays, evaluator.goal, host_budget_bytes, evaluator.limit_s).solve()
    return _solution(evaluator, _descended(evaluator, _least(evaluator)), relaxed)


def _descended(evaluator: Evaluator, least: Proposal) -> Proposal:
    """The last of the plans for budgets a percent below the one before, from the peak of `least` down to the first that is not
    met: a search for the least peak alone stops up to six percent above what searches for budgets reach."""
    program, best = evaluator.arrays.program, least
    for _ in range(_DESCENTS):
        goal = MeetBudget(int(_peak_bytes(evaluator, best) * _LESS) + program.reserve_bytes)
        other = evaluator.at(goal)
        relaxed = Relaxation(evaluator.arrays, goal, evaluator.host_budget_bytes, evaluator.limit_s).solve()
        if relaxed.value is None or evaluator.hurried:
            break
        found = search_once(other, other.propose(other.keep, "fits"), relaxed)
        if not found.feasible:
            found = min((found, *where_lost(other, goal)), key=lambda p: p.score)
        if not found.feasible:
            break
        best = found
    return _again(evaluator, best)


def _least(evaluator: Evaluator) -> Proposal:
    """The plan with the least peak that is found at any time, as fast as it is found for that peak; the same whatever the
    budget of `evaluator`, so that it may be named: who asks for its peak gets it or a faster one."""
    program = evaluator.arrays.program
    found = solve(
        program,
        evaluator.arrays.hardware,
        WithinSlowdown(1e6),
        host_budget_bytes=evaluator.host_budget_bytes,
        max_inflight_bytes=evaluator.window_bytes,
        patience=evaluator.patience,
    )
    other = evaluator.at(MeetBudget(found.timeline.peak_bytes + program.reserve_bytes))
    start = other.propose(found.actions, found.solver, found.max_inflight_bytes)
    relaxed = Relaxation(evaluator.arrays, other.goal, evaluator.host_budget_bytes, evaluator.limit_s).solve()
    searched = search_once(other, other.propose(other.keep, "fits"), relaxed)
    if searched.score <= start.score:
        return searched
    other.budget = other.count + FEWEST
    return improve(other, start, small=False)


def _infeasible(evaluator: Evaluator, goal: MeetBudget, relaxed: Relaxed, least: Proposal) -> BudgetError:
    """The error for a budget that nothing meets, with the least one that is met."""
    arrays, program = evaluator.arrays, evaluator.arrays.program
    result = evaluator.evaluate(least.actions, least.window_bytes)[0]
    timeline = timeline_of(arrays, result)
    held = describe(held_at(arrays, least.actions, result, result.peak_step))
    reserve = f" and {format_bytes(program.reserve_bytes)} in reserve" if program.reserve_bytes else ""
    proof = "no plan can meet it" if relaxed.value is None else "no plan was found that meets it"
    least_bytes = timeline.peak_bytes + program.reserve_bytes
    error = BudgetError(
        f"device_budget {format_bytes(goal.device_budget_bytes)}: {proof}. The least feasible one found is "
        f"{format_bytes(least_bytes)} ({least_bytes} bytes) at {timeline.slowdown:+.1%} time; its peak is at "
        f"{program.step_name(result.peak_step)!r} and holds {held}{reserve}. Raise device_budget to that, or make the batch or "
        "sequence smaller."
    )
    error.least_bytes = least_bytes
    return error
