"""What recorded runs say of a step: the time of a gap between two calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from graphoffload.compiler.step_facts import _gap, _Record, turn_of
from graphoffload.facts.limits import Limits
from graphoffload.planner.step.facts import Gap
from graphoffload.runtime.step.schedule import Mark
from graphoffload.torch_internals.allocator import Change

MB = 10**6
START, END = ("forward end", 0), ("forward", 1)


@dataclass(frozen=True)
class Moment:
    """An event of a compute stream."""

    ms: float

    def synchronize(self) -> None:
        """It is over."""

    def elapsed_time(self, later: Moment) -> float:
        """As torch.cuda.Event."""
        return later.ms - self.ms


def record(gap_ms: float, allocated_mb: int, peak_mb: int, changes: Sequence[Change] = ()) -> Any:
    """A run whose second call begins so long after the first one's end; memory rises to a peak meanwhile."""
    marks = [
        Mark(START[0], START[1], allocated_mb * MB, allocated_mb * MB, 0, Moment(5.0), time_us=0),
        Mark(END[0], END[1], allocated_mb * MB, peak_mb * MB, 0, Moment(5.0 + gap_ms), time_us=9),
    ]
    return _Record(SimpleNamespace(marks=marks, changes=changes, calls=[None, None]))  # type: ignore[arg-type]


def test_a_gap_is_the_shortest_with_the_highest_peak_of_any_run() -> None:
    """The last run page-locked memory in it, the first one took most memory."""
    records = [record(3.0, 10, 40), record(14.0, 10, 20)]
    assert _gap(records, START, END, Limits()) == Gap(0.003, 40 * MB)
    assert _gap(records[1:], START, END, Limits()) == Gap(0.014, 20 * MB)


def test_where_allocations_were_recorded_they_are_what_counts() -> None:
    """In the gaps of a first run other graphs are compiled, and their kernels timed on tensors of their own."""
    seen = record(3.0, 10, 40, [Change(2, 5 * MB), Change(3, -5 * MB), Change(4, 7 * MB), Change(5, -7 * MB)])
    assert _gap([record(3.0, 10, 280), seen], START, END, Limits()) == Gap(0.003, 17 * MB)
    assert _gap([record(3.0, 10, 280)], START, END, Limits()) == Gap(0.003, 280 * MB)


def test_zeros_for_outputs_without_a_gradient_are_in_a_backwards_peak_once() -> None:
    """They count where backward begins, and are allocated right after that: 20 MB, 7 of zeros, and 5 in the middle."""
    moments = [("forward", 10, 0), ("forward end", 20, 0), ("backward", 27, 7), ("backward end", 15, 0)]
    marks = [
        Mark(kind, 0, allocated * MB, 0, 8 * MB, Moment(0.0), time_us=10 * at, soon_bytes=soon * MB)
        for at, (kind, allocated, soon) in enumerate(moments)
    ]
    changes = [Change(21, 7 * MB), Change(22, 5 * MB), Change(23, -5 * MB), Change(24, -12 * MB)]
    call = SimpleNamespace(output_bytes={0: 4 * MB, 1: 7 * MB})
    turn = turn_of(SimpleNamespace(marks=marks, changes=changes, calls=[call]))  # type: ignore[arg-type]
    assert turn is not None
    assert turn.backward_peak_bytes == 32 * MB
    assert turn.peak_bytes == 27 * MB
    dropped = turn_of(SimpleNamespace(marks=marks[:3], changes=[], calls=[call]))  # type: ignore[arg-type]
    assert dropped is not None
    assert dropped.backward_peak_bytes == 0, "it did not end"


def test_no_gap_before_the_first_call() -> None:
    assert _gap([record(3.0, 10, 40)], None, END, Limits()) == Gap()
