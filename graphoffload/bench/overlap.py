"""What ran at the same time, read from a profiler trace: kernels, copies to the host, copies from it.

timeline = profile(step, path="trace.json.gz")
timeline.d2h.overlap_with_compute_ms, timeline.h2d.gb_per_s
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

Interval = tuple[float, float]
SMALL_COPY_BYTES = 64 * 1024  # scalars and the like; not ours


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as disjoint intervals in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Total of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def common(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """Times in both of two lists of disjoint intervals in order."""
    found, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            found.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


@dataclass(frozen=True)
class Direction:
    """All copies of one direction. `gb_per_s` is over the time that at least one of them ran."""

    copies: int
    total_bytes: int
    busy_ms: float
    span_ms: float
    overlap_with_compute_ms: float
    pageable: int

    @property
    def gb_per_s(self) -> float:
        """Average bandwidth while copying, in 1e9 bytes a second."""
        return self.total_bytes / self.busy_ms / 1e6 if self.busy_ms else 0.0

    @property
    def span_gb_per_s(self) -> float:
        """Average from the first copy's start to the last one's end: gaps count, so this is what the link gave in all."""
        return self.total_bytes / self.span_ms / 1e6 if self.span_ms else 0.0


@dataclass(frozen=True)
class Timeline:
    """One profiled step. `compute_idle_ms`: no kernel ran between the first kernel's start and the last one's end."""

    kernels: int
    compute_busy_ms: float
    compute_span_ms: float
    both_directions_ms: float
    d2h: Direction
    h2d: Direction

    @property
    def compute_idle_ms(self) -> float:
        """Gaps between kernels: stalls, and launches that came late."""
        return self.compute_span_ms - self.compute_busy_ms

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON types."""
        rates = {
            name: {"gb_per_s": direction.gb_per_s, "span_gb_per_s": direction.span_gb_per_s}
            for name, direction in (("d2h", self.d2h), ("h2d", self.h2d))
        }
        return {**asdict(self), "compute_idle_ms": self.compute_idle_ms, "rates": rates}

    def lines(self) -> list[str]:
        """For people."""
        said = [
            f"compute busy {self.compute_busy_ms:.1f} ms in {self.compute_span_ms:.1f} ms, idle {self.compute_idle_ms:.1f} ms; "
            f"both directions at once {self.both_directions_ms:.1f} ms"
        ]
        for name, d in (("D2H", self.d2h), ("H2D", self.h2d)):
            said.append(
                f"{name}: {d.copies} copies, {d.total_bytes / 1e9:.3f} GB, busy {d.busy_ms:.1f} ms = "
                f"{d.gb_per_s:.1f} GB/s, first to last {d.span_ms:.1f} ms = {d.span_gb_per_s:.1f} GB/s, "
                f"beside kernels {d.overlap_with_compute_ms:.1f} ms" + (f", {d.pageable} PAGEABLE" if d.pageable else "")
            )
        return said


def _interval(event: dict[str, Any]) -> Interval:
    start = float(event["ts"]) / 1e3
    return start, start + float(event.get("dur", 0.0)) / 1e3


def _direction(events: list[dict[str, Any]], compute: list[Interval]) -> Direction:
    times = merged(_interval(event) for event in events)
    return Direction(
        copies=len(events),
        total_bytes=sum(int(event["args"].get("bytes", 0)) for event in events),
        busy_ms=length(times),
        span_ms=times[-1][1] - times[0][0] if times else 0.0,
        overlap_with_compute_ms=length(common(times, compute)),
        pageable=sum("Pageable" in event["name"] for event in events),
    )


def read_trace(trace: dict[str, Any]) -> Timeline:
    """The timeline in a Chrome trace as torch.profiler exports it. NCCL's kernels are communication, not compute."""
    complete = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    kernels = [event for event in complete if event.get("cat") == "kernel" and not event["name"].startswith("nccl")]
    compute = merged(_interval(event) for event in kernels)
    large = [
        event
        for event in complete
        if event.get("cat") == "gpu_memcpy" and int(event.get("args", {}).get("bytes", 0)) >= SMALL_COPY_BYTES
    ]
    sides = {name: [event for event in large if name in event["name"]] for name in ("DtoH", "HtoD")}
    busy = {name: merged(_interval(event) for event in events) for name, events in sides.items()}
    return Timeline(
        kernels=len(kernels),
        compute_busy_ms=length(compute),
        compute_span_ms=compute[-1][1] - compute[0][0] if compute else 0.0,
        both_directions_ms=length(common(busy["DtoH"], busy["HtoD"])),
        d2h=_direction(sides["DtoH"], compute),
        h2d=_direction(sides["HtoD"], compute),
    )


def profile(step: Callable[[], Any], path: str | Path | None = None) -> Timeline:
    """Run `step` once under the profiler (after one under it for warm-up); keeps the trace at `path` (".json.gz")."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities[-1:]):
        step()
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities[-1:]) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        text = file.read_text()
    if path is not None:
        with gzip.open(path, "wt", compresslevel=5) as out:
            out.write(text)
    return read_trace(json.loads(text))
