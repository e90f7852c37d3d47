"""solve(): from a goal to the best plan that the solvers find, its lower bound and a reason for every candidate.

    keep-all fits? ── yes ──▶ keep all
        │ no
    exact (few assignments)   greedy: all actions, recompute only, offload only  LP ──▶ greedy repairs   everything offloaded
        └──────────────┬───────────────────┴──────────────┘
                    the evaluator ──▶ local search from the best two ──▶ Solution
                        └─ none meets the budget ──▶ again, scored by where memory is over, for lower budgets ──▶ or BudgetError

Every proposal is scored by the simulator, so a bad estimate in a solver costs quality, never truth. The gap to the lower bound
says how much can be lost at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphoffload.errors import BudgetError
from graphoffload.facts.plan import Action
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.patience import Patience
from graphoffload.planner.arrays import Arrays, arrays_of
from graphoffload.planner.bottleneck import describe, held_at
from graphoffload.planner.goals import Evaluator, Goal, MeetBudget, Proposal, WithinSlowdown
from graphoffload.planner.problem import Program
from graphoffload.planner.reasons import reasons_for
from graphoffload.planner.simulator import Timeline, timeline_of
from graphoffload.planner.strategies.exact import search_exactly
from graphoffload.planner.strategies.greedy import greedy_moves
from graphoffload.planner.strategies.local_search import improve, windows
from graphoffload.planner.strategies.relaxation import Relaxation, Relaxed
from graphoffload.units import format_bytes

__all__ = ["Goal", "MeetBudget", "Solution", "WithinSlowdown", "least_budget_bytes", "solve"]

_SMALL = 24
_FEWEST = 260
_MOST = 2000
_TURNS = 3
_WORK = 2_000_000
_AIMS = 8
_LOWER = (1.0, 0.97, 0.93)
_NEAR = 1.2
_FAR = 0.015
_RUNG = 1.005
_RUNGS = 4
_DESCENTS = 8
_LESS = 0.99
_LEAST_KEPT: tuple[Action, ...] = ("offload", "recompute", "keep")
_STARTS: dict[str, tuple[Action, ...]] = {
    "greedy": ("offload", "recompute"),
    "greedy recompute": ("recompute",),
    "greedy offload": ("offload",),
    "lp": ("offload", "recompute"),
}


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


def solve(
    program: Program,
    hardware: HardwareProfile,
    goal: Goal,
    *,
    host_budget_bytes: int | None = None,
    max_inflight_bytes: int | None = None,
    evaluations: int | None = None,
    patience: Patience | None = None,
) -> Solution:
    """The best plan found for `goal`; the best until `patience` ends.

    With a number of `evaluations` there is one search that spends no more, and its plan may be above a budget.

    Raises:
        BudgetError: no plan was found within the budgets; the message has the least budget found feasible and what holds it up.
            Or what is fixed to offload exceeds the host budget.
    """
    arrays = arrays_of(program, hardware)
    small = len(program.candidates) <= _SMALL
    evaluator = Evaluator(
        arrays,
        goal,
        host_budget_bytes=host_budget_bytes,
        window_bytes=max_inflight_bytes,
        budget=evaluations or (6000 if small else _evaluations(program)),
        patience=patience,
    )
    keep = evaluator.propose(evaluator.keep, "fits")
    fixed_bytes = evaluator.evaluate(evaluator.keep)[0].host_bytes
    if host_budget_bytes is not None and fixed_bytes > host_budget_bytes:
        raise BudgetError(
            f"host_budget {format_bytes(host_budget_bytes)}: what is fixed to offload needs {format_bytes(fixed_bytes)}. "
            f"Raise host_budget to that, or fix fewer tensors."
        )
    if isinstance(goal, MeetBudget) and keep.feasible:
        return _solution(evaluator, keep, None)
    relaxed = Relaxation(arrays, goal, host_budget_bytes, evaluator.limit_s).solve()
    best = _search(evaluator, keep, relaxed)
    if isinstance(goal, MeetBudget) and evaluations is None:
        if not best.feasible:
            best = min((best, *_where_lost(evaluator, goal)), key=lambda p: p.score)
        if not best.feasible or _is_far(evaluator, best, relaxed):
            least = _least(evaluator)
            best = min((best, *_from_below(evaluator, least)), key=lambda p: p.score)
            if not best.feasible:
                best = _descended(evaluator, least)
                if not best.feasible:
                    raise _infeasible(evaluator, goal, relaxed, best)
    return _solution(evaluator, best, relaxed)


def _is_far(evaluator: Evaluator, best: Proposal, relaxed: Relaxed) -> bool:
    """Whether a plan may be much slower than it has to be. One that is not is as good as any for a tighter budget, too: the
    bound of that is no lower."""
    compute_s = evaluator.arrays.compute_s
    return best.score[1] - (compute_s if relaxed.value is None else relaxed.value) > _FAR * compute_s


def _from_below(evaluator: Evaluator, least: Proposal) -> Iterator[Proposal]:
    """Plans for tighter budgets, which meet this one as well, and what local search makes of them here: the one with the least
    peak, and those for budgets on a grid that is the same for all budgets, so that neighbours look at the same ones."""
    program = evaluator.arrays.program
    least_bytes = evaluator.evaluate(least.actions, least.window_bytes)[0].peak_bytes
    starts = [least]
    rung = math.ceil(math.log(max(2, evaluator.limit_bytes), _RUNG)) - 1
    for bytes_below in (int(_RUNG ** (rung - step)) for step in range(_RUNGS)):
        if bytes_below < least_bytes or evaluator.hurried:
            break
        other = evaluator.at(MeetBudget(bytes_below + program.reserve_bytes))
        relaxed = Relaxation(evaluator.arrays, other.goal, evaluator.host_budget_bytes, evaluator.limit_s).solve()
        starts.append(_search(other, other.propose(other.keep, "fits"), relaxed))
    for found in starts:
        start = evaluator.propose(found.actions, found.solver, found.window_bytes)
        if start.feasible:
            evaluator.budget = evaluator.count + _FEWEST
            yield improve(evaluator, start, small=False)


def _search(evaluator: Evaluator, keep: Proposal, relaxed: Relaxed) -> Proposal:
    """The best proposal of all strategies, and of local search from them."""
    small, goal = len(evaluator.arrays.program.candidates) <= _SMALL, evaluator.goal
    best, proven = search_exactly(evaluator)
    if best is not None and proven and "offload" not in best.actions:  # the search knows copies that run freely, no windows
        return best
    found = [windows(evaluator, start) for start in (keep, best) if start is not None]
    found += _proposals(evaluator, relaxed)
    if small and isinstance(goal, MeetBudget):
        found.append(_all_offloaded(evaluator))
    found = sorted(dict.fromkeys(found) if small else found, key=lambda p: p.score)
    best = min(_improved(evaluator, found, small=small), key=lambda p: p.score)
    if not best.feasible and isinstance(goal, MeetBudget):
        searched = found[:_TURNS] if small and not evaluator.exhausted else ()
        evaluator.budget += evaluator.count
        aimed = _aiming_lower(evaluator, goal) if evaluator.lost else ()
        start = min((*aimed, _all_offloaded(evaluator)), key=lambda p: p.score)
        best = best if start in searched else improve(evaluator, start, small=small)
    return best


def _where_lost(evaluator: Evaluator, goal: MeetBudget) -> Iterator[Proposal]:
    """What is found by other scores, and for budgets a little lower, where something was found a little above: the solvers lose
    their way at one budget and not at the next, and who can do with less can do with this."""
    near_bytes = evaluator.limit_bytes * _NEAR
    for share in _LOWER:
        if evaluator.smallest is None or evaluator.evaluate(*evaluator.smallest)[0].peak_bytes > near_bytes:
            return
        lower = MeetBudget(goal.device_budget_bytes - int(evaluator.limit_bytes * (1.0 - share)))
        other = evaluator.at(lower, lost=True)
        relaxed = Relaxation(evaluator.arrays, lower, evaluator.host_budget_bytes, evaluator.limit_s).solve()
        if relaxed.value is None:
            return
        found = _search(other, other.propose(other.keep, "fits"), relaxed)
        for actions, window in filter(None, ((found.actions, found.window_bytes), other.smallest)):
            same = evaluator.propose(actions, found.solver, window)
            if same.feasible:
                evaluator.budget = evaluator.count + _FEWEST
                yield improve(evaluator, same, small=False)
                return


def _evaluations(program: Program) -> int:
    """Simulations that a solve may spend: few for large instances, so that 80 layers cost little more than 8."""
    size = len(program.forward) + len(program.backward) + len(program.candidates)
    return max(_FEWEST, min(_MOST, _WORK // size))


def _improved(evaluator: Evaluator, found: Sequence[Proposal], *, small: bool) -> Iterator[Proposal]:
    """Local search from the best proposal, and where simulations are cheap from greedy's and the LP's, each with its share.

    A proposal that meets the budget by waiting for copies may be far from every good one, and one a little above it near.
    """
    if small:
        yield from (improve(evaluator, start, small=True) for start in found[:_TURNS])
        return
    starts = [found[0], *(p for p in found[1:] if p.solver in ("greedy", "lp"))]
    starts = starts[: min(_TURNS, max(1, evaluator.budget // _FEWEST))]
    total = evaluator.budget
    for turn, start in enumerate(starts):
        evaluator.budget = evaluator.count + (total - evaluator.count) // (len(starts) - turn)
        yield improve(evaluator, start, small=False)


def _proposals(evaluator: Evaluator, relaxed: Relaxed) -> Iterator[Proposal]:
    """What each solver makes of the goal."""
    if isinstance(evaluator.goal, MeetBudget):
        target_bytes = max(0, evaluator.limit_bytes)
        for name, allowed in _STARTS.items():
            start = round_down(evaluator, relaxed) if name == "lp" else evaluator.keep
            yield windows(evaluator, evaluator.propose(greedy_moves(evaluator, start, target_bytes, allowed=allowed), name))
        return
    if "lp" in _STARTS:
        yield evaluator.propose(round_down(evaluator, relaxed), "lp")
    yield _all_offloaded(evaluator)
    yield from _halving(evaluator)


def _halving(evaluator: Evaluator) -> Iterator[Proposal]:
    """Greedy for a slowdown: budgets between nothing and the peak of keep-all, halved until the limit of time is met."""
    low, high = 0, evaluator.evaluate(evaluator.keep)[0].peak_bytes
    for _ in range(6):
        middle = (low + high) // 2
        actions = greedy_moves(evaluator, evaluator.keep, middle, limit_s=evaluator.limit_s)
        yield evaluator.propose(actions, "greedy")
        peak = evaluator.evaluate(actions)[0].peak_bytes
        low, high = (low, min(middle, peak)) if peak <= middle else (middle, high)


def _all_offloaded(evaluator: Evaluator) -> Proposal:
    """Everything offloaded, in the best window: where memory falls only if compute waits for copies early."""
    return windows(evaluator, evaluator.propose(_nothing_kept(evaluator.arrays), "all"))


def _aiming_lower(evaluator: Evaluator, goal: MeetBudget) -> Iterator[Proposal]:
    """The LP for limits that are lower by what its rounding broke: whole tensors are larger than the room that it leaves."""
    device_bytes, host_bytes = goal.device_budget_bytes, evaluator.host_budget_bytes
    for _ in range(_AIMS):
        relaxed = Relaxation(evaluator.arrays, MeetBudget(device_bytes), host_bytes, evaluator.limit_s).solve()
        if relaxed.value is None:
            return
        found = windows(
            evaluator, evaluator.propose(greedy_moves(evaluator, round_down(evaluator, relaxed), evaluator.limit_bytes), "lp")
        )
        yield found
        if found.feasible:
            return
        result = evaluator.evaluate(found.actions, found.window_bytes)[0]
        device_bytes -= max(0, result.peak_bytes - evaluator.limit_bytes)
        if host_bytes is not None and evaluator.host_budget_bytes is not None:
            host_bytes -= max(0, result.host_bytes - evaluator.host_budget_bytes)


def _nothing_kept(arrays: Arrays) -> tuple[Action, ...]:
    """Everything offloaded; what cannot be offloaded is recomputed, and what cannot be recomputed either is kept."""
    choices = (candidate.actions for candidate in arrays.program.candidates)
    return tuple(next(action for action in _LEAST_KEPT if action in allowed) for allowed in choices)


def round_down(evaluator: Evaluator, relaxed: Relaxed) -> tuple[Action, ...]:
    """Whole numbers from the relaxation's fractions, per class: earliest layers offload, the next recompute, the last keep.

    Rounded to the nearest whole, so limits may be broken a little; greedy and local search repair.
    """
    actions = list(evaluator.keep)
    for index, fold in enumerate(relaxed.classes):
        offload = min(fold.count, int(relaxed.offload[index] + 0.5))
        recompute = min(fold.count - offload, int(relaxed.recompute[index] + relaxed.offload[index] + 0.5) - offload)
        for rank, member in enumerate(fold.members):
            choices = evaluator.arrays.program.candidates[member].actions
            if len(choices) > 1:
                wanted: Action = "offload" if rank < offload else "recompute" if rank < offload + recompute else "keep"
                actions[member] = wanted if wanted in choices else "keep"
    return tuple(actions)


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
        budget=_evaluations(program),
        patience=patience,
    )
    relaxed = Relaxation(evaluator.arrays, evaluator.goal, host_budget_bytes, evaluator.limit_s).solve()
    return _solution(evaluator, _descended(evaluator, _least(evaluator)), relaxed)


def _descended(evaluator: Evaluator, least: Proposal) -> Proposal:
    """The last of the plans for budgets a percent below the one before, from the peak of `least` down to the first that is not
    met: a search for the least peak alone stops up to six percent above what searches for budgets reach."""
    program, best = evaluator.arrays.program, least
    for _ in range(_DESCENTS):
        peak_bytes = evaluator.evaluate(best.actions, best.window_bytes)[0].peak_bytes
        goal = MeetBudget(int(peak_bytes * _LESS) + program.reserve_bytes)
        other = evaluator.at(goal)
        relaxed = Relaxation(evaluator.arrays, goal, evaluator.host_budget_bytes, evaluator.limit_s).solve()
        if relaxed.value is None or evaluator.hurried:
            break
        found = _search(other, other.propose(other.keep, "fits"), relaxed)
        if not found.feasible:
            found = min((found, *_where_lost(other, goal)), key=lambda p: p.score)
        if not found.feasible:
            break
        best = found
    return evaluator.propose(best.actions, best.solver, best.window_bytes)


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
    searched = _search(other, other.propose(other.keep, "fits"), relaxed)
    if searched.score <= start.score:
        return searched
    other.budget = other.count + _FEWEST
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
