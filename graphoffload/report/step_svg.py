"""A StepPicture as an SVG file of 1200 pixels: lanes over time, memory below them on the same axis. No library, no script."""

from __future__ import annotations

import math
from collections.abc import Sequence

from graphoffload.report.step_picture import COLOURS, Lane, Memory, StepPicture, kind_of, lane_names, milliseconds
from graphoffload.report.svg import element, page, shorten
from graphoffload.units import format_bytes

_INK = {"layer": "#333333"}
_KEEP, _PLAN, _BUDGET, _OUTSIDE = "#7d7d7d", "#1f5fa8", "#d62728", "#3f7f3f"
_WIDTH, _LEFT, _RIGHT, _TOP, _LANE_H, _GAP, _MEMORY_H = 1200.0, 92.0, 24.0, 92.0, 28.0, 6.0, 300.0
_FAR = 1.6  # a budget more than this above every curve is not on the axis
_FONT, _CHARACTER = 12.0, 7.3  # pixels; a character of the drawing's font is this wide


def timeline_svg(picture: StepPicture) -> str:
    """The picture as the text of an SVG file, 1200 pixels wide; hovering over a box shows its label and time."""
    body = [element("text", text=shorten(picture.title, 140), x=12, y=24, font_size=15, fill="#111111")]
    body += [
        element("text", text=shorten(fact, 160), x=12, y=44 + 18 * line, fill="#444444")
        for line, fact in enumerate(picture.facts)
    ]
    if picture.end_s <= 0:
        if not picture.facts:
            body.append(element("text", text="No times: no hardware numbers were at hand.", x=12, y=44, fill=COLOURS["stall"]))
        return page(_WIDTH, _TOP, body, font_size=_FONT)
    names, scale = lane_names(picture), (_WIDTH - _LEFT - _RIGHT) / picture.end_s
    bottom = _TOP + (_LANE_H + _GAP) * len(names)
    floor = bottom + 40 + _MEMORY_H
    body += _time_axis(picture, scale, floor)
    for number, name in enumerate(names):
        body += _lane(picture, name, _TOP + number * (_LANE_H + _GAP), scale)
    body += _memory(picture, scale, floor)
    return page(_WIDTH, floor + 46, body, font_size=_FONT)


def _lane(picture: StepPicture, name: str, top: float, scale: float) -> list[str]:
    """One lane with its name, its boxes and, for compute, the stalls."""
    drawn = [element("text", text=shorten(name, 10), x=_LEFT - 10, y=top + 18, text_anchor="end", fill="#222222")]
    drawn.append(element("rect", x=_LEFT, y=top, width=_WIDTH - _LEFT - _RIGHT, height=_LANE_H, fill="#f6f6f6"))
    drawn += _spans([span for span in picture.lanes if span[0] == name], top, scale)
    if name == "compute":
        drawn += [
            element("rect", class_="stall", x=_LEFT + start_s * scale, y=top, width=max((end_s - start_s) * scale, 1.0),
                    height=_LANE_H, fill=COLOURS["stall"], title=f"stall, {milliseconds(end_s - start_s)}: {cause}")
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
        fill = COLOURS.get(kind_of(lane, label), "#999999")
        gap = 0.0 if lane == "compute" else 0.6  # nothing is between forward, backward and recomputation
        pale = 0.7 if lane == "layer" and number % 2 else 1
        title = f"{label}{more}, {milliseconds(end_s - start_s)}"
        drawn.append(
            element("rect", class_="span", x=_LEFT + start_s * scale, y=top, width=max(width - gap, 0.6), height=_LANE_H,
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


def _nice(value: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least `value`; 0.0 for 0."""
    if value <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= value * (1 - 1e-9))
