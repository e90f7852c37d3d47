"""Eager code between the forward and the backward of a graph that is planned alone: what it takes is learnt in two runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lazy import LazyStreams, clean_slate, lazy_steps
from torch import Tensor, nn

import graphoffload
from graphoffload.analysis.program import TURN
from graphoffload.compiler import alone, device_limits, dispatch, step_again
from graphoffload.compiler.device_limits import resolve_limits
from graphoffload.compiler.outside import LATEST
from graphoffload.compiler.step_runs import _PLANNER, GRAPHS
from graphoffload.errors import BudgetExceededWarning
from graphoffload.facts.plan import Plan
from graphoffload.report.predictions import predicted_of
from graphoffload.testing.attention import HIDDEN
from graphoffload.units import format_bytes
from tests.runtime.stepping import OPTIONS, Whole, assert_equal

__all__ = ["clean_slate"]

KB = 1024
CONFIG = graphoffload.OffloadConfig(**{**OPTIONS, "device_budget": "auto"})


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch) -> Iterator[LazyStreams]:
    """Every byte counts, and no step before this one does."""
    torch._dynamo.reset()
    monkeypatch.setattr(alone, "_ROUNDED", 1)
    monkeypatch.setattr(dispatch, "_LEARNT", 1)
    monkeypatch.setattr(alone, "tolerated_bytes", lambda _: 0)
    with lazy_steps() as lazy:
        yield lazy
    torch._dynamo.reset()


class Scores(Whole):
    """A model in one graph, which returns scores of words."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(HIDDEN, 8 * HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """As it says."""
        y: Tensor = self.head(super().forward(x))
        return y


def plain() -> nn.Module:
    """A model, always with the same parameters."""
    torch.manual_seed(0)
    return Scores()


def inputs() -> Tensor:
    """Of a batch, always the same."""
    return torch.randn(64, 32, HIDDEN, generator=torch.Generator().manual_seed(0))


def whole(**options: Any) -> nn.Module:
    """A model that is compiled as a whole."""
    model = plain()
    model.compile(backend=graphoffload.OffloadBackend(graphoffload.OffloadConfig(**{**OPTIONS, **options})))
    return model


def plan_of(**options: Any) -> Plan:
    """What is planned for a model, without training."""
    (plan,) = graphoffload.explain(plain(), graphoffload.OffloadConfig(**{**OPTIONS, **options}))(inputs()).plans
    return plan


def left_by(plan: Plan | None) -> int:
    """What is allocated where the forward of a plan ends."""
    predicted = None if plan is None else predicted_of(plan.key)
    return 0 if predicted is None else predicted.timeline.memory[predicted.timeline.forward_steps - 1] - predicted.turn_bytes


def step(
    model: nn.Module, lazy: LazyStreams, taken: int = 0, *, more: int = 0, freed: int = 0
) -> tuple[list[Tensor | None], list[str]]:
    """One step whose loss takes so many bytes. Its gradients, and its warnings.

    more: allocated throughout, beside what was planned with. freed: allocated until the loss is there.
    """
    model.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lazy.allocated = more + freed, more + freed
        result = model(inputs())
        left = left_by(planned(model)) + more
        lazy.allocated = left + freed, left + freed + taken
        loss = result.square().sum()
        lazy.allocated = left, left + freed + taken
        loss.backward()
        lazy.allocated = more + freed, left + freed + taken
    texts = [str(w.message) for w in caught if issubclass(w.category, BudgetExceededWarning)]
    return [parameter.grad for parameter in model.parameters()], texts


def budget_of(share: float) -> int:
    """Between the least peak and that of keep-all."""
    keep = plan_of(policy="keep").prediction.keep_peak_bytes
    least = plan_of(policy="offload").prediction.predicted_peak_bytes
    return int(least + share * (keep - least))


def now() -> Plan:
    """What the latest model runs by."""
    plan = GRAPHS[max(GRAPHS)].first.plan
    assert plan is not None
    return plan


def planned(model: nn.Module) -> Plan | None:
    """The plan of a model that is compiled."""
    return now() if model._compiled_call_impl is not None else None


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


def test_memory_outside_that_grows_is_planned_with(
    lazy: LazyStreams, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    for times in range(1, 8):
        for _ in range(2):
            found, texts = step(model, lazy, more=times * grown // 2)
            assert_equal(found, expected)
    assert capsys.readouterr().err.count("more are allocated outside") == alone._MOST_AGAIN
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
