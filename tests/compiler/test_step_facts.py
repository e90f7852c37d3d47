"""What recorded runs say of a step: the time of a gap between two calls."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from graphoffload.compiler.step_facts import _gap, _Record
from graphoffload.facts.limits import Limits
from graphoffload.planner.step.facts import Gap
from graphoffload.runtime.step.schedule import Mark

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


def record(gap_ms: float, allocated_mb: int, peak_mb: int) -> Any:
    """A run whose second call begins so long after the first one's end; memory rises to a peak meanwhile."""
    marks = [
        Mark(START[0], START[1], allocated_mb * MB, allocated_mb * MB, 0, Moment(5.0)),
        Mark(END[0], END[1], allocated_mb * MB, peak_mb * MB, 0, Moment(5.0 + gap_ms)),
    ]
    return _Record(SimpleNamespace(marks=marks, changes=[], calls=[None, None]))  # type: ignore[arg-type]


def test_a_gap_is_the_shortest_with_the_highest_peak_of_any_run() -> None:
    """The last run page-locked memory in it, the first one took most memory."""
    records = [record(3.0, 10, 40), record(14.0, 10, 20)]
    assert _gap(records, START, END, Limits()) == Gap(0.003, 40 * MB)
    assert _gap(records[1:], START, END, Limits()) == Gap(0.014, 20 * MB)


def test_no_gap_before_the_first_call() -> None:
    assert _gap([record(3.0, 10, 40)], None, END, Limits()) == Gap()
