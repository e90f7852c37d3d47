"""A budget that is exceeded in truth is said, once, with both numbers and what to do."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graphoffload.errors import BudgetExceededWarning
from graphoffload.facts.limits import Limits
from graphoffload.facts.plan import Plan, Prediction
from graphoffload.monitor import budget_check as overrun
from graphoffload.options.config import OffloadConfig
from graphoffload.runtime import registry

BUDGET = 10 * 2**30
KEY = "a plan that is watched"
LIMITS = Limits(device_budget_bytes=BUDGET)


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    overrun._said.clear()
    overrun._RISES.clear()
    yield
    registry._PLANS.pop(KEY, None)
    registry._RUN.pop(KEY, None)


def watched(device: str = "cuda:0", budget: Any = BUDGET) -> Callable[..., Any]:
    plan = Plan(key=KEY, graph="graph7", device=device, prediction=Prediction(predicted_peak_bytes=9 * 2**30))
    registry._PLANS[KEY] = plan
    limit = budget if isinstance(budget, int) else None
    return overrun.watch_budget(lambda x: x + 1, KEY, OffloadConfig(device_budget=budget), Limits(device_budget_bytes=limit))


def said(run: Callable[..., Any], calls: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [run(number) for number in range(calls)] == [number + 1 for number in range(calls)]
    return [str(item.message) for item in caught if issubclass(item.category, BudgetExceededWarning)]


def counts(monkeypatch: pytest.MonkeyPatch, peak_bytes: int) -> None:
    """torch counts this peak, from the first step on."""
    peaks = itertools.chain([0], itertools.repeat(peak_bytes))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks))


def test_a_peak_from_before_the_first_step_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model's, which ran before with everything kept."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2 * BUDGET)
    assert said(watched(), 20) == []


def test_said_once_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    counts(monkeypatch, BUDGET + 2**29)
    run = watched()
    assert said(run, 2) == [], "the first steps compile"
    (text,) = said(run, 20)
    for part in ("device_budget=10.0 GiB", "exceeded by 512.0 MiB", "peak of 10.5 GiB", "graph7 predicted 9.00 GiB", "tune()"):
        assert part in text
    assert said(watched(), 20) == [], "the same configuration"


def test_the_plan_with_the_highest_peak_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of graphs of one step, whose backwards come later; not one on another device, or for a larger budget."""
    run = watched()
    registry._PLANS[KEY] = dataclasses.replace(registry._PLANS[KEY], part=True)
    for name, device, peak_gib in (("long", "cuda:0", 9.5), ("other", "cuda:1", 9.9), ("before", "cuda:0", 20)):
        prediction = Prediction(predicted_peak_bytes=int(peak_gib * 2**30))
        monkeypatch.setitem(registry._PLANS, name, Plan(key=name, graph=name, device=device, prediction=prediction))
    counts(monkeypatch, BUDGET + 2**29)
    (text,) = said(run, 20)
    assert "the plan of long predicted 9.50 GiB" in text


@pytest.mark.parametrize(("asked", "uncut"), [(2**29 - 2**25, "32.0 MiB of the peak are in no tensor"), (2**29, "")])
def test_what_is_in_no_tensor_is_said(monkeypatch: pytest.MonkeyPatch, asked: int, uncut: str) -> None:
    """Tensors of 1.125 MiB in blocks of 2 MiB, say: no plan has these bytes."""
    peaks = {"allocated_bytes.all.peak": BUDGET + 2**29, "requested_bytes.all.peak": BUDGET + asked}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: peaks)
    counts(monkeypatch, BUDGET + 2**29)
    (text,) = said(watched(), 20)
    assert ("expandable_segments:True" in text) == bool(uncut)
    assert uncut in text


@pytest.mark.parametrize(
    ("peaks", "named"),
    [
        pytest.param([0, 1, 2, 2, 11, 11, 11, 11], "shorter", id="behind a call of the second one"),
        pytest.param([0, 1, 2, 11, 11, 11, 11, 11], "graph7", id="behind a call of the first one"),
        pytest.param([0, 1, 2, 11, 1, 2, 11, 11], "shorter", id="and then torch's counter was reset"),
    ],
)
def test_the_plan_whose_call_raised_the_peak_is_named(monkeypatch: pytest.MonkeyPatch, peaks: list[int], named: str) -> None:
    """Where graphs take turns, whatever they were predicted to take."""
    looks = (3, 4)
    monkeypatch.setattr(overrun, "_LOOKS", looks)
    first = watched()
    for name, peak_gib in (("shorter", 8.0), ("longest", 9.9)):
        prediction = Prediction(predicted_peak_bytes=int(peak_gib * 2**30))
        monkeypatch.setitem(registry._PLANS, name, Plan(key=name, graph=name, device="cuda:0", prediction=prediction))
    second = overrun.watch_budget(lambda x: x + 1, "shorter", OffloadConfig(device_budget=BUDGET), LIMITS)
    found = iter(peaks)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(found) * 2**30)
    (text,) = [text for _ in range(looks[-1]) for run in (first, second) for text in said(run, 1)]
    assert f"the plan of {named} predicted" in text


def test_a_later_step_may_take_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizer state that came with the first step's end, say."""
    peaks = iter([0, *[BUDGET] * 8, BUDGET + 1])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks))
    assert len(said(watched(), 20)) == 1


def test_nothing_is_looked_at_without_a_number_or_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: str) -> int:
        raise AssertionError("asked")

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", fails)
    assert said(watched(device="cpu"), 20) == []
    assert said(watched(budget="auto"), 20) == []


def test_no_budget_of_nothing_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """More too much than there is to lower."""
    counts(monkeypatch, 2 * BUDGET)
    (text,) = said(watched(), 20)
    assert "exceeded by 10.0 GiB" in text
    assert "make the batch or the sequence smaller: 10.0 GiB is more than any lower device_budget makes up for" in text
    assert "lower device_budget by" not in text


def test_what_was_reserved_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counts(monkeypatch, BUDGET + 2**30)
    watched()
    plan = registry._PLANS[KEY]
    told = dataclasses.replace(plan, part=True, prediction=dataclasses.replace(plan.prediction, reserve_bytes=2**29))
    registry._PLANS[KEY] = told
    (text,) = said(overrun.watch_budget(lambda x: x + 1, KEY, OffloadConfig(device_budget=BUDGET), LIMITS), 20)
    assert "graph7 predicted 9.50 GiB, 512.0 MiB of it reserved, and speaks of that graph alone" in text
