"""A plan for a little less memory, where it is better than the one that was found for all of it.

The search of a step with many calls (solve.py) looks at a few of its mixes of variants, by their bounds. Where what it finds is
far from the bound, a tighter budget leads to other mixes: a ConvNeXt of 36 calls was planned at 3.4 % above its bound, and with
5 % less memory at 1.2 % above the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from graphoffload.planner.step.mixes import ALL_MIXES
from graphoffload.planner.step.runs import Run, Runs

_LESS = 0.05  # of what activations may take
_FAR = 1.01  # times its bound: what is nearer stays


def better_with_less(
    runs: Runs, best: Run, bound: Callable[[], float | None], search: Callable[[Runs], Run | None]
) -> Run:
    """The better one of a run within the budget and of one that is searched for within less.

    Args:
        bound: of the best run's value, which takes an LP to find; None: nothing is known. search: what found the best run.
    """
    limit_bytes, facts = runs.limit_bytes, runs.problem.facts
    if limit_bytes is None or len(facts.calls) <= ALL_MIXES or runs.score(best)[0] > 0.0 or runs.over():
        return best
    least = bound()
    if least is None or runs.near(best, least, _FAR):
        return best
    saved_bytes = max(0, limit_bytes - facts.base_bytes)
    less = replace(runs.problem, reserve_bytes=runs.problem.reserve_bytes + int(_LESS * saved_bytes))
    other = search(Runs(less, runs.known))
    return best if other is None else min((best, other), key=runs.score)
