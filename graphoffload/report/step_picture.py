"""One step as a picture: compute, copies, stalls of compute, and memory for keep-all and for the plan.

    layer    | layers.0 | layers.1 |  | layers.1 | layers.0 |
    compute  |######## forward ####|xx|####### backward ####|      x: a stall, in red, with its cause on hovering
    D2H         |=====|=====|
    H2D                               |====|====|
    memory   keep-all in grey, the plan in blue, the budget as a dashed line

`picture_of` makes one from the simulator's prediction. A StepPicture is plain tuples, so a profiler's measurements can be drawn
the same way. `timeline_svg` draws it, `trace_json` writes the same lanes for chrome://tracing and Perfetto.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphoffload.facts.plan import Plan
from graphoffload.planner.predicted import Predicted, in_plan_order
from graphoffload.planner.simulator import Timeline
from graphoffload.report.svg import element, page, shorten
from graphoffload.report.table import percent
from graphoffload.units import format_bytes

Lane = tuple[str, float, float, str]  # lane, start and end in seconds, label
Stall = tuple[float, float, str]  # start and end in seconds, cause
Memory = tuple[float, int]  # second, bytes allocated from there on

LANES = ("compute", "D2H", "H2D")
_COLOURS = {"layer": "#dfe5ec", "forward": "#6f8fae", "backward": "#4f6f8f", "D2H": "#e8821a", "H2D": "#8d63b8"}
_INK = {"layer": "#333333"}
_STALL, _KEEP, _PLAN, _BUDGET, _OUTSIDE = "#d62728", "#7d7d7d", "#1f5fa8", "#d62728", "#3f7f3f"
_WIDTH, _LEFT, _RIGHT, _TOP, _LANE_H, _GAP, _MEMORY_H = 1200.0, 92.0, 24.0, 92.0, 28.0, 6.0, 300.0
_FAR = 1.6  # a budget more than this above every curve is not on the axis
_FONT, _CHARACTER = 12.0, 7.3  # pixels; a character of the drawing's font is this wide
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
    lanes += [("compute", i.start_s, i.end_s, "forward" if i.end_s <= half else "backward") for i in timeline.lanes.compute]
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
        facts=_facts(plan, timeline),
    )


def _facts(plan: Plan, timeline: Timeline) -> tuple[str, ...]:
    keep_s, bound_s = plan.prediction.keep_time_s, plan.prediction.lower_bound_slowdown
    least = "" if bound_s is None else f", bound {percent(bound_s)}"
    change = f" ({percent(timeline.time_s / keep_s - 1.0)}{least})" if keep_s else ""
    d2h_s, h2d_s = (sum(copy.end_s - copy.start_s for copy in lane) for lane in (timeline.lanes.d2h, timeline.lanes.h2d))
    count = f"{len(plan.transfers)} {'copy' if len(plan.transfers) == 1 else 'copies'}"
    copies = f"offloads {format_bytes(plan.offloaded_bytes)} in {count}: D2H {milliseconds(d2h_s)}, H2D {milliseconds(h2d_s)}"
    stalls = f"compute stalls (red) for {milliseconds(timeline.stall_s)}" if timeline.stalls else "no stalls"
    return (
        f"keep-all {milliseconds(keep_s)}, plan {milliseconds(timeline.time_s)}{change}; {stalls}",
        f"{copies if plan.transfers else 'offloads nothing'}; recomputes {format_bytes(plan.recomputed_bytes)}",
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
        layer, candidate = _layer_of(tensor.module), predicted.candidates.get(tensor.name)
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


def _layer_of(path: str) -> str:
    """The module path up to its first number: "model.layers.3" for "model.layers.3.mlp.up"; "" without one."""
    parts = path.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else ""


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
    yield from zip((0.0, *timeline.ends_s), timeline.memory, strict=False)
    if timeline.memory:
        yield timeline.time_s, timeline.memory[-1]


def trace_json(picture: StepPicture) -> str:
    """The lanes as a trace for Perfetto or chrome://tracing (times in microseconds), memory as counters, stalls in compute."""
    names = _lane_names(picture)
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
                ("memory, outside the graphs", picture.memory_outside))  # fmt: skip
    for name, points in counters:
        events += [{"ph": "C", "pid": 0, "name": name, "ts": s * 1e6, "args": {"bytes": nbytes}} for s, nbytes in points]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def timeline_svg(picture: StepPicture) -> str:
    """The picture as the text of an SVG file, 1200 pixels wide; hovering over a box shows its label and time."""
    body = [element("text", text=shorten(picture.title, 140), x=12, y=24, font_size=15, fill="#111111")]
    body += [
        element("text", text=shorten(fact, 160), x=12, y=44 + 18 * line, fill="#444444")
        for line, fact in enumerate(picture.facts)
    ]
    if picture.end_s <= 0:
        if not picture.facts:
            body.append(element("text", text="No times: no hardware numbers were at hand.", x=12, y=44, fill=_STALL))
        return page(_WIDTH, _TOP, body, font_size=_FONT)
    names, scale = _lane_names(picture), (_WIDTH - _LEFT - _RIGHT) / picture.end_s
    bottom = _TOP + (_LANE_H + _GAP) * len(names)
    floor = bottom + 40 + _MEMORY_H
    body += _time_axis(picture, scale, floor)
    for number, name in enumerate(names):
        body += _lane(picture, name, _TOP + number * (_LANE_H + _GAP), scale)
    body += _memory(picture, scale, floor)
    return page(_WIDTH, floor + 46, body, font_size=_FONT)


def _lane_names(picture: StepPicture) -> list[str]:
    names = dict.fromkeys(lane for lane, *_ in picture.lanes)
    return [*(["layer"] if "layer" in names else []), *LANES, *(name for name in names if name not in ("layer", *LANES))]


def _lane(picture: StepPicture, name: str, top: float, scale: float) -> list[str]:
    """One lane with its name, its boxes and, for compute, the stalls."""
    drawn = [element("text", text=shorten(name, 10), x=_LEFT - 10, y=top + 18, text_anchor="end", fill="#222222")]
    drawn.append(element("rect", x=_LEFT, y=top, width=_WIDTH - _LEFT - _RIGHT, height=_LANE_H, fill="#f6f6f6"))
    drawn += _spans([span for span in picture.lanes if span[0] == name], top, scale)
    if name == "compute":
        drawn += [
            element("rect", class_="stall", x=_LEFT + start_s * scale, y=top, width=max((end_s - start_s) * scale, 1.0),
                    height=_LANE_H, fill=_STALL, title=f"stall, {milliseconds(end_s - start_s)}: {cause}")
            for start_s, end_s, cause in picture.stalls
        ]  # fmt: skip
    return drawn


def _spans(spans: Sequence[Lane], top: float, scale: float) -> list[str]:
    """Boxes of one lane; boxes narrower than a pixel join their neighbor, so that a step of 10 000 kernels stays small."""
    merged: list[list[Lane]] = []
    for span in sorted(spans, key=lambda span: span[1]):
        group = merged[-1] if merged else None
        if group and (span[2] - span[1]) * scale < 1.0 and (span[2] - group[0][1]) * scale < 2.0:
            group.append(span)
        else:
            merged.append([span])
    drawn = []
    for number, group in enumerate(merged):
        lane, start_s, _, label = group[0]
        end_s = max(span[2] for span in group)
        width = (end_s - start_s) * scale
        more = "" if len(group) == 1 else f" and {len(group) - 1} more"
        fill = _COLOURS.get(label if lane == "compute" else lane, "#999999")
        pale = 0.7 if lane == "layer" and number % 2 else 1
        title = f"{label}{more}, {milliseconds(end_s - start_s)}"
        drawn.append(
            element("rect", class_="span", x=_LEFT + start_s * scale, y=top, width=max(width - 0.6, 0.6), height=_LANE_H,
                    fill=fill, fill_opacity=pale, title=title)
        )  # fmt: skip
        if text := _label_in(lane, label, int((width - 8) / _CHARACTER)):
            x, ink = _LEFT + start_s * scale + 5, _INK.get(lane, "#ffffff")
            drawn.append(element("text", text=text, x=x, y=top + 18, fill=ink, pointer_events="none"))
    return drawn


def _label_in(lane: str, label: str, characters: int) -> str:
    """The part of a label that fits in a box: "layers.3", or "3" if that is too long; copies by tensor; "" if nothing fits."""
    text = ".".join(label.split(".")[-2:]) if lane == "layer" else label.partition(",")[0]
    if len(text) > characters and lane == "layer":
        text = text.rpartition(".")[2] if text.rpartition(".")[2].isdigit() else text
    if len(text) > characters:
        return shorten(text, characters) if characters >= 8 else ""
    return text


def _time_axis(picture: StepPicture, scale: float, floor: float) -> list[str]:
    """Ticks in milliseconds through lanes and memory, and the start of backward."""
    step_s, drawn = _nice(picture.end_s / 8), []
    bottom = floor - _MEMORY_H - 40  # of the lanes; the lines leave out the key between lanes and memory
    for number in range(int(picture.end_s / step_s * (1 + 1e-9)) + 1):
        x = _LEFT + number * step_s * scale
        drawn.append(element("line", x1=x, x2=x, y1=_TOP - 4, y2=bottom, stroke="#e2e2e2"))
        drawn.append(element("line", x1=x, x2=x, y1=floor - _MEMORY_H, y2=floor + 5, stroke="#e2e2e2"))
        text = f"{number * step_s * 1e3:g}"
        drawn.append(element("text", text=text, x=x, y=floor + 20, text_anchor="middle", fill="#444444"))
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    drawn.append(element("text", text="time (ms)", x=middle, y=floor + 38, text_anchor="middle", fill="#222222"))
    if picture.forward_end_s is not None:
        x = _LEFT + picture.forward_end_s * scale
        drawn += [
            element("line", class_="middle", x1=x, x2=x, y1=y1, y2=y2, stroke="#666666", stroke_dasharray="2 3")
            for y1, y2 in ((_TOP - 4, bottom), (floor - _MEMORY_H, floor))
        ]
    return drawn


def _memory(picture: StepPicture, scale: float, floor: float) -> list[str]:
    """Both curves over one axis of bytes, the budget, and a key above them."""
    layers = (("keep-all", picture.memory_keep, _KEEP), ("plan", picture.memory_plan, _PLAN),
              ("outside", picture.memory_outside, _OUTSIDE))  # fmt: skip
    curves = [layer for layer in layers if layer[1]]
    sizes = [nbytes for _, points, _ in curves for _, nbytes in points] or [0]
    budget = picture.budget_bytes
    inside = budget is not None and budget <= _FAR * max(sizes)
    sizes += [budget] if budget is not None and inside else []
    base, step, most = _scale_of(min(sizes), max(*sizes, 1))
    tall = _MEMORY_H / (most - base)
    drawn = []
    for number in range(int((most - base) / step * (1 + 1e-9)) + 1):
        y = floor - number * step * tall
        drawn.append(element("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, stroke="#e8e8e8"))
        text = format_bytes(round(base + number * step))
        drawn.append(element("text", text=text, x=_LEFT - 8, y=y + 4, text_anchor="end", fill="#444444"))
    left, above = _LEFT, floor - _MEMORY_H - 16
    drawn.append(element("text", text="memory", x=_LEFT - 10, y=above, text_anchor="end", fill="#222222"))
    for name, points, colour in curves:
        peak_s, peak = max(points, key=lambda point: point[1])
        drawn += _curve(name, points, colour, scale, floor, base, tall)
        mark = element("circle", cx=_LEFT + peak_s * scale, cy=floor - (peak - base) * tall, r=3.5, fill=colour)
        key, left = _key(f"{name}: peak {format_bytes(peak)} at {milliseconds(peak_s)}", colour, "", left, above)
        drawn += [mark, *key]
    if budget is not None and inside:
        y = floor - (budget - base) * tall
        drawn.append(
            element("line", class_="budget", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, stroke=_BUDGET, stroke_width=1.4,
                    stroke_dasharray="7 4")
        )  # fmt: skip
    if budget is not None:
        key, left = _key(f"budget {format_bytes(budget)}{'' if inside else ', far above'}", _BUDGET, "7 4", left, above)
        drawn += key
    if base:
        drawn += _key("the axis does not start at 0", "", "", left, above)[0]
    return drawn


def _curve(name: str, points: Sequence[Memory], colour: str, scale: float, floor: float, base: int, tall: float) -> list[str]:
    """One staircase; within half a pixel only the largest and the last value are drawn."""
    columns: list[tuple[float, int, int]] = []
    for second, nbytes in points:
        x = _LEFT + second * scale
        if columns and x - columns[-1][0] < 0.5:
            columns[-1] = (columns[-1][0], max(columns[-1][1], nbytes), nbytes)
        else:
            columns.append((x, nbytes, nbytes))
    steps = [f"M{columns[0][0]:.1f},{floor - (columns[0][1] - base) * tall:.1f}"]
    for x, high, last in columns:
        steps.append(f"H{x:.1f}V{floor - (high - base) * tall:.1f}")
        steps += [f"V{floor - (last - base) * tall:.1f}"] if last != high else []
    line = "".join(steps)
    closed = f"{line}V{floor:.1f}H{columns[0][0]:.1f}Z"
    area = element("path", d=closed, fill=colour, fill_opacity=0.12)
    return [area, element("path", class_=name, d=line, fill="none", stroke=colour, stroke_width=1.6, title=name)]


def _key(text: str, colour: str, dashes: str, left: float, y: float) -> tuple[list[str], float]:
    """A short line in the curve's color and its name; returns where the next one starts."""
    drawn = []
    if colour:
        dashed = {"stroke_dasharray": dashes} if dashes else {}
        drawn.append(element("line", x1=left, x2=left + 24, y1=y - 4, y2=y - 4, stroke=colour, stroke_width=2.5, **dashed))
        left += 30
    drawn.append(element("text", text=text, x=left, y=y, fill="#222222"))
    return drawn, left + _CHARACTER * len(text) + 22


def _scale_of(least: int, most: int) -> tuple[int, float, float]:
    """(lowest byte, bytes a line, highest byte) of the axis, without the part below all curves if that is most of it."""
    base = least if least > 0.6 * most else 0
    span = max(most - base, 1) * 1.06
    unit = 2.0 ** (10 * min(int(math.log2(max(span, 1.0)) // 10), 3))
    step = _nice(span / unit / 5) * unit
    base = int(base // step * step)
    return base, step, base + step * math.ceil((most * 1.02 - base) / step)


def milliseconds(seconds: float) -> str:
    """ "0.033 ms", "12.3 ms", "1230 ms": three digits."""
    milliseconds = seconds * 1e3
    return f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"


def _nice(value: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least `value`; 0.0 for 0."""
    if value <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= value * (1 - 1e-9))
