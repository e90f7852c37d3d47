"""The short table at the end of a call, and one line for each variant while it runs. GB are decimal, as in the benchmarks."""

from __future__ import annotations

from typing import Any

from graphoffload.bench.measure import Row
from graphoffload.bench.results import predictions_of


def gb(nbytes: float | None) -> str:
    """Decimal GB, "-" for what is not known."""
    return "-" if nbytes is None else f"{nbytes / 1e9:.3f}"


def number(value: float | None, form: str) -> str:
    """As `form` says, "-" for what is not known."""
    return "-" if value is None else format(value, form)


def progress_line(row: Row) -> str:
    """What just came out."""
    if not row.samples:
        return f"{row.variant}: {row.status}"
    interval = f" [{row.ratio_interval[0]:.4f}, {row.ratio_interval[1]:.4f}]" if row.ratio_interval else ""
    return (
        f"{row.variant}: {row.status}; {number(row.step_ms, '.1f')} ms, x{number(row.ratio, '.4f')}{interval}, "
        f"peak over static {gb(row.peak_bytes)} GB, in all {gb(row.total_bytes)} GB, "
        f"gradient error {number(row.gradient_error, '.2g')}, "
        f"first step {row.compile_s:.1f} s"
    )


HEADER = (
    "variant", "step ms", "+-", "x keep", "95 %", "host ms", "peak GB", "in all GB", "saved GB", "copied GB", "saved/copied",
    "pinned GB", "predicted GB, ms", "bound", "grad err", "twin err", "grad norm", "loss", "1st s", "status",
)  # fmt: skip


def _prediction(row: Row) -> tuple[str, str]:
    plans = row.ours.get("plans") or []
    if not plans:
        return "-", "-"
    time_ms = sum(prediction["predicted_time_s"] for prediction in predictions_of(plans)) * 1e3
    bounds = [plan["lower_bound_slowdown"] for plan in plans]
    return f"{gb(row.predicted_peak_bytes)}, {time_ms:.0f}", "-" if None in bounds else f"{max(bounds):+.3f}"


def _cells(row: Row, keep_peak: int | None) -> tuple[str, ...]:
    if not row.samples:
        return (row.variant, *("" for _ in HEADER[2:]), row.status)
    saved = None if keep_peak is None or row.peak_bytes is None else keep_peak - row.peak_bytes
    copied = row.ours.get("per_step", {}).get("d2h_bytes")
    share = f"{saved / copied:.4f}" if saved is not None and copied else "-"
    predicted, bound = _prediction(row)
    interval = f"{row.ratio_interval[0]:.4f}-{row.ratio_interval[1]:.4f}" if row.ratio_interval else "-"
    return (
        row.variant, number(row.step_ms, ".1f"), number(row.spread_ms, ".1f"), number(row.ratio, ".4f"), interval,
        number(row.host_ms, ".1f"), gb(row.peak_bytes), gb(row.total_bytes), gb(saved), gb(copied), share,
        gb(row.pinned_bytes), predicted, bound, number(row.gradient_error, ".2g"), number(row.ours.get("twin_error"), ".2g"),
        number(row.gradient_norm, ".6g"), number(row.loss, ".6g"), f"{row.compile_s:.0f}", row.status,
    )  # fmt: skip


def show_table(rows: list[Row], facts: dict[str, Any]) -> None:
    """Print all rows, columns aligned."""
    keep_peak = rows[0].peak_bytes if rows else None
    lines = [HEADER, *(_cells(row, keep_peak) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER) - 1)]
    noise = facts.get("eager_noise")
    print(
        f"\n{facts['model']} {facts.get('sizes', '')} on {facts.get('device', 'cpu')}, torch {facts['torch']}; "
        f"eager's gradient error {number(noise, '.2g')}, keep-all repeats to {number(facts.get('repeat_noise'), '.2g')}"
    )
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)) + "  " + line[-1])
