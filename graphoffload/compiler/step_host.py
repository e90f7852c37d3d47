"""Whether the host keeps up with the plan of a step. If not, a plan with fewer copies may be faster.

    a plan ──▶ runs that compile ──▶ a few runs are looked at, and the fastest counts
       the device always has work, or the step takes what was predicted ──▶ nothing
       else: what it took longer, over its copies, is the price of one
           a plan at that price would take less than the step took ──▶ planned again at that price
               no faster ──▶ planned again without a price, and left at that until another goal is set

A tensor that is copied in some calls of a graph is four ops on the host in each of them. Time is predicted for a device that
never waits for its host: what a host takes beside everything else that it does is not known before it was seen. So nothing is
estimated here but the step at that price, and what comes of it is measured.

Several ranks have one plan, and each has a host of its own: their plans are not looked at. Nor are microbatches in flight
together, and plans for a slowdown: with fewer copies they would free less memory than was asked for. MLPs in slices, which
round gradients otherwise, are no way to copy less.
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

    price_s: of each tensor that is copied, where the step is planned with one; 0.0: copies are free.
    free_s: what the step took by a plan whose copies were free. solved: the step at a price, when it was last asked for.
    """

    price_s: float = 0.0
    free_s: float = 0.0
    solved: Solved | None = None
    _compared: bool = False
    _looks: Looks = field(default_factory=Looks)

    def begin_plan(self) -> None:
        """Another plan runs from now on."""
        self._looks = Looks()

    def takes(self, plan: StepPlan) -> bool:
        """Whether a plan at the price is to run: it is predicted to take less than the step took before, or one did so."""
        return self._compared or plan.solution.timeline.time_s < self.free_s

    def give_up(self) -> None:
        """Copies are free until another goal is set: fewer are no better, or not possible any more."""
        self.price_s, self.free_s, self._compared = 0.0, 0.0, True

    def look(self, plan: StepPlan, run: StepRun) -> None:
        """A run by a plan begins: look at it, if something is still to be known."""
        if not self._compared and (plan.solution.timeline.schedule or self.price_s):
            self._looks.at(run)

    def why_other(self, plan: StepPlan, priced_s: Callable[[float], float | None]) -> str:
        """At the start of a run: why the step should be planned again, with a price or without; "" for no reason.

        Args:
            priced_s: what the step would take by a plan for such a price; None where no such plan meets the goal.
        """
        fastest = self._looks.fastest()
        if fastest is None:
            return ""
        return self._why_free(fastest) if self.price_s else self._why_priced(plan, fastest, priced_s)

    def _why_priced(self, plan: StepPlan, seen: Issued, priced_s: Callable[[float], float | None]) -> str:
        planned_s, copies = plan.solution.timeline.time_s, len(plan.solution.timeline.schedule)
        if seen.idle < _IDLE or seen.step_s <= _SLOWER * planned_s:
            return ""
        price_s = (seen.step_s - planned_s) / copies
        instead_s = priced_s(price_s)
        said = f"the host took {_ms(seen.host_s)} to issue a step that was predicted to take {_ms(planned_s)}"
        if instead_s is None or instead_s > (1.0 - _WORTH) * seen.step_s:
            log.info("%s; with fewer copies it would be no faster", said)
            self._compared, self.solved = True, None
            return ""
        self.price_s, self.free_s = price_s, seen.step_s
        return f"{said}, and with fewer copies {_ms(instead_s)}"

    def _why_free(self, seen: Issued) -> str:
        said = f"with fewer copies it took {_ms(seen.step_s)}, before {_ms(self.free_s)}"
        if seen.step_s < self.free_s:
            log.info("the step is faster now: %s", said)
            self._compared = True
            return ""
        self.give_up()
        return said


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
