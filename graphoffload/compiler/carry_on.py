"""A trial above its budget is carried on from the graph that it partitioned, until that graph meets the budget.

    choose ──▶ partition ──▶ above the budget ──▶ choose more to compute again, by this graph's memory ──▶ partition ──▶ ...
    on keep-all's memory     by what estimates missed            what was chosen before stays

The first choice sees keep-all's memory and estimates of what recomputation holds. The compiler fuses recomputed operations
with others, so the graph that comes of it may hold more. That graph is the start here: what estimates missed is left to choose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from graphoffload.analysis.chains import Chain, chains_of, with_chains
from graphoffload.compiler.request import GraphAnalysis
from graphoffload.compiler.trial import Trial, excess_of, instance_of, make_trial
from graphoffload.errors import BudgetError
from graphoffload.facts.goals import Goal
from graphoffload.facts.refusals import Refusal, refusal_of

_ROUNDS = 4


def until_met(trial: Trial, goal: Goal, notes: Sequence[str], over: Callable[[], bool]) -> Trial:
    """The best of `trial` and those that it is carried on to; as it is if it meets `goal`, or leaves nothing to decide.

    Args:
        notes: what was noted before `trial`. over: whether the time for planning is.
    """
    best = trial
    for _ in range(_ROUNDS):
        if best.excess <= 0 or not trial.is_open or over():
            break
        try:
            found = carried_on(trial, goal, notes)
        except BudgetError:
            break
        if found is None:
            break
        trial = found
        best = min(best, trial, key=lambda trial: trial.score)
    return best


def carried_on(trial: Trial, goal: Goal, notes: Sequence[str]) -> Trial | None:
    """A trial that computes again what `trial` does, and more, or offloads; None if that changes nothing.

    Raises:
        BudgetError: no choice on top of `trial`'s meets the budget of `goal`.
    """
    analysis = replace(_from_here(trial.analysis), notes=[*notes])
    found = make_trial(analysis, instance_of(analysis), goal)
    if found.analysis.again <= trial.analysis.again and found.actions == trial.actions:
        return None
    keep, first = trial.decided.keep_timeline, trial.decided
    decided = replace(found.decided, keep_timeline=keep, lower_bound_s=first.lower_bound_s, warnings=first.warnings)
    reasons = {**trial.reasons, **found.reasons}
    excess = excess_of(analysis.request, decided, found.timeline)
    return replace(found, original=trial.original, reasons=reasons, decided=decided, excess=excess)


def _from_here(analysis: GraphAnalysis) -> GraphAnalysis:
    """The analysis of the graph as a trial partitioned it, with what can be recomputed of what it saves."""
    request, binding = analysis.request, analysis.binding
    assert binding.callers is not None
    chains = chains_of(analysis.pair, analysis.table, binding.callers, binding.user_recomputed, binding.decisions)
    for tensor in analysis.table.tensors:
        if refusal_of(tensor.why_not_recompute) is Refusal.SAVED_ALL_THE_SAME:
            chains[tensor.name] = Chain((), (), tensor.why_not_recompute)
    table = with_chains(analysis.table, chains)
    wanted = request.constraints(table, analysis.resolution)
    return replace(analysis, table=table, chains=chains, wanted=wanted, thorough=False)
