"""Makes trials of a plan and chooses one.

    a budget     fused ──far from the bound, or above──▶ unfused ──▶ outputs not held ──▶ both ──▶ tighter budgets
                   │ near the bound, if need be at the prices that a trial has shown (prices.py)       │
                   └──────────────────────────▶ the cheapest that meets it ◀──────────────────────────┘
    a slowdown   fused, unfused if time is left, half the slowdown, budgets below the peak: the smallest

Recomputation may hold more memory than estimated, since the compiler fuses recomputed values with other operations. A trial
that misses its budget for this reason is repeated without recomputing values that are in memory where it is above the budget.

A plan near its bound is about as good as any plan for a tighter budget, since the tighter budget's bound is no lower. For any
other plan, trials for tighter budgets are made as well, as each of them also meets this budget. Tighter budgets are on one
grid, which neighboring budgets share.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from graphoffload.analysis.program import Instance
from graphoffload.compiler import trial as trials
from graphoffload.compiler.carry_on import until_met
from graphoffload.compiler.decide import without_recomputation
from graphoffload.compiler.prices import at_prices_of, with_time_to_spare
from graphoffload.compiler.request import GraphAnalysis
from graphoffload.compiler.trial import Trial, against, instance_of, keep_all, seen_from
from graphoffload.compiler.ways import other_ways
from graphoffload.compiler.ways import unfused as unfused_way
from graphoffload.errors import BudgetError
from graphoffload.facts.goals import FAR, Goal, MeetBudget, WithinSlowdown
from graphoffload.patience import Patience
from graphoffload.planner.simulator import Timeline
from graphoffload.units import format_bytes

_ATTEMPTS = 4
_REPAIRS = 3
_SEARCHES = 2
_WORTH = 0.03
_UNUSED = 0.005  # of keep-all's time, unused by a plan for a slowdown: about what unfused operations cost
_NOTED_SLOWDOWN = 0.1  # from this slowdown on, a note names the tensors at the peak
_RUNG = 1.02
_RUNGS = 4
_ERROR_BUDGETS = (0.0, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16)  # an error names the first that is met, above the least found


def feasible_trial(analysis: GraphAnalysis, in_blocks: Callable[[GraphAnalysis], GraphAnalysis | None] | None = None) -> Trial:
    """The cheapest trial for a budget, the smallest for a slowdown.

    Args:
        in_blocks: makes the analysis of the same graph with its blocks computed again whole; None where it has none.

    Raises:
        BudgetError: no trial meets the budget in any way. It names the least budget that is met whatever the caller does, and
            the slowdown at that budget.
    """
    patience = Patience(analysis.request.session.name)
    analysis = replace(analysis, patience=patience)
    goal = analysis.request.goal
    trial = _smallest(analysis, goal) if isinstance(goal, WithinSlowdown) else _for_budget(analysis, in_blocks)
    if patience.ended:
        trial.analysis.notes.append(patience.note())
    return trial


def _at(analysis: GraphAnalysis, goal: Goal) -> GraphAnalysis:
    return replace(analysis, request=replace(analysis.request, goal=goal))


def _over(analysis: GraphAnalysis) -> bool:
    """Whether the time for planning is over."""
    return analysis.patience is not None and analysis.patience.over()


def _make(analysis: GraphAnalysis, instance: Instance, goal: Goal) -> Trial:
    """One trial. Messages about a long search name it."""
    if analysis.patience is not None:
        analysis.patience.doing = f"a trial for {goal}"
    return trials.make_trial(analysis, instance, goal)


@dataclass(slots=True)
class _SearchResult:
    """Results of the ways to meet one budget: the best trial, those above the budget, and errors of ways without a trial."""

    best: Trial | None
    misses: list[Trial]
    errors: list[BudgetError]


def _for_budget(analysis: GraphAnalysis, in_blocks: Callable[[GraphAnalysis], GraphAnalysis | None] | None) -> Trial:
    found = _meets(analysis, (analysis, *other_ways(analysis)))
    far = found.best is None or _is_far(found.best, proven=True)
    if in_blocks is not None and far and (blocks := in_blocks(analysis)) is not None:
        found = _or_in_blocks(analysis, found, blocks)
    if found.best is None:
        raise _refusal(analysis, found)
    trial, keep_s = found.best, found.best.decided.keep_timeline.time_s
    slowdown = trial.timeline.time_s / keep_s - 1.0 if keep_s else 0.0
    if trial.decided.planned and slowdown >= _NOTED_SLOWDOWN:
        trial.analysis.notes.append(f"{slowdown:+.0%} time is the price of the memory {trial.held()}")
    return trial


def _or_in_blocks(analysis: GraphAnalysis, found: _SearchResult, blocks: GraphAnalysis) -> _SearchResult:
    """`found`, or with blocks computed again whole if that is faster, or the only way that meets the budget.

    Raises:
        BudgetError: the budget is met in no way. It names the lower of the least budgets.
    """
    keep, own = keep_all(instance_of(analysis), analysis), keep_all(instance_of(blocks), blocks)
    if found.best is not None and (own.time_s >= found.best.timeline.time_s - FAR * keep.time_s or _over(analysis)):
        return found
    other = _meets(blocks, (blocks, *other_ways(blocks)))
    if other.best is not None and other.best.excess > 0:
        other = _SearchResult(None, [other.best], other.errors)
    if other.best is None and found.best is None:
        known = [_least_known(analysis, result) for result in (found, other)]
        if None not in known[1:] and (known[0] is None or known[1] < known[0]):  # type: ignore[operator]
            raise _refusal(blocks, other, keep)
        return found
    if other.best is None:
        return found
    trial = against(other.best, other.best.analysis.request, keep)
    if (first := found.best) and first.timeline.time_s - _condition_s(first, trial.analysis) <= trial.timeline.time_s:
        return found
    bound_s = None if found.best is None else found.best.decided.lower_bound_s  # of plans that choose among all activations
    best = seen_from(analysis, replace(trial, decided=replace(trial.decided, lower_bound_s=bound_s)))
    return replace(found, best=best)


def _meets(analysis: GraphAnalysis, ways: tuple[GraphAnalysis, ...]) -> _SearchResult:
    """The cheapest trial that meets the budget, of these ways and of tighter budgets, until one is near its bound."""
    found, start = _SearchResult(None, [], []), (ways[0], instance_of(ways[0]))
    keep = keep_all(start[1], analysis)
    for way in ways:
        if found.best is not None and (not _is_far(found.best) or _over(analysis)):
            break
        instance = start[1] if way is ways[0] else instance_of(way)
        if way.outputs_stay and way is not ways[0] and instance.program == start[1].program:
            continue  # nothing is fused that this way does not fuse
        try:
            trial = _best_trial(way, instance)
        except BudgetError as error:
            found.errors.append(error)
            continue
        if not trial.decided.planned and (trial.excess <= 0 or not trial.is_open):
            return _SearchResult(trial, [], [])
        trial = trial if way.unfused_bytes is None else against(trial, analysis.request, keep)
        if trial.excess > 0:
            found.misses.append(trial)
        elif found.best is None or trial.timeline.time_s < found.best.timeline.time_s - _condition_s(found.best, way):
            found.best, start = trial, (way, instance)
    if found.best is None or _is_far(found.best):
        for trial in _tighter(analysis, *start):
            trial = trial if start[0].unfused_bytes is None else against(trial, analysis.request, keep)
            if trial.excess > 0:
                found.misses.append(trial)
            elif found.best is None:
                found.best = trial
            elif trial.timeline.time_s < found.best.timeline.time_s:
                found.best = _bounded(trial, found.best)
            if found.best is not None and not _is_far(found.best):
                break
    return found


def _condition_s(best: Trial, way: GraphAnalysis) -> float:
    """Seconds by which a plan must be faster to replace `best`: a margin, if it depends on the caller and `best` does not."""
    return 0.0 if way.outputs_stay or not best.analysis.outputs_stay else FAR * best.decided.keep_timeline.time_s


def _is_far(trial: Trial, *, proven: bool = False) -> bool:
    """Whether a trial may be much slower than it has to be; `proven`: whatever recomputation has shown to cost."""
    keep_s = trial.decided.keep_timeline.time_s
    known = (trial.decided.lower_bound_s, None if proven else trial.shown_bound_s)
    return trial.timeline.time_s - max((bound for bound in known if bound is not None), default=keep_s) > FAR * keep_s


def _tighter(analysis: GraphAnalysis, way: GraphAnalysis, instance: Instance) -> Iterator[Trial]:
    """Trials for budgets below that of `analysis`, on a grid that is the same for all budgets."""
    budget = max(2, analysis.request.goal.device_budget_bytes or 0)
    step = math.ceil(math.log(budget, _RUNG)) - 1
    for rung in range(step, step - _RUNGS, -1):
        if _over(analysis):
            return
        try:
            yield _make(replace(way, thorough=False), instance, analysis.request.goal.tightened(budget - int(_RUNG**rung)))
        except BudgetError:
            return


def _least_known(analysis: GraphAnalysis, found: _SearchResult) -> int | None:
    """The least budget that trials or errors of a search name; None if there is none."""
    held = [trial for trial in found.misses if trial.analysis.outputs_stay] or found.misses
    known = [(analysis.request.goal.device_budget_bytes or 0) + int(trial.excess) for trial in held]
    return min([*known, *(error.least_bytes for error in found.errors if error.least_bytes is not None)], default=None)


def _refusal(analysis: GraphAnalysis, found: _SearchResult, keep: Timeline | None = None) -> BudgetError:
    """The error for a budget that no trial meets. It names the least budget for which a plan was then made.

    keep: keep-all that the error's slowdown is relative to; None: that of the trial.
    """
    budget = analysis.request.goal.device_budget_bytes or 0
    held = [trial for trial in found.misses if trial.analysis.outputs_stay] or found.misses
    least = _least_known(analysis, found)
    if least is None:
        return found.errors[0]
    ways = (analysis, *(way for way in other_ways(analysis) if way.outputs_stay))
    for share in _ERROR_BUDGETS:
        asked = int(max(least, budget + 1) * (1.0 + share))
        goal = analysis.request.goal.tightened(budget - asked)
        met = _meets(_at(analysis, goal), tuple(_at(way, goal) for way in ways)).best
        if met is not None:
            met = met if keep is None else against(met, met.analysis.request, keep)
            return _error(budget, asked, met, met.held())
        if _over(analysis):
            break
    nearest = min(held, key=lambda trial: trial.excess, default=None)
    return found.errors[0] if nearest is None else _error(budget, budget + int(nearest.excess), nearest, nearest.held())


def _error(budget: int, least: int, trial: Trial, held: str) -> BudgetError:
    slowdown = trial.timeline.time_s / trial.decided.keep_timeline.time_s - 1.0
    error = BudgetError(
        f"device_budget {format_bytes(budget)}: no plan was found that meets it. The least feasible one found is "
        f"{format_bytes(least)} ({least} bytes) at {slowdown:+.1%} time; its peak is {held}. Raise device_budget to that, or "
        "make the batch or sequence smaller."
    )
    error.least_bytes = least
    return error


def _best_trial(analysis: GraphAnalysis, instance: Instance) -> Trial:
    """The best trial for the budget of `analysis`; a trial above it if none meets it.

    If recomputation needs more memory than planned, the trial is repeated without recomputing values that are in memory there.
    Next come budgets lower by the excess, then by a half and a quarter of it if none is met. The last trial is without
    recomputation.

    Raises:
        BudgetError: there is no trial at all.
    """
    goal = analysis.request.goal
    first = _make(analysis, instance, goal)
    best = until_met(first, goal, analysis.notes, lambda: _over(analysis))
    quick, barred = replace(analysis, thorough=False), frozenset[str]()
    trial, more = first, _recomputed_where_over(analysis, first)
    for _ in range(_REPAIRS):
        if best.excess <= 0 or not best.is_open or more <= barred or _over(analysis):
            break
        barred |= more
        try:
            trial = _make(replace(quick, wanted=without_recomputation(analysis.wanted, barred)), instance, goal)
        except BudgetError:
            break
        best = min(best, _bounded(trial, first), key=lambda trial: trial.score)
        more = _recomputed_where_over(analysis, trial)
    less_bytes = int(first.excess) + 1
    for _ in range(_ATTEMPTS - 1):
        if best.excess <= 0 or not best.is_open or _over(analysis):
            break
        try:
            trial = _make(quick, instance, goal.tightened(less_bytes))
        except BudgetError:
            less_bytes //= 2
            continue
        best = min(best, _bounded(trial, first), key=lambda trial: trial.score)
        less_bytes += max(0, int(trial.excess)) + 1
    if best.is_open and best.excess > 0 and not _over(analysis):
        best = _bounded(_or_without_recomputation(analysis, instance, best), first)
    return _at_shown_prices(analysis, instance, best) if best is first else best


def _at_shown_prices(analysis: GraphAnalysis, instance: Instance, best: Trial) -> Trial:
    """`best`, or a trial chosen at the prices of recomputation that `best` has shown, if that is faster."""
    done = not best.decided.planned or best.excess > 0 or not _is_far(best) or _over(analysis)
    if done or (priced := at_prices_of(best, instance)) is None:
        return best
    with contextlib.suppress(BudgetError):
        trial = _at_prices(analysis, instance, priced, analysis.request.goal)
        faster = trial.timeline.time_s < trials.on(best, trial.analysis.hardware).timeline.time_s
        shown_s, trial = trial.decided.lower_bound_s, trials.on(_bounded(trial, best), analysis.hardware)
        best = replace(trial if faster and trial.excess <= 0 else best, shown_bound_s=shown_s)
    return best


def _at_prices(analysis: GraphAnalysis, instance: Instance, priced: Instance, goal: Goal) -> Trial:
    """A trial chosen from `priced`, with time to spare, on the hardware that has it."""
    trial = _make(with_time_to_spare(analysis), priced, goal)
    return trial if trial.instance is not priced else replace(trial, instance=instance)


def _bounded(trial: Trial, first: Trial) -> Trial:
    """A trial for a tighter budget or with fewer choices, with the bound of the original goal, which is lower."""
    return replace(trial, decided=replace(trial.decided, lower_bound_s=first.decided.lower_bound_s))


def _recomputed_where_over(analysis: GraphAnalysis, trial: Trial) -> frozenset[str]:
    """Names of the activations that a trial recomputes and that are in memory at a step of backward above the budget."""
    timeline = trial.timeline
    most = (analysis.request.goal.device_budget_bytes or 0) - analysis.request.limits.reserve_bytes
    over = [step for step in range(timeline.forward_steps, len(timeline.memory)) if timeline.memory[step] > most]
    alive = {b.name for b in trial.instance.program.buffers if any(b.first <= step <= b.last for step in over)}
    saved = {tensor.name for tensor in trial.analysis.table.tensors}
    gone = [tensor for tensor in trial.original.tensors if tensor.name not in saved]
    return frozenset(t.name for t in gone if not alive.isdisjoint((t.name, *t.views, *analysis.chains[t.name].nodes)))


def _within(analysis: GraphAnalysis, instance: Instance, goal: WithinSlowdown) -> Trial:
    """The best trial for a slowdown. After one that is too slow, the next is at the prices that it has shown, if they are not
    those that were estimated; then one for a smaller slowdown."""
    first = best = trial = _make(analysis, instance, goal)
    priced: Instance | None = None
    for _ in range(_ATTEMPTS - 1):
        if trial.excess <= 0 or not trial.decided.planned or _over(analysis):
            break
        known, priced = priced, priced or at_prices_of(first, instance)
        if known is priced:
            goal = goal.tightened(1.1 * trial.excess / trial.decided.keep_timeline.time_s)
        if priced is None:
            trial = _make(analysis, instance, goal)
        else:
            trial = trials.on(_at_prices(analysis, instance, priced, goal), analysis.hardware)
            bound = first.decided.lower_bound_peak_bytes  # of all plans
            trial = replace(trial, decided=replace(trial.decided, lower_bound_peak_bytes=bound))
        best = min(best, trial, key=lambda trial: trial.score)
    return best


def _smallest(analysis: GraphAnalysis, goal: WithinSlowdown) -> Trial:
    """The best trial for a slowdown: with fused operations or, if these leave time unused, with unfused operations."""
    instance = instance_of(analysis)
    fused = _within(analysis, instance, goal)
    if not fused.decided.planned or _over(analysis):
        return fused
    unfused = _smallest_unfused(analysis, instance, fused, goal)
    return _smaller(analysis, instance, fused, goal) if unfused is None else min(fused, unfused, key=lambda trial: trial.score)


def _smallest_unfused(analysis: GraphAnalysis, instance: Instance, fused: Trial, goal: WithinSlowdown) -> Trial | None:
    """The smallest trial with unfused operations; None if these take too long, change nothing, or cannot free memory.

    Until `against` compares it with the fused keep-all, the trial's slowdown is relative to the unfused one, which is slower.
    """
    keep = fused.decided.keep_timeline
    if not analysis.fuses or -fused.excess < _UNUSED * keep.time_s:
        return None
    unfused = unfused_way(analysis, "which leaves less in memory at once")
    unfused_instance = instance_of(unfused)
    if unfused_instance.program == instance.program:
        return None
    allowed = goal.allowed(keep.time_s, keep_all(unfused_instance, unfused).time_s)
    if allowed <= 0.0:
        return None
    own = WithinSlowdown(allowed)
    unfused = _at(unfused, own)
    trial = _within(unfused, unfused_instance, own)
    bounds = [made.decided.lower_bound_peak_bytes or 0 for made in (trial, fused)]
    if bounds[0] >= bounds[1] and trial.timeline.peak_bytes >= fused.timeline.peak_bytes:
        return None
    return against(_smaller(unfused, unfused_instance, trial, own), analysis.request, keep)


def _or_without_recomputation(analysis: GraphAnalysis, instance: Instance, best: Trial) -> Trial:
    """`best`, or a trial without recomputation that no user requested, if that is better."""
    with contextlib.suppress(BudgetError):
        kept = replace(analysis, wanted=without_recomputation(analysis.wanted))
        return min(best, _make(kept, instance, analysis.request.goal), key=lambda trial: trial.score)
    return best


def _smaller(analysis: GraphAnalysis, instance: Instance, best: Trial, goal: WithinSlowdown) -> Trial:
    """The best of `best`, trials for half the slowdown, and trials for budgets below `best`'s peak.

    `best` has the least estimated peak. After torch has partitioned again, another choice may have the least peak.
    """
    bound = best.decided.lower_bound_peak_bytes or 0
    if best.timeline.peak_bytes - bound > _WORTH * best.timeline.peak_bytes:
        best = min(best, _make(analysis, instance, goal.tightened(goal.max_slowdown / 2)), key=lambda trial: trial.score)
        best = _or_without_recomputation(analysis, instance, best)
    low, peak = bound, best.timeline.peak_bytes
    for _ in range(_SEARCHES):
        if peak - low <= _WORTH * peak or _over(analysis):
            break
        low = (low + peak) // 2
        with contextlib.suppress(BudgetError):
            trial = _make(analysis, instance, MeetBudget(low + analysis.request.limits.reserve_bytes))
            if trial.score < best.score:
                decided = replace(trial.decided, lower_bound_s=None, lower_bound_peak_bytes=bound)
                low = bound if trial.score[:2] < best.score[:2] else low
                best, peak = replace(trial, decided=decided), trial.timeline.peak_bytes
    return best
