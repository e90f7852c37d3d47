"""One way to meet a budget: a first trial, repairs where it is above, and trials at shown prices where it is dear.

    first ──above──▶ carried on ──▶ without recomputing what is in memory there ──▶ tighter budgets ──▶ no recomputation
      │
      └───met, but not as fast as chosen──▶ chosen again at the prices of the trial, and at those of the next (prices.py)

What is a way is said in ways.py; plan_search.py tries one after the other.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from graphoffload.analysis.program import Instance
from graphoffload.compiler import trial as trials
from graphoffload.compiler.carry_on import until_met
from graphoffload.compiler.decide import without_recomputation
from graphoffload.compiler.prices import DIFFERS, Prices, with_time_to_spare
from graphoffload.compiler.request import GraphAnalysis
from graphoffload.compiler.trial import Trial
from graphoffload.errors import BudgetError
from graphoffload.facts.goals import FAR, UNMEASURABLE, Goal

ATTEMPTS = 4
_REPAIRS = 3
_PRICED = 3


def over(analysis: GraphAnalysis) -> bool:
    """Whether the time for planning is over."""
    return analysis.patience is not None and analysis.patience.over()


def make(analysis: GraphAnalysis, instance: Instance, goal: Goal) -> Trial:
    """One trial. Messages about a long search name it."""
    if analysis.patience is not None:
        analysis.patience.doing = f"a trial for {goal}"
    return trials.make_trial(analysis, instance, goal)


def is_far(trial: Trial, *, proven: bool = False) -> bool:
    """Whether a trial may be much slower than it has to be; `proven`: whatever recomputation has shown to cost."""
    keep_s = trial.decided.keep_timeline.time_s
    known = (trial.decided.lower_bound_s, None if proven else trial.shown_bound_s)
    return trial.timeline.time_s - max((bound for bound in known if bound is not None), default=keep_s) > FAR * keep_s


def best_trial(analysis: GraphAnalysis, instance: Instance, *, first: Trial | None = None, priced: bool = True) -> Trial:
    """The best trial for the budget of `analysis`; a trial above it if none meets it.

    first: the first trial, where it has been made. priced: chosen again at shown prices.

    If recomputation needs more memory than planned, the trial is repeated without recomputing values that are in memory there.
    Next come budgets lower by the excess, then by a half and a quarter of it if none is met. The last trial is without
    recomputation.

    Raises:
        BudgetError: there is no trial at all.
    """
    goal = analysis.request.goal
    first = first or make(analysis, instance, goal)
    best = until_met(first, goal, analysis.notes, lambda: over(analysis))
    quick, barred = replace(analysis, thorough=False), frozenset[str]()
    trial, more = first, _recomputed_where_over(analysis, first)
    for _ in range(_REPAIRS):
        if best.excess <= 0 or not best.is_open or more <= barred or over(analysis):
            break
        barred |= more
        try:
            trial = make(replace(quick, wanted=without_recomputation(analysis.wanted, barred)), instance, goal)
        except BudgetError:
            break
        best = min(best, bounded(trial, first), key=lambda trial: trial.score)
        more = _recomputed_where_over(analysis, trial)
    less_bytes = int(first.excess) + 1
    for _ in range(ATTEMPTS - 1):
        if best.excess <= 0 or not best.is_open or over(analysis):
            break
        try:
            trial = make(quick, instance, goal.tightened(less_bytes))
        except BudgetError:
            less_bytes //= 2
            continue
        best = min(best, bounded(trial, first), key=lambda trial: trial.score)
        less_bytes += max(0, int(trial.excess)) + 1
    if best.is_open and best.excess > 0 and not over(analysis):
        best = bounded(or_without_recomputation(analysis, instance, best), first)
    return _at_shown_prices(analysis, instance, best) if priced else best


def _at_shown_prices(analysis: GraphAnalysis, instance: Instance, best: Trial) -> Trial:
    """`best`, or a trial chosen at the prices of recomputation that it and later trials have shown, if that is faster, both on
    the link as it is and on a slower one."""
    prices, trial = Prices(instance, analysis.chains), best
    for _ in range(_PRICED):
        if not best.decided.planned or best.excess > 0 or _is_as_chosen(best) or over(analysis):
            break
        if 1.0 / DIFFERS <= prices.learn(trial) <= DIFFERS:
            break
        try:
            trial = at_prices(analysis, instance, prices.applied(), analysis.request.goal)
        except BudgetError:
            break
        faster = trial.timeline.time_s < trials.on(best, trial.analysis.hardware).timeline.time_s
        shown_s, trial = trial.decided.lower_bound_s, trials.on(bounded(trial, best), analysis.hardware)
        if faster and trial.excess <= 0 and trial.timeline.time_s <= best.timeline.time_s:
            best = trial
        best = replace(best, shown_bound_s=shown_s)
    return best


def _is_as_chosen(trial: Trial) -> bool:
    """Whether a trial takes about what the fastest choice was estimated to take, at the prices that are known by then."""
    keep_s = trial.decided.keep_timeline.time_s
    known = (trial.shown_bound_s, trial.decided.lower_bound_s, keep_s)
    return abs(trial.timeline.time_s - next(bound for bound in known if bound is not None)) <= UNMEASURABLE * keep_s


def at_prices(analysis: GraphAnalysis, instance: Instance, priced: Instance, goal: Goal) -> Trial:
    """A trial chosen from `priced`, with time to spare, on the hardware that has it."""
    trial = make(with_time_to_spare(analysis), priced, goal)
    return trial if trial.instance is not priced else replace(trial, instance=instance)


def bounded(trial: Trial, first: Trial) -> Trial:
    """A trial for a tighter budget, with fewer choices, at other prices or without held outputs, with the bound of the original
    goal; with its own if that is lower and says anything."""
    own, bound, keep_s = trial.decided.lower_bound_s, first.decided.lower_bound_s, trial.decided.keep_timeline.time_s
    if own is not None and bound is not None and own > keep_s:
        bound = min(own, bound)
    return replace(trial, decided=replace(trial.decided, lower_bound_s=bound))


def _recomputed_where_over(analysis: GraphAnalysis, trial: Trial) -> frozenset[str]:
    """Names of the activations that a trial recomputes and that are in memory at a step of backward above the budget."""
    timeline = trial.timeline
    most = (analysis.request.goal.device_budget_bytes or 0) - analysis.request.limits.reserve_bytes
    above = [step for step in range(timeline.forward_steps, len(timeline.memory)) if timeline.memory[step] > most]
    alive = {b.name for b in trial.instance.program.buffers if any(b.first <= step <= b.last for step in above)}
    saved = {tensor.name for tensor in trial.analysis.table.tensors}
    gone = [tensor for tensor in trial.original.tensors if tensor.name not in saved]
    return frozenset(t.name for t in gone if not alive.isdisjoint((t.name, *t.views, *analysis.chains[t.name].nodes)))


def or_without_recomputation(analysis: GraphAnalysis, instance: Instance, best: Trial) -> Trial:
    """`best`, or a trial without recomputation that no user requested, if that is better."""
    with contextlib.suppress(BudgetError):
        kept = replace(analysis, wanted=without_recomputation(analysis.wanted))
        return min(best, make(kept, instance, analysis.request.goal), key=lambda trial: trial.score)
    return best
