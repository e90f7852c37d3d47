"""A long run of planned steps on lazy streams: losses equal to the bit to those of synchronous copies and of plain compiled
blocks, and nothing grows. tests/gpu/test_step_soak.py is the same with streams and real memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from lazy import LazyStreams, clean_slate, lazy_steps, once
from soaking import EVENTS, PLENTY, Course, Log, assert_flat, build, run
from torch import Tensor

import graphoffload
from graphoffload.runtime import twin_copies
from graphoffload.runtime.offloaded_tensors import OffloadedTensor
from graphoffload.runtime.pinned import pool, window
from graphoffload.runtime.step.calls import StepRun

__all__ = ["clean_slate", "once"]

OPTIONS: dict[str, Any] = {
    "device_budget": PLENTY, "reserve": 0, "inner": "aot_eager", "hardware": "h200-sxm", "min_tensor_bytes": 1
}  # fmt: skip
LONG = Course(steps=150, rows=(24, 32, 48, 64), shares=(0.02, 0.4), rounds=3, every=4, looks=8, blocks=4, width=32)
SHORT = dataclasses.replace(LONG, steps=32, rows=(32, 48), shares=(0.1,), rounds=2, looks=2, blocks=3)
RESIDENT_BYTES = 32 * 2**20


@pytest.fixture
def lazy() -> Iterator[LazyStreams]:
    with lazy_steps() as lazy:
        graphoffload.reset_stats()
        yield lazy


@functools.cache
def plain(course: Course) -> Log:
    return run(build(course, backend="aot_eager"), course, planned=False, books=False)


@pytest.mark.parametrize(
    ("course", "least"), [(SHORT, 1), pytest.param(LONG, 5, marks=pytest.mark.long)], ids=["short", "long"]
)
def test_a_run(lazy: LazyStreams, course: Course, least: int) -> None:
    """`least`: how often each event comes. The long one has more of all that the short one has."""
    model = build(course, backend="graphoffload", options=OPTIONS)
    log = run(model, course)
    assert log.happened["goal"] == course.rounds * len(course.goals)
    assert min(log.happened[event] for event in EVENTS) >= least
    assert log.refused == []
    stats = graphoffload.stats()
    assert stats["deferred"] > 100 * least
    assert stats["prefetch_hits"] > 20 * least
    assert stats["stays"] > 20 * least
    assert lazy.complaints == []
    assert_flat(log, course, slack_bytes=RESIDENT_BYTES)
    with twin_copies():
        twin = run(model, course, books=False)
    assert twin.losses == log.losses
    assert plain(course).losses == log.losses


def test_a_copy_that_is_not_waited_for_shows(lazy: LazyStreams) -> None:
    """A source is freed and written to while its copy is still to come."""
    expected = plain(SHORT).losses
    model = build(SHORT, backend="graphoffload", options=OPTIONS)
    assert run(model, SHORT).losses == expected
    original = OffloadedTensor.settle

    def careless(entry: OffloadedTensor, *, waited: bool = False) -> Tensor | None:
        return original(entry, waited=True)

    with mock.patch.object(OffloadedTensor, "settle", careless):
        found = run(model, SHORT, books=False).losses
        lazy.finish()
    assert found != expected
    lazy.complaints.clear()


def test_host_memory_that_goes_back_all_the_time(lazy: LazyStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of few steps: what a goal does not need goes, and the next one takes it again; no copy is lost."""
    for module in (window, pool):
        monkeypatch.setattr(module, "TURNS", 2)
    monkeypatch.setattr(window, "TURNS_IF_SHORT", 2)
    expected = plain(SHORT).losses
    before = graphoffload.host_memory()
    log = run(build(SHORT, backend="graphoffload", options=OPTIONS), SHORT)
    after = graphoffload.host_memory()
    assert log.losses == expected
    assert after.returned_bytes - before.returned_bytes > max(log.between("held", 0, SHORT.steps))
    assert after.allocations - before.allocations > 15


def test_runs_that_are_kept_show(lazy: LazyStreams) -> None:
    """Something holds a run after it is over."""
    held: list[StepRun] = []
    original = StepRun.finish

    def keeps(this: StepRun) -> None:
        held.append(this)
        original(this)

    model = build(SHORT, backend="graphoffload", options=OPTIONS)
    with mock.patch.object(StepRun, "finish", keeps):
        log = run(model, SHORT)
    with pytest.raises(AssertionError, match="StepRun grew"):
        assert_flat(log, SHORT, slack_bytes=RESIDENT_BYTES)
