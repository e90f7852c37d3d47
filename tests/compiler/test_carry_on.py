"""A trial above its budget is carried on from the graph that it partitioned."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import graphoffload
from graphoffload.compiler import carry_on, one_way
from graphoffload.compiler import plan_search as search
from graphoffload.compiler import trial as trials
from graphoffload.errors import GoalMissedWarning
from graphoffload.facts.goals import MeetBudget
from graphoffload.runtime.registry import last_plans


class Wide(nn.Module):
    """Five values between two products that can be computed again, one from the other."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 512, bias=False), nn.Linear(512, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        return x + self.down(hidden.sigmoid() * hidden.tanh() * hidden.exp())


LOOSE, TIGHT = 0.9, 0.7
OPTIONS: dict[str, Any] = {
    "hardware": "h200-sxm",
    "min_tensor_bytes": 0,
    "reserve": 0,
    "host_budget": 0,
    "inner": "aot_eager",
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Wide() for _ in range(4)))


@pytest.fixture(scope="module")
def keep_bytes() -> int:
    """The peak with everything kept."""
    return graphoffload.explain(net(), policy="keep", **OPTIONS)(torch.randn(64, 32)).keep_peak_bytes


def making(monkeypatch: pytest.MonkeyPatch, make: Callable[[Any, Any, Any], Any]) -> None:
    """All trials are made by `make`."""
    for module in (trials, carry_on):
        monkeypatch.setattr(module, "make_trial", make)


def no_more_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that meets the budget is taken, whatever it costs."""
    monkeypatch.setattr(search, "is_far", lambda *_, **__: False)
    monkeypatch.setattr(one_way, "_is_as_chosen", lambda *_: True)


def first_for_more(monkeypatch: pytest.MonkeyPatch, budget: int) -> list[Any]:
    """The first trial is made for `budget` instead of what is asked; all trials that are made, in order."""
    made: list[Any] = []
    make = trials.make_trial

    def loosely(analysis: Any, instance: Any, goal: Any) -> Any:
        made.append(make(analysis, instance, goal if made else MeetBudget(budget)))
        return made[-1]

    making(monkeypatch, loosely)
    return made


def test_what_was_chosen_stays_and_more_is_computed_again(monkeypatch: pytest.MonkeyPatch, keep_bytes: int) -> None:
    made = first_for_more(monkeypatch, int(LOOSE * keep_bytes))
    budget = int(TIGHT * keep_bytes)
    report = graphoffload.explain(net(), device_budget=budget, **OPTIONS)(torch.randn(64, 32))
    first, second = made[:2]
    assert first.excess > 0 >= second.excess
    assert first.analysis.again < second.analysis.again
    (plan,) = report.plans
    assert plan.prediction.predicted_peak_bytes <= budget
    assert plan.prediction.keep_peak_bytes == keep_bytes, "slowdown and savings are against everything kept"
    assert report.kept_bytes + report.offloaded_bytes + report.recomputed_bytes == first.original.saved_bytes
    names = {decision.name for decision in plan.decisions if decision.action == "recompute"}
    assert {tensor.name for tensor in first.original.tensors} >= names > set()
    assert plan.prediction.predicted_slowdown > 0


def test_it_costs_what_the_first_choice_for_that_budget_costs(monkeypatch: pytest.MonkeyPatch, keep_bytes: int) -> None:
    budget, x = int(TIGHT * keep_bytes), torch.randn(64, 32)
    at_once = graphoffload.explain(net(), device_budget=budget, **OPTIONS)(x)
    first_for_more(monkeypatch, int(LOOSE * keep_bytes))
    carried = graphoffload.explain(net(), device_budget=budget, **OPTIONS)(x)
    assert carried.predicted_slowdown <= at_once.predicted_slowdown + 0.01


def test_gradients_are_those_of_the_model_as_it_is(monkeypatch: pytest.MonkeyPatch, keep_bytes: int) -> None:
    x = torch.randn(64, 32)

    def gradients(**how: Any) -> list[torch.Tensor]:
        model = net()
        torch.compile(model, **how)(x).square().sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    expected = gradients(backend="aot_eager")
    made = first_for_more(monkeypatch, int(LOOSE * keep_bytes))
    no_more_trials(monkeypatch)
    torch._dynamo.reset()
    found = gradients(backend="graphoffload", options={"device_budget": int(TIGHT * keep_bytes), **OPTIONS})
    assert made[0].excess > 0 >= made[1].excess
    assert len(made) == 2, "the plan is the trial that was carried on"
    assert last_plans()[-1].recomputed_bytes > 0
    assert all(map(torch.equal, found, expected))


def test_where_nothing_more_can_be_computed_again_other_ways_follow(monkeypatch: pytest.MonkeyPatch, keep_bytes: int) -> None:
    """As it was before: budgets that are lower by what the trial was above."""
    no_more_trials(monkeypatch)
    monkeypatch.setattr(one_way, "_recomputed_where_over", lambda *_: frozenset())
    made, excess = first_for_more(monkeypatch, int(TIGHT * keep_bytes)), trials.excess_of
    monkeypatch.setattr(trials, "excess_of", lambda r, d, t: 1000.0 if not made else excess(r, d, t))
    monkeypatch.setattr(carry_on, "carried_on", lambda *_: None)
    budget = int(TIGHT * keep_bytes)
    report = graphoffload.explain(net(), device_budget=budget, **OPTIONS)(torch.randn(64, 32))
    assert len(made) == 2
    assert report.predicted_peak_bytes <= budget


class Summed(nn.Module):
    """Blocks whose MLPs a user has computed again, with values beside them that nobody has decided about."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"mlp": Wide()}) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block["mlp"](x) + x.sigmoid() * x.tanh()
        return x


def test_what_seemed_to_fit_as_asked_is_planned_where_it_does_not(monkeypatch: pytest.MonkeyPatch, keep_bytes: int) -> None:
    """A user's own recomputation was estimated to meet the budget: the rest is not decided, and may still meet it."""
    made: list[Any] = []
    make = trials.make_trial

    def above(analysis: Any, instance: Any, goal: Any) -> Any:
        trial = make(analysis, instance, goal)
        made.append(trial if made else replace(trial, excess=1000.0))
        return made[-1]

    making(monkeypatch, above)
    options = {**OPTIONS, "policy": {"*.mlp": "recompute"}, "device_budget": keep_bytes}
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", GoalMissedWarning)
        report = graphoffload.explain(Summed(), **options)(torch.randn(64, 32))
    assert not made[0].decided.planned
    assert made[0].is_open
    assert len(made) > 1, "it was planned"
    assert report.predicted_peak_bytes <= keep_bytes


def test_notes_are_those_of_the_plan(monkeypatch: pytest.MonkeyPatch, keep_bytes: int) -> None:
    """And not of a trial that was carried on, whose figures are no longer true."""
    made = first_for_more(monkeypatch, int(LOOSE * keep_bytes))
    noted = carry_on.until_met

    def with_a_note(trial: Any, *rest: Any) -> Any:
        trial.analysis.notes.append("what the first trial was")
        return noted(trial, *rest)

    monkeypatch.setattr(one_way, "until_met", with_a_note)
    no_more_trials(monkeypatch)
    (plan,) = graphoffload.explain(net(), device_budget=int(TIGHT * keep_bytes), **OPTIONS)(torch.randn(64, 32)).plans
    assert len(made) == 2
    assert "what the first trial was" not in plan.notes
