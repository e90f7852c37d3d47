"""Whether the host keeps up with the plan of a step. If not, a plan that copies nothing may be faster.

    a plan ──▶ runs that compile ──▶ a few runs are looked at, and the fastest counts
       the device always has work, or the step takes what was predicted ──▶ nothing
       else, and the step without copies would take less than it took ──▶ planned again without copies
           no faster ──▶ planned again with copies, and left at that until another goal is set

A tensor that is copied in some calls of a graph is four ops on the host in each of them. Time is predicted for a device that
never waits for its host: what a host takes beside everything else that it does is not known before it was seen. So nothing is
estimated here but the step without copies, and what comes of it is measured.

Several ranks have one plan, and each has a host of its own: their plans are not looked at. Nor are microbatches in flight
together, and plans for a slowdown: without copies they would free less memory than was asked for. MLPs in slices, which round
gradients otherwise, are no way to do without copies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from graphoffload.compiler.looks import Looks
from graphoffload.compiler.step_plan import Solved, StepPlan
from graphoffload.log import log
from graphoffload.runtime.step.calls import StepRun
from graphoffload.runtime.step.pace import Issued

_IDLE = 0.25
_SLOWER = 1.05
_WORTH = 0.02  # of the step: what a new plan may save is less


@dataclass(slots=True)
class HostSeen:
    """What is known of the host of one sequence.

    copied_s: what the step took with copies, where it is planned without; None: plans may copy.
    solved: the step without copies, when it was last asked for.
    """

    copied_s: float | None = None
    solved: Solved | None = None
    _compared: bool = False
    _looks: Looks = field(default_factory=Looks)

    @property
    def copies(self) -> bool:
        """Whether its plans may copy."""
        return self.copied_s is None

    def begin_plan(self) -> None:
        """Another plan runs from now on."""
        self._looks = Looks()

    def is_faster(self, plan: StepPlan) -> bool:
        """Whether a plan without copies is predicted to take less than the step took with them."""
        return self.copied_s is not None and plan.solution.timeline.time_s < self.copied_s

    def allow_copies(self) -> None:
        """Plans may copy until another goal is set: doing without is no better, or not possible any more."""
        self.copied_s, self._compared = None, True

    def look(self, plan: StepPlan, run: StepRun) -> None:
        """A run by a plan begins: look at it, if something is still to be known."""
        if not self._compared and (plan.solution.timeline.host_bytes or not self.copies):
            self._looks.at(run)

    def why_other(self, plan: StepPlan, without_s: Callable[[], float | None]) -> str:
        """At the start of a run: why the step should be planned again, with copies or without; "" for no reason.

        Args:
            without_s: what the step would take without copies; None where no such plan meets the goal.
        """
        fastest = self._looks.fastest()
        if fastest is None:
            return ""
        if self.copied_s is None:
            return self._why_without(plan, fastest, without_s)
        return self._why_with(fastest, self.copied_s)

    def _why_without(self, plan: StepPlan, seen: Issued, without_s: Callable[[], float | None]) -> str:
        planned_s = plan.solution.timeline.time_s
        if seen.idle < _IDLE or seen.step_s <= _SLOWER * planned_s:
            return ""
        instead_s = without_s()
        said = f"the host took {_ms(seen.host_s)} to issue a step that was predicted to take {_ms(planned_s)}"
        if instead_s is None or instead_s > (1.0 - _WORTH) * seen.step_s:
            log.info("%s; without copies it would be no faster", said)
            self._compared, self.solved = True, None
            return ""
        self.copied_s = seen.step_s
        return f"{said}, and without copies {_ms(instead_s)}"

    def _why_with(self, seen: Issued, copied_s: float) -> str:
        said = f"without copies it took {_ms(seen.step_s)}, with them {_ms(copied_s)}"
        if seen.step_s < copied_s:
            log.info("the step is faster now: %s", said)
            self._compared = True
            return ""
        self.allow_copies()
        return said


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
