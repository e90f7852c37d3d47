"""What is predicted of one graph's step beyond its plan: enough to draw it. Kept in the process that planned, never stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from graphoffload.planner.problem import Candidate
from graphoffload.planner.simulator import Scheduled, Timeline


@dataclass(frozen=True, slots=True)
class Predicted:
    """The timeline of a plan, and of the same graph with everything kept.

    Attributes:
        limit_bytes: what the plan's peak was to stay within: the budget less the reserve; None where nothing was to be met.
        hardware: name of the profile that the times come from.
        candidates: by the name of the saved activation. Their uses are steps of the timeline.
    """

    timeline: Timeline
    keep_timeline: Timeline
    limit_bytes: int | None = None
    hardware: str = ""
    candidates: Mapping[str, Candidate] = field(default_factory=dict)


def in_plan_order(timeline: Timeline) -> list[Scheduled]:
    """The timeline's transfers in the order of its plan's, whose ids are their numbers in it."""
    return sorted(timeline.schedule, key=lambda item: (item.offload_at, item.candidate))
