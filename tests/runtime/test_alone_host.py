"""A host that does not keep up with a graph that is planned alone: seen in a few runs, and said once."""

from __future__ import annotations

import pytest
from lazy import LazyStreams, clean_slate

from graphoffload.compiler.looks import LOOKS
from graphoffload.runtime.step.pace import Issued, Pace
from tests.runtime.stepping import Moment, assert_equal
from tests.runtime.test_step_host import RUN, Streams
from tests.runtime.whole import budget_of, lazy, now, plain, step, whole

__all__ = ["clean_slate", "lazy"]

SLOW = Issued(step_s=2.0, host_s=2.0, idle=1.0, ran_s=2.0, issued_s=1.9)
"""No planned step of these models takes as long."""


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Issued]:
    """What looks find, again and again."""
    seen = [SLOW]
    monkeypatch.setattr(Pace, "found", lambda _: seen[0])
    return seen


def said(lazy: LazyStreams, capfd: pytest.CaptureFixture[str], share: float = 0.6, steps: int = 12) -> list[str]:
    """The lines about the host in some steps, whose gradients are right."""
    expected, _ = step(plain(), lazy)
    capfd.readouterr()
    model = whole(device_budget=budget_of(share))
    for _ in range(steps):
        assert_equal(step(model, lazy)[0], expected)
    return [line for line in capfd.readouterr().err.splitlines() if "the host is the limit" in line]


def test_a_slow_host_is_said_once(lazy: LazyStreams, found: list[Issued], capfd: pytest.CaptureFixture[str]) -> None:
    (line,) = said(lazy, capfd)
    planned_ms = 1e3 * now().prediction.predicted_time_s
    assert f"takes 1900.0 ms to issue a forward and backward that were predicted to take {planned_ms:.1f} ms" in line
    assert 'mode="reduce-overhead"' in line


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param(SLOW._replace(ran_s=0.0), id="as fast as predicted"),
        pytest.param(SLOW._replace(issued_s=1.0), id="the device is the limit"),
        pytest.param(SLOW._replace(step_s=9.0, host_s=9.0, ran_s=0.0, issued_s=0.0), id="a slow loss between"),
    ],
)
def test_nothing_is_said(seen: Issued, lazy: LazyStreams, found: list[Issued], capfd: pytest.CaptureFixture[str]) -> None:
    found[0] = seen
    assert not said(lazy, capfd)


def test_a_plan_that_keeps_all_slows_nothing(lazy: LazyStreams, found: list[Issued], capfd: pytest.CaptureFixture[str]) -> None:
    assert not said(lazy, capfd, share=2.0)
    assert not now().changes_anything


def test_few_runs_say_nothing(lazy: LazyStreams, found: list[Issued], capfd: pytest.CaptureFixture[str]) -> None:
    """Two are recorded, and the line comes where a run begins after those that are looked at."""
    assert not said(lazy, capfd, steps=LOOKS + 2)
    assert said(lazy, capfd, steps=LOOKS + 4)


def test_what_lies_between_forward_and_backward_is_no_part() -> None:
    pace = Pace(Streams(*(Moment(at) for at in (1.0, 3.0, 9.0, 14.0))))
    for kind, call in RUN:
        pace.mark(kind, call)
    found = pace.found()
    assert found is not None
    assert found.step_s == pytest.approx(13e-3)
    assert found.ran_s == pytest.approx(7e-3)
    assert 0.0 < found.issued_s < found.host_s


def test_another_plan_is_looked_at_afresh(lazy: LazyStreams, found: list[Issued], capfd: pytest.CaptureFixture[str]) -> None:
    """A loss that breaks the budget has the graph planned again: it is the second plan that is spoken of."""
    expected, _ = step(plain(), lazy)
    taken = budget_of(1.0) - budget_of(0.0)
    model = whole(device_budget=budget_of(0.8))
    for _ in range(12):
        assert_equal(step(model, lazy, taken)[0], expected)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "the host is the limit" in line]
    assert f"{1e3 * now().prediction.predicted_time_s:.1f} ms, so" in line
