"""An allocation that failed: what is said of the step, and what the next one is planned with."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lazy import LazyStreams, lazy_steps
from torch import nn

import graphoffload
from graphoffload.compiler import device_limits, step_again
from graphoffload.errors import BudgetError, StepNotPlannedWarning
from graphoffload.monitor import step_memory
from graphoffload.monitor.step_memory import Shortage, shortage_of
from graphoffload.runtime.step.calls import LATEST, STEPS, StepRun
from graphoffload.testing.attention import HIDDEN
from tests.runtime.stepping import (
    OPTIONS,
    PLENTY,
    assert_equal,
    batch,
    budget_at,
    compiled,
    fresh,
    gradients,
    kept,
    loss_of,
    plan_now,
    step,
)
from tests.runtime.test_step_runs import Wide

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
GIB = 2**30


@pytest.fixture
def lazy() -> Iterator[LazyStreams]:
    with lazy_steps() as lazy:
        yield lazy
    step_memory._FAILED.clear()
    LATEST.pop(CUDA, None)


def failed(lacking_bytes: int) -> None:
    """As the observer notes it."""
    step_memory._FAILED[CPU] = Shortage("the backward of call 1", lacking_bytes)


def test_the_next_step_is_planned_with_less(lazy: LazyStreams, capfd: pytest.CaptureFixture[str]) -> None:
    model = fresh()
    (expected,) = kept(model, [batch()])
    budget = budget_at(0.8)
    compiled(model, budget)
    for _ in range(3):
        step(model, batch())
    loss = loss_of(model, batch())
    failed(budget // 10)
    del loss  # the caller caught the error
    assert_equal(step(model, batch()), expected)
    plan = plan_now()
    assert plan is not None
    assert plan.solution.timeline.peak_bytes <= budget - budget // 10
    assert "planned again: less memory after an error" in capfd.readouterr().err
    assert_equal(step(model, batch()), expected)
    assert plan_now() is plan


def test_more_than_any_plan_has(lazy: LazyStreams) -> None:
    """Training goes on by the least plan."""
    model = fresh()
    (expected,) = kept(model, [batch()])
    compiled(model, budget_at(0.5))
    for _ in range(3):
        step(model, batch())
    failed(10 * budget_at(0.5))
    with pytest.warns(step_again.BudgetExceededWarning, match="since less memory after an error"):
        assert_equal(step(model, batch()), expected)


def test_the_least_budget_of_an_error_can_be_set(lazy: LazyStreams) -> None:
    """What a step took more than predicted is in it."""
    model = compiled(fresh(), budget_at(0.8))
    for _ in range(3):
        step(model, batch())
    failed(budget_at(0.8) // 10)
    step(model, batch())
    graphoffload.set_budget("1B")
    with pytest.raises(BudgetError) as info:
        step(model, batch())
    assert info.value.least_bytes is not None
    graphoffload.set_budget(info.value.least_bytes)
    step(model, batch())
    plan = plan_now()
    assert plan is not None
    assert plan.solution.timeline.peak_bytes <= info.value.least_bytes - budget_at(0.8) // 10


def test_what_fails_where_no_activation_lives_is_no_reason(lazy: LazyStreams) -> None:
    model = compiled(fresh(), budget_at(0.8))
    for _ in range(3):
        step(model, batch())
    plan = plan_now()
    failed(0)
    step(model, batch())
    assert plan_now() is plan


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Wide(64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.long
def test_a_graph_with_a_plan_of_its_own(lazy: LazyStreams) -> None:
    """It is planned with less; what no plan meets is a warning, and it runs on."""
    torch._dynamo.reset()
    model, x = Whole(), torch.ones(64, HIDDEN)
    model.compile(backend=graphoffload.OffloadBackend(**OPTIONS, device_budget=PLENTY), dynamic=False)

    def run() -> tuple[list[Any], int]:
        before = graphoffload.stats()["offloads"]
        return gradients(model, model(x).square().sum()), graphoffload.stats()["offloads"] - before

    expected, none = run()
    assert none == 0
    (plan,) = graphoffload.last_plans()[-1:]
    failed(PLENTY - plan.prediction.keep_peak_bytes * 4 // 5)
    found, offloads = run()
    assert offloads > 0
    assert_equal(found, expected)
    failed(PLENTY)
    with pytest.warns(StepNotPlannedWarning, match="runs on as it is"):
        found, again = run()
    assert again == offloads
    assert_equal(found, expected)


@pytest.mark.parametrize("idle", [False, True])
def test_what_the_observer_notes(
    lazy: LazyStreams, idle: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """After the last backward no other plan helps, and nothing is taken off."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 90 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 95 * GIB)
    model = compiled(fresh(), PLENTY)
    loss = loss_of(model, batch())
    run = STEPS.of(CPU)
    assert isinstance(run, StepRun)
    if idle:
        loss.backward()
    LATEST[CUDA] = run
    step_memory._failed(0, 3 * GIB, 0, 2 * GIB)
    shortage, text = shortage_of(CUDA), capfd.readouterr().err
    assert shortage is not None
    assert shortage_of(CUDA) is None
    assert "3.00 GiB are asked for, 90.0 GiB are allocated, and 5.00 GiB are cached" in text
    if idle:
        assert shortage.lacking_bytes == 0
        assert "out of memory in eager code after the last backward" in text
        assert "no other plan of the step helps" in text
    else:
        assert shortage.lacking_bytes == 3 * GIB
        assert "out of memory in eager code after the forward of call 3" in text
        assert "Activations of compiled graphs are" in text
        assert "no plan fits" not in text


def test_what_no_plan_would_fit(lazy: LazyStreams, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """What is needed without any activation is named."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 90 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 95 * GIB)
    loss = loss_of(compiled(fresh(), PLENTY), batch())
    run = STEPS.of(CPU)
    assert run is not None
    LATEST[CUDA] = run
    step_memory._failed(0, 11 * GIB, 0, 2 * GIB)
    del loss
    assert "Without any of them 101.0 GiB are needed at this point, and the device has 100.0 GiB" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("keep_all", "budget", "maps"),
    [(200, 95, True), (80, 95, False), (200, 50, False), (200, None, False)],
)
def test_when_memory_is_mapped_by_pages(
    keep_all: int, budget: int | None, maps: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where the plan is for nearly all of the device, and keeping everything would take that much."""
    monkeypatch.setattr(device_limits, "device_budget_now", lambda *_, **__: 100 * GIB)
    monkeypatch.setattr(device_limits.allocator, "map_by_pages", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    given = None if budget is None else budget * GIB
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert device_limits.map_by_pages_if_tight(CUDA, keep_all * GIB, given, of_a_step=False) is maps
        assert not device_limits.map_by_pages_if_tight(CPU, keep_all * GIB, given, of_a_step=False)
    assert ("page by page" in capfd.readouterr().err) is maps
