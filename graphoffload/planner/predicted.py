"""What is predicted of a plan: its figures, which are stored with it; and enough to draw its step, which stays in the process
that planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from graphoffload.facts.plan import Prediction
from graphoffload.planner.memory_layers import MemoryLayers
from graphoffload.planner.problem import Candidate
from graphoffload.planner.simulator import Scheduled, Timeline


@dataclass(frozen=True, slots=True)
class Predicted:
    """The timeline of a plan, and of the same graph with everything kept.

    Attributes:
        limit_bytes: what the plan's peak was to stay within: the budget less the reserve; None where nothing was to be met.
        hardware: name of the profile that the times come from.
        candidates: by the name of the saved activation. Their uses are steps of the timeline.
        layers: of the timeline; its tuples are empty where they are unknown.
        turn_bytes: what the timelines have of eager code between forward and backward.
    """

    timeline: Timeline
    keep_timeline: Timeline
    limit_bytes: int | None = None
    hardware: str = ""
    candidates: Mapping[str, Candidate] = field(default_factory=dict)
    layers: MemoryLayers = MemoryLayers()  # noqa: RUF009 (frozen)
    turn_bytes: int = 0


def in_plan_order(timeline: Timeline) -> list[Scheduled]:
    """The timeline's transfers in the order of its plan's, whose ids are their numbers in it."""
    return sorted(timeline.schedule, key=lambda item: (item.offload_at, item.candidate))


def prediction_of(
    timeline: Timeline,
    keep: Timeline,
    *,
    reserve_bytes: int,
    lower_bound_s: float | None,
    lower_bound_peak_bytes: int | None,
) -> Prediction:
    """The figures of a timeline beside that of keep-all. A bound that rounding left above what was found is what was found."""
    time_s, peak_bytes = timeline.time_s, timeline.peak_bytes
    return Prediction(
        keep_peak_bytes=keep.peak_bytes,
        predicted_peak_bytes=peak_bytes,
        keep_time_s=keep.time_s,
        predicted_time_s=time_s,
        lower_bound_time_s=None if lower_bound_s is None else min(lower_bound_s, time_s),
        host_bytes=timeline.host_bytes,
        stall_s=timeline.stall_s,
        lower_bound_peak_bytes=None if lower_bound_peak_bytes is None else min(lower_bound_peak_bytes, peak_bytes),
        reserve_bytes=reserve_bytes,
    )
