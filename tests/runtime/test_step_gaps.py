"""Gaps between two calls of a recorded step: the device waits where one begins, so that a late host is no part of its time."""

from __future__ import annotations

from typing import Any

import pytest
from lazy import CPU, LazyStreams, afresh, clean_slate, once

from graphoffload.compiler import step_runs
from graphoffload.runtime.step.calls import STEPS, StepRun
from graphoffload.testing.lazy_streams import LazyTime
from tests.runtime.stepping import batch, budget_at, compiled, fresh, lazy, slow_link, step

__all__ = ["afresh", "clean_slate", "lazy", "once"]


def held_in_runs(lazy: LazyStreams, count: int) -> list[int]:
    """How often compute was held in each of the first runs of a model."""
    model, found = fresh(), list[int]()
    compiled(model, budget_at(0.5), hardware=slow_link(1e9))
    for _ in range(count):
        before = lazy.held
        step(model, batch())
        found.append(lazy.held - before)
    return found


def test_compute_is_held_at_the_gaps_of_recorded_runs(lazy: LazyStreams) -> None:
    first, second, *planned = held_in_runs(lazy, 4)
    run = STEPS.of(CPU)
    assert run is not None
    assert (first, second) == (0, 2 * len(run.calls)), "each forward and each backward ends with a gap; a first run compiles"
    assert planned == [0, 0]


def test_other_ranks_would_wait_as_well(lazy: LazyStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_runs, "default_group", lambda: (None, 0, 2))
    assert held_in_runs(lazy, 3) == [0, 0, 0]


@pytest.mark.parametrize("where", ["behind", "captured"])
def test_a_device_that_is_behind_and_a_capture_are_not_held(
    where: str, lazy: LazyStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LazyTime, "query", lambda _: where != "behind")
    lazy.captures = where == "captured"
    run: Any = StepRun(lazy, recording=True, holding=True)
    call = run.begin(0)
    run._mark("forward end", call)
    assert [mark.kind for mark in run.marks] == ["forward", "forward end"]
    assert lazy.held == 0


def test_runs_that_nothing_is_planned_from_are_not_held(lazy: LazyStreams) -> None:
    """Forwards whose backwards never come: each of them is recorded, and a device that is held would be slower for good."""
    model = fresh()
    compiled(model, budget_at(0.5), hardware=slow_link(1e9))
    for _ in range(6):
        model(batch())
    assert lazy.held == 0
