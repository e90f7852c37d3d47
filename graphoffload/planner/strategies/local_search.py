"""Local search: change one, exchange two, move a share of a folded group, replace what compute waits for, choose the window.

The first improvement wins. For few candidates every single change is tried until none helps: the result is a local optimum, and
two changes that pay only together are missed. For many candidates moves are per group of repeated layers (the earliest or the
latest members, one or a share), and the search ends with the evaluator's evaluations. The layers of a group have equal sizes
and costs, so which of them moves matters only through time, and the ends are the extremes of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from graphoffload.facts.plan import Action
from graphoffload.planner.goals import Evaluator, MeetBudget, Proposal
from graphoffload.planner.problem import Program
from graphoffload.planner.strategies.greedy import greedy_moves

_STALLED = 4
_ONE = 1_000_000
_SHARES = (4, 16, _ONE)
_WINDOWS = (0.75, 0.5, 0.33, 0.2, 0.1, 0.05, 0.0)
Move = tuple[tuple[int, Action], ...]


def groups_of(program: Program) -> dict[str, list[int]]:
    """Candidates with a choice by group, in order of production; one without a group is its own."""
    groups: dict[str, list[int]] = {}
    for index in sorted(range(len(program.candidates)), key=lambda k: (program.candidates[k].produced_at, k)):
        candidate = program.candidates[index]
        if len(candidate.actions) > 1:
            groups.setdefault(f"group {candidate.group}" if candidate.group else f"one {index}", []).append(index)
    return groups


def _single(program: Program, actions: Sequence[Action], wanted: Sequence[int]) -> list[Move]:
    return [((k, action),) for k in wanted for action in program.candidates[k].actions if action != actions[k]]


def _small_moves(program: Program, actions: Sequence[Action]) -> Iterator[Move]:
    movable = [k for k, candidate in enumerate(program.candidates) if len(candidate.actions) > 1]
    yield from _single(program, actions, movable)


def _folded_moves(program: Program, groups: dict[str, list[int]], actions: Sequence[Action]) -> Iterator[Move]:
    """Shares of groups, largest first: a move of many that helps is worth many of one."""
    for share in _SHARES:
        for members in groups.values():
            for old, new in (
                ("recompute", "keep"),
                ("recompute", "offload"),
                ("offload", "keep"),
                ("offload", "recompute"),
                ("keep", "offload"),
            ):
                fit = [k for k in members if actions[k] == old and new in program.candidates[k].actions]
                count = max(1, len(fit) // share)
                if not fit or (share != _ONE and count == 1):
                    continue
                for chosen in (fit[-count:], fit[:count])[: 1 if count == len(fit) else 2]:
                    yield tuple((k, new) for k in chosen)  # type: ignore[misc]


def _exchanges(program: Program, groups: dict[str, list[int]], actions: Sequence[Action]) -> Iterator[Move]:
    """One member of a group takes a cheaper action, one of another group pays for it."""
    singles = [move for move in _folded_moves(program, groups, actions) if len(move) == 1]
    for one in singles:
        for two in singles:
            if (
                one is not two
                and one[0][0] != two[0][0]
                and actions[one[0][0]] != "keep"
                and one[0][1] == "keep"
                and two[0][1] != "keep"
            ):
                yield one + two


def without_stalled(evaluator: Evaluator, best: Proposal) -> Iterator[Move]:
    """A tensor that compute waits for is kept, and greedy finds others for it, such as several small ones for a large one."""
    waits: dict[int, float] = {}
    for index, _, seconds in evaluator.evaluate(best.actions, best.window_bytes)[0].stalls:
        waits[index] = waits.get(index, 0.0) + seconds
    for index in sorted(waits, key=lambda k: -waits[k])[:_STALLED]:
        if "keep" not in evaluator.arrays.program.candidates[index].actions:
            continue
        start: list[Action] = list(best.actions)
        start[index] = "keep"
        found = greedy_moves(evaluator, start, evaluator.limit_bytes, barred=frozenset({index}))
        yield tuple((k, action) for k, (action, old) in enumerate(zip(found, best.actions, strict=True)) if action != old)


def improve(evaluator: Evaluator, start: Proposal, *, small: bool) -> Proposal:
    """The best proposal that moves reach from `start` before the evaluator's evaluations run out."""
    program = evaluator.arrays.program
    groups = groups_of(program)
    kinds: list[Callable[[Proposal], Iterator[Move]]] = [lambda p: _small_moves(program, p.actions)]
    if not small:
        kinds = [
            lambda p: _folded_moves(program, groups, p.actions),
            lambda p: _exchanges(program, groups, p.actions),
        ]
        if isinstance(evaluator.goal, MeetBudget):
            kinds.insert(0, lambda p: without_stalled(evaluator, p))
    best = windows(evaluator, start)
    improved = True
    while improved and not evaluator.exhausted:
        improved = False
        for kind in kinds:
            for move in kind(best):
                if evaluator.exhausted:
                    break
                actions = list(best.actions)
                for index, action in move:
                    actions[index] = action
                found = evaluator.propose(actions, start.solver + "+local", best.window_bytes)
                if found.score < best.score:
                    best, improved = found, True
                    break
            if improved:
                break
        if improved and best.window_bytes is None and not best.feasible:
            best = windows(evaluator, best)
    return windows(evaluator, best)


def windows(evaluator: Evaluator, start: Proposal) -> Proposal:
    """The same actions with a bounded window of outstanding copies, where waiting early for memory is what meets the limits."""
    if evaluator.window_bytes is not None or "offload" not in start.actions:
        return start
    peak = evaluator.evaluate(start.actions)[0].inflight_peak_bytes
    choices: list[int | None] = [None, *(int(peak * share) for share in _WINDOWS)]
    options = (evaluator.propose(start.actions, start.solver, window) for window in choices)
    return min(options, key=lambda p: p.score)
