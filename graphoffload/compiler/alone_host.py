"""Whether the host keeps up with a graph that is planned alone, such as a whole model. Where it does not, a line says so once.

A plan's times are those of a device that never waits for its host. A small model, or one with many short kernels, is issued
more slowly than it runs: steps take what the host takes, and what is computed again or copied is more for it to issue.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphoffload.compiler.looks import Looks
from graphoffload.facts.plan import Plan
from graphoffload.runtime.step.calls import StepRun

_SLOWER = 1.05  # than predicted
_BEHIND = 0.9  # of the time between the first and the last kernel of a call, the host was still issuing it


@dataclass(slots=True)
class AloneHost:
    """What is seen of the host of one graph.

    key: of the plan that is looked at. looks: None for one that changes nothing, and so makes nothing slower.
    """

    _key: str = ""
    _looks: Looks | None = None

    def look(self, plan: Plan | None, run: StepRun) -> None:
        """A run of a graph begins by its plan."""
        if plan is None:
            return
        if plan.key != self._key:
            self._key, self._looks = plan.key, Looks() if plan.changes_anything else None
        if self._looks is not None:
            self._looks.at(run)

    def note(self, plan: Plan | None) -> str:
        """At the start of a run: that steps are slower than the plan's, since the host is the limit; "" for nothing to say."""
        if plan is None or self._looks is None or plan.key != self._key:
            return ""
        seen, planned_s = self._looks.fastest(), plan.prediction.predicted_time_s
        if seen is None or not planned_s or seen.ran_s <= _SLOWER * planned_s or seen.issued_s <= _BEHIND * seen.ran_s:
            return ""
        return (
            f"the host is the limit: it takes {1e3 * seen.issued_s:.1f} ms to issue a forward and backward that were "
            f"predicted to take {1e3 * planned_s:.1f} ms, so steps are slower than predicted; larger batches help, and "
            'mode="reduce-overhead" has CUDA graphs issue them'
        )
