"""A run of few calls is made better call by call, where it is far above its bound.

    mixes    3 | 4 4 4      two variants a graph, in three layouts, ranked by a bound that lets parts of tensors stay
    climb    4 | 4 0 0      then another variant for one call, or for it and all calls of its graph on one side of it, and again

Two variants a graph at most: each is a compile.
"""

from __future__ import annotations

from collections.abc import Iterator

from graphoffload.facts.goals import FAR
from graphoffload.planner.step.mixes import ALL_MIXES
from graphoffload.planner.step.runs import QUICK, Run, Runs

_ROUNDS = 6
_TRIED = 60
"""Changes of one round that are made into runs, those with the lowest bounds."""
_MOST_VARIANTS = 2
_WORTH = 0.999


def climbed(runs: Runs, best: Run, lowest_bound: float) -> Run:
    """The best run, or a better one that differs in the variants of some calls."""
    if len(runs.problem.facts.calls) > ALL_MIXES:
        return best
    for _ in range(_ROUNDS):
        if runs.over() or runs.near(best, lowest_bound, 1.0 + FAR):
            break
        missed, value, _ = runs.score(best)
        bounds = {chosen: runs.bound(chosen) for chosen in _changes(runs, best.chosen)}
        may = sorted((bound, chosen) for chosen, bound in bounds.items() if missed > 0.0 or bound < _WORTH * value)
        found = min((runs.run(chosen, evaluations=QUICK) for _, chosen in may[:_TRIED]), key=runs.score, default=best)
        if runs.score(found) >= runs.score(best):
            break
        best = found
    return best


def _changes(runs: Runs, chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Other variants for one call, and for it and the calls of its graph that come before or after it."""
    facts = runs.problem.facts
    for at, call in enumerate(facts.calls):
        others = [other for other, fact in enumerate(facts.calls) if fact.graph == call.graph]
        for variant in range(len(facts.graphs[call.graph])):
            for changed in ({at}, {other for other in others if other <= at}, {other for other in others if other >= at}):
                new = tuple(variant if other in changed else old for other, old in enumerate(chosen))
                if new != chosen and len({new[other] for other in others}) <= _MOST_VARIANTS:
                    yield new
