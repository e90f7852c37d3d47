"""A run: one choice of variants, solved, with slack, in terms of events, and replayed. What a step will really do.

variants ── join, solve ──▶ actions ── just in time, slack ──▶ moments ── events, replay ──▶ timeline
               ▲                                                                         │ above the budget
               └───────────── for a budget lower by the excess, a few times ◀─────────────┘
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from graphoffload.facts.goals import FAR, MeetBudget, Score, WithinSlowdown
from graphoffload.facts.plan import Action
from graphoffload.planner.arrays import Ints, arrays_of
from graphoffload.planner.prefetch import prefetch_reloads, release_later
from graphoffload.planner.simulator import Evaluation, Scheduled, Timeline, evaluate, timeline_of
from graphoffload.planner.solver import Solution, solve
from graphoffload.planner.step.events import CallSchedule, ReloadSteps, StepSchedule, drains, moments_of, schedule_step
from graphoffload.planner.step.facts import StepProblem
from graphoffload.planner.step.joint import Joined, Pieces, join
from graphoffload.planner.step.paced import paced_reloads
from graphoffload.planner.step.replay import replay_step
from graphoffload.planner.strategies.relaxation import Relaxation

_ROUNDS = 4
_MORE_THAN_BUDGET = (1.0, 1.01, 1.02, 1.03, 1.05)
"""Of the budget: what plans may take whose copies come back late."""
_WORK = 2_000_000
QUICK = 40
"""Simulations for a run that is compared with others."""
_ANY_TIME_S = 1e6
_MOST_BYTES = 1e18
_LESS = 0.995
_DESCENTS = 5
_CHOICES = 2
_AS_SMALL = 1 << 20
_ROUNDING = 1e-9
_FREE = 1.0005
_INFINITE = float("inf")
Names = Sequence[Collection[str]]


@dataclass(frozen=True, slots=True)
class Run:
    """Variants and actions with the schedule that the runtime gets, and the timeline of that."""

    chosen: tuple[int, ...]
    joined: Joined
    actions: tuple[Action, ...]
    window_bytes: int | None
    solver: str
    schedule: StepSchedule
    result: Evaluation
    timeline: Timeline


def _held(released: int | None, planned: int, steps: Ints) -> bool:
    """Whether a source is still allocated at one of `steps`, though its release was planned before."""
    return bool(np.any((steps > planned) & (steps <= (len(steps) and steps[-1] if released is None else released))))


class Known:
    """Solutions, runs and bounds that were made for one step, by variants and limits. Problems that differ in the variants that
    they may choose from ask for many of the same."""

    def __init__(self) -> None:
        self.solutions: dict[Hashable, Solution] = {}
        self.runs: dict[Hashable, Run] = {}
        self.bounds: dict[Hashable, float | None] = {}


class Runs:
    """Makes runs of one step for the goal of its problem, and compares them.

    known: of another problem of the same step, on the same hardware, with the same host budget and patience.

    Attributes:
        limit_bytes: the budget less the reserve; None for a slowdown. limit_s: what a slowdown allows; None for a budget.
        keep: every call runs variant 0 and keeps everything but what a policy asks for. reference: everything is kept.
    """

    def __init__(self, problem: StepProblem, known: Known | None = None) -> None:
        self.problem, self.known = problem, known or Known()
        facts, goal = problem.facts, problem.goal
        self._pieces = Pieces()
        joined = join(facts, [0] * len(facts.calls), self._pieces)
        self.keep = self._kept((0,) * len(facts.calls), joined, "fits")
        self.reference = self.keep.timeline
        if set(self.keep.actions) - {"keep"}:
            everything: list[Action] = ["keep"] * len(self.keep.actions)
            self.reference = self._scheduled(self.keep.chosen, joined, everything, None, "fits", ()).timeline
        budget = goal.device_budget_bytes
        self.limit_bytes = None if budget is None else budget - problem.reserve_bytes
        self.limit_s: float | None = None
        if isinstance(goal, WithinSlowdown):
            self.limit_s = (1.0 + goal.max_slowdown) * self.reference.time_s * (1.0 + _ROUNDING)

    def over(self) -> bool:
        """Whether planning has to end."""
        return self.problem.patience is not None and self.problem.patience.over()

    def score(self, run: Run) -> Score:
        """Less is better: by how much the goal is missed, then time at a budget and peak at a slowdown."""
        time_s, peak_bytes = run.timeline.time_s, run.timeline.peak_bytes
        host_bytes = self.problem.host_budget_bytes
        broken = 0.0 if host_bytes is None else max(0.0, run.timeline.host_bytes - host_bytes)
        if self.limit_s is not None:
            return broken + max(0.0, time_s - self.limit_s), peak_bytes, time_s
        limit_bytes = peak_bytes if self.limit_bytes is None else self.limit_bytes
        return broken + max(0.0, peak_bytes - limit_bytes), time_s, peak_bytes

    def near(self, run: Run, bound: float | None, factor: float) -> bool:
        """Whether a run is as good as the bound of its variants says, so that others need not be looked at."""
        missed, value, _ = self.score(run)
        return bound is not None and missed <= 0.0 and value <= factor * bound

    def is_clearly_better(self, one: Run, other: Run) -> bool:
        """Whether `one` misses the goal by less than `other`; if neither misses it, whether it is better by a margin."""
        (missed, value, _), (other_missed, other_value, _) = self.score(one), self.score(other)
        if missed > 0.0 or other_missed > 0.0:
            return missed < other_missed
        return value < (1.0 - FAR) * other_value

    def counts(self, joined: Joined, limits: tuple[int, int]) -> int:
        """How many simulations or bounds may be spent, between two limits: few for large steps."""
        program = joined.program
        size = len(program.forward) + len(program.backward) + len(program.candidates)
        return max(limits[0], min(limits[1], _WORK // max(1, size)))

    def _identity(self, chosen: tuple[int, ...]) -> Hashable:
        """What a run or bound of these variants follows from, besides what `known` says."""
        names = tuple(self.problem.facts.variant(call, variant).name for call, variant in enumerate(chosen))
        return chosen, names, self.limit_bytes, self.limit_s

    def bound(self, chosen: tuple[int, ...]) -> float:
        """The LP bound of these variants, in seconds or bytes; infinite where no plan exists."""
        identity, bounds = self._identity(chosen), self.known.bounds
        if identity not in bounds:
            bounds[identity] = self.relaxed(join(self.problem.facts, chosen, self._pieces))
        value = bounds[identity]
        return _INFINITE if value is None else value

    def relaxed(self, joined: Joined) -> float | None:
        """The optimum of the LP relaxation of a joint program; None: no plan exists."""
        arrays = arrays_of(joined.program, self.problem.hardware)
        goal = self._goal(arrays.compute_s, 0.0)
        if goal is None:
            return None
        limit_s = _INFINITE if self.limit_s is None else self.limit_s
        return Relaxation(arrays, goal, self.problem.host_budget_bytes, limit_s).solve().value

    def _goal(self, compute_s: float, tightened: float) -> MeetBudget | WithinSlowdown | None:
        """The goal for a program that keeps everything in `compute_s`; None: its recomputation alone is too slow."""
        if self.limit_s is None:
            return MeetBudget(int((self.limit_bytes or 0) - tightened))
        allowed = (self.limit_s - tightened) / compute_s - 1.0 if compute_s else 0.0
        return WithinSlowdown(allowed) if allowed >= 0.0 else None

    def run(self, chosen: Sequence[int], *, evaluations: int) -> Run:
        """These variants with the best actions found, scheduled; within the goal if a few rounds reach that."""
        chosen, runs = tuple(chosen), self.known.runs
        identity = self._identity(chosen), evaluations
        if identity not in runs:
            joined = join(self.problem.facts, chosen, self._pieces)
            runs[identity] = min(self._rounds(chosen, joined, evaluations), key=self.score)
        return runs[identity]

    def held_back(self, chosen: Sequence[int], *, evaluations: int) -> Run:
        """These variants by plans for the budget and for a little more, of which some copies come back later than in time.

        In a solver's plan, a copy back is in time for its first use, whatever memory there is then. Where that alone is in the
        way, what keeps to the budget may wait for copies all along the step, while a single late one would do.
        """
        assert self.limit_bytes is not None
        chosen, runs = tuple(chosen), self.known.runs
        identity = "held back", self._identity(chosen), evaluations
        if identity not in runs:
            joined = join(self.problem.facts, chosen, self._pieces)
            goals = (MeetBudget(int(share * self.limit_bytes)) for share in _MORE_THAN_BUDGET)
            runs[identity] = min((self._later(chosen, joined, goal, evaluations) for goal in goals), key=self.score)
        return runs[identity]

    def _later(self, chosen: tuple[int, ...], joined: Joined, goal: MeetBudget, evaluations: int) -> Run:
        """The plan for a goal, with copies back one by one behind the last moment at which memory is above the budget."""
        solution = self._solve(chosen, joined, goal, evaluations)
        planned = {item.candidate: item for item in solution.timeline.schedule}
        while True:
            window, schedule = solution.max_inflight_bytes, tuple(planned.values())
            run = self._scheduled(chosen, joined, solution.actions, window, solution.solver, schedule)
            late = self._one_later(run, planned.values()) if self.score(run)[0] > 0.0 else None
            if late is None or self.over():
                return run
            planned[late.candidate] = late

    def _one_later(self, run: Run, planned: Iterable[Scheduled]) -> Scheduled | None:
        """Of the copies that are back at the last step of backward with memory above the budget, and needed later, the one that
        is needed last: from the start of the next call on, or from its first use. None: there is none."""
        assert self.limit_bytes is not None
        above = np.flatnonzero(run.result.memory[len(run.joined.program.forward) :] > self.limit_bytes)
        if not len(above):
            return None
        last, back = int(above[-1]), {candidate: position for position, candidate in run.schedule.moments.reloads}
        there = (item for item in planned if back[item.candidate] <= last < item.wait_at)
        item = max(there, key=lambda item: (item.wait_at, item.candidate), default=None)
        if item is None:
            return None
        starts = (start for start in run.joined.backward_start if start > last)
        at = min(item.wait_at, min(starts, default=item.wait_at))
        return replace(item, reload_at=at) if at > item.reload_at else None

    def _rounds(self, chosen: tuple[int, ...], joined: Joined, evaluations: int) -> Iterator[Run]:
        tightened, compute_s = 0.0, arrays_of(joined.program, self.problem.hardware).compute_s
        for _ in range(_ROUNDS):
            goal = self._goal(compute_s, tightened)
            if goal is None:
                break
            run = self._solved(chosen, joined, goal, evaluations)
            yield run
            missed = self.score(run)[0]
            if missed <= 0.0 or self.over():
                return
            tightened += missed
        if goal is None and not tightened:
            yield self._kept(chosen, joined, "keep")

    def _solved(self, chosen: tuple[int, ...], joined: Joined, goal: MeetBudget | WithinSlowdown, evaluations: int) -> Run:
        solution = self._solve(chosen, joined, goal, evaluations)
        found: list[Run] = []
        for timeline in self._with_slack(chosen, joined, solution):
            run = self._scheduled(
                chosen, joined, solution.actions, solution.max_inflight_bytes, solution.solver, timeline.schedule
            )
            found.append(run)
            if self.score(run)[0] <= 0.0 and run.timeline.time_s <= solution.timeline.time_s * _FREE:
                return run
        return min((*found, *self._waiting(found[-1], solution)), key=self.score)

    def _solve(
        self, chosen: tuple[int, ...], joined: Joined, goal: MeetBudget | WithinSlowdown, evaluations: int
    ) -> Solution:
        identity, solutions = (self._identity(chosen), goal, evaluations), self.known.solutions
        if identity not in solutions:
            solutions[identity] = solve(
                joined.program,
                self.problem.hardware,
                goal,
                host_budget_bytes=self.problem.host_budget_bytes,
                evaluations=evaluations,
                patience=self.problem.patience,
            )
        return solutions[identity]

    def _waiting(self, run: Run, solution: Solution) -> Iterator[Run]:
        """The same, just in time, but compute waits at the last event before memory is above what the solution needs."""
        early: set[int] = set()
        limit_bytes = solution.timeline.peak_bytes
        planned = {item.candidate: item.release_at for item in solution.timeline.schedule}
        for _ in range(_ROUNDS):
            above = np.flatnonzero(run.result.memory[: solution.timeline.forward_steps] > limit_bytes)
            late = {index for index, at in planned.items() if at is not None and _held(run.result.release[index], at, above)}
            if late <= early:
                return
            early |= late
            run = self._scheduled(
                run.chosen, run.joined, run.actions, run.window_bytes, run.solver, solution.timeline.schedule, early
            )
            yield run

    def _with_slack(self, chosen: tuple[int, ...], joined: Joined, solution: Solution) -> Iterator[Timeline]:
        """The timeline with reloads earlier and releases later, with either, and just in time. Where code between calls copies,
        reloads start with calls as well."""
        just_in_time = solution.timeline
        program, hardware, window = joined.program, self.problem.hardware, solution.max_inflight_bytes
        arrays = arrays_of(program, hardware)
        limit_bytes = just_in_time.peak_bytes if self.limit_bytes is None else self.limit_bytes

        def again(reload_by: Mapping[int, int]) -> Timeline:
            result = evaluate(arrays, solution.actions, max_inflight_bytes=window, reload_by=reload_by)
            return timeline_of(arrays, result)

        if just_in_time.schedule:
            earlier = prefetch_reloads(program, just_in_time, again, limit_bytes=limit_bytes)
            ends = drains(self.problem.facts, chosen, joined)
            paced = paced_reloads(joined, just_in_time, again, arrays, ends, limit_bytes=limit_bytes) if ends else ()
            for timeline in (*paced, earlier):
                yield release_later(program, timeline, limit_bytes=limit_bytes)
                yield timeline
        yield just_in_time

    def _kept(self, chosen: tuple[int, ...], joined: Joined, solver: str) -> Run:
        """Everything is kept but what a policy asks for; what it has offloaded comes back just in time."""
        actions, arrays = joined.program.keep_actions(), arrays_of(joined.program, self.problem.hardware)
        planned = timeline_of(arrays, evaluate(arrays, actions)).schedule if "offload" in actions else ()
        return self._scheduled(chosen, joined, actions, None, solver, planned)

    def _scheduled(
        self,
        chosen: tuple[int, ...],
        joined: Joined,
        actions: Sequence[Action],
        window_bytes: int | None,
        solver: str,
        planned: Sequence[Scheduled],
        early: Collection[int] = (),
    ) -> Run:
        arrays = arrays_of(joined.program, self.problem.hardware)
        schedule = schedule_step(self.problem.facts, chosen, joined, planned, early)
        result = replay_step(arrays, actions, schedule.moments)
        return Run(chosen, joined, tuple(actions), window_bytes, solver, schedule, result, timeline_of(arrays, result))

    def given(self, chosen: Sequence[int], calls: Sequence[CallSchedule], reload_steps: ReloadSteps, actions: Names) -> Run:
        """What a schedule that others made comes to here. actions: by call, the candidates that it offloads.

        Raises:
            KeyError: it names what the programs do not have.
        """
        joined = join(self.problem.facts, chosen, self._pieces)
        facts = self.problem.facts
        names = (facts.variant(call, chosen[call]).program.candidates[index].name for call, index in joined.of)
        own: list[Action] = [
            "offload" if name in actions[call] else "keep" for (call, _), name in zip(joined.of, names, strict=True)
        ]
        moments = moments_of(facts, chosen, joined, calls, reload_steps)
        arrays = arrays_of(joined.program, self.problem.hardware)
        result = replay_step(arrays, own, moments)
        schedule = StepSchedule(tuple(calls), reload_steps, moments)
        return Run(tuple(chosen), joined, tuple(own), None, "given", schedule, result, timeline_of(arrays, result))

    def least(self, choices: Iterable[tuple[int, ...]]) -> Run:
        """The run with the least peak that is found at any time, whatever the goal, so that it may be named.

        Of choices whose bounds are equal, those with more recomputation are tried: their bounds are closer.
        """
        free = Runs(replace(self.problem, goal=WithinSlowdown(0.0), reserve_bytes=0), self.known)
        free.limit_s = _ANY_TIME_S
        most_first = list(dict.fromkeys(choices))[::-1]
        smallest = sorted(most_first, key=lambda chosen: math.floor(min(free.bound(chosen), _MOST_BYTES) / _AS_SMALL))[
            :_CHOICES
        ]
        best = min((free.run(chosen, evaluations=QUICK) for chosen in smallest), key=free.score)
        share = 1.0
        for _ in range(_DESCENTS):
            goal = MeetBudget(int(best.timeline.peak_bytes * share))
            lower = Runs(replace(self.problem, goal=goal, reserve_bytes=0), self.known)
            found = min((best, *(lower.run(chosen, evaluations=QUICK) for chosen in smallest)), key=lower.score)
            if lower.score(found)[0] > 0.0 or self.over():
                break
            best, share = found, _LESS
        return best
