"""The plan table, and the line that every plan prints.

    module            tensor    shape      dtype   n      size  decision   why
    layers.0-7.mlp    mm_2-9    8x64x256   bf16    8  1.00 MiB  offload    2.43 + 2.42 ms of copies, hidden
    9 more tensors of less than min_tensor_bytes=1.00 MiB stay: 2.20 MiB together

Identical layers fold into one row: storages whose module paths differ only in numbers, with the same operation, shape, dtype,
decision and reason. A folded row shows the range of every number ("0-7"), the number of storages and the sum of their bytes;
folding drops no byte. In "layers.0-3.experts.0-7" the ranges are independent: the count may be below their product.
A table that is not compact has a row for small tensors too, whole names, and the operations that run during the copies.

Text is plain ASCII of a fixed width, so that it can be compared, logged and diffed.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphoffload.facts.plan import Action, Plan, Transfer
from graphoffload.facts.refusals import least_of
from graphoffload.facts.saved_tensors import SavedTensor
from graphoffload.units import format_bytes

ACTIONS: tuple[Action, ...] = ("keep", "recompute", "offload")
_STYLES = {"keep": "blue", "recompute": "green", "offload": "yellow"}
_DTYPES = {"bfloat16": "bf16", "float": "f", "uint": "u", "int": "i", "complex": "c"}
_BOX = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
_NUMBER = re.compile(r"\d+")
_NAME = 24  # characters of a tensor's name in a compact table


@dataclass(slots=True)
class Row:
    """One line of the table: `count` storages of `nbytes` together. `about`: storages whose size changes, counted as in the
    call that was compiled. `symbolic`: storages without a size (counted as 0 bytes)."""

    action: Action
    op: str
    shape: str
    dtype: str
    why: str
    paths: list[str] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)
    overlaps: list[str] = field(default_factory=list)
    nbytes: int = 0
    about: int = 0
    symbolic: int = 0

    @property
    def count(self) -> int:
        """Storages in this row."""
        return len(self.tensors)

    @property
    def module(self) -> str:
        """Module path with the range of every number, such as "layers.0-7.mlp"; "-" when unknown."""
        return _fold_paths(self.paths) or "-"

    @property
    def tensor(self) -> str:
        """Node names, folded like the module path; first and last if they differ in more than numbers."""
        if len({_NUMBER.sub("#", name) for name in self.tensors}) == 1:
            return _fold_paths(self.tensors)
        return f"{self.tensors[0]}..{self.tensors[-1]}"

    @property
    def size(self) -> str:
        """Bytes of all storages; "~" if they change, "+" if some are unknown."""
        if self.symbolic == self.count:
            return format_bytes(None)
        return "~" * bool(self.about) + format_bytes(self.nbytes) + "+" * bool(self.symbolic)

    @property
    def least(self) -> str:
        """The min_tensor_bytes that keeps these storages; "" where something else does."""
        return least_of(self.why) if self.action == "keep" else ""

    @property
    def overlaps_with(self) -> str:
        """Nodes at the ends of the first storage's copies; "e.g." if the others have different ones."""
        return self.overlaps[0] if len(set(self.overlaps)) == 1 else f"e.g. {self.overlaps[0]}"


def folded_rows(plans: Sequence[Plan]) -> list[Row]:
    """Rows of the table over the plans of one or several graphs, in the order of first production.

    Every storage of every plan is in exactly one row. A decision on a tensor that the plan's table does not hold is a row
    without a shape and with no bytes.
    """
    rows: dict[tuple[str, ...], Row] = {}
    for one in (row for plan in plans for row in single_rows(plan)):
        key = (_NUMBER.sub("#", one.paths[0]), one.op, one.shape, one.dtype, one.action, one.why)
        row = rows.setdefault(key, Row(one.action, one.op, one.shape, one.dtype, one.why))
        row.paths += one.paths
        row.tensors += one.tensors
        row.overlaps += one.overlaps
        row.nbytes += one.nbytes
        row.about += one.about
        row.symbolic += one.symbolic
    return list(rows.values())


def single_rows(plan: Plan) -> Iterator[Row]:
    """A row for every storage of a plan, as `folded_rows` has them before they are folded."""
    decided = {decision.name: decision for decision in plan.decisions}
    transfers = {transfer.tensor: transfer for transfer in plan.transfers}
    known = {tensor.name for tensor in plan.saved.tensors}
    strays = (
        SavedTensor(name=name, views=(), nbytes=None, dtype="", shape=("?",), strides=(), op="")
        for name in decided
        if name not in known
    )
    for tensor in (*plan.saved.tensors, *strays):
        decision = decided.get(tensor.name)
        action: Action = decision.action if decision else "keep"
        why = decision.reason if decision else "the plan does not mention it"
        yield Row(
            action,
            tensor.op,
            _shape(tensor.shape),
            _dtype(tensor.dtype),
            why,
            paths=[tensor.module],
            tensors=[tensor.name],
            overlaps=[_overlaps_with(transfers.get(tensor.name)) if action == "offload" else ""],
            nbytes=tensor.planned_bytes,
            about=int(tensor.nbytes is None and tensor.example_bytes > 0),
            symbolic=int(tensor.nbytes is None and not tensor.example_bytes),
        )


def plan_table(plan: Plan, *, width: int = 128, color: bool = False, compact: bool = True) -> str:
    """The whole plan as text: a row for every group of like tensors, totals per decision, notes and the summary line.

    Args:
        plan: decisions for one graph.
        width: characters a line; longer cells wrap.
        color: with ANSI colours; without them the text depends on nothing but the other arguments.
        compact: with one line for all tensors that are below min_tensor_bytes, and names in few characters.
    """
    return table_of([plan], width=width, color=color, compact=compact)


def summary_line(
    plan: Plan, *, device_bytes: int | None = None, budget_bytes: int | None = None, reserved_for: str = "", hint: str = ""
) -> str:
    """The line about a plan, also if it changes nothing. Its peaks include the reserve.

    Args:
        plan: decisions for one graph; its own `summary` is not read.
        device_bytes: memory of the device, for "31.2 of 139.0 GiB"; None when unknown.
        budget_bytes: the budget that was given, for "9.93 of 10.0 GiB budget"; None without one.
        reserved_for: purpose of the reserve; "" if only the user knows it.
        hint: the effect of another option, such as "max_slowdown=0.01 would save 13 GiB".
    """
    predicted, amounts = plan.prediction, totals(folded_rows([plan]))
    peak_bytes = predicted.with_reserve(predicted.predicted_peak_bytes)
    peak = _peak(peak_bytes, device_bytes if budget_bytes is None else budget_bytes)
    device = ""
    if budget_bytes is not None:
        peak += " budget" * bool(peak)
        device = f"device {format_bytes(device_bytes)}" if device_bytes is not None else ""
    ends = [*_caveats(plan, reserved_for), hint]
    words: dict[Action, str] = {"offload": "offloads", "recompute": "recomputes"}
    done = [f"{word} {_amount(*amounts[action])}" for action, word in words.items() if amounts[action][0]]
    if not done:
        count, nbytes, _ = amounts["keep"]
        line = f"{peak}{f' ({device})' * bool(device)}: kept all"
        if not peak:
            line = f"kept all {format_bytes(nbytes)} in {_tensors(count)}; no peak predicted"
        return "; ".join(filter(None, [line, *ends]))
    parts = [*done, f"keeps {format_bytes(amounts['keep'][1])}"]
    least = predicted.with_reserve(predicted.lower_bound_peak_bytes or 0)
    keep = f"keep-all {format_bytes(predicted.with_reserve(predicted.keep_peak_bytes))}"
    against = [keep, f"bound {format_bytes(least)}" if least else "", device]
    costs = [f"{peak} ({', '.join(filter(None, against))})" if peak else "no peak predicted"]
    if predicted.keep_time_s and predicted.predicted_time_s:
        costs.append(f"slowdown {percent(predicted.predicted_slowdown)}{bound(predicted.lower_bound_slowdown)}")
    else:
        costs.append("no time predicted")
    return "; ".join(filter(None, [f"{', '.join(parts)}: {', '.join(costs)}", *ends]))


def _caveats(plan: Plan, reserved_for: str) -> list[str]:
    """What the peak in a plan's line includes, and what it does not."""
    if not plan.prediction.predicted_peak_bytes:
        return []
    reserve = plan.prediction.reserve_bytes
    reserved = f"{format_bytes(reserve)} of the peak are reserved{f' for {reserved_for}' * bool(reserved_for)}"
    caveats = [reserved] * bool(reserve) + ["the peak is this graph's alone, one of several"] * plan.part
    if plan.turn_bytes:
        caveats.append(f"{format_bytes(plan.turn_bytes)} are for eager code between forward and backward, such as a loss")
    return caveats + ["only if nothing keeps the model's outputs"] * (not plan.outputs_held)


def table_of(
    plans: Sequence[Plan], *, width: int = 128, color: bool = False, summary: bool = True, compact: bool = True
) -> str:
    """One table for `plans` of identical graphs; see plan_table. summary: with their lines."""
    rows, first = folded_rows(plans), plans[0]
    name = f"graph {first.graph}" + f", variant {first.variant}" * bool(first.variant)
    title = name if len(plans) == 1 else f"{len(plans)} identical graphs, {first.graph} .. {plans[-1].graph}"
    key = f"key {first.key[:12]}, " if len(plans) == 1 and first.key else ""
    summaries = list(dict.fromkeys(plan.summary or summary_line(plan) for plan in plans))
    if not summary:
        summaries = []
    elif len(summaries) > 2:
        summaries = [f"first: {summaries[0]}", f"last: {summaries[-1]}"]
    shown = [row for row in rows if not (compact and row.least)]
    lines = [*_small_lines(rows if compact else ()), "", *total_lines(totals(rows)), ""]
    lines += ["notes", *(f"  - {note}" for note in first.notes), ""] if first.notes else []
    console = Console(
        file=io.StringIO(), width=width, force_terminal=color, color_system="standard" if color else None, _environ={},
        force_jupyter=False, legacy_windows=False, markup=False, emoji=False, highlight=False,
    )  # fmt: skip
    with console.capture() as capture:
        device = first.device + (f", planned for {first.hardware}" if first.hardware else "")
        console.print(Text(f"{title} ({key}{device}): {_tensors(sum(row.count for row in rows))} saved for backward"))
        if shown:
            console.print(_rich_table(shown, width, compact))
        for line in (*lines, *summaries):
            console.print(Text(line))
    return "\n".join(line.rstrip() for line in capture.get().splitlines()).rstrip("\n") + "\n"


def _small_lines(rows: Sequence[Row]) -> list[str]:
    """What stays since it is small, one line for each bound."""
    small: dict[str, list[Row]] = {}
    for row in rows:
        if row.least:
            small.setdefault(row.least, []).append(row)
    found = []
    for least, kept in small.items():
        count, nbytes, _ = totals(kept)["keep"]
        more, together = " more" * (len(kept) < len(rows)), " together" * (count != 1)
        found.append(
            f"{count}{more} tensor{'s' * (count != 1)} of less than min_tensor_bytes={least} stay{'s' * (count == 1)}: "
            f"{format_bytes(nbytes)}{together}"
        )
    return found


def _rich_table(rows: Sequence[Row], width: int, compact: bool) -> Table:
    """The rows as a rich table. Names and reasons wrap, at dots and underscores too; figures never do."""
    columns: dict[str, list[str]] = {
        "module": [row.module for row in rows],
        "tensor": [_short(row.tensor) if compact else row.tensor for row in rows],
        "shape": [row.shape for row in rows],
        "dtype": [row.dtype for row in rows],
        "n": [str(row.count) for row in rows],
        "size": [row.size for row in rows],
        "decision": [str(row.action) for row in rows],
        "why": [row.why for row in rows],
    }
    if not compact:
        columns["overlaps with"] = [row.overlaps_with for row in rows]
    widths = _widths(columns, width)
    table = Table(box=_BOX, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, overflow="fold", width=widths[name], justify="right" if name in ("n", "size") else "left")
    for row, cells in zip(rows, zip(*columns.values(), strict=True), strict=True):
        styles = {"decision": _STYLES[row.action]}
        table.add_row(*(Text(_wrap(c, widths[n]), style=styles.get(n, "")) for n, c in zip(columns, cells, strict=True)))
    return table


def _widths(columns: dict[str, list[str]], width: int) -> dict[str, int]:
    """Characters for each column: its need; then wide columns shrink, the widest first, until the table fits."""
    widths = {name: max(len(cell) for cell in (name, *cells)) for name, cells in columns.items()}
    wide = ("module", "tensor", "shape", "why", "overlaps with")
    spare = width - 2 * (len(columns) - 1) - sum(widths.values())
    while spare < 0:
        widest = max((name for name in wide if name in widths), key=lambda name: widths[name])
        if widths[widest] <= 12:
            break
        widths[widest] -= 1
        spare += 1
    return widths


def _wrap(text: str, width: int) -> str:
    """Lines of at most `width` characters, broken at spaces, longer words after dots, else after underscores and commas."""
    pieces = [text]
    for pattern in (r"\S+\s*|\s+", r"[^.]+\.*|\.+", r"[^_,]+[_,]*|[_,]+"):
        pieces = [p for piece in pieces for p in ([piece] if len(piece.rstrip()) <= width else re.findall(pattern, piece))]
    lines, line = [], ""
    for piece in pieces:
        if len((line + piece).rstrip()) > width and line:
            lines.append(line.rstrip())
            line = ""
        line += piece
        while len(line.rstrip()) > width:
            lines.append(line[:width])
            line = line[width:]
    return "\n".join([*lines, line.rstrip()])


def totals(rows: Iterable[Row]) -> dict[Action, tuple[int, int, int]]:
    """(storages, bytes, of unknown size) for each decision."""
    sums: dict[Action, tuple[int, int, int]] = dict.fromkeys(ACTIONS, (0, 0, 0))
    for row in rows:
        count, nbytes, symbolic = sums[row.action]
        sums[row.action] = (count + row.count, nbytes + row.nbytes, symbolic + row.symbolic)
    return sums


def total_lines(sums: dict[Action, tuple[int, int, int]]) -> list[str]:
    """Totals as text, one line a decision."""
    return [f"{action:<9} {_amount(*sums[action])}" for action in ACTIONS]


def _amount(count: int, nbytes: int, symbolic: int) -> str:
    unknown = f" ({symbolic} of symbolic size not counted)" if symbolic else ""
    return f"{format_bytes(nbytes)} in {_tensors(count)}{unknown}"


def _tensors(count: int) -> str:
    return f"{count} tensor" if count == 1 else f"{count} tensors"


def _peak(peak_bytes: int, limit_bytes: int | None) -> str:
    """ "predicted peak 31.2 of 139.0 GiB", or "" without a prediction."""
    if not peak_bytes:
        return ""
    peak = format_bytes(peak_bytes)
    if limit_bytes is None:
        return f"predicted peak {peak}"
    limit = format_bytes(limit_bytes)
    number, unit = peak.split()
    return f"predicted peak {number if limit.endswith(f' {unit}') else peak} of {limit}"


def percent(fraction: float) -> str:
    """ "+0.4 %"; two digits below 0.1 %."""
    percent = round(fraction * 100.0, 2) + 0.0
    return f"{percent:+.1f} %" if percent == 0.0 or abs(percent) >= 0.1 else f"{percent:+.2f} %"


def bound(slowdown: float | None) -> str:
    """ " (bound +0.1 %)"; "" without one."""
    return "" if slowdown is None else f" (bound {percent(slowdown)})"


def _short(name: str) -> str:
    """A tensor's name in few characters: how it begins, and its first and last number."""
    if len(name) <= _NAME:
        return name
    end = (re.search(r"\d[\d,.-]*$", name) or re.search(r".{0,8}$", name))[0]  # type: ignore[index]
    end = f"{end.partition(',')[0]},..,{end.rpartition(',')[2]}" if end.count(",") > 1 else end
    return f"{name[: max(_NAME - 2 - len(end), 4)]}..{end}"


def _shape(shape: tuple[int | str, ...]) -> str:
    return "x".join(str(size) for size in shape) or "()"


def _dtype(dtype: str) -> str:
    """ "bf16" for "torch.bfloat16"."""
    name = dtype.removeprefix("torch.")
    for long, short in _DTYPES.items():
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name


def _overlaps_with(transfer: Transfer | None) -> str:
    """Operations that run during the copies: forward from the producer (or a node named) to release, backward from reload to
    wait."""
    if transfer is None:
        return "no transfer planned"
    start = "" if transfer.offload_after == transfer.tensor else f"{transfer.offload_after} "
    return f"fwd {start}to {transfer.release_after or 'end'}, bwd {transfer.reload_before} to {transfer.wait_before}"


def _fold_paths(paths: Sequence[str]) -> str:
    """Module paths that differ only in numbers as one: ["layers.0.mlp", "layers.1.mlp"] -> "layers.0-1.mlp"."""
    split = [re.split(r"(\d+)", path) for path in dict.fromkeys(paths)]
    return "".join(
        _ranges({int(parts[place]) for parts in split}) if place % 2 else split[0][place] for place in range(len(split[0]))
    )


def _ranges(numbers: set[int]) -> str:
    """ "0-3,5"; "1,3,..,79" when that would get long."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    return ",".join(texts if len(texts) <= 4 else [*texts[:2], "..", texts[-1]])
