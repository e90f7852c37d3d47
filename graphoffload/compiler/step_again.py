"""What is known of a sequence of calls, and whether its plan still holds at the start of its next run.

    memory outside, the device's free memory     another amount than it was planned with, by more than a percent
    the last run's own peak                      above the budget: planned with that much less, unless that changes nothing
    its copies                                   slower than planned (step_link.py)
    its host                                     slower than the device, and fewer copies may help (step_host.py)
    what was asked for                           set_budget, set_slowdown

A run's own peak is one that it raised between its first forward and the end of its last backward. What an optimizer takes
between two runs is none of it: no plan of the activations lowers that. Nor is the peak of a run that left its plan, such as two
microbatches at once: a plan with less would hold for runs that need none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from graphoffload.compiler.alone_host import AloneHost
from graphoffload.compiler.device_limits import device_budget_now
from graphoffload.compiler.override import OVERRIDE
from graphoffload.compiler.rounds import Rounds
from graphoffload.compiler.step_flight import OVERLAPS, seen_in_flight
from graphoffload.compiler.step_host import HostSeen
from graphoffload.compiler.step_link import LinkSeen
from graphoffload.compiler.step_plan import Asked, StepPlan
from graphoffload.compiler.step_ranks import Proposal
from graphoffload.compiler.step_rise import Rise
from graphoffload.errors import BudgetExceededWarning, warn
from graphoffload.facts.goals import UNMEASURABLE, KeepIfFits, MeetBudget
from graphoffload.planner.step.facts import StepFacts
from graphoffload.runtime.step.call import StepCall
from graphoffload.runtime.step.calls import StepRun
from graphoffload.units import format_bytes

_SAME_SHARE, _SAME_BYTES = 0.01, 256 * 2**20  # of the budget: by which memory outside may differ from what was planned with
_FREED_SHARE = 0.05  # of the budget: what must have come free for a plan with less to be given up
_FREED_RUNS = 8  # in a row: between the microbatches of one step, gradients come and go
_FEWER_STEPS = 8  # in a row with fewer microbatches in flight: a part of a batch, or an evaluation, is none of it
WARM = 2  # runs of a plan that compile its backwards
MOST_EXCESS_BYTES = 64 * 2**20  # above a budget that nobody gave, and at most above any
_GIVEN_EXCESS_BYTES = 2**20  # another plan of a step seldom costs a compile
_RETRIED = 3  # runs in a row: the first ones after a plan find the memory of other steps

GOAL_WAS_SET = "another goal was set"
AFTER_ERROR = "less memory after an error"


@dataclass(frozen=True, slots=True)
class Excess:
    """A run whose peak was above its budget, and by how much; taken_bytes less were planned with after it."""

    peak_bytes: int
    excess_bytes: int
    taken_bytes: int


@dataclass(slots=True)
class Known:
    """What is known of one sequence.

    sequence: its graphs. after: the sequence that followed it last time. runs: recorded, until they are `facts`. plan: once
    there is one. asked: what the plan is for.
    fixed: nothing is planned until something else is asked for. alone: it is one call of a graph that has a plan of its own;
    it is fixed once it is known what eager code takes beside it (alone.py).
    version: of the override that it was made under. taken_bytes: less memory than there seems to be, as an error taught.
    start_bytes: allocated at the start of the runs that the facts are of; planned_bytes: when it was planned, and what was to
    rise until the optimizer steps. rise: from run to run of a step.
    retries: how often the allocator had to give memory back to serve an allocation; retried: runs in a row that it had to.
    followed: runs under the present plan. freed: runs in a row with much less outside than it was planned with.
    rounds: with other ranks that run this step. proposal: told to them, and nothing decided yet.
    excess: of the last plan that exceeded its budget; excess_bytes: taken for such plans of this goal. beyond: plans do not
    lower the peak, so nothing more is taken for it.
    in_flight: microbatches at a time; overlaps: runs in a row that showed it. most: in the step that runs; steps: in the
    latest ones. flight_bytes: allocated when the first of those that were recorded last began. entering: calls that were
    running when it was learnt: until their backwards have ended, or cannot come, and none is in flight, nothing is recorded.
    link: how fast its copies are. host: whether it keeps up; alone_host: with a graph that is planned alone.
    refused: an error that is to be said, since a run goes on.
    inside: it began while another run waited for its own backward. ran: the latest run of it, until the next one begins.
    watched: runs whose allocations were recorded.
    """

    sequence: tuple[int, ...]
    after: tuple[int, ...] = ()
    runs: list[StepRun] = field(default_factory=list)
    facts: StepFacts | None = None
    plan: StepPlan | None = None
    asked: Asked | None = None
    fixed: bool = False
    alone: bool = False
    version: int = 0
    taken_bytes: int = 0
    start_bytes: int = 0
    planned_bytes: int = 0
    rise: Rise = field(default_factory=Rise)
    retries: int = 0
    retried: int = 0
    followed: int = 0
    freed: int = 0
    excess: Excess | None = None
    excess_bytes: int = 0
    beyond: bool = False
    refused: str = ""
    rounds: Rounds | None = None
    proposal: Proposal | None = None
    in_flight: int = 1
    overlaps: int = 0
    most: int = 0
    steps: deque[int] = field(default_factory=lambda: deque(maxlen=_FEWER_STEPS))
    flight_bytes: int = 0
    entering: Sequence[StepCall] | None = None
    link: LinkSeen = field(default_factory=LinkSeen)
    host: HostSeen = field(default_factory=HostSeen)
    alone_host: AloneHost = field(default_factory=AloneHost)
    inside: bool = False
    ran: StepRun | None = None
    watched: int = 0

    @property
    def seen_together(self) -> bool:
        """Whether a recorded run had as many microbatches beside it as there are at a time."""
        return any(seen_in_flight(run) >= self.in_flight for run in self.runs)

    @property
    def host_counts(self) -> bool:
        """Whether its host is looked at (step_host.py)."""
        goal = None if self.asked is None else self.asked.goal
        return self.rounds is None and not self.flies and isinstance(goal, KeepIfFits | MeetBudget)

    @property
    def flies(self) -> bool:
        """Whether other microbatches begin before the backward of one."""
        return self.in_flight > 1

    def begin_goal(self) -> None:
        """Another goal was set: what plans for the last one took beyond its budget says nothing of this one."""
        self.excess, self.beyond, self.refused = None, False, ""
        self.host = HostSeen()
        self.taken_bytes, self.excess_bytes = max(0, self.taken_bytes - self.excess_bytes), 0

    def fly(self, count: int, running: Sequence[StepCall] = ()) -> None:
        """So many microbatches are in flight at a time, with these calls: what is known of other numbers no longer holds."""
        if count != self.in_flight:
            self.in_flight, self.entering, self.rounds, self.proposal = count, running, None, None
            self.facts, self.plan, self.runs = None, None, []
            self.host = HostSeen()
            self.overlaps = self.overlaps if self.flies else 0
            self.steps.clear()

    def takes_off(self, flying: int) -> bool:
        """A run begins beside so many: whether it, and those after it, can be recorded and planned."""
        if self.flies:
            if not flying and self.most:
                self.steps.append(self.most)
                self.most = 0
                self._look_back()
            self.most = max(self.most, flying + 1)
            if self.plan is None and self.facts is None:
                self.fly(max(self.in_flight, flying + 1), self.entering or ())
            if self.entering is not None and not flying and not any(map(_may_come_back, self.entering)):
                self.entering = None
        return self.entering is None

    def _look_back(self) -> None:
        """A plan goes by what comes again: more microbatches in each of the latest steps, or fewer in many. Once more may be
        chance, such as an output that lives on."""
        more = min(list(self.steps)[-OVERLAPS:])
        if len(self.steps) >= OVERLAPS and more > self.in_flight:
            self.fly(more)
        elif len(self.steps) == _FEWER_STEPS and max(self.steps) < self.in_flight:
            self.fly(max(self.steps))


def _may_come_back(call: StepCall) -> bool:
    """Whether a backward of a call may still come, or run."""
    return not call.ended and call.node is not None and call.node() is not None


def learn_shortage(known: Known, lacking_bytes: int) -> None:
    """A planned run had too little memory: the next one is planned with less."""
    known.taken_bytes += lacking_bytes
    known.version = -1


def why_again(known: Known, device: torch.device, last: StepRun | None) -> str:
    """What changed since a step was planned, in words; "" if it is as it was. `last`: the run that ended before this moment."""
    plan, asked = known.plan, known.asked
    assert plan is not None
    assert asked is not None
    if known.version != OVERRIDE.version:
        if known.version < 0:
            known.excess, known.beyond = None, False
            return AFTER_ERROR
        known.begin_goal()
        return GOAL_WAS_SET
    if last is None or last.streams is None or last.twin:
        return ""
    known.followed += 1
    budget = asked.goal.device_budget_bytes
    retries = last.streams.retries()
    known.retried, known.retries = known.retried + 1 if retries > known.retries else 0, retries
    if asked.budget_bytes is None and known.retried >= _RETRIED:
        known.retried = 0
        known.taken_bytes += int(_SAME_SHARE * (budget or 0))
        return "the allocator had to give back what it caches in the middle of a step"
    if budget is None:
        return ""
    return _exceeded(known, asked, plan, last) or _other_memory(known, asked, plan, device, last)


def tolerated_bytes(given_bytes: int | None) -> int:
    """By how much a run may exceed its budget. None: no budget was given."""
    return MOST_EXCESS_BYTES if given_bytes is None else _GIVEN_EXCESS_BYTES


def differs(nbytes: int, budget_bytes: int) -> bool:
    """Whether so much memory more or less is worth another plan."""
    return nbytes > max(_SAME_BYTES, int(_SAME_SHARE * budget_bytes))


def _exceeded(known: Known, asked: Asked, plan: StepPlan, last: StepRun) -> str:
    """Why a step above its budget is planned again; with a warning where the budget was given."""
    budget = asked.goal.device_budget_bytes
    assert budget is not None
    excess = last.peak_bytes - budget
    as_planned = last.plan is plan and not last.off and known.followed > WARM
    own = as_planned and last.peak_bytes > last.start_peak_bytes
    tolerated = tolerated_bytes(asked.budget_bytes)
    if own and excess <= tolerated:
        known.excess = None  # this plan did lower the peak: a later one above the budget has another cause
    if not own or excess <= tolerated or known.beyond:
        return ""
    unused = max(0, budget - asked.reserve_bytes - asked.taken_bytes - plan.solution.timeline.peak_bytes)
    before, known.excess = known.excess, Excess(last.peak_bytes, excess, unused + excess)
    if before is not None and last.peak_bytes > before.peak_bytes - before.excess_bytes // 2:
        known.taken_bytes, known.beyond = max(0, known.taken_bytes - before.taken_bytes), True
        known.excess_bytes = max(0, known.excess_bytes - before.taken_bytes)
        if asked.budget_bytes is not None:
            warn(
                BudgetExceededWarning,
                f"device_budget={format_bytes(asked.budget_bytes)} is exceeded by {format_bytes(excess)}, and a plan with less "
                "activation memory does not lower the step's peak: something else holds it. Look for large tensors between "
                "the compiled graphs or inside one operation, or make the batch or sequence smaller.",
            )
        return "less activation memory did not lower the step's peak"
    known.taken_bytes += known.excess.taken_bytes
    known.excess_bytes += known.excess.taken_bytes
    if asked.budget_bytes is not None:
        warn(
            BudgetExceededWarning,
            f"device_budget={format_bytes(asked.budget_bytes)} was exceeded by {format_bytes(excess)} in the last step, whose "
            f"peak was predicted to be {format_bytes(plan.solution.timeline.peak_bytes)}. The step is planned again with that "
            "much less. Nothing has to be done unless this comes again; then give a budget that is smaller by it.",
        )
    return f"the last step took {format_bytes(excess)} more than its budget"


def _other_memory(known: Known, asked: Asked, plan: StepPlan, device: torch.device, last: StepRun) -> str:
    """Whether there is more or less memory outside, or on the device, than it was planned with."""
    assert asked.goal.device_budget_bytes is not None
    assert last.streams is not None
    planned_for = budget = asked.goal.device_budget_bytes - asked.taken_bytes
    more = last.streams.allocated_bytes()[0] + known.rise.ahead_bytes - known.planned_bytes
    if asked.budget_bytes is None and device.type == "cuda":
        budget = min(budget, device_budget_now(device, of_a_step=True) - known.taken_bytes)
    same = max(_SAME_BYTES, int(_SAME_SHARE * budget))
    predicted = plan.solution.timeline.peak_bytes
    peak = predicted + more
    if predicted > planned_for:  # the least plan, and only more memory allows another one
        budget = max(budget, peak)
    if more > same and peak > budget:
        return f"{format_bytes(more)} more are allocated outside"
    if peak > budget + same:
        return f"{format_bytes(peak - budget)} less are free on the device"
    known.freed = known.freed + 1 if -more > max(same, _FREED_SHARE * budget) else 0
    if known.freed >= _FREED_RUNS and plan.solution.slowdown > UNMEASURABLE:
        return f"{format_bytes(-more)} less are allocated outside"
    return ""
