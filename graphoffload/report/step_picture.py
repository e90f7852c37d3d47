"""One step as a picture: compute, copies, stalls of compute, and memory for keep-all and for the plan.

    layer    | layers.0 | layers.1 |  | layers.1 | layers.0 |
    compute  |######## forward ####|xx|##rr### backward ####|      x: a stall, in red, with its cause on hovering
                                                                r: recomputation, in green
    D2H         |=====|=====|
    H2D                               |====|====|
    memory   keep-all in grey, the plan in blue, the budget as a dashed line

`picture_of` makes one from the simulator's prediction. A StepPicture is plain tuples, so a profiler's measurements can be drawn
the same way. `timeline_svg` (step_svg.py) and the page draw it, `trace_json` writes the same lanes for chrome://tracing and
Perfetto.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphoffload.facts.plan import Plan
from graphoffload.planner.memory_layers import Again, MemoryLayers
from graphoffload.planner.predicted import Predicted, in_plan_order
from graphoffload.planner.simulator import Timeline
from graphoffload.report.table import percent
from graphoffload.units import format_bytes

Lane = tuple[str, float, float, str]  # lane, start and end in seconds, label
Stall = tuple[float, float, str]  # start and end in seconds, cause
Memory = tuple[float, int]  # second, bytes allocated from there on

RECOMPUTE = "recompute "
"""Labels of recomputation in the compute lane begin with this."""
LANES = ("compute", "D2H", "H2D")
COLOURS = {
    "layer": "#dfe5ec", "forward": "#6f8fae", "backward": "#4f6f8f", "recompute": "#3f8f3a", "D2H": "#e8821a", "H2D": "#8d63b8",
    "stall": "#d62728",
}  # fmt: skip
"""Of what `kind_of` returns, and of stalls."""
_FEW = 6  # tensors that the label of a stretch of recomputation names
_NO_TIMELINE = (
    "No timeline: this plan was not made in this process; it came from a compile cache or from JSON.",
    "graphoffload.explain plans anew, and so does compiling with TORCHINDUCTOR_FORCE_DISABLE_CACHES=1.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPicture:
    """The content of a picture of one step, forward and backward.

    Attributes:
        lanes: (lane, start_s, end_s, label); lanes appear as layer, compute, D2H, H2D, then others by first use.
        stalls: (start_s, end_s, cause): compute waits for a copy; drawn in the compute lane.
        memory_keep, memory_plan: (time_s, bytes) in order of time, bytes hold until the next; either may be empty.
        budget_bytes: drawn as a dashed line; None: there was no budget.
        forward_end_s: where backward starts. facts: lines below the title.
        memory_outside: the part of memory_plan that is outside the compiled graphs; a layer of its curve.
        memory_kept, memory_in_flight: the parts that are saved activations, at rest and being copied; at the same times.

    Raises:
        ValueError: an interval ends before it starts.
    """

    title: str = "one step, forward and backward"
    lanes: tuple[Lane, ...] = ()
    stalls: tuple[Stall, ...] = ()
    memory_keep: tuple[Memory, ...] = ()
    memory_plan: tuple[Memory, ...] = ()
    budget_bytes: int | None = None
    forward_end_s: float | None = None
    facts: tuple[str, ...] = ()
    memory_outside: tuple[Memory, ...] = ()
    memory_kept: tuple[Memory, ...] = ()
    memory_in_flight: tuple[Memory, ...] = ()

    def __post_init__(self) -> None:
        for start_s, end_s, label in [*((lane[1], lane[2], lane[3]) for lane in self.lanes), *self.stalls]:
            if not end_s >= start_s:
                raise ValueError(f"{label!r} ends at {end_s} s, before it starts at {start_s} s.")

    @property
    def end_s(self) -> float:
        """The last moment of anything drawn."""
        moments = (*(lane[2] for lane in self.lanes), *(stall[1] for stall in self.stalls))
        return max((*moments, *(point[0] for point in (*self.memory_keep, *self.memory_plan))), default=0.0)


def picture_of(plan: Plan, predicted: Predicted | None) -> StepPicture:
    """The picture of a plan's predicted step; without a prediction, a picture that says why there is none."""
    if predicted is None:
        return StepPicture(title=f"{plan.graph}: one step, forward and backward", facts=_NO_TIMELINE)
    timeline = predicted.timeline
    transfers = dict(zip((item.candidate for item in in_plan_order(timeline)), plan.transfers, strict=True))
    labels = {
        index: f"{transfer.tensor}, {transfer.module or 'the model'}, {format_bytes(transfer.nbytes)}"
        for index, transfer in transfers.items()
    }
    lanes: list[Lane] = list(_layers(plan, predicted))
    half = timeline.lanes.forward_end_s
    lanes += compute_lane(timeline, predicted.layers.again, _tensors_of(plan))
    for name, copies in (("D2H", timeline.lanes.d2h), ("H2D", timeline.lanes.h2d)):
        lanes += [(name, i.start_s, i.end_s, labels.get(-1 if i.candidate is None else i.candidate, "")) for i in copies]
    return StepPicture(
        title=f"{plan.graph}: one step, forward and backward, as predicted for {predicted.hardware}",
        lanes=tuple(lanes),
        stalls=tuple(stalls_of(timeline, {transfer.tensor: labels[index] for index, transfer in transfers.items()})),
        memory_keep=tuple(memory_points(predicted.keep_timeline)),
        memory_plan=tuple(memory_points(timeline)),
        budget_bytes=predicted.limit_bytes,
        forward_end_s=half,
        facts=_facts(plan, predicted),
        **memory_parts(timeline, predicted.layers),
    )


def _facts(plan: Plan, predicted: Predicted) -> tuple[str, ...]:
    timeline = predicted.timeline
    keep_s, bound_s = plan.prediction.keep_time_s, plan.prediction.lower_bound_slowdown
    least = "" if bound_s is None else f", bound {percent(bound_s)}"
    change = f" ({percent(timeline.time_s / keep_s - 1.0)}{least})" if keep_s else ""
    d2h_s, h2d_s = (sum(copy.end_s - copy.start_s for copy in lane) for lane in (timeline.lanes.d2h, timeline.lanes.h2d))
    count = f"{len(plan.transfers)} {'copy' if len(plan.transfers) == 1 else 'copies'}"
    copies = f"offloads {format_bytes(plan.offloaded_bytes)} in {count}: D2H {milliseconds(d2h_s)}, H2D {milliseconds(h2d_s)}"
    stalls = f"compute stalls (red) for {milliseconds(timeline.stall_s)}" if timeline.stalls else "no stalls"
    return (
        f"keep-all {milliseconds(keep_s)}, plan {milliseconds(timeline.time_s)}{change}; {stalls}",
        f"{copies if plan.transfers else 'offloads nothing'}; recomputes {format_bytes(plan.recomputed_bytes)}"
        f"{again_text(predicted.layers)}",
    )


def _layers(plan: Plan, predicted: Predicted) -> Iterator[Lane]:
    """The stretches of the numbered layers, as far as their saved activations tell.

    In forward a layer lasts from the step that makes its first activation to the one that makes its last. In backward it
    lasts until the step that uses its last activation. There is nothing for fewer than two layers.
    """
    made: dict[str, list[int]] = {}  # global steps of the timeline
    used: dict[str, list[int]] = {}
    timeline = predicted.timeline
    for tensor in plan.saved.tensors:
        layer, candidate = layer_of(tensor.module), predicted.candidates.get(tensor.name)
        if layer and candidate is not None:  # what is recomputed is no candidate of the final graphs
            made.setdefault(layer, []).append(candidate.produced_at)
            used.setdefault(layer, []).extend(timeline.forward_steps + step for step in candidate.backward_uses)
    if len(made) < 2:
        return
    moments_s = (0.0, *timeline.ends_s)
    for steps, start_s in ((made, 0.0), (used, timeline.lanes.forward_end_s)):
        for layer, spanned in sorted(steps.items(), key=lambda item: max(item[1], default=0)):
            first_s, last_s = moments_s[min(spanned, default=0)], moments_s[max(spanned, default=-1) + 1]
            if last_s > max(start_s, first_s):
                yield "layer", max(start_s, first_s), last_s, layer
                start_s = last_s


def layer_of(path: str) -> str:
    """The module path up to its first number: "model.layers.3" for "model.layers.3.mlp.up"; "" without one."""
    parts = path.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else ""


def compute_lane(timeline: Timeline, again: Sequence[Again], tensors: Mapping[str, str]) -> Iterator[Lane]:
    """The stretches of compute: forward, backward, and what backward runs again, by the tensors that come of it.

    Args:
        tensors: labels of the tensors that are recomputed, by the name of their step.
    """
    half, waiting = timeline.lanes.forward_end_s, deque(again)
    for stretch in timeline.lanes.compute:
        start_s = stretch.start_s
        while waiting and waiting[0].start_s < stretch.end_s:
            first_s, last_s = max(waiting[0].start_s, start_s), min(waiting[0].end_s, stretch.end_s)
            if first_s > start_s:
                yield "compute", start_s, first_s, "backward"
            if last_s > first_s:
                yield "compute", first_s, last_s, _again_label(waiting[0], tensors)
            start_s = max(start_s, last_s)
            if waiting[0].end_s > stretch.end_s:  # a stall divides it
                break
            waiting.popleft()
        if stretch.end_s > start_s:
            yield "compute", start_s, stretch.end_s, "forward" if stretch.end_s <= half else "backward"


def _again_label(again: Again, tensors: Mapping[str, str]) -> str:
    """A line for each tensor, a few of them; operations alone where they make nothing that was to be saved."""
    named = [tensors[name] for name in again.names if name in tensors]
    lines = [f"{RECOMPUTE}{label}" for label in named[:_FEW]]
    if not named:
        count = f", {len(again.names)} operations" if len(again.names) > 1 else ""
        return f"{RECOMPUTE}{again.names[-1]}{count}"
    return "\n".join([*lines, *([f"and {len(named) - _FEW} more tensors"] if len(named) > _FEW else [])])


def _tensors_of(plan: Plan) -> dict[str, str]:
    """Labels of the tensors that a plan recomputes, by every name of theirs in a graph."""
    again = {decision.name for decision in plan.decisions if decision.action == "recompute"}
    return {
        tensor.name: f"{tensor.name}, {tensor.module or 'the model'}, {format_bytes(tensor.nbytes)}"
        for tensor in plan.saved.tensors
        if tensor.name in again
    }


def again_text(layers: MemoryLayers) -> str:
    """ " (green) in 35.2 ms", or nothing without recomputation."""
    return f" (green) in {milliseconds(sum(a.end_s - a.start_s for a in layers.again))}" if layers.again else ""


def memory_parts(timeline: Timeline, layers: MemoryLayers) -> dict[str, Any]:
    """The fields of a StepPicture with what the memory consists of."""
    parts = {"memory_outside": layers.outside, "memory_kept": layers.kept, "memory_in_flight": layers.in_flight}
    return {name: tuple(_points(timeline, nbytes)) for name, nbytes in parts.items()}


def stalls_of(timeline: Timeline, labels: dict[str, str]) -> Iterator[Stall]:
    """The timeline's stalls, one after the other, in the gaps of compute."""
    waiting = list(timeline.stalls)
    moment_s = 0.0
    for start_s in (*(stretch.start_s for stretch in timeline.lanes.compute), timeline.time_s):
        end_s = max((stretch.end_s for stretch in timeline.lanes.compute if stretch.end_s <= start_s), default=0.0)
        moment_s = max(moment_s, end_s)
        while waiting and moment_s + waiting[0].seconds <= start_s * (1 + 1e-9) + 1e-12:
            stall = waiting.pop(0)
            yield (
                moment_s,
                moment_s + stall.seconds,
                f"waits at {stall.where} for {labels.get(stall.candidate, stall.candidate)}",
            )
            moment_s += stall.seconds


def memory_points(timeline: Timeline) -> Iterator[Memory]:
    """Bytes from the start of each step on, and at the very end."""
    yield from _points(timeline, timeline.memory)


def _points(timeline: Timeline, nbytes: Sequence[int]) -> Iterator[Memory]:
    yield from zip((0.0, *timeline.ends_s), nbytes, strict=False)
    if nbytes:
        yield timeline.time_s, nbytes[-1]


def trace_json(picture: StepPicture) -> str:
    """The lanes as a trace for Perfetto or chrome://tracing (times in microseconds), memory as counters, stalls in compute."""
    names = lane_names(picture)
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": name}} for number, name in enumerate(names)
    ]
    events.append({"ph": "M", "pid": 0, "name": "process_name", "args": {"name": picture.title}})
    spans = [(lane, start_s, end_s, label, lane) for lane, start_s, end_s, label in picture.lanes]
    spans += [("compute", start_s, end_s, f"stall: {cause}", "stall") for start_s, end_s, cause in picture.stalls]
    events += [
        {"ph": "X", "pid": 0, "tid": names.index(lane), "name": label, "cat": kind, "ts": start_s * 1e6,
         "dur": (end_s - start_s) * 1e6}
        for lane, start_s, end_s, label, kind in spans
    ]  # fmt: skip
    counters = (("memory, keep-all", picture.memory_keep), ("memory, plan", picture.memory_plan),
                ("memory, outside the graphs", picture.memory_outside), ("memory, kept", picture.memory_kept),
                ("memory, in flight", picture.memory_in_flight))  # fmt: skip
    for name, points in counters:
        events += [{"ph": "C", "pid": 0, "name": name, "ts": s * 1e6, "args": {"bytes": nbytes}} for s, nbytes in points]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def lane_names(picture: StepPicture) -> list[str]:
    """The lanes in the order in which they are drawn."""
    names = dict.fromkeys(lane for lane, *_ in picture.lanes)
    return [*(["layer"] if "layer" in names else []), *LANES, *(name for name in names if name not in ("layer", *LANES))]


def kind_of(lane: str, label: str) -> str:
    """The color of a span: "forward", "backward" or "recompute" in the compute lane, else its lane."""
    if lane != "compute":
        return lane
    return "recompute" if label.startswith(RECOMPUTE) else label


def milliseconds(seconds: float) -> str:
    """ "0.033 ms", "12.3 ms", "1230 ms": three digits."""
    milliseconds = seconds * 1e3
    return f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"
