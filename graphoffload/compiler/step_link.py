"""Whether copies are as fast as the plan of a step has them. If not, and if it matters, the step is planned again.

    a plan ──▶ runs that compile ──▶ the copies of one run are timed ──▶ rates
       as planned, or the plan takes no longer with them ──▶ nothing
       slower, and the plan replayed with them takes longer ──▶ planned again, for copies that are as fast as these
       far slower ──▶ up to two more runs are timed first, and the best rate of each direction counts

Rates are measured once, for a device and all processes of a host that copy then. A step's own kernels, other users of the host
and other GPUs slow copies by more or less than that. Copies that are faster than planned cost nothing.

Another process that computes on the device takes turns with this one, and copies wait for its turns. A run beside it may have a
tenth of the next one's rates, and a plan for these would copy next to nothing from then on.

A run is not looked at that left its plan, or had no large copies both ways; nor are microbatches in flight together, whose
copies are of several runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from graphoffload.compiler.step_plan import StepPlan
from graphoffload.log import log
from graphoffload.planner.step.facts import StepProblem
from graphoffload.planner.step.flight import follow_flight, offloads_of
from graphoffload.runtime.step.calls import StepRun
from graphoffload.runtime.streams.copy_times import CopyTimes

LOOKS = 2
"""At plans of one sequence: rates that change from day to day are no reason to compile again and again."""
_TRIES = 4  # runs of one plan that are timed until one can be looked at
_SLOWER, _FAR_SLOWER = 0.04, 0.3
_RUNS = 3  # that are timed where copies are far slower than planned
_WORTH = 0.005  # of the step: what a new plan may save is less


def stop_timing(run: StepRun | None) -> None:
    """A run's copies are issued: those of others are not its own."""
    if run is not None and run.streams is not None:
        run.streams.times = None


@dataclass(slots=True)
class LinkSeen:
    """What is known of the copies of one sequence.

    Attributes:
        rates: bytes a second to the host and back that it is planned for; None: those of the device's profile.
        looks: plans whose copies were timed.
    """

    rates: tuple[float, float] | None = None
    looks: int = 0
    _times: CopyTimes | None = None
    _tries: int = 0
    _seen: list[tuple[float, float]] = field(default_factory=list)  # of runs by the present plan

    def begin_plan(self) -> None:
        """Another plan runs from now on."""
        self._times, self._tries, self._seen = None, 0, []

    def why_slower(self, plan: StepPlan, last: StepRun, problem: Callable[[], StepProblem]) -> str:
        """At the start of a run: why its plan should be made again; "" for no reason.

        Args:
            last: the run before it, on the same streams. problem: what the plan is of.
        """
        if self._times is not None:
            planned = problem()
            found = self._times.rates(planned.hardware.copy_latency_s) if last.plan is plan and not last.off else {}
            if found is None:
                return ""  # its last copies still run, so another run's start tells
            self._times = None
            if len(found) == 2:
                self._seen.append((found["d2h"], found["h2d"]))
                self._tries = min(self._tries, _TRIES - 1)
            if self._seen:
                rates = max(d2h for d2h, _ in self._seen), max(h2d for _, h2d in self._seen)
                enough = len(self._seen) == _RUNS or self._tries == _TRIES
                if enough or not _is_slower(rates, plan.rates, _FAR_SLOWER):
                    self._tries = _TRIES
                    self.looks += 1
                    return self._judged(plan, planned, rates)
        if self._tries < _TRIES and self.looks < LOOKS and plan.solution.timeline.host_bytes and last.streams is not None:
            self._tries += 1
            self._times = last.streams.times = CopyTimes()
        return ""

    def _judged(self, plan: StepPlan, problem: StepProblem, found: tuple[float, float]) -> str:
        planned = plan.rates
        seen = min(planned[0], found[0]), min(planned[1], found[1])
        if not _is_slower(seen, planned, _SLOWER):
            return ""
        said = f"copies ran at {seen[0] / 1e9:.1f} GB/s to the host and {seen[1] / 1e9:.1f} back"
        before, after = (
            _replayed_s(plan, replace(problem, hardware=problem.hardware.no_faster(*rates))) for rates in (planned, seen)
        )
        if after <= (1 + _WORTH) * before:
            log.info("%s, and the step takes no longer for it", said)
            return ""
        self.rates = seen
        return f"{said}, not at {planned[0] / 1e9:.1f} and {planned[1] / 1e9:.1f}"


def _is_slower(seen: tuple[float, float], planned: tuple[float, float], share: float) -> bool:
    return any(now < (1 - share) * then for now, then in zip(seen, planned, strict=True))


def _replayed_s(plan: StepPlan, problem: StepProblem) -> float:
    """What a plan's step takes on this hardware."""
    solution = plan.solution
    offloads = offloads_of(problem.facts, solution)
    found = follow_flight(problem, solution.chosen, solution.calls, solution.reload_steps, offloads, solution.solver)
    return found.timeline.time_s
