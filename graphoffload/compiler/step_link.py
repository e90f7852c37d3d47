"""Whether copies are as fast as the plan of a step has them. If not, and if it matters, the step is planned again.

    a plan ──▶ runs that compile ──▶ the copies of one run are timed ──▶ rates
       as planned, or the plan takes no longer with them ──▶ nothing
       slower, and the plan replayed with them takes longer ──▶ planned again, for copies that are as fast as these

Rates are measured once, for a device and all processes of a host that copy then. A step's own kernels, other users of the host
and other GPUs slow copies by more or less than that. Copies that are faster than planned cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from graphoffload.compiler.step_plan import StepPlan, with_rates
from graphoffload.log import log
from graphoffload.planner.step.facts import StepProblem
from graphoffload.planner.step.flight import follow_flight, offloads_of
from graphoffload.runtime.streams.copy_times import CopyTimes
from graphoffload.runtime.streams.protocol import CopyStreams

_LOOKS = 2  # at plans of one sequence: rates that change from day to day are no reason to compile again and again
_SLOWER = 0.04
_WORTH = 0.005  # of the step: what a new plan may save is less


@dataclass(slots=True)
class LinkSeen:
    """What is known of the copies of one sequence.

    Attributes:
        rates: bytes a second to the host and back that it is planned for; None: those of the device's profile.
        looks: plans whose copies were timed.
    """

    rates: tuple[float, float] | None = None
    looks: int = 0
    _plan: StepPlan | None = None
    _times: CopyTimes | None = None
    _done: bool = False

    def why_slower(self, plan: StepPlan, streams: CopyStreams, problem: Callable[[], StepProblem]) -> str:
        """At the start of a run: why its plan should be made again; "" for no reason. problem: what it is a plan of."""
        if plan is not self._plan:
            self._plan, self._times = plan, None
            self._done = self.looks >= _LOOKS or not plan.solution.timeline.host_bytes
        if self._done:
            return ""
        if self._times is None:
            self._times = streams.times = CopyTimes()
            return ""
        if streams.times is self._times:
            streams.times = None
        found = self._times.rates()
        if found is None:
            return ""
        self._done, self._times = True, None
        self.looks += 1
        return self._judged(plan, problem(), found)

    def _judged(self, plan: StepPlan, problem: StepProblem, found: dict[str, float]) -> str:
        hardware = problem.hardware
        planned = hardware.copy_rate_bytes_per_s("d2h"), hardware.copy_rate_bytes_per_s("h2d")
        seen = min(planned[0], found.get("d2h", planned[0])), min(planned[1], found.get("h2d", planned[1]))
        said = f"copies ran at {seen[0] / 1e9:.1f} GB/s to the host and {seen[1] / 1e9:.1f} back"
        if seen[0] >= (1 - _SLOWER) * planned[0] and seen[1] >= (1 - _SLOWER) * planned[1]:
            return ""
        before, after = (
            _replayed_s(plan, replace(problem, hardware=hardware)) for hardware in (hardware, with_rates(hardware, seen))
        )
        if after <= (1 + _WORTH) * before:
            log.info("%s, and the step takes no longer for it", said)
            return ""
        self.rates = seen
        return f"{said}, not at {planned[0] / 1e9:.1f} and {planned[1] / 1e9:.1f}"


def _replayed_s(plan: StepPlan, problem: StepProblem) -> float:
    """What a plan's step takes on this hardware."""
    solution = plan.solution
    offloads = offloads_of(problem.facts, solution)
    found = follow_flight(problem, solution.chosen, solution.calls, solution.reload_steps, offloads, solution.solver)
    return found.timeline.time_s
