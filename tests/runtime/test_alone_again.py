"""A graph that is planned alone is planned again: for what came beside it, what went, and what was missing."""

from __future__ import annotations

import pytest
from lazy import LazyStreams, clean_slate

import graphoffload
from graphoffload.compiler import alone, device_limits, step_again
from graphoffload.compiler.device_limits import resolve_limits
from graphoffload.compiler.outside import LATEST
from graphoffload.compiler.step_runs import _plan_alone_with_less
from tests.runtime.stepping import assert_equal
from tests.runtime.whole import CONFIG, budget_of, graph, inputs, lazy, now, plain, step, whole

__all__ = ["clean_slate", "lazy"]


def gap() -> int:
    """Between the least peak and that of keep-all."""
    return budget_of(1.0) - budget_of(0.0)


@pytest.fixture
def unmade(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """State that an optimizer is still to make, as a list of one number; and every byte counts."""
    monkeypatch.setattr(step_again, "_SAME_BYTES", 1)
    monkeypatch.setattr(step_again, "_SAME_SHARE", 0)
    state = [gap() // 2]
    monkeypatch.setattr(device_limits, "_reserve", lambda *_: state[0])
    return state


def counted() -> int:
    """How much of an optimizer's state the present plan has, as reserved or as there."""
    limits = graph().own.limits
    return limits.reserve_bytes + limits.static_bytes - graph().own.graph.limits.static_bytes


def test_memory_outside_that_grows_is_planned_with(lazy: LazyStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as gradients that a second microbatch finds, or a copy of the parameters; what grows without end is given up."""
    monkeypatch.setattr(step_again, "_SAME_BYTES", 1)
    budget, grown = budget_of(0.9), (budget_of(1.0) - budget_of(0.0)) // 2
    expected, _ = step(plain(), lazy)
    model = whole(device_budget=budget)
    for _ in range(3):
        step(model, lazy)
    first = now()
    step(model, lazy, more=grown)
    step(model, lazy)
    assert now() == first, "once is no growth"
    found, texts = step(model, lazy, more=grown)
    assert_equal(found, expected)
    assert not texts
    second = now()
    assert second.key != first.key
    assert first.prediction.predicted_peak_bytes <= second.prediction.predicted_peak_bytes <= budget
    assert second.bytes_of("keep") < first.bytes_of("keep")
    step(model, lazy, more=grown)
    assert now() == second
    for _ in range(LATEST):
        step(model, lazy)
    assert now() == first, "it is gone, and the plan of before is there again"
    given_up = []
    for times in range(1, 8):
        for _ in range(2):
            found, texts = step(model, lazy, more=times * grown // 2)
            assert_equal(found, expected)
            given_up += texts
    (text,) = given_up
    assert "Look for what grows" in text
    assert graph().own.compiles == alone._MOST_AGAIN
    assert now().prediction.predicted_peak_bytes <= budget


def test_microbatches_of_which_the_second_finds_gradients(lazy: LazyStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a copy of the parameters in the middle of training: neither of both breaks the budget alone."""
    monkeypatch.setattr(step_again, "_SAME_BYTES", 1)
    gradients = copied = (budget_of(1.0) - budget_of(0.0)) // 8
    budget = budget_of(1.0) + gradients + copied // 2
    expected, _ = step(plain(), lazy)
    model = whole(device_budget=budget)
    for number in range(8):
        for more in (0, gradients):
            found, texts = step(model, lazy, more=more + copied * (number >= 3))
            assert_equal(found, expected)
            assert not texts
        assert now().changes_anything == (number >= 4), number
    assert now().prediction.predicted_peak_bytes <= budget


@pytest.mark.parametrize("late", ["what is freed before backward", "what backward finds as well"])
def test_what_came_between_two_runs(lazy: LazyStreams, monkeypatch: pytest.MonkeyPatch, late: str) -> None:
    """Outputs and gradients of the last step are at the turn alone if they go there; those that stay are there throughout."""
    monkeypatch.setattr(step_again, "_SAME_BYTES", 1)
    budget, came = budget_of(0.97), (budget_of(1.0) - budget_of(0.0)) // 4
    expected, _ = step(plain(), lazy)
    model = whole(device_budget=budget)
    step(model, lazy)
    freed = late == "what is freed before backward"
    for _ in range(3):
        found, texts = step(model, lazy, more=0 if freed else came, freed=came if freed else 0)
        assert_equal(found, expected)
        assert not texts
    first, *_ = (plan for plan in graphoffload.last_plans() if plan.graph == now().graph)
    if freed:
        assert now().key == first.key
        assert now().turn_bytes == came
    else:
        assert now().turn_bytes == 0
        assert now().bytes_of("keep") < first.bytes_of("keep")
        assert now().prediction.predicted_peak_bytes <= budget


def test_another_process_takes_memory(
    lazy: LazyStreams, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under "auto" what the device has free is looked at now and then."""
    expected, _ = step(plain(), lazy)
    model = whole(device_budget="auto")
    for _ in range(3):
        step(model, lazy)
    monkeypatch.setattr(step_again, "_SAME_BYTES", 1)
    monkeypatch.setattr(step_again, "_SAME_SHARE", 0)
    lost = []
    monkeypatch.setattr(alone, "_lost_bytes", lambda graph, budget: lost[0] if lost else 0)
    step(model, lazy)
    assert "planned again" not in capsys.readouterr().err
    left = budget_of(0.8)
    lost.append(resolve_limits(CONFIG, [inputs()]).device_budget_bytes - left)
    monkeypatch.setattr(device_limits, "_device_budget", lambda *of: left)
    found, _ = step(model, lazy)
    assert_equal(found, expected)
    assert "less are free on the device" in capsys.readouterr().err
    assert now().changes_anything
    assert now().prediction.predicted_peak_bytes <= left


@pytest.mark.parametrize("dynamic", [False, True])
def test_state_that_came_is_in_the_next_plan(lazy: LazyStreams, unmade: list[int], *, dynamic: bool) -> None:
    """It was reserved for. A loss that breaks the budget then, and another budget, are planned with it."""
    (state,), taken = unmade, 3 * gap() // 4
    model = whole(dynamic=dynamic, device_budget=budget_of(0.6) + state, reserve="auto")
    for number in range(5):
        if number:
            unmade[0] = 0
        step(model, lazy, taken, more=state * bool(number))
    assert now().turn_bytes >= taken
    assert counted() == state
    graphoffload.set_budget(budget_of(0.5) + state)
    step(model, lazy, taken, more=state)
    assert counted() == state
    assert now().prediction.predicted_peak_bytes <= budget_of(0.5) + state


def test_state_that_comes_later_is_in_another_budget(lazy: LazyStreams, unmade: list[int]) -> None:
    """As where gradients of several microbatches are summed first: it costs one compile."""
    (state,) = unmade
    model = whole(device_budget=2 * budget_of(1.0), reserve="auto")
    for _ in range(3):
        step(model, lazy)
    unmade[0] = 0
    for _ in range(3):
        step(model, lazy, more=state)
    graphoffload.set_budget(budget_of(0.6) + state)
    step(model, lazy, more=state)
    assert counted() == state
    assert now().prediction.predicted_peak_bytes <= budget_of(0.6) + state
    assert graph().own.compiles == 1


def test_a_plan_that_comes_back_is_judged_by_what_it_was_made_for(lazy: LazyStreams, unmade: list[int]) -> None:
    """What grows after another budget was set and taken back, or after it was gone, is planned with as before."""
    (state,), grown = unmade, gap() // 2
    budget = budget_of(1.0) + state + grown // 4
    model = whole(device_budget=budget, reserve="auto")
    step(model, lazy)
    unmade[0] = 0
    for _ in range(3):
        step(model, lazy, more=state)
    for asked in (budget - 4096, budget):
        graphoffload.set_budget(asked)
        step(model, lazy, more=state)
    for cycle in range(5):
        for _ in range(4):
            step(model, lazy, more=state + grown)
        assert now().changes_anything, cycle
        assert graph().own.limits.static_bytes - graph().own.graph.limits.static_bytes == state + grown
        assert now().prediction.predicted_peak_bytes <= budget
        for _ in range(LATEST + 1):
            step(model, lazy, more=state)
        assert not now().changes_anything, cycle
    assert graph().own.compiles <= 2, "both plans are there"


@pytest.mark.parametrize("learnt", [False, True])
def test_memory_that_was_missing_is_left_free(lazy: LazyStreams, unmade: list[int], *, learnt: bool) -> None:
    """Also where it is less than what plans are told apart by in a compile cache."""
    unmade[0] = 0
    model = whole(device_budget=budget_of(1.0) + 4096, reserve="auto")
    for _ in range(4 if learnt else 1):
        step(model, lazy)
    before = now()
    _plan_alone_with_less(graph(), gap() // 3)
    assert now().key != before.key
    assert now().prediction.predicted_peak_bytes <= budget_of(1.0) + 4096 - gap() // 3


def test_a_plan_from_a_compile_cache(lazy: LazyStreams, unmade: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its timeline is not known. State that came is counted once."""
    (state,), taken = unmade, gap()
    monkeypatch.setattr(alone, "predicted_of", lambda _: None)
    model = whole(device_budget=2 * budget_of(1.0), reserve="auto")
    for number in range(4):
        if number:
            unmade[0] = 0
        step(model, lazy, taken, more=state * bool(number))
    assert graph().own.compiles == 0
    assert now().turn_bytes == taken
    assert now().prediction.predicted_peak_bytes <= budget_of(1.0) + taken


def test_what_a_budget_tolerates_is_no_growth(lazy: LazyStreams, unmade: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    unmade[0], tolerated = 0, gap()
    monkeypatch.setattr(alone, "tolerated_bytes", lambda _: tolerated)
    model = whole(device_budget=budget_of(1.0), reserve="auto")
    step(model, lazy)
    for _ in range(5):
        step(model, lazy, more=tolerated // 2)
    assert graph().own.compiles == 0
