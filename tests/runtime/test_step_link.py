"""Copies that are slower than planned: timed in one run, and a reason to plan again where the step takes longer for it."""

from __future__ import annotations

import itertools

import pytest
from lazy import LazyStreams, afresh, clean_slate, once

import graphoffload
from graphoffload.compiler import step_link
from graphoffload.runtime.streams.copy_times import LARGE_BYTES, CopyTimes
from tests.runtime.stepping import Model, Moment, batch, budget_at, lazy, plan_now, step, trained

__all__ = ["afresh", "clean_slate", "lazy", "once"]

RATE = 1e9
STEPS = 18


def test_the_rate_that_half_of_the_bytes_reach() -> None:
    """One disturbed copy does not count, however long it takes; a direction without copies has no rate."""
    times = CopyTimes()
    for begin, took in ((0.0, 1.0), (1.0, 1.0), (2.0, 50.0), (52.0, 0.5), (60.0, 0.0)):
        times.note("d2h", 10**7, Moment(begin), Moment(begin + took))
    assert times.rates(0.0) == {"d2h": pytest.approx(1e10)}
    assert times.rates(0.5e-3) == {"d2h": pytest.approx(2e10)}, "beside a copy's latency"


def test_copies_that_still_run_have_no_rate_yet() -> None:
    times, end = CopyTimes(), Moment(2.0, reached=False)
    times.note("h2d", 10**7, Moment(0.0), end)
    assert times.rates(0.0) is None
    end.reached = True
    assert times.rates(0.0) == {"h2d": pytest.approx(5e9)}


def test_small_copies_and_endless_ones_are_not_timed() -> None:
    times = CopyTimes()
    assert not times.wants(LARGE_BYTES - 1)
    for _ in itertools.takewhile(times.wants, itertools.repeat(LARGE_BYTES)):
        times.note("d2h", LARGE_BYTES, Moment(0.0), Moment(1.0))
    assert len(times._copies) == 4096


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What each look finds."""
    found = {"d2h": RATE, "h2d": RATE}
    monkeypatch.setattr(CopyTimes, "rates", lambda *_: found)
    return found


def train(capfd: pytest.CaptureFixture[str], share: float = 0.5, steps: int = STEPS) -> tuple[Model, list[str]]:
    return trained(capfd, steps, share, RATE)


def planned_s() -> float:
    plan = plan_now()
    assert plan is not None
    assert plan.solution.timeline.host_bytes
    return plan.solution.timeline.time_s


@pytest.mark.parametrize("way", ["d2h", "h2d"])
def test_slow_copies_are_planned_for(
    way: str, lazy: LazyStreams, rates: dict[str, float], capfd: pytest.CaptureFixture[str]
) -> None:
    """Once: the plan that follows has these rates, and its own copies are as fast as it says."""
    rates[way] = 0.2 * RATE
    _, lines = train(capfd)
    assert len(lines) == 1
    said = {"d2h": "copies ran at 0.2 GB/s to the host and 1.0 back", "h2d": "copies ran at 1.0 GB/s to the host and 0.2 back"}
    assert lines[0].endswith(f"planned again: {said[way]}, not at 1.0 and 1.0")
    assert lazy.times is None


@pytest.mark.parametrize("factor", [0.97, 1.0, 3.0])
def test_copies_as_fast_as_planned_are_no_reason(
    factor: float, lazy: LazyStreams, rates: dict[str, float], capfd: pytest.CaptureFixture[str]
) -> None:
    rates.update(d2h=factor * RATE, h2d=factor * RATE)
    assert train(capfd)[1] == []
    assert lazy.times is None


@pytest.mark.parametrize(("disturbed", "said"), [(2, "0.9 GB/s to the host and 0.9"), (3, "0.1 GB/s to the host and 0.1")])
def test_copies_that_are_far_slower_are_timed_again(
    disturbed: int, said: str, lazy: LazyStreams, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process takes turns on the device. The fastest of three runs counts."""
    monkeypatch.setattr(step_link, "_WORTH", -1.0)
    found = itertools.chain([0.1 * RATE] * disturbed, itertools.repeat(0.9 * RATE))
    monkeypatch.setattr(CopyTimes, "rates", lambda *_: dict.fromkeys(("d2h", "h2d"), next(found)))
    _, lines = train(capfd, steps=STEPS)
    assert len(lines) == 1
    assert f"copies ran at {said} back" in lines[0]
    assert lazy.times is None


def test_slow_copies_that_cost_nothing_are_no_reason(
    lazy: LazyStreams, rates: dict[str, float], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_link, "_WORTH", 10.0)
    rates.update(d2h=0.5 * RATE, h2d=0.5 * RATE)
    assert train(capfd)[1] == []


@pytest.mark.parametrize(("empty", "again"), [(3, 1), (4, 0)])
def test_a_run_that_says_nothing_is_followed_by_another(
    empty: int, again: int, lazy: LazyStreams, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One without large copies both ways, up to four times."""
    found = itertools.chain([{"d2h": 1.0}] * empty, itertools.repeat({"d2h": 0.2 * RATE, "h2d": 0.2 * RATE}))
    monkeypatch.setattr(CopyTimes, "rates", lambda *_: next(found))
    assert len(train(capfd)[1]) == again
    assert lazy.times is None


def test_rates_that_change_all_the_time_are_followed_twice(
    lazy: LazyStreams, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    falling = (RATE / 2**look for look in itertools.count(1))
    monkeypatch.setattr(CopyTimes, "rates", lambda *_: dict.fromkeys(("d2h", "h2d"), next(falling)))
    assert len(train(capfd, steps=24)[1]) == 2


def test_what_was_learnt_holds_for_another_goal(
    lazy: LazyStreams, rates: dict[str, float], capfd: pytest.CaptureFixture[str]
) -> None:
    rates.update(d2h=0.2 * RATE, h2d=0.2 * RATE)
    model, lines = train(capfd)
    assert len(lines) == 1
    slow_s = planned_s()
    graphoffload.set_budget(budget_at(0.6))
    step(model, batch())
    graphoffload.set_budget(budget_at(0.5))
    for _ in range(STEPS):
        step(model, batch())
    assert planned_s() == pytest.approx(slow_s)


def test_a_step_that_copies_nothing_is_not_timed(
    lazy: LazyStreams, rates: dict[str, float], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[CopyTimes] = []
    monkeypatch.setattr(step_link, "CopyTimes", lambda: asked.append(CopyTimes()))
    rates.update(d2h=1.0, h2d=1.0)
    assert train(capfd, share=2.0)[1] == []
    assert asked == []
