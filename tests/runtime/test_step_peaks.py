"""What the device's memory says of a planned step: a run's own peak, memory outside that grows in the middle of training, and
zeros that autograd makes before a backward."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from lazy import LazyStreams, clean_slate, lazy_steps, once
from torch import Tensor, nn

import graphoffload
from graphoffload.compiler import alone, step_again, step_planning
from graphoffload.compiler.step_plan import Asked
from graphoffload.compiler.step_runs import _PLANNER
from graphoffload.errors import BudgetExceededWarning
from graphoffload.facts.goals import MeetBudget
from graphoffload.runtime.hooks import twin_copies
from graphoffload.torch_internals import autograd
from tests.runtime import stepping
from tests.runtime.stepping import Model, assert_equal, batch, budget_at, compiled, fresh, kept, loss_of, plan_now, step

__all__ = ["clean_slate", "once"]

QUIET = 4  # runs that plan and warm up


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch) -> Iterator[LazyStreams]:
    """Every byte counts."""
    stepping.peaks()
    monkeypatch.setattr(step_again, "_SAME_BYTES", 1)
    monkeypatch.setattr(step_again, "tolerated_bytes", lambda _: 1)
    with lazy_steps() as lazy:
        yield lazy


@pytest.fixture
def trained(lazy: LazyStreams) -> tuple[Model, list[Tensor | None]]:
    """A planned model between its budgets, and its gradients."""
    model = fresh()
    (expected,) = kept(model, [batch()])
    compiled(model, budget_at(0.5))
    for _ in range(2 + QUIET):
        assert_equal(step(model, batch()), expected)
    return model, expected


def run(model: Model, lazy: LazyStreams, peak_bytes: int, expected: list[Tensor | None]) -> list[str]:
    """One step whose forward takes the device's peak there; warnings of the next one's start, whose forward is dropped."""
    loss = loss_of(model, batch())
    lazy.allocated = 0, peak_bytes
    assert_equal(stepping.gradients(model, loss), expected)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_equal(step(model, batch()), expected)
    return [str(w.message) for w in caught if issubclass(w.category, BudgetExceededWarning)]


def peak() -> int:
    """What the present plan predicts."""
    plan = plan_now()
    assert plan is not None
    return plan.solution.timeline.peak_bytes


@pytest.mark.parametrize(
    ("budget_bytes", "tolerated", "alone_tolerated"),
    [
        (None, 64 * 2**20, 64 * 2**20),
        (2**30, 2**20, 4 * 2**20),
        (8 * 2**30, 2**20, 8 * 2**30 // 400),
        (80 * 2**30, 2**20, 64 * 2**20),
    ],
)
def test_what_a_run_may_exceed_its_budget_by(budget_bytes: int | None, tolerated: int, alone_tolerated: int) -> None:
    """A step: a megabyte of a budget that was given. A graph that is planned alone is compiled anew, and workspaces of
    libraries are in no plan: a quarter of a percent, between 4 and 64 MiB."""
    asked = Asked(MeetBudget(2**40), 0, None, budget_bytes, 0)
    assert step_again.tolerated_bytes(asked.budget_bytes) == tolerated
    assert alone.tolerated_bytes(asked.budget_bytes) == alone_tolerated


def test_a_peak_above_the_budget(trained: Any, lazy: LazyStreams) -> None:
    """It is planned with that much less, and once that held, nothing more changes until it is above again."""
    model, expected = trained
    before, budget = peak(), budget_at(0.5)
    excess = budget // 10
    (text,) = run(model, lazy, budget + excess, expected)
    assert "was exceeded by" in text
    assert peak() <= budget - excess < before
    planned = peak()
    lazy.allocated = 0, 0  # the counter is reset
    for _ in range(QUIET):
        assert not run(model, lazy, budget, expected)
        lazy.allocated = 0, 0
    assert peak() == planned
    (text,) = run(model, lazy, budget + excess, expected)
    assert "was exceeded by" in text, "the plan before this one did lower the peak"
    assert peak() < planned


def test_a_plan_with_room_to_spare_takes_less_as_well(trained: Any, lazy: LazyStreams) -> None:
    """What a run takes beyond its plan may be more than it takes beyond the budget: a plan for that much less is no other."""
    model, expected = trained
    before, budget = peak(), budget_at(0.5)
    room = budget - before
    assert room > 2
    (text,) = run(model, lazy, budget + 2, expected)
    assert "was exceeded by 2 B" in text
    assert peak() <= before - 2


def test_ends_of_blocks_have_room_in_a_step(lazy: LazyStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a graph that is planned alone: of a budget that was given, what the allocator does not cut off stays free."""
    resolve, ends = step_planning.resolve_limits, budget_at(0.5) - budget_at(0.4)
    monkeypatch.setattr(step_planning, "resolve_limits", lambda *given: replace(resolve(*given), uncut_bytes=ends))
    model = fresh()
    (expected,) = kept(model, [batch()])
    compiled(model, budget_at(0.5))
    for _ in range(2 + QUIET):
        assert_equal(step(model, batch()), expected)
    assert peak() <= budget_at(0.5) - ends


def test_another_goal_is_not_planned_with_what_the_last_one_took(trained: Any, lazy: LazyStreams) -> None:
    """The least budget is met again, and the same plan comes back."""
    model, expected = trained
    budget = budget_at(0.1)
    graphoffload.set_budget(budget)
    assert_equal(step(model, batch()), expected)
    planned = peak()
    for _ in range(QUIET):
        assert_equal(step(model, batch()), expected)
    (text,) = run(model, lazy, budget + budget // 5, expected)
    assert "was exceeded by" in text
    lazy.allocated = 0, 0
    graphoffload.set_budget(budget_at(0.5))
    assert_equal(step(model, batch()), expected)
    graphoffload.set_budget(budget)
    assert_equal(step(model, batch()), expected)
    assert peak() == planned


def test_a_peak_that_no_plan_lowers(trained: Any, lazy: LazyStreams) -> None:
    """The plan with less is given up again, and that is said once."""
    model, expected = trained
    before, budget = peak(), budget_at(0.5)
    high = budget + budget // 10
    assert len(run(model, lazy, high, expected)) == 1
    assert peak() < before
    texts = []
    for _ in range(2 * QUIET):
        lazy.allocated = 0, 0
        texts += run(model, lazy, high, expected)
    (text,) = texts
    assert "does not lower the step's peak" in text
    assert peak() == before


def test_what_an_optimizer_takes_is_no_peak_of_the_step(trained: Any, lazy: LazyStreams) -> None:
    model, expected = trained
    before = plan_now()
    for more in range(QUIET):
        lazy.allocated = 0, (2 + more) * budget_at(0.5)
        assert not run(model, lazy, lazy.allocated[1], expected)
    assert plan_now() is before


def test_two_microbatches_at_once_are_no_peak_of_the_step(trained: Any, lazy: LazyStreams) -> None:
    """They leave the plan, which holds for the steps after them as it did before."""
    model, expected = trained
    before = plan_now()
    losses = [loss_of(model, batch()) for _ in range(2)]
    lazy.allocated = 0, 2 * budget_at(0.5)
    for loss in losses:
        assert_equal(stepping.gradients(model, loss), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetExceededWarning)
        for _ in range(QUIET):
            assert_equal(step(model, batch()), expected)
    assert plan_now() is before


def test_a_twin_with_clones_on_the_device_is_not_judged(trained: Any, lazy: LazyStreams) -> None:
    """It takes more than its plan, and says nothing of the plan."""
    model, expected = trained
    before, budget = plan_now(), budget_at(0.5)
    with twin_copies():
        assert not run(model, lazy, 2 * budget, expected)
    lazy.allocated = 0, 0
    assert not run(model, lazy, budget, expected)
    assert plan_now() is before
    (text,) = run(model, lazy, budget + budget // 10, expected)
    assert "was exceeded by" in text


def test_memory_outside_that_leaves_too_little(trained: Any, lazy: LazyStreams) -> None:
    """Training goes on by the least plan, with one warning, and by a better one once the memory is free again."""
    model, expected = trained
    before, budget = peak(), budget_at(0.5)
    lazy.allocated = 2 * budget, 0
    with pytest.warns(BudgetExceededWarning, match=r"no plan of the training step meets device_budget=.* any more") as caught:
        assert_equal(step(model, batch()), expected)
    assert len(caught) == 1
    assert "more are allocated outside" in str(caught[0].message)
    least = plan_now()
    assert least is not None
    assert budget_at(0) - budget_at(0) // 10 <= peak() - 2 * budget < before
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetExceededWarning)
        for _ in range(QUIET):
            assert_equal(step(model, batch()), expected)
        assert plan_now() is least
        lazy.allocated = 0, 0
        for _ in range(step_again._FREED_RUNS + 1):
            assert_equal(step(model, batch()), expected)
    assert peak() == before


class Headed(nn.Module):
    """Its loss reads the logits that it returns as well."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 100)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.head(x)
        return logits.square().mean(), logits, logits.argmax(-1)


def test_zeros_of_outputs_without_a_gradient() -> None:
    """Autograd makes them after the hooks before a backward: as many bytes as the output has."""
    outputs = torch.compile(Headed(), backend="aot_eager")(torch.ones(4, 8))
    node = autograd.compiled_node(outputs)
    nbytes = autograd.output_bytes(outputs, node)
    assert sorted(nbytes.values()) == [4, 4 * 100 * 4]
    seen: list[int] = []
    node.register_prehook(lambda gradients: seen.append(autograd.zeros_bytes(nbytes, gradients)))
    outputs[0].backward()
    assert seen == [4 * 100 * 4]


class Last(nn.Module):
    def __init__(self, used: bool) -> None:
        super().__init__()
        self.layers, self.used = nn.ModuleList([nn.Linear(8, 8), Headed()]), used

    def forward(self, x: Tensor) -> Tensor:
        loss, logits, _ = self.layers[1](self.layers[0](x))
        return loss + logits.sum() if self.used else loss


@pytest.mark.parametrize("used", [True, False])
def test_a_recorded_step_counts_zeros(lazy: LazyStreams, used: bool) -> None:
    """Where the logits have a gradient it is there before, and counted by the allocator."""
    lazy.allocated = 10_000, 10_000
    model: Any = compiled(Last(used), stepping.PLENTY)  # type: ignore[arg-type]
    for _ in range(3):
        model(torch.ones(4, 8)).backward()
    ((_, known),) = _PLANNER.known.items()
    assert known.facts is not None
    last = known.facts.calls[-1]
    own = 4 * 8 * 4  # the head's input is an activation
    assert last.backward_outside_bytes == 10_000 - own + (0 if used else 4 * 100 * 4)
