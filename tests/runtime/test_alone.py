"""Eager code between the forward and the backward of a graph that is planned alone: what it takes is learnt in two runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from lazy import LazyStreams, clean_slate
from torch import Tensor, nn

import graphoffload
from graphoffload.analysis.program import TURN
from graphoffload.compiler import alone, compile_variant, own_plans
from graphoffload.compiler.device_limits import resolve_limits
from graphoffload.compiler.step_runs import _PLANNER
from graphoffload.facts.limits import Limits
from graphoffload.options.config import OffloadConfig
from graphoffload.units import format_bytes
from tests.runtime.stepping import Whole, assert_equal
from tests.runtime.whole import CONFIG, backward_of, budget_of, inputs, lazy, left_by, now, plain, plan_of, step, whole

__all__ = ["clean_slate", "lazy"]


def test_a_loss_that_breaks_the_budget_is_planned_with(lazy: LazyStreams) -> None:
    """Two runs by the first plan, a warning with the numbers, and the same gradients by the second plan."""
    budget = budget_of(0.8)
    expected, _ = step(plain(), lazy)
    model, taken = whole(device_budget=budget), budget_of(1.0) - budget_of(0.0)
    for _ in range(2):
        found, texts = step(model, lazy, taken)
        assert_equal(found, expected)
        assert not texts
    first = now()
    assert first.turn_bytes == 0
    excess = left_by(first) + taken - budget
    found, (text,) = step(model, lazy, taken)
    assert_equal(found, expected)
    assert f"was exceeded by {format_bytes(excess)} in the first steps" in text
    assert "eager code such as a loss takes" in text
    assert now().key != first.key
    assert now().turn_bytes == taken
    assert now().prediction.predicted_peak_bytes <= budget
    assert now().bytes_of("keep") < first.bytes_of("keep")
    second = now()
    for _ in range(3):
        found, texts = step(model, lazy, taken)
        assert_equal(found, expected)
        assert not texts
    assert now() == second


def test_ends_of_blocks_have_room_beside_what_is_learnt(lazy: LazyStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs show of a loss is what they took; what the allocator does not cut off may be more in the next ones."""
    ends, budget, taken = budget_of(0.1) - budget_of(0.0), budget_of(0.8), budget_of(1.0) - budget_of(0.0)

    def with_ends(config: OffloadConfig, tensors: Any) -> Limits:
        found = resolve_limits(config, tensors)
        return replace(found, static_bytes=found.static_bytes + ends, uncut_bytes=ends)

    for module in (compile_variant, own_plans):
        monkeypatch.setattr(module, "resolve_limits", with_ends)
    expected, _ = step(plain(), lazy)
    model = whole(device_budget=budget)
    for _ in range(3):
        found, _ = step(model, lazy, taken - ends)  # beside what the plan predicts, whose room for ends these steps do not use
        assert_equal(found, expected)
    assert taken + ends <= now().turn_bytes < taken + 2 * ends
    assert now().prediction.predicted_peak_bytes <= budget


def test_a_loss_that_fits_is_in_the_prediction(lazy: LazyStreams) -> None:
    """Nothing is compiled again, and the peak is the step's from then on."""
    budget = 2 * budget_of(1.0)
    model, taken = whole(device_budget=budget), budget_of(1.0) // 2
    step(model, lazy, taken)
    step(model, lazy, taken)
    before = now()
    _, texts = step(model, lazy, taken)
    assert not texts
    assert now().key == before.key
    assert now().turn_bytes == taken
    turn_bytes = plan_of(device_budget=budget).prediction.predicted_peak_bytes
    assert before.prediction.predicted_peak_bytes == turn_bytes
    assert now().prediction.predicted_peak_bytes > turn_bytes
    assert now().prediction.predicted_peak_bytes == now().prediction.keep_peak_bytes
    assert "eager code between forward and backward" in now().summary


@pytest.mark.parametrize("cached", [False, True])
def test_outputs_that_are_held_are_planned_with(lazy: LazyStreams, monkeypatch: pytest.MonkeyPatch, cached: bool) -> None:
    """Where they break the budget: backward was planned to be rid of them once it has read them. A plan from a cache has no
    timeline, and its peak stands for backward's."""
    budget = budget_of(0.8)
    if cached:
        monkeypatch.setattr(alone, "predicted_of", lambda _: None)
    expected, _ = step(plain(), lazy)
    model, held = whole(device_budget=budget), budget_of(0.4) - budget_of(0.0)
    for _ in range(2):
        found, texts = step(model, lazy, held=held)
        assert_equal(found, expected)
        assert not texts
    first = now()
    excess, more = backward_of(first) + held - budget, held
    assert excess > 0
    if cached:
        more -= first.prediction.predicted_peak_bytes - backward_of(first)
    found, (text,) = step(model, lazy, held=held)
    assert_equal(found, expected)
    assert f"was exceeded by {format_bytes(excess)} in the first steps: the backward of" in text
    assert f"took {format_bytes(more)} more than was planned" in text
    assert now().key != first.key
    assert now().prediction.predicted_peak_bytes <= budget
    assert now().bytes_of("keep") < first.bytes_of("keep")
    second = now()
    for _ in range(3):
        found, texts = step(model, lazy, held=0)
        assert_equal(found, expected)
        assert not texts
    assert now() == second


def test_outputs_that_fit_in_what_is_to_stay_free_cost_nothing(lazy: LazyStreams) -> None:
    """A reserve is for what the process allocates besides: nothing is compiled again, and no budget was exceeded."""
    held = budget_of(0.4) - budget_of(0.0)
    model = whole(device_budget=budget_of(0.8) + 2 * held, reserve=2 * held)
    for _ in range(2):
        step(model, lazy, held=held)
    first = now()
    assert first.changes_anything
    assert first.prediction.reserve_bytes == 2 * held
    _, texts = step(model, lazy, held=held)
    assert not texts
    assert now().key == first.key


def test_outputs_that_fit_beside_backward_cost_nothing(lazy: LazyStreams) -> None:
    """What it takes is within the budget: nothing is compiled again."""
    model, held = whole(device_budget=2 * budget_of(1.0)), budget_of(1.0) // 2
    for _ in range(2):
        step(model, lazy, held=held)
    first = now()
    _, texts = step(model, lazy, held=held)
    assert not texts
    assert now().key == first.key


def test_no_plan_has_room_for_the_loss(lazy: LazyStreams) -> None:
    """Training goes on by the least plan, and a warning says what is missing."""
    budget = budget_of(0.5)
    expected, _ = step(plain(), lazy)
    model, taken = whole(device_budget=budget), 2 * budget
    step(model, lazy, taken)
    step(model, lazy, taken)
    found, (broken, least) = step(model, lazy, taken)
    assert_equal(found, expected)
    assert "was exceeded by" in broken
    assert "by the plan that takes least" in least
    assert f"at '{TURN}'" in least
    assert now().prediction.predicted_peak_bytes > budget
    _, texts = step(model, lazy, taken)
    assert not texts


def test_another_budget_is_planned_with_what_the_loss_takes(lazy: LazyStreams) -> None:
    """Also one that is set before it is known."""
    low, high, taken = budget_of(0.5), budget_of(0.9), (budget_of(1.0) - budget_of(0.0)) // 4
    model = whole(device_budget=2 * high)
    step(model, lazy, taken)
    graphoffload.set_budget(high)
    step(model, lazy, taken)
    assert now().prediction.predicted_peak_bytes <= high
    step(model, lazy, taken)
    assert now().turn_bytes == taken
    graphoffload.set_budget(low)
    step(model, lazy, taken)
    assert now().turn_bytes == taken
    assert now().prediction.predicted_peak_bytes <= low


def test_the_turn_is_the_last_step_of_forward() -> None:
    """What it takes stands beside everything that is kept, and holds up the plans that need it."""
    torch._dynamo.reset()
    (plan,) = graphoffload.explain(plain(), CONFIG)(inputs()).plans
    scores = 8 * inputs().numel()
    assert plan.turn_bytes == 12 * scores, "all of a device is planned for: an eager loss in float32 is estimated"
    (keep,) = graphoffload.explain(plain(), CONFIG.with_options(policy="keep"))(inputs()).plans
    assert keep.turn_bytes == 0
    assert plan.prediction.keep_peak_bytes > keep.prediction.keep_peak_bytes


def test_what_teaches_nothing_is_given_up(lazy: LazyStreams) -> None:
    """Forwards of which no backward comes are not watched for ever."""
    model = whole(device_budget=budget_of(0.8))
    step(model, lazy)
    for _ in range(6):
        model(inputs())
    ((_, known),) = _PLANNER.known.items()
    assert known.fixed
    assert not known.runs
    step(model, lazy)


def test_a_graph_that_is_called_twice_and_then_once(lazy: LazyStreams) -> None:
    """What runs in place of what was expected is not recorded, and teaches nothing."""
    model = whole(device_budget=2 * budget_of(1.0))
    for times in (2, 2, 2, 2, 1, 1, 1, 1, 1):
        model.zero_grad()
        sum(model(inputs()).square().sum() for _ in range(times)).backward()
    assert any(known.alone and known.fixed for known in _PLANNER.known.values())


def test_a_step_of_several_calls_has_no_estimate(lazy: LazyStreams) -> None:
    """What eager code takes between them was recorded."""
    model = whole(device_budget="auto")
    for _ in range(4):
        model.zero_grad()
        (model(inputs()).sum() + model(inputs()).sum()).backward()
    (known,) = (known for known in _PLANNER.known.values() if len(known.sequence) > 1)
    assert known.facts is not None
    for variants in known.facts.graphs:
        assert all(step.name != TURN for variant in variants for step in variant.program.forward)


class WithLoss(nn.Module):
    """A model that computes its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Whole()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The loss and what it is of."""
        y = self.body(x)
        return y.square().mean(), y


def test_nothing_is_estimated_for_a_model_with_its_loss() -> None:
    torch._dynamo.reset()
    (plan,) = graphoffload.explain(WithLoss(), CONFIG)(inputs()).plans
    assert plan.turn_bytes == 0
