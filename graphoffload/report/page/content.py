"""What the page shows, as plain values for JSON: of the objects that the printed table and the pictures are made of.

A Shown is one plan of one graph, or of one step. Those of reports for other budgets are the stops of the page's slider.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from graphoffload.errors import ConfigError
from graphoffload.facts.plan import Action, Plan, Prediction
from graphoffload.planner.predicted import Predicted
from graphoffload.report.predictions import predicted_of
from graphoffload.report.step_picture import (
    COLOURS,
    RECOMPUTE,
    Memory,
    StepPicture,
    kind_of,
    lane_names,
    layer_of,
    milliseconds,
    picture_of,
)
from graphoffload.report.step_report import StepReport
from graphoffload.report.table import ACTIONS, Row, bound, folded_rows, percent, single_rows, totals
from graphoffload.units import format_bytes, unit_of

_COLUMNS = 2000  # of time: spans and steps that are shorter are drawn together
_CALL = re.compile(r"call (\d+): (.*)", re.DOTALL)
_FAR = 1.6  # a budget more than this above every curve is not drawn
_KINDS = {
    "layer": "layer", "forward": "forward", "backward": "backward", "recompute": "recomputation", "stall": "stall",
    "D2H": "copy to the host", "H2D": "copy back",
}  # fmt: skip
_OF_THE_STEP = (
    "The figures are those of the step that this graph is a part of; the lanes and the memory are this graph's alone."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A plan of a graph that is planned alone, or of a step.

    Attributes:
        name: what it plans. plans: with how often each runs, 1 if unknown.
        sums: (tensors, bytes) by decision; None instead of the number where only the bytes are known.
        budget_bytes: None: there was none, or it is unknown. of_step: the figures are of the step that the graph is a part of.
    """

    name: str
    prediction: Prediction
    picture: StepPicture
    plans: tuple[tuple[Plan, int], ...]
    sums: dict[Action, tuple[int | None, int]]
    calls: tuple[tuple[str, str], ...] = ()
    budget_bytes: int | None = None
    summary: str = ""
    of_step: bool = False


def shown_of(
    plans: Sequence[Plan], calls: Sequence[int] = (), step: StepReport | None = None, budget_bytes: int | None = None
) -> list[Shown]:
    """What a report holds: the step, or each plan by itself. calls: how often each plan's graph runs; () if unknown."""
    if step is None:
        return [shown_plan(plan, predicted_of(plan.key), budget_bytes) for plan in plans]
    counts = list(calls) if len(calls) == len(plans) else [1] * len(plans)
    sums: dict[Action, tuple[int | None, int]] = {
        "keep": (None, step.kept_bytes), "recompute": (None, step.recomputed_bytes), "offload": (None, step.offloaded_bytes)
    }  # fmt: skip
    budget = step.budget_bytes if budget_bytes is None else budget_bytes
    return [
        Shown(
            name="one training step",
            prediction=step,
            picture=step.picture,
            plans=tuple(zip(plans, counts, strict=True)),
            sums=sums,
            calls=step.calls,
            budget_bytes=budget,
            summary=step.summary,
        )
    ]


def shown_plan(plan: Plan, predicted: Predicted | None, budget_bytes: int | None = None) -> Shown:
    """A plan by itself; `predicted` is None if another process made it."""
    if predicted is not None and predicted.limit_bytes is not None:
        budget_bytes = predicted.limit_bytes + plan.prediction.reserve_bytes
    sums = totals(folded_rows([plan]))
    return Shown(
        name=f"{plan.graph}, variant {plan.variant}" if plan.variant else plan.graph,
        prediction=plan.prediction,
        picture=picture_of(plan, predicted),
        plans=((plan, 1),),
        sums={action: sums[action][:2] for action in ACTIONS},
        budget_bytes=budget_bytes,
        summary=plan.summary,
        of_step=bool(plan.variant) and (predicted is None or predicted.timeline.time_s != plan.prediction.predicted_time_s),
    )


def content_of(
    shown: Sequence[Shown], others: Sequence[Sequence[Shown]] = (), *, notes: Sequence[str] = (), text: str = ""
) -> dict[str, Any]:
    """The page's data.

    Args:
        shown: the report's own. others: of reports for other budgets, the same graphs in the same order.
        notes: lines of the report. text: the report as it is printed.

    Raises:
        ConfigError: one of the others has more or fewer graphs, or a step instead of graphs.
    """
    for number, other in enumerate(others, start=1):
        if [bool(one.calls) for one in other] != [bool(one.calls) for one in shown]:
            kind = "steps" if shown[0].calls else "graphs"
            raise ConfigError(
                f"the {len(shown)} {kind} of the report and the {len(other)} of other report {number} are not of one model: "
                "there is no slider from one to the other. Give reports of the same call, explained for other budgets."
            )
    graphs = []
    for place, own in enumerate(shown):
        stops = _distinct([own, *(other[place] for other in others)])
        stops.sort(key=lambda one: (_budget(one), one.prediction.predicted_peak_bytes))
        graphs.append({"name": own.name, "stops": [_stop(one) for one in stops], "start": stops.index(own)})
    return {"graphs": graphs, "notes": list(notes), "text": text, "colours": COLOURS, "kinds": _KINDS}


def _distinct(stops: Sequence[Shown]) -> list[Shown]:
    """One for each budget and peak: the first."""
    seen: dict[tuple[int, int], Shown] = {}
    for stop in stops:
        seen.setdefault((_budget(stop), stop.prediction.predicted_peak_bytes), stop)
    return list(seen.values())


def _budget(one: Shown) -> int:
    return one.prediction.with_reserve(one.prediction.predicted_peak_bytes) if one.budget_bytes is None else one.budget_bytes


def _stop(one: Shown) -> dict[str, Any]:
    groups = list(_groups(one))
    return {
        "title": one.picture.title,
        "label": format_bytes(_budget(one)) if one.budget_bytes is not None else f"open (peak {format_bytes(_budget(one))})",
        "cards": _cards(one),
        "summary": [*([_OF_THE_STEP] if one.of_step else []), one.summary],
        "why_empty": "" if one.picture.end_s > 0 else _why_empty(one.picture),
        "half_ms": None if one.picture.forward_end_s is None else one.picture.forward_end_s * 1e3,
        "end_ms": one.picture.end_s * 1e3,
        "lanes": lane_names(one.picture),
        "spans": list(_spans(one)),
        "memory": _memory(one.picture, one.prediction.reserve_bytes),
        "groups": groups,
        "notes": list(dict.fromkeys(note for plan, _ in one.plans for note in plan.notes)),
    }


def _why_empty(picture: StepPicture) -> str:
    return (
        " ".join(picture.facts)
        or "There are no times: no hardware numbers were at hand. --hardware h200-sxm plans for that GPU."
    )


def _cards(one: Shown) -> list[list[str]]:
    """(name, value, what it is to be compared with)."""
    prediction = one.prediction
    peak, keep = (prediction.with_reserve(n) for n in (prediction.predicted_peak_bytes, prediction.keep_peak_bytes))
    of = f"budget {format_bytes(one.budget_bytes)}, " if one.budget_bytes is not None else ""
    reserve = f", {format_bytes(prediction.reserve_bytes)} reserved" if prediction.reserve_bytes else ""
    cards = [["peak memory", format_bytes(peak), f"{of}keep-all {format_bytes(keep)}{reserve}"] if peak else
             ["peak memory", "-", "not predicted"]]  # fmt: skip
    if prediction.keep_time_s and prediction.predicted_time_s:
        slower = f"{percent(prediction.predicted_slowdown)}{bound(prediction.lower_bound_slowdown)}"
        cards.append(["step time", milliseconds(prediction.predicted_time_s),
                      f"{slower}, keep-all {milliseconds(prediction.keep_time_s)}"])  # fmt: skip
        cards.append(
            [
                "stalls",
                milliseconds(prediction.stall_s),
                "compute waits for copies" if prediction.stall_s else "compute waits for no copy",
            ]
        )
    else:
        cards.append(["step time", "-", "not predicted"])
    for action in reversed(ACTIONS):
        count, nbytes = one.sums[action]
        words = {"offload": "copied to the host", "recompute": "computed again", "keep": "stay on the device"}[action]
        tensors = "" if count is None else f" in {count} tensor{'s' * (count != 1)}"
        cards.append([action, format_bytes(nbytes), f"{words}{tensors}"])
    return cards


def _spans(one: Shown) -> Iterator[list[Any]]:
    """(lane, kind, start in ms, length in ms, lines to show on hovering, short name), shorter ones of a kind joined."""
    picture, reason = one.picture, _reasons(one)
    spans = [(lane, kind_of(lane, label), start_s, end_s, label) for lane, start_s, end_s, label in picture.lanes]
    spans += [("compute", "stall", start_s, end_s, cause) for start_s, end_s, cause in picture.stalls]
    narrow_s = picture.end_s / _COLUMNS
    open_spans: dict[tuple[str, str], list[Any]] = {}
    for lane, kind, start_s, end_s, label in sorted(spans, key=lambda span: span[2]):
        group = open_spans.get((lane, kind))
        if group and end_s - start_s < narrow_s and end_s - group[0] < 2 * narrow_s:
            group[1], group[3] = max(group[1], end_s), group[3] + 1
            continue
        if group:
            yield _span(lane, kind, group, reason)
        open_spans[lane, kind] = [start_s, end_s, label, 0]
    for (lane, kind), group in open_spans.items():
        yield _span(lane, kind, group, reason)


def _span(lane: str, kind: str, group: Sequence[Any], reason: Callable[[str], list[str]]) -> list[Any]:
    start_s, end_s, label, more = group
    lines = [f"{_KINDS.get(kind, kind)}, {milliseconds(end_s - start_s)}{f', with {more} shorter ones' if more else ''}"]
    if kind not in ("forward", "backward"):
        for line in str(label).split("\n"):
            text = line.removeprefix(RECOMPUTE)
            lines += [text, *reason(text)]
    short = ".".join(label.split(".")[-2:]) if kind == "layer" else label.removeprefix(RECOMPUTE).partition(",")[0]
    return [
        lane,
        kind,
        start_s * 1e3,
        (end_s - start_s) * 1e3,
        lines,
        "" if kind in ("forward", "backward", "stall") else short,
    ]


def _reasons(one: Shown) -> Callable[[str], list[str]]:
    """Finds a span's tensor by the beginning of its label, and says its module and why it is treated so."""
    known: dict[tuple[str, str], dict[str, tuple[str, str]]] = {}
    for plan, _ in one.plans:
        modules = {tensor.name: tensor.module for tensor in plan.saved.tensors}
        known[plan.graph, plan.variant] = {d.name: (modules.get(d.name, ""), d.reason) for d in plan.decisions}
    alone = next(iter(known.values()), {})

    def lines(label: str) -> list[str]:
        name = label.partition(",")[0]
        call = _CALL.fullmatch(name)
        if call is None:
            found = alone.get(name)
            return [f"why: {found[1]}"] if found else []
        number = int(call[1])
        found = known.get(one.calls[number], {}).get(call[2]) if number < len(one.calls) else None
        return [f"module: {found[0] or 'the block itself'}", f"why: {found[1]}"] if found else []

    return lines


def _memory(picture: StepPicture, reserve_bytes: int) -> dict[str, Any]:
    """The curves in the unit of their axis: a stack of what the plan's memory is, keep-all, and the budget."""
    plan, keep = picture.memory_plan, picture.memory_keep
    most = max((nbytes for _, nbytes in (*plan, *keep)), default=0)
    unit, factor = unit_of(most)
    chosen = list(_thinned(plan, picture.end_s / _COLUMNS))
    parts = {"outside": picture.memory_outside, "kept": picture.memory_kept, "in_flight": picture.memory_in_flight}
    columns = {name: [points[k][1] for k in chosen] for name, points in parts.items() if len(points) == len(plan)}
    total = [plan[k][1] for k in chosen]
    columns["rest"] = [nbytes - sum(column[n] for column in columns.values()) for n, nbytes in enumerate(total)]
    budget, again = picture.budget_bytes, list(_thinned(keep, picture.end_s / _COLUMNS))
    near = budget is not None and budget <= _FAR * most
    return {
        "unit": unit,
        "most": most / factor,
        "ms": [plan[k][0] * 1e3 for k in chosen],
        "total": _scaled(total, factor),
        "parts": {name: _scaled(column, factor) for name, column in columns.items()},
        "complete": set(parts) <= set(columns),
        "keep_ms": [keep[k][0] * 1e3 for k in again],
        "keep": _scaled((keep[k][1] for k in again), factor),
        "budget": budget / factor if budget is not None and near else None,
        "budget_text": "" if budget is None else _budget_text(budget, reserve_bytes, near),
        "peak_text": format_bytes(max(total, default=0)),
        "keep_peak_text": format_bytes(max((nbytes for _, nbytes in keep), default=0)),
    }


def _budget_text(limit_bytes: int, reserve_bytes: int, near: bool) -> str:
    less = f" less {format_bytes(reserve_bytes)} reserve" if reserve_bytes else ""
    return f"budget {format_bytes(limit_bytes + reserve_bytes)}{less}{'' if near else ' (far above)'}"


def _scaled(column: Iterable[int], factor: int) -> list[float]:
    return [round(nbytes / factor, 5) for nbytes in column]


def _thinned(points: Sequence[Memory], width_s: float) -> Iterator[int]:
    """Of the steps within one column of time, the one with most memory and the last; no peak is lost."""
    index = 0
    times = [second for second, _ in points]
    while index < len(points):
        end = max(index + 1, bisect_right(times, times[index] + width_s))
        best = max(range(index, end), key=lambda k: points[k][1])
        yield from dict.fromkeys((index, best, end - 1) if end - index > 3 else range(index, end))
        index = end


def _groups(one: Shown) -> Iterator[dict[str, Any]]:
    """The table by layer: of each storage module, tensor, shape, dtype, bytes, size, decision, reason and copies."""
    several = len(one.plans) > 1
    for plan, count in one.plans:
        each = f", each of {count} calls" if count > 1 else ""
        about = f"{plan.graph}{f' {plan.variant}' * bool(plan.variant)}{each}: " if several else ""
        layers: dict[str, list[Row]] = {}
        for row in single_rows(plan):
            path = row.paths[0]
            layers.setdefault(layer_of(path) or path.partition(".")[0] or "in no module", []).append(row)
        for layer, rows in layers.items():
            sums = totals(rows)
            amounts = [[action, format_bytes(sums[action][1])] for action in reversed(ACTIONS) if sums[action][0]]
            nbytes = sum(row.nbytes for row in rows)
            yield {
                "name": f"{about}{layer}", "bytes": nbytes, "size": format_bytes(nbytes), "amounts": amounts,
                "rows": [
                    [row.module, row.tensor, row.shape, row.dtype, row.nbytes, row.size, row.action, row.why, row.overlaps[0]]
                    for row in rows
                ],
            }  # fmt: skip
