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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from graphoffload.analysis.program import Instance
from graphoffload.compiler import trial as trials
from graphoffload.compiler.one_way import ATTEMPTS, at_prices, best_trial, bounded, is_far, make, or_without_recomputation, over
from graphoffload.compiler.prices import at_prices_of
from graphoffload.compiler.request import GraphAnalysis
from graphoffload.compiler.trial import Trial, against, instance_of, keep_all, seen_from
from graphoffload.compiler.ways import other_ways
from graphoffload.compiler.ways import unfused as unfused_way
from graphoffload.errors import BudgetError
from graphoffload.facts.goals import FAR, Goal, MeetBudget, WithinSlowdown
from graphoffload.patience import Patience
from graphoffload.planner.simulator import Timeline
from graphoffload.units import format_bytes

_SEARCHES = 2
_WORTH = 0.03
_UNUSED = 0.005  # of keep-all's time, unused by a plan for a slowdown: about what unfused operations cost
_NOTED_SLOWDOWN = 0.1  # from this slowdown on, a note names the tensors at the peak
_NO_HOPE = 1.25  # of a budget: no way is known whose least is lower by so much than another's
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
    analysis = replace(analysis, patience=patience, thorough=not analysis.request.session.has_resort)
    goal = analysis.request.goal
    trial = _smallest(analysis, goal) if isinstance(goal, WithinSlowdown) else _for_budget(analysis, in_blocks)
    if patience.ended:
        trial.analysis.notes.append(patience.note())
    return trial


def _at(analysis: GraphAnalysis, goal: Goal) -> GraphAnalysis:
    return replace(analysis, request=replace(analysis.request, goal=goal))


@dataclass(slots=True)
class _SearchResult:
    """Results of the ways to meet one budget: the best trial, those above the budget, and errors of ways without a trial."""

    best: Trial | None
    misses: list[Trial]
    errors: list[BudgetError]


def _for_budget(analysis: GraphAnalysis, in_blocks: Callable[[GraphAnalysis], GraphAnalysis | None] | None) -> Trial:
    found = _meets(analysis, (analysis, *other_ways(analysis)))
    far = found.best is None or is_far(found.best, proven=True)
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
    if found.best is not None and (own.time_s >= found.best.timeline.time_s - FAR * keep.time_s or over(analysis)):
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


def _meets(analysis: GraphAnalysis, ways: tuple[GraphAnalysis, ...], *, any_will_do: bool = False) -> _SearchResult:
    """The cheapest trial that meets the budget, of these ways and of tighter budgets, until one is near its bound; the first
    that meets it if `any_will_do`: then no trial is repaired before each way has made one."""
    found, start = _SearchResult(None, [], []), (ways[0], instance_of(ways[0]))
    keep, made, instances = keep_all(start[1], analysis), dict[int, Trial](), {id(ways[0]): start[1]}
    for way in ways if any_will_do else ():
        instance = instances[id(way)] = instances.get(id(way)) or instance_of(way)
        with contextlib.suppress(BudgetError):
            trial = made[id(way)] = make(replace(way, thorough=False), instance, way.request.goal)
            if trial.excess <= 0:
                return replace(found, best=trial if way.unfused_bytes is None else against(trial, analysis.request, keep))
    for way in ways:
        if found.best is not None and (any_will_do or not is_far(found.best) or over(analysis)):
            break
        instance = instances.get(id(way)) or instance_of(way)
        if way.outputs_stay and way is not ways[0] and instance.program == start[1].program:
            continue  # nothing is fused that this way does not fuse
        try:
            first = made.get(id(way))
            trial = best_trial(_without_naming(way, found.errors), instance, first=first, priced=not any_will_do)
        except BudgetError as error:
            found.errors.append(error)
            continue
        if not trial.decided.planned and (trial.excess <= 0 or not trial.is_open):
            return _SearchResult(trial, [], [])
        trial = trial if way.unfused_bytes is None else against(trial, analysis.request, keep)
        if trial.excess > 0:
            found.misses.append(trial)
        elif found.best is None:
            found.best, start = trial, (way, instance)
        elif trial.timeline.time_s < found.best.timeline.time_s - _condition_s(found.best, way):
            found.best, start = bounded(trial, found.best), (way, instance)
    if found.misses if found.best is None else is_far(found.best) and not any_will_do:
        for trial in _tighter(analysis, *start):
            trial = trial if start[0].unfused_bytes is None else against(trial, analysis.request, keep)
            if trial.excess > 0:
                found.misses.append(trial)
            elif found.best is None:
                found.best = trial
            elif trial.timeline.time_s < found.best.timeline.time_s:
                found.best = bounded(trial, found.best)
            if found.best is not None and (any_will_do or not is_far(found.best)):
                break
    return found


def _without_naming(way: GraphAnalysis, errors: Sequence[BudgetError]) -> GraphAnalysis:
    """`way`, for which nobody searches the least budget where another way's is known and far above this one: such a search
    takes most of the time of a refusal, and one of them is enough to name a budget."""
    most = _NO_HOPE * (way.request.goal.device_budget_bytes or 0)
    known = [error.least_bytes for error in errors if error.least_bytes is not None]
    return replace(way, thorough=False) if known and min(known) > most else way


def _condition_s(best: Trial, way: GraphAnalysis) -> float:
    """Seconds by which a plan must be faster to replace `best`: a margin, if it depends on the caller and `best` does not."""
    return 0.0 if way.outputs_stay or not best.analysis.outputs_stay else FAR * best.decided.keep_timeline.time_s


def _tighter(analysis: GraphAnalysis, way: GraphAnalysis, instance: Instance) -> Iterator[Trial]:
    """Trials for budgets below that of `analysis`, on a grid that is the same for all budgets."""
    budget = max(2, analysis.request.goal.device_budget_bytes or 0)
    step = math.ceil(math.log(budget, _RUNG)) - 1
    for rung in range(step, step - _RUNGS, -1):
        if over(analysis):
            return
        try:
            yield make(replace(way, thorough=False), instance, analysis.request.goal.tightened(budget - int(_RUNG**rung)))
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
    if analysis.request.session.has_resort:
        return _unnamed(budget, least)
    ways = (analysis, *(way for way in other_ways(analysis) if way.outputs_stay))
    for share in _ERROR_BUDGETS:
        asked = int(max(least, budget + 1) * (1.0 + share))
        goal = analysis.request.goal.tightened(budget - asked)
        met = _meets(_at(analysis, goal), tuple(_at(way, goal) for way in ways), any_will_do=True).best
        if met is not None:
            met = met if keep is None else against(met, met.analysis.request, keep)
            return _error(budget, asked, met, met.held())
        if over(analysis):
            break
    nearest = min(held, key=lambda trial: trial.excess, default=None)
    return found.errors[0] if nearest is None else _error(budget, budget + int(nearest.excess), nearest, nearest.held())


def _unnamed(budget: int, least: int) -> BudgetError:
    """The error where another way is tried next. Nobody has made a plan for `least`."""
    error = BudgetError(
        f"device_budget {format_bytes(budget)}: no plan was found that meets it; the least is about {format_bytes(least)}."
    )
    error.least_bytes = least
    return error


def _error(budget: int, least: int, trial: Trial, held: str) -> BudgetError:
    slowdown = trial.timeline.time_s / trial.decided.keep_timeline.time_s - 1.0
    error = BudgetError(
        f"device_budget {format_bytes(budget)}: no plan was found that meets it. The least feasible one found is "
        f"{format_bytes(least)} ({least} bytes) at {slowdown:+.1%} time; its peak is {held}. Raise device_budget to that, or "
        "make the batch or sequence smaller."
    )
    error.least_bytes = least
    return error


def _within(analysis: GraphAnalysis, instance: Instance, goal: WithinSlowdown) -> Trial:
    """The best trial for a slowdown. After one that is too slow, the next is at the prices that it has shown, if they are not
    those that were estimated; then one for a smaller slowdown."""
    first = best = trial = make(analysis, instance, goal)
    priced: Instance | None = None
    for _ in range(ATTEMPTS - 1):
        if trial.excess <= 0 or not trial.decided.planned or over(analysis):
            break
        known, priced = priced, priced or at_prices_of(first, instance, analysis.chains)
        if known is priced:
            goal = goal.tightened(1.1 * trial.excess / trial.decided.keep_timeline.time_s)
        if priced is None:
            trial = make(analysis, instance, goal)
        else:
            trial = trials.on(at_prices(analysis, instance, priced, goal), analysis.hardware)
            bound = first.decided.lower_bound_peak_bytes  # of all plans
            trial = replace(trial, decided=replace(trial.decided, lower_bound_peak_bytes=bound))
        best = min(best, trial, key=lambda trial: trial.score)
    return best


def _smallest(analysis: GraphAnalysis, goal: WithinSlowdown) -> Trial:
    """The best trial for a slowdown: with fused operations or, if these leave time unused, with unfused operations."""
    instance = instance_of(analysis)
    fused = _within(analysis, instance, goal)
    if not fused.decided.planned or over(analysis):
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


def _smaller(analysis: GraphAnalysis, instance: Instance, best: Trial, goal: WithinSlowdown) -> Trial:
    """The best of `best`, trials for half the slowdown, and trials for budgets below `best`'s peak.

    `best` has the least estimated peak. After torch has partitioned again, another choice may have the least peak.
    """
    bound = best.decided.lower_bound_peak_bytes or 0
    if best.timeline.peak_bytes - bound > _WORTH * best.timeline.peak_bytes:
        best = min(best, make(analysis, instance, goal.tightened(goal.max_slowdown / 2)), key=lambda trial: trial.score)
        best = or_without_recomputation(analysis, instance, best)
    low, peak = bound, best.timeline.peak_bytes
    for _ in range(_SEARCHES):
        if peak - low <= _WORTH * peak or over(analysis):
            break
        low = (low + peak) // 2
        with contextlib.suppress(BudgetError):
            trial = make(analysis, instance, MeetBudget(low + analysis.request.limits.reserve_bytes))
            if trial.score < best.score:
                decided = replace(trial.decided, lower_bound_s=None, lower_bound_peak_bytes=bound)
                low = bound if trial.score[:2] < best.score[:2] else low
                best, peak = replace(trial, decided=decided), trial.timeline.peak_bytes
    return best
