"""Copies and kernels run at the same time, in forward and in backward: read from a profiler trace. And the trace's reader."""

from __future__ import annotations

import pytest

from graphoffload.bench.midsize import Measured
from graphoffload.bench.overlap import common, length, merged, read_trace


def test_copies_run_beside_kernels(measured: Measured) -> None:
    """D2H is forward's, H2D backward's. Nearly all of their time must lie beside kernels."""
    timeline = measured.timeline
    assert timeline is not None
    said = "\n".join(timeline.lines())
    assert timeline.d2h.copies > 0, said
    assert timeline.h2d.copies == timeline.d2h.copies, said
    assert timeline.d2h.overlap_with_compute_ms >= 0.8 * timeline.d2h.busy_ms, said
    assert timeline.h2d.overlap_with_compute_ms >= 0.8 * timeline.h2d.busy_ms, said


def test_copies_are_from_pinned_memory_at_full_speed(measured: Measured) -> None:
    """PCIe 5 gives 55 GB/s; a pageable copy gives a fifth. Older links: half of that is still far above pageable."""
    timeline = measured.timeline
    assert timeline is not None
    said = "\n".join(timeline.lines())
    assert timeline.d2h.pageable == timeline.h2d.pageable == 0, said
    assert timeline.d2h.total_bytes == timeline.h2d.total_bytes == measured.copied_bytes, said
    assert timeline.d2h.gb_per_s >= 20, said
    assert timeline.h2d.gb_per_s >= 20, said


def test_reader_of_traces() -> None:
    """Two kernels, a D2H copy that starts in the first and ends between them, an H2D copy inside the second."""

    def event(cat: str, name: str, ts: float, dur: float, **args: int) -> dict[str, object]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}

    trace = {
        "traceEvents": [
            event("kernel", "gemm", 0, 1000),
            event("kernel", "gemm", 2000, 1000),
            event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 1000, 1000),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 500, 1000, bytes=10**6),
            event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 2100, 100, bytes=10**6),
            event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 2900, 1, bytes=8),
            {"ph": "M", "name": "process_name"},
        ]
    }
    timeline = read_trace(trace)
    assert (timeline.d2h.copies, timeline.h2d.copies, timeline.h2d.pageable) == (1, 1, 1)
    assert timeline.compute_idle_ms == pytest.approx(1.0)
    assert timeline.d2h.overlap_with_compute_ms == pytest.approx(0.5)
    assert timeline.d2h.gb_per_s == pytest.approx(1.0)
    assert length(common(merged([(0, 2), (1, 3)]), merged([(2, 5)]))) == 1
