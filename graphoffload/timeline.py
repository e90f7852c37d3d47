"""One step as a picture: what computes, what is copied, where compute stalls, and memory for keep-all and for the plan.

    compute  |########|####|xx|########|      x: a stall, in red, with its cause on hovering
    D2H         |=====|=====|
    H2D                     |====|====|
    memory   keep-all in grey, the plan in blue, the budget as a dashed line

Input is plain tuples, so that what the simulator predicted and what a profiler measured are drawn alike. chrome_trace writes
the same lanes for chrome://tracing and Perfetto.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from graphoffload.svg import element, page, shorten
from graphoffload.units import format_bytes

Lane = tuple[str, float, float, str]  # lane, start and end in seconds, label
Stall = tuple[float, float, str]  # start and end in seconds, cause
Memory = tuple[float, int]  # second, bytes allocated from there on

_COLOURS = {"compute": "#7f9cb8", "D2H": "#f58518", "H2D": "#9467bd"}
_LEFT, _RIGHT, _WIDTH, _TOP, _LANE_H, _MEMORY_H = 90.0, 30.0, 1200.0, 60.0, 34.0, 260.0


def draw_timeline(
    lanes: Iterable[Lane],
    stalls: Iterable[Stall],
    memory_keep: Sequence[Memory],
    memory_plan: Sequence[Memory],
    path: str | Path,
    *,
    budget_bytes: int | None = None,
    title: str = "",
) -> Path:
    """Writes the picture as SVG and returns its path.

    Args:
        lanes: (lane, start_s, end_s, label); lanes appear as compute, D2H, H2D, then others by first use.
        stalls: (start_s, end_s, cause): compute waits for a copy; drawn in the compute lane.
        memory_keep, memory_plan: (time_s, bytes) steps in order of time, bytes hold until the next; either may be empty.
        budget_bytes: drawn as a dashed line.

    Raises:
        ValueError: an interval ends before it starts.
        OSError: the file cannot be written.
    """
    spans, waits = list(lanes), list(stalls)
    for start_s, end_s, label in [*((span[1], span[2], span[3]) for span in spans), *waits]:
        if not end_s >= start_s:
            raise ValueError(f"{label!r} ends at {end_s} s, before it starts at {start_s} s.")
    names = list(dict.fromkeys([*_COLOURS, *(span[0] for span in spans)]))
    end_s = max(
        (*(span[2] for span in spans), *(w[1] for w in waits), *(m[0] for m in (*memory_keep, *memory_plan))), default=0.0
    )
    scale = (_WIDTH - _LEFT - _RIGHT) / end_s if end_s > 0 else 0.0
    body = [element("text", text=title or "one step, forward and backward", x=12, y=22, font_size=14, fill="#222222")]
    if not end_s:
        body.append(element("text", text="no times: no hardware numbers were at hand", x=_LEFT, y=44, fill="#c0392b"))
    bottom = _TOP + _LANE_H * len(names)
    for number, name in enumerate(names):
        top = _TOP + number * _LANE_H
        body.append(element("text", text=shorten(name, 12), x=_LEFT - 10, y=top + 19, text_anchor="end", fill="#333333"))
        body.append(element("rect", x=_LEFT, y=top, width=_WIDTH - _LEFT - _RIGHT, height=_LANE_H - 6, fill="#f5f5f5"))
        body += _spans([span for span in spans if span[0] == name], top, scale, _COLOURS.get(name, "#999999"))
        if name == "compute":
            body += [
                element("rect", class_="stall", x=_LEFT + start * scale, y=top, width=max((stop - start) * scale, 1.0),
                        height=_LANE_H - 6, fill="#d62728", title=f"stall {(stop - start) * 1e3:.3f} ms: {cause}")
                for start, stop, cause in waits
            ]  # fmt: skip
    body += _time_axis(end_s, scale, bottom + _MEMORY_H + 40)
    body += _memory(memory_keep, memory_plan, budget_bytes, end_s, scale, bottom + 30)
    lost_s = sum(stop - start for start, stop, _ in waits)
    body.append(_key(lost_s, bool(waits), budget_bytes is not None))
    path = Path(path)
    path.write_text(page(_WIDTH, bottom + _MEMORY_H + 70, body), encoding="utf-8")
    return path


def chrome_trace(lanes: Iterable[Lane], path: str | Path, *, memory: Iterable[Memory] = ()) -> Path:
    """Writes the lanes as a trace for Perfetto or chrome://tracing (JSON, times in microseconds), and memory as a counter.

    Raises:
        OSError: the file cannot be written.
    """
    spans = list(lanes)
    names = list(dict.fromkeys([*_COLOURS, *(span[0] for span in spans)]))
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": name}} for number, name in enumerate(names)
    ]
    events += [
        {
            "ph": "X",
            "pid": 0,
            "tid": names.index(lane),
            "name": label,
            "cat": lane,
            "ts": start * 1e6,
            "dur": (end - start) * 1e6,
        }
        for lane, start, end, label in spans
    ]
    events += [
        {"ph": "C", "pid": 0, "name": "allocated", "ts": second * 1e6, "args": {"bytes": nbytes}} for second, nbytes in memory
    ]
    path = Path(path)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    return path


def _spans(spans: Sequence[Lane], top: float, scale: float, fill: str) -> list[str]:
    """Boxes of one lane; what is narrower than a pixel joins its neighbour, so that a step of 10 000 kernels stays small."""
    merged: list[list[tuple[float, float, str]]] = []
    for _, start, end, label in sorted(spans, key=lambda span: span[1]):
        group = merged[-1] if merged else None
        if group and (end - start) * scale < 1.0 and (end - group[0][0]) * scale < 2.0:
            group.append((start, end, label))
        else:
            merged.append([(start, end, label)])
    drawn = []
    for group in merged:
        start, end = group[0][0], max(span[1] for span in group)
        width = (end - start) * scale
        text = f"{group[0][2]} {(end - start) * 1e3:.3f} ms" if len(group) == 1 else f"{len(group)} of them: {group[0][2]} .."
        drawn.append(
            element("rect", class_="span", x=_LEFT + start * scale, y=top, width=max(width - 0.4, 0.6), height=_LANE_H - 6,
                    fill=fill, title=text)
        )  # fmt: skip
        if width > 40:
            drawn.append(
                element(
                    "text",
                    text=shorten(group[0][2], int(width / 6.2) - 1),
                    x=_LEFT + start * scale + 4,
                    y=top + 18,
                    fill="#ffffff",
                )
            )
    return drawn


def _time_axis(end_s: float, scale: float, bottom: float) -> list[str]:
    """Ticks in milliseconds through lanes and memory."""
    drawn = []
    step_s = _nice(end_s / 8)
    for number in range(int(end_s / step_s) + 1 if step_s else 0):
        x = _LEFT + number * step_s * scale
        drawn.append(element("line", x1=x, x2=x, y1=_TOP - 6, y2=bottom - 10, stroke="#dddddd", stroke_width=0.7))
        drawn.append(
            element("text", text=f"{number * step_s * 1e3:g} ms", x=x, y=bottom + 4, text_anchor="middle", fill="#555555")
        )
    return drawn


def _memory(
    keep: Sequence[Memory], plan: Sequence[Memory], budget_bytes: int | None, end_s: float, scale: float, top: float
) -> list[str]:
    """Both curves over one axis of bytes, and the budget."""
    most = max((*(nbytes for _, nbytes in (*keep, *plan)), budget_bytes or 0, 1))
    high, floor = most * 1.08, top + _MEMORY_H
    tall = _MEMORY_H / high
    unit = 2.0 ** (10 * min(int(math.log2(most) // 10), 3))
    step = _nice(most / unit / 5) * unit
    drawn = []
    for number in range(int(high / step) + 1):
        y = floor - number * step * tall
        drawn.append(element("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, stroke="#eeeeee"))
        text = format_bytes(round(number * step))
        drawn.append(element("text", text=text, x=_LEFT - 8, y=y + 4, text_anchor="end", fill="#555555"))
    end = _WIDTH - _RIGHT - 4
    for points, colour, area, name, right in (
        (keep, "#8c8c8c", 0.12, "keep-all", end),
        (plan, "#1f5fa8", 0.18, "plan", end - 200),
    ):
        if points:
            peak = max(nbytes for _, nbytes in points)
            steps = [f"M{_LEFT + points[0][0] * scale:.1f},{floor - points[0][1] * tall:.1f}"]
            steps += [f"H{_LEFT + second * scale:.1f}V{floor - nbytes * tall:.1f}" for second, nbytes in points[1:]]
            line = "".join([*steps, f"H{_LEFT + end_s * scale:.1f}"])
            closed = f"{line}V{floor:.1f}H{_LEFT + points[0][0] * scale:.1f}Z"
            drawn.append(element("path", d=closed, fill=colour, fill_opacity=area))
            tooltip = f"{name}: peak {format_bytes(peak)}"
            drawn.append(element("path", class_=name, d=line, fill="none", stroke=colour, stroke_width=1.6, title=tooltip))
            y = floor - peak * tall - 5
            drawn.append(element("text", text=tooltip, x=right, y=y, text_anchor="end", fill=colour))
    if budget_bytes is not None:
        y = floor - budget_bytes * tall
        drawn.append(
            element("line", class_="budget", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, stroke="#d62728", stroke_dasharray="6 4")
        )
        drawn.append(element("text", text=f"budget {format_bytes(budget_bytes)}", x=_LEFT + 6, y=y - 5, fill="#d62728"))
    return drawn


def _key(lost_s: float, stalls: bool, budget: bool) -> str:
    text = f"stalls (red): {lost_s * 1e3:.3f} ms" if stalls else "no stalls"
    return element("text", text=f"{text}{'; dashed: budget' if budget else ''}", x=_LEFT, y=44, fill="#555555")


def _nice(value: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least `value`; 0.0 for 0."""
    if value <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= value * (1 - 1e-9))
