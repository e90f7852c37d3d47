"""plan_step(): the variant of each call, what each call copies, and when, for a goal of the whole step.

    everything fits? ── yes ──▶ variant 0 for all calls, nothing offloaded
        │ no
    mixes of variants, by the LP bound of their joint program          mixes.py
        │ the best few
    keep or offload with solve() ──▶ slack ──▶ events ──▶ replay       a run: what will really happen
        │ the best run                    └── above the budget: again, for one lower by the excess
        │ counts a little higher and lower
    solve() once more with more simulations ──▶ StepSolution
        └─ nothing meets the budget ──▶ other variants for the calls with the peak
                  └─ nor do these ──▶ the run with the least peak, if that does ──▶ or BudgetError

A slowdown is relative to variant 0 with everything kept. Time, peak and memory of a solution are those of the schedule that the
runtime gets, so all that is lost to events and to ops that calls share is in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from graphoffload.errors import BudgetError, PlanError
from graphoffload.facts.goals import FAR, WithinSlowdown
from graphoffload.facts.plan import Action, Prediction
from graphoffload.planner.predicted import prediction_of
from graphoffload.planner.simulator import Timeline
from graphoffload.planner.solver import host_infeasible
from graphoffload.planner.step.climb import climbed
from graphoffload.planner.step.errors import step_infeasible
from graphoffload.planner.step.events import CallSchedule, ReloadSteps
from graphoffload.planner.step.facts import StepFacts, StepProblem, Variant
from graphoffload.planner.step.joint import Joined, join_programs
from graphoffload.planner.step.late_copies import with_late_copies
from graphoffload.planner.step.less import better_with_less
from graphoffload.planner.step.mixes import ALL_MIXES, Mixes, MixSearch, choose, neighbours, uniform
from graphoffload.planner.step.parts import Wider, numbers_in, only, widened, without_slices
from graphoffload.planner.step.runs import QUICK, Known, Names, Run, Runs

__all__ = ["StepSolution", "follow_step", "plan_step"]

_VALUES = (120, 600)
_EVALUATIONS = (200, 1000)
_FINALISTS = 4
_RUNS = 60
_MORE = 12
_REPAIRS = 8
_FAR_OFF = 0.01
"""Of the budget: a run that is further above it is not repaired where other variants are left, or slices are in all."""
_SHARES = (0.12, 0.06, 0.03, 0.0)
_NEAR_BOUND = 1.002


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSolution:
    """A plan of a training step.

    Attributes:
        chosen: the variant of each call. actions: by call and candidate of its variant.
        timeline: of the joint program, with releases and reloads at the events of `calls`. Its `keep_time_s` is that of
            `keep_timeline`, and its `recompute_s` what the chosen variants compute more.
        keep_timeline: every call runs variant 0 and keeps everything.
        lower_bound_s: no plan within the budgets is faster. lower_bound_peak_bytes: no plan within the slowdown is smaller.
            None for the other goal, where `StepFacts.bounds` is empty, and where a call runs a variant that is not bounded.
        max_inflight_bytes: the window that the actions were found for; the counts of `calls` are what bounds it.
        solver: who proposed the actions. calls: the schedule of each. reload_steps: places of the reload ops of each variant.
        in_flight: microbatches at a time. Memory is that of all of them, time and schedule are one's.
    """

    chosen: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    joined: Joined
    timeline: Timeline
    keep_timeline: Timeline
    lower_bound_s: float | None
    lower_bound_peak_bytes: int | None
    max_inflight_bytes: int | None
    solver: str
    calls: tuple[CallSchedule, ...]
    reload_steps: ReloadSteps
    in_flight: int = 1

    @property
    def slowdown(self) -> float:
        """Extra time relative to variant 0 with everything kept: 0.02 is 2 %."""
        return self.timeline.slowdown

    def prediction(self, reserve_bytes: int) -> Prediction:
        """The figures of the step, for a budget from which so much came off."""
        return prediction_of(
            self.timeline,
            self.keep_timeline,
            reserve_bytes=reserve_bytes,
            lower_bound_s=self.lower_bound_s,
            lower_bound_peak_bytes=self.lower_bound_peak_bytes,
        )


def in_all(solution: StepSolution, own: StepFacts, facts: StepFacts) -> StepSolution:
    """A solution of a step with some of its variants, `own`, by the numbers that these have among all of them."""
    if own.graphs == facts.graphs:
        return solution
    chosen = numbers_in(facts, own, solution.chosen)
    new = {(call.graph, at): to for call, at, to in zip(own.calls, solution.chosen, chosen, strict=True)}
    steps = {(graph, new[graph, at]): places for (graph, at), places in solution.reload_steps.items()}
    return replace(solution, chosen=chosen, reload_steps=steps)


def plan_step(problem: StepProblem, wider: Wider | None = None) -> StepSolution:
    """The best plan found for a step of one microbatch at a time; the best until the problem's patience ends.

    Variants that compute whole blocks again are looked at where the others miss the goal, or are far from their bound. They are
    taken where they are clearly better: their times are less certain than those of chains. Variants that compute MLPs in slices
    round gradients otherwise, and are looked at, or made, where all others miss the goal.

    Args:
        wider: makes the same step with more variants, those in slices, behind those that each graph has. None: it has them.

    Raises:
        BudgetError: no plan was found within the budget; the message has the least budget of the step, and what holds it up.
    """
    found, facts = _planned(problem, wider)
    return in_all(found.solution(), found.runs.problem.facts, facts)


def _planned(problem: StepProblem, wider: Wider | None) -> tuple[_Found, StepFacts]:
    """The best run, and the step with all variants that it was chosen from."""
    known, at_once = Known(), replace(problem, facts=without_slices(problem.facts))
    if wider is None and at_once.facts.graphs == problem.facts.graphs:
        return _with_blocks(problem, known), problem.facts
    refused: BudgetError | None = None
    found: _Found | None = None
    try:
        found = _with_blocks(at_once, known, gives_up=True)
    except _FarOffError:
        pass
    except BudgetError as error:
        refused = error
    if found is not None and found.runs.score(found.run)[0] <= 0.0:
        return found, problem.facts
    problem = widened(problem, wider)
    if problem.facts.graphs == at_once.facts.graphs:
        return _with_blocks(problem, known), problem.facts
    if refused is not None:
        return _best_instead(problem, known, refused), problem.facts
    other = _best(problem, known)
    if found is None or found.runs.is_clearly_better(other.run, found.run):  # the least plan is as good as none
        return other, problem.facts
    return found, problem.facts


class _FarOffError(Exception):
    """What was found is so far above the budget that others are looked at before more of its kind."""


def _with_blocks(problem: StepProblem, known: Known, *, gives_up: bool = False) -> _Found:
    """The best run of chains; of whole blocks as well, where it is not as good as its bound says."""
    chains = only(problem.facts, lambda variant: variant.bounded)
    if chains.graphs == problem.facts.graphs:
        return _best(problem, known, gives_up=gives_up)
    try:
        found = _best(replace(problem, facts=chains), known, gives_up=gives_up)
    except _FarOffError:
        return _best(problem, known, gives_up=True)
    except BudgetError as refused:
        return _best_instead(problem, known, refused)
    if found.runs.near(found.run, found.bound, 1.0 + FAR):
        return found
    try:
        other = _best(problem, known)
    except BudgetError:
        return found
    return other if found.runs.is_clearly_better(other.run, found.run) else found


def follow_step(
    problem: StepProblem,
    chosen: Sequence[int],
    calls: Sequence[CallSchedule],
    reload_steps: ReloadSteps,
    offloads: Names,
    solver: str,
) -> StepSolution:
    """A plan that was made elsewhere, for a problem of one's own: the same decisions, and what they come to here.

    Args:
        chosen, calls, reload_steps, solver: as in StepSolution. offloads: by call, the candidates that the plan offloads.

    Raises:
        PlanError: it names what this step does not have.
    """
    runs = Runs(problem)
    graphs = [fact.graph for fact in problem.facts.calls]
    try:
        own = [
            replace(call, reload_at=reload_steps[graph, variant])
            for call, graph, variant in zip(calls, graphs, chosen, strict=True)
        ]
        run = runs.given(chosen, own, reload_steps, offloads)
    except (KeyError, IndexError, ValueError) as error:
        raise PlanError(f"the plan that another rank made does not fit this step: {error} is not in it.") from None
    return _found(runs, replace(run, solver=solver)).solution()


def _best_instead(problem: StepProblem, known: Known, refused: BudgetError) -> _Found:
    """A plan of all variants where a part of them has none; where all have none, the error that names the lower budget."""
    try:
        return _best(problem, known)
    except BudgetError as error:
        raise min(refused, error, key=lambda error: error.least_bytes or 0) from None


def _best(problem: StepProblem, known: Known | None = None, *, gives_up: bool = False) -> _Found:
    """The best run of a problem's variants. known: of the same problem with fewer variants.

    Raises:
        BudgetError: none is within the budget, and the least one is not as good; or the host has too little for what is fixed
            to offload.
        _FarOffError: none is near the budget, and it `gives_up` then: to look for the least takes long.
    """
    runs = Runs(problem, known)
    facts, goal, keep = problem.facts, problem.goal, runs.keep
    in_slices = any(variant.slices for variants in facts.graphs for variant in variants)
    if not facts.calls or (not isinstance(goal, WithinSlowdown) and runs.score(keep)[0] <= 0.0):
        return _found(runs, keep)
    if runs.limit_bytes is not None and facts.least_peak_bytes > runs.limit_bytes:
        return _least(runs)
    best = _search(runs) or keep
    far_off = runs.limit_bytes is not None and runs.score(best)[0] > _FAR_OFF * runs.limit_bytes
    if gives_up and far_off:
        raise _FarOffError
    if far_off and in_slices:
        return _least(runs)
    if isinstance(goal, WithinSlowdown):
        best = min((best, keep), key=runs.score)
        host, needed = problem.host_budget_bytes, best.timeline.host_bytes
        if host is not None and needed > host:
            raise host_infeasible(host, needed)
    elif runs.score(best)[0] > 0.0:
        levels = [] if gives_up or in_slices else [choose(facts, mixes) for mixes in uniform(facts)]
        best = _repaired(runs, [best, *(runs.run(chosen, evaluations=QUICK) for chosen in reversed(levels))])
        if runs.score(best)[0] > 0.0:
            return _least(runs)
    else:
        best = better_with_less(runs, best, partial(_bound, runs, best.chosen), _search)
    return _found(runs, best)


def _least(runs: Runs) -> _Found:
    """The run that takes least, where none is within the budget.

    Raises:
        BudgetError: such a run is not as good.
    """
    found = runs.least([choose(runs.problem.facts, mixes) for mixes in uniform(runs.problem.facts)])
    if runs.score(found)[0] > 0.0 and not runs.problem.or_least:
        raise step_infeasible(runs, found)
    return _found(runs, found)


def _repaired(runs: Runs, starts: Sequence[Run]) -> Run:
    """The best of runs that are above the budget, each with another variant for the call that has the peak, again and again.

    Calls of one graph differ in how much else is held when they run. The peak of a step that recomputes everything is often
    that of one call, whose backward comes when all that the calls before it save is still there.
    """
    best = min(starts, key=runs.score)
    for start in starts:
        run = start
        for _ in range(_REPAIRS):
            call = run.joined.call_at(run.timeline.peak_step)
            if runs.score(run)[0] <= 0.0 or call is None or runs.over():
                break
            changed = [
                (*run.chosen[:call], variant, *run.chosen[call + 1 :])
                for variant in range(len(runs.problem.facts.graphs[runs.problem.facts.calls[call].graph]))
                if variant != run.chosen[call]
            ]
            found = min((runs.run(chosen, evaluations=QUICK) for chosen in changed), key=runs.score, default=run)
            if runs.score(found) >= runs.score(run):
                break
            run = found
        best = min((best, run), key=runs.score)
    return best


def _search(runs: Runs) -> Run | None:
    """The best run: mixes by their bound, the best few as runs, then counts around the best. None: bounds exclude all mixes."""
    facts = runs.problem.facts
    search = MixSearch(facts, runs.bound, most=runs.counts(runs.keep.joined, _VALUES), over=runs.over)
    order = search.best()
    if not order:
        return None
    most = _RUNS if len(facts.calls) <= ALL_MIXES else _FINALISTS
    tried: dict[tuple[int, ...], Run] = {}

    def run(mixes: Mixes) -> Run:
        chosen = choose(facts, mixes)
        if chosen not in tried:
            tried[chosen] = runs.run(chosen, evaluations=QUICK)
        return tried[chosen]

    mixes = _best_first(runs, search, order, run, most)
    for share in _SHARES:
        improved = True
        while improved and len(tried) < most + _MORE and not runs.over():
            if runs.near(run(mixes), search.seen.get(mixes), _NEAR_BOUND):
                break
            missed, value, _ = runs.score(run(mixes))
            others = neighbours(facts, mixes, share)
            better = [other for other in others if missed > 0.0 or runs.bound(choose(facts, other)) < value]
            found = min((mixes, *better), key=lambda found: runs.score(run(found)))
            mixes, improved = found, found != mixes
    best = run(mixes)
    if runs.score(best)[0] <= 0.0:
        best = min((best, runs.run(best.chosen, evaluations=runs.counts(best.joined, _EVALUATIONS))), key=runs.score)
    best = climbed(runs, best, search.value(order[0]))
    return with_late_copies(runs, best, search, order)


def _best_first(runs: Runs, search: MixSearch, order: Sequence[Mixes], run: Callable[[Mixes], Run], most: int) -> Mixes:
    """The mixes with the best of at most so many runs: a few that differ, then by their bounds, while one may be better."""
    mixes = order[0]
    best = runs.score(run(mixes))
    looked = 1
    for other in dict.fromkeys((*_distinct(order), *order)):
        if looked >= most or runs.over():
            break
        if other == mixes or (best[0] <= 0.0 and search.seen[other] >= best[1]):
            continue
        looked += 1
        score = runs.score(run(other))
        if score < best:
            mixes, best = other, score
    return mixes


def _distinct(order: Sequence[Mixes]) -> list[Mixes]:
    """The best of each pair of variants in each layout, a few."""
    found: dict[tuple[tuple[int, int, str], ...], Mixes] = {}
    for mixes in order:
        found.setdefault(tuple((mix.low, mix.high, mix.layout) for mix in mixes), mixes)
    return list(found.values())[:_FINALISTS]


@dataclass(frozen=True, slots=True)
class _Found:
    """A run and what bounds its value: seconds for a budget, bytes for a slowdown; None: nothing does."""

    runs: Runs
    run: Run
    bound: float | None

    def solution(self) -> StepSolution:
        """The run as a plan."""
        runs, run, bound = self.runs, self.run, self.bound
        actions: list[list[Action]] = [[] for _ in runs.problem.facts.calls]
        for (call, _), action in zip(run.joined.of, run.actions, strict=True):
            actions[call].append(action)
        time_s, peak_bytes, keep_s = run.timeline.time_s, run.timeline.peak_bytes, runs.reference.time_s
        slowdown = isinstance(runs.problem.goal, WithinSlowdown)
        again_s = max(0.0, run.timeline.keep_time_s - keep_s)
        return StepSolution(
            chosen=run.chosen,
            actions=tuple(tuple(each) for each in actions),
            joined=run.joined,
            timeline=replace(run.timeline, keep_time_s=keep_s, recompute_s=again_s),
            keep_timeline=runs.reference,
            lower_bound_s=None if slowdown or bound is None else min(bound, time_s),
            lower_bound_peak_bytes=int(min(bound, peak_bytes)) if slowdown and bound is not None else None,
            max_inflight_bytes=run.window_bytes,
            solver=run.solver,
            calls=run.schedule.calls,
            reload_steps=run.schedule.reload_steps,
        )


def _found(runs: Runs, run: Run) -> _Found:
    slowdown = isinstance(runs.problem.goal, WithinSlowdown)
    return _Found(runs, run, run.timeline.time_s if run is runs.keep and not slowdown else _bound(runs, run.chosen))


def _bound(runs: Runs, chosen: Sequence[int]) -> float | None:
    """The LP relaxation of keep-all's programs with their chains, which allows what any mix of bounded variants does."""
    facts = runs.problem.facts
    if not facts.bounds or not all(facts.variant(call, variant).bounded for call, variant in enumerate(chosen)):
        return None
    saved = [min(variant.saved_input_bytes for variant in variants) for variants in facts.graphs]
    variants = [Variant("bound", frozenset(), facts.bounds[call.graph], saved[call.graph]) for call in facts.calls]
    joined = join_programs(facts, variants)
    return runs.relaxed(joined)
