"""One search for one goal: what each strategy proposes, and what local search makes of the best of it.

    exact (few assignments)   greedy: all actions, recompute only, offload only  LP ──▶ greedy repairs   everything offloaded
        └──────────────┬───────────────────┴──────────────┘
                    the evaluator ──▶ local search from the best two, and where none meets the budget from what aims lower
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphoffload.facts.plan import Action
from graphoffload.planner.arrays import Arrays
from graphoffload.planner.goals import Evaluator, MeetBudget, Proposal
from graphoffload.planner.problem import Program
from graphoffload.planner.strategies.exact import search_exactly
from graphoffload.planner.strategies.greedy import greedy_moves
from graphoffload.planner.strategies.local_search import improve, windows
from graphoffload.planner.strategies.relaxation import Relaxation, Relaxed

SMALL = 24
"""An instance with so many candidates is searched tensor by tensor."""
FEWEST = 260
"""Simulations that a search, or local search alone, may at least spend."""
_MOST = 2000
_TURNS = 3
_WORK = 2_000_000
_AIMS = 8
_LOWER = (1.0, 0.97, 0.93)
_NEAR = 1.2
_LEAST_KEPT: tuple[Action, ...] = ("offload", "recompute", "keep")
_STARTS: dict[str, tuple[Action, ...]] = {
    "greedy": ("offload", "recompute"),
    "greedy recompute": ("recompute",),
    "greedy offload": ("offload",),
    "lp": ("offload", "recompute"),
}


def search_once(evaluator: Evaluator, keep: Proposal, relaxed: Relaxed) -> Proposal:
    """The best proposal of all strategies, and of local search from them."""
    small, goal = len(evaluator.arrays.program.candidates) <= SMALL, evaluator.goal
    best, proven = search_exactly(evaluator)
    if best is not None and proven and "offload" not in best.actions:  # the search knows copies that run freely, no windows
        return best
    found = [windows(evaluator, start) for start in (keep, best) if start is not None]
    found += _proposals(evaluator, relaxed)
    if small and isinstance(goal, MeetBudget):
        found.append(all_offloaded(evaluator))
    found = sorted(dict.fromkeys(found) if small else found, key=lambda p: p.score)
    best = min(_improved(evaluator, found, small=small), key=lambda p: p.score)
    if not best.feasible and isinstance(goal, MeetBudget):
        searched = found[:_TURNS] if small and not evaluator.exhausted else ()
        evaluator.budget += evaluator.count
        aimed = _aiming_lower(evaluator, goal) if evaluator.lost else ()
        start = min((*aimed, all_offloaded(evaluator)), key=lambda p: p.score)
        best = best if start in searched else improve(evaluator, start, small=small)
    return best


def where_lost(evaluator: Evaluator, goal: MeetBudget) -> Iterator[Proposal]:
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
        found = search_once(other, other.propose(other.keep, "fits"), relaxed)
        for actions, window in filter(None, ((found.actions, found.window_bytes), other.smallest)):
            same = evaluator.propose(actions, found.solver, window)
            if same.feasible:
                evaluator.budget = evaluator.count + FEWEST
                yield improve(evaluator, same, small=False)
                return


def evaluations_for(program: Program) -> int:
    """Simulations that a solve may spend: few for large instances, so that 80 layers cost little more than 8."""
    size = len(program.forward) + len(program.backward) + len(program.candidates)
    return max(FEWEST, min(_MOST, _WORK // size))


def _improved(evaluator: Evaluator, found: Sequence[Proposal], *, small: bool) -> Iterator[Proposal]:
    """Local search from the best proposal, and where simulations are cheap from greedy's and the LP's, each with its share.

    A proposal that meets the budget by waiting for copies may be far from every good one, and one a little above it near.
    """
    if small:
        yield from (improve(evaluator, start, small=True) for start in found[:_TURNS])
        return
    starts = [found[0], *(p for p in found[1:] if p.solver in ("greedy", "lp"))]
    starts = starts[: min(_TURNS, max(1, evaluator.budget // FEWEST))]
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
    yield all_offloaded(evaluator)
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


def all_offloaded(evaluator: Evaluator) -> Proposal:
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
