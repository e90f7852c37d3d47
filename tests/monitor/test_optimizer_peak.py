"""What an optimizer's step takes above a budget is said with its name and what to do; no plan is blamed for it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from graphoffload.errors import BudgetExceededWarning
from graphoffload.facts.limits import Limits
from graphoffload.facts.plan import Plan, Prediction
from graphoffload.monitor import budget_check, optimizer_peak
from graphoffload.options.config import OffloadConfig
from graphoffload.runtime import registry

GPU, BUDGET = torch.device("cuda:0"), 10 * 2**30
BEFORE, PEAK = 9 * 2**30, 12 * 2**30


class Counted:
    """torch's counts of a GPU's memory. An optimizer's step raises the peak to `within`."""

    def __init__(self, peak: int, within: int) -> None:
        self.asked, self._peaks = 0, iter((peak, within))
        self._last = within

    def peak(self, _: Any) -> int:
        self.asked += 1
        return next(self._peaks, self._last)


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("_watched", "_before", "_peaks"):
        monkeypatch.setattr(optimizer_peak, name, {})
    monkeypatch.setattr(optimizer_peak, "_device_of", lambda optimizer: GPU)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: BEFORE)
    yield
    registry._PLANS.pop("watched", None)


def counts(monkeypatch: pytest.MonkeyPatch, peak: int, within: int) -> Counted:
    counted = Counted(peak, within)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", counted.peak)
    return counted


def said(steps: int, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **how: Any) -> list[str]:
    parameter = nn.Parameter(torch.ones(3))
    optimizer: Any = kind([parameter], **how)  # type: ignore[call-arg]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            parameter.grad = torch.ones(3)
            optimizer.step()
    return [str(item.message) for item in caught if issubclass(item.category, BudgetExceededWarning)]


def test_said_once_with_the_optimizer_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer_peak.watch_optimizers(GPU, BUDGET, "digest")
    counts(monkeypatch, BEFORE, PEAK)
    (text,) = said(20)
    parts = ("device_budget=10.0 GiB was exceeded by 2.00 GiB in AdamW.step()", "9.00 GiB are allocated when it begins")
    for part in (*parts, "3.00 GiB are added", "AdamW(..., fused=True)", "at least 12.0 GiB"):
        assert part in text
    optimizer_peak.watch_optimizers(GPU, BUDGET, "digest")
    counts(monkeypatch, BEFORE, PEAK)
    assert said(20) == [], "the same configuration"


@pytest.mark.parametrize(
    ("kind", "how", "advice"),
    [
        (torch.optim.AdamW, {"fused": True}, ""),
        (torch.optim.AdamW, {"foreach": False}, "fused=True"),
        (torch.optim.RMSprop, {}, "foreach=False"),
        (torch.optim.RMSprop, {"foreach": False}, ""),
        (torch.optim.LBFGS, {}, ""),
    ],
)
def test_only_what_an_optimizer_has_is_advised(kind: type[torch.optim.Optimizer], how: dict[str, Any], advice: str) -> None:
    optimizer: Any = kind([nn.Parameter(torch.ones(3))], **how)  # type: ignore[call-arg]
    text = optimizer_peak._text(optimizer, BUDGET, BEFORE, PEAK)
    assert advice in text
    assert ("=True)" in text or "=False)" in text) == bool(advice)
    assert "device_budget has to be at least 12.0 GiB" in text


@pytest.mark.parametrize(("before", "within"), [(BEFORE, BUDGET), (PEAK, PEAK), (2 * PEAK, 2 * PEAK)])
def test_a_peak_below_the_budget_or_of_another_moment_is_no_optimizers(
    monkeypatch: pytest.MonkeyPatch, before: int, within: int
) -> None:
    optimizer_peak.watch_optimizers(GPU, BUDGET, "digest")
    counts(monkeypatch, before, within)
    assert said(3) == []
    assert optimizer_peak.is_an_optimizers(GPU, within) == (within > before)


def test_only_the_first_steps_on_that_device_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = counts(monkeypatch, BEFORE, BEFORE)
    optimizer_peak.watch_optimizers(torch.device("cpu"), BUDGET, "on a CPU")
    assert said(3) == []
    optimizer_peak.watch_optimizers(torch.device("cuda:1"), BUDGET, "on another GPU")
    assert said(3) == []
    assert counted.asked == 0
    optimizer_peak.watch_optimizers(GPU, BUDGET, "digest")
    assert said(25) == []
    assert counted.asked == 2 * optimizer_peak._STEPS


def test_a_plan_is_not_blamed_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget's own check reads the same peak a few calls later."""
    monkeypatch.setattr(budget_check, "_said", set())
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {})
    registry._PLANS["watched"] = Plan(key="watched", graph="graph0", device=str(GPU), prediction=Prediction())
    config = OffloadConfig(device_budget=BUDGET)
    run = budget_check.watch_budget(lambda x: x, "watched", config, Limits(device_budget_bytes=BUDGET))
    optimizer_peak.watch_optimizers(GPU, BUDGET, config.digest())
    peaks = iter((BEFORE, BEFORE, PEAK))  # of the first call, and of the optimizer's first step
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks, PEAK))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(0)
        assert len(said(1)) == 1
        for number in range(12):
            run(number)
    assert not [item for item in caught if issubclass(item.category, BudgetExceededWarning)]
