"""Plans that wait for a few copies back, where plans whose copies are in time wait all along the step, or copy nothing.

    backward    | call 3 | call 2: memory above the budget | call 1 |
    H2D                     [== for call 1 ==]                          in time, and the peak of call 2 is above the budget
                                                   [== for call 1 ==]   late: compute waits for one copy

Mixes are compared by their bounds, and a bound lets a part of a tensor stay. The more a step copies, the less its bound says.
So where the best run is far above it, mixes are tried that it ranks lower as well: one variant for all calls, of each.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphoffload.facts.goals import FAR
from graphoffload.planner.step.mixes import Mixes, MixSearch, choose, uniform
from graphoffload.planner.step.runs import QUICK, Run, Runs

_LOWEST = 4
"""Mixes with the lowest bounds that are tried."""
_ABOVE = 0.05
"""Of the budget: a run that is further above it needs more than late copies."""


def with_late_copies(runs: Runs, best: Run, search: MixSearch, order: Sequence[Mixes]) -> Run:
    """The best run, or a better one, where that is far above its bound, or above the budget by little.

    Args:
        order: mixes, the one with the lowest bound first.
    """
    facts, lowest_bound = runs.problem.facts, search.value(order[0])
    if runs.limit_bytes is None or runs.score(best)[0] > _ABOVE * runs.limit_bytes:
        return best
    lowest = list(dict.fromkeys(choose(facts, mixes) for mixes in order))[:_LOWEST]
    for chosen in dict.fromkeys((*lowest, *(choose(facts, mixes) for mixes in uniform(facts)))):
        if runs.over() or runs.near(best, lowest_bound, 1.0 + FAR):
            break
        if not runs.near(best, runs.bound(chosen), 1.0):
            best = min((best, runs.held_back(chosen, evaluations=QUICK)), key=runs.score)
    return best
