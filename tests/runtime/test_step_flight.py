"""Several microbatches in flight, as in a stage of a pipeline: planned together, gradients to the bit, peaks as counted."""

from __future__ import annotations

import gc
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from lazy import LazyStreams, clean_slate, lazy_steps, once
from torch import Tensor, nn

import graphoffload
from graphoffload.compiler.step_plan import StepPlan
from graphoffload.errors import BudgetError, StepNotPlannedWarning
from graphoffload.runtime.offloaded_tensors import RELEASE_PENDING, OffloadedTensor
from graphoffload.runtime.step.calls import StepRun
from tests.runtime.stepping import OPTIONS, PLENTY, assert_equal, plan_now
from tests.runtime.test_step_truth import CLOSE, WIDTH, Block, Counter

__all__ = ["clean_slate", "once"]

BLOCKS, ROWS, MICROBATCHES = 4, 64, 6
AT_A_TIME = 3


class Stage(nn.Module):
    """Blocks of a pipeline's stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def stage(budget: Any = None, **options: Any) -> Stage:
    """Always with the same parameters; compiled block by block. No budget: everything is kept."""
    torch.manual_seed(0)
    module = Stage()
    asked = {"policy": "keep"} if budget is None else {"device_budget": budget}
    for layer in module.layers:
        layer.compile(backend=graphoffload.OffloadBackend(**{**OPTIONS, **asked, **options}), dynamic=False)
    return module


def one_forward_one_backward(module: nn.Module, at_a_time: int) -> None:
    """1F1B: the backward of the oldest microbatch runs when so many are in flight."""
    flying: deque[Tensor] = deque()

    def backward() -> None:
        y = flying.popleft()
        y.backward(torch.ones_like(y))

    for seed in range(MICROBATCHES):
        flying.append(module(batch(seed)))
        if len(flying) == at_a_time:
            backward()
    while flying:
        backward()


def all_forwards_first(module: nn.Module, _: int) -> None:
    """GPipe."""
    for y in [module(batch(seed)) for seed in range(MICROBATCHES)]:
        y.backward(torch.ones_like(y))


def batch(seed: int) -> Tensor:
    """What another stage sends."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


Way = Callable[[nn.Module, int], None]


def step(module: nn.Module, way: Way, at_a_time: int = AT_A_TIME) -> list[Tensor | None]:
    """One step of all microbatches; what it leaves."""
    module.zero_grad()
    way(module, at_a_time)
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


@pytest.fixture
def counter() -> Iterator[Counter]:
    """Bytes are those that live."""
    gc.collect()
    counter = Counter()
    with counter.counting():
        graphoffload.reset_stats()
        yield counter


def planned(way: Way, budget: Any, expected: list[Tensor | None], at_a_time: int = AT_A_TIME) -> tuple[Stage, StepPlan]:
    """A stage in training, once its plan is there."""
    module = stage(budget)
    for _ in range(5):
        assert_equal(step(module, way, at_a_time), expected)
    return module, plan_of()


def plan_of() -> StepPlan:
    """Of a microbatch."""
    plan = plan_now(BLOCKS)
    assert plan is not None
    return plan


def peak_of(counter: Counter, module: Stage, way: Way, at_a_time: int = AT_A_TIME) -> int:
    """The counted peak of a steady step."""
    module.zero_grad()
    counter.peak_bytes = counter.now()
    way(module, at_a_time)
    return counter.peak_bytes


@pytest.mark.parametrize(
    ("way", "at_a_time", "share"),
    [
        pytest.param(one_forward_one_backward, 2, 0.85, marks=pytest.mark.long),
        (one_forward_one_backward, 3, 0.75),
        (all_forwards_first, MICROBATCHES, 0.7),
    ],
)
def test_microbatches_in_flight_are_planned(way: Way, at_a_time: int, share: float, counter: Counter) -> None:
    """By the plan of one of them, with what the others keep: the peak is that of all, and the budget is kept."""
    expected = step(stage(), way, at_a_time)
    module, plan = planned(way, PLENTY, expected, at_a_time)
    assert plan.solution.in_flight == at_a_time
    assert f"{at_a_time} microbatches in flight" in plan.summary
    keep = plan.solution.timeline.peak_bytes
    assert peak_of(counter, module, way, at_a_time) == pytest.approx(keep, rel=CLOSE)
    torch._dynamo.reset()
    del module
    module, plan = planned(way, int(share * keep), expected, at_a_time)
    predicted = plan.solution.timeline.peak_bytes
    assert 0.9 * share * keep < predicted <= share * keep
    assert peak_of(counter, module, way, at_a_time) == pytest.approx(predicted, rel=CLOSE)
    assert graphoffload.stats()["prefetch_hits"] > 0
    assert_equal(step(module, way, at_a_time), expected)


@pytest.mark.parametrize("at_a_time", [pytest.param(2, marks=pytest.mark.long), 3])
def test_no_microbatch_holds_what_was_copied_while_another_runs_backward(
    at_a_time: int, counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies that no event of forward waits for are waited for when the next backward starts, whose ever it is: what the others
    hold then is in the plan without them."""
    way, seen = one_forward_one_backward, list[tuple[int, int]]()
    expected = step(stage(), way, at_a_time)
    module, plan = planned(way, PLENTY, expected, at_a_time)
    torch._dynamo.reset()
    del module
    module, _ = planned(way, int(0.85 * plan.solution.timeline.peak_bytes), expected, at_a_time)
    turn = StepRun.turn

    def turned(run: StepRun) -> None:
        began = not run.turned
        turn(run)
        copies = [entry for other in run.beside() for entry in other.copies]
        if began:
            seen.append((len(copies), sum(entry.state is RELEASE_PENDING for entry in copies)))

    monkeypatch.setattr(StepRun, "happened", lambda *_: None)
    monkeypatch.setattr(StepRun, "turn", turned)
    assert_equal(step(module, way, at_a_time), expected)
    assert len(seen) == MICROBATCHES
    assert {pending for _, pending in seen} == {0}
    assert max(copies for copies, _ in seen) > 0


@pytest.fixture
def lazy() -> Iterator[LazyStreams]:
    """Nothing is allocated: budgets are for activations alone."""
    with lazy_steps() as lazy:
        graphoffload.reset_stats()
        yield lazy


def in_flight() -> int:
    """What the present plan is for."""
    return plan_of().solution.in_flight


def test_two_at_once_by_chance_change_no_plan(lazy: LazyStreams) -> None:
    """Twice in a row is not by chance; from then on the plan is for two."""
    module = stage(PLENTY)
    for _ in range(4):
        step(module, one_forward_one_backward, 1)
    assert in_flight() == 1

    def two() -> None:
        for y in [module(batch(seed)) for seed in range(2)]:
            y.backward(torch.ones_like(y))

    plan = plan_of()
    for _ in range(3):
        two()
        step(module, one_forward_one_backward, 1)
    assert plan_of() is plan
    for _ in range(6):
        two()
    assert in_flight() == 2
    assert not lazy.complaints


def test_a_budget_that_only_one_microbatch_meets(lazy: LazyStreams) -> None:
    """The error is for as many as there are, and names a budget that they meet."""
    expected = step(stage(), one_forward_one_backward)
    module, _ = planned(one_forward_one_backward, PLENTY, expected)
    graphoffload.set_budget("4KiB")
    with pytest.raises(BudgetError, match="with 3 microbatches in flight at a time") as info:
        step(module, one_forward_one_backward)
    least = info.value.least_bytes
    assert least is not None
    graphoffload.set_budget(least)
    for _ in range(2):
        assert_equal(step(module, one_forward_one_backward), expected)
    assert plan_of().solution.timeline.peak_bytes <= least


def test_flights_that_are_cut_short(lazy: LazyStreams) -> None:
    """Forwards that are dropped, an evaluation and an exception in between: gradients stay right, and so does the plan."""
    expected = step(stage(), one_forward_one_backward)
    module, plan = planned(one_forward_one_backward, PLENTY, expected)
    graphoffload.set_budget(int(0.7 * plan.solution.timeline.peak_bytes))
    for at in range(4):
        dropped = [module(batch(seed)) for seed in range(at)]
        if at == 2:
            dropped.pop().sum().backward()
        del dropped
        with torch.no_grad():
            module(batch(0))
        with pytest.raises(RuntimeError, match="normalized_shape"):
            module(torch.zeros(ROWS, WIDTH - 1))
        assert_equal(step(module, one_forward_one_backward), expected)
    assert in_flight() == AT_A_TIME
    assert graphoffload.stats()["d2h_bytes"] > 0
    assert not lazy.complaints


def test_what_is_waited_for_and_freed_early_shows(lazy: LazyStreams) -> None:
    """A microbatch whose copies are not waited for when the next one begins: its sources are freed while they are copied."""
    expected = step(stage(), one_forward_one_backward)
    module, plan = planned(one_forward_one_backward, PLENTY, expected)
    graphoffload.set_budget(int(0.7 * plan.solution.timeline.peak_bytes))
    assert_equal(step(module, one_forward_one_backward), expected)
    original = OffloadedTensor.settle

    def careless(entry: OffloadedTensor, *, waited: bool = False) -> Tensor | None:
        return original(entry, waited=True)

    with mock.patch.object(OffloadedTensor, "settle", careless):
        found = step(module, one_forward_one_backward)
        lazy.finish()
    assert any(
        not torch.equal(one, other) for one, other in zip(found, expected, strict=True) if one is not None and other is not None
    )
    lazy.complaints.clear()


def test_an_output_that_lives_on_for_a_step_changes_no_plan(lazy: LazyStreams) -> None:
    """One more in flight than ever again."""
    module = stage(PLENTY)
    for _ in range(5):
        step(module, one_forward_one_backward)
    plan = plan_of()
    for _ in range(2):
        held = module(batch(0))
        step(module, one_forward_one_backward)
        del held
        step(module, one_forward_one_backward)
    assert plan_of() is plan


def test_a_forward_whose_backward_never_comes(lazy: LazyStreams) -> None:
    """Another budget is planned for all the same, and a late backward of it is right."""
    expected = step(stage(), one_forward_one_backward)
    module, plan = planned(one_forward_one_backward, PLENTY, expected)
    budget = int(0.7 * plan.solution.timeline.peak_bytes)
    held = module(batch(0))
    graphoffload.set_budget(budget)
    for _ in range(6):
        assert_equal(step(module, one_forward_one_backward), expected)
    assert plan_of().solution.timeline.peak_bytes <= budget
    assert in_flight() == AT_A_TIME
    module.zero_grad()
    held.backward(torch.ones_like(held))
    found = [p.grad for p in module.parameters()]
    twin = stage()
    y = twin(batch(0))
    y.backward(torch.ones_like(y))
    assert_equal(found, [p.grad for p in twin.parameters()])


def test_more_or_fewer_in_flight_from_now_on(lazy: LazyStreams) -> None:
    """The plan is for as many as there are."""
    module = stage(PLENTY)
    for at_a_time, steps in ((2, 5), (4, 6), (3, 12), (1, 12), (2, 6)):
        for _ in range(steps):
            step(module, one_forward_one_backward, at_a_time)
        assert in_flight() == at_a_time


def test_a_microbatch_is_dropped_when_flight_is_seen_first(lazy: LazyStreams) -> None:
    """Its backward is not waited for."""
    module = stage(PLENTY)
    for _ in range(2):
        first, second = module(batch(0)), module(batch(1))
        first.backward(torch.ones_like(first))
        del first, second
    for _ in range(4):
        step(module, one_forward_one_backward, 2)
    assert in_flight() == 2


def test_a_graph_that_is_the_whole_model_says_that_its_plan_is_for_one(lazy: LazyStreams) -> None:
    """It is planned alone."""
    torch.manual_seed(0)
    module = Stage()
    module.compile(backend=graphoffload.OffloadBackend(**OPTIONS, device_budget=PLENTY), dynamic=False)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(4):
            step(module, one_forward_one_backward)
    said = [str(one.message) for one in seen if one.category is StepNotPlannedWarning]
    assert len(said) == 1
    assert "microbatches of graph" in said[0]
