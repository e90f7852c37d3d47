"""A graph that is called once in a step gets a variant that is made for it: each activation is chosen by itself."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from lazy import LazyStreams

import graphoffload
from graphoffload.compiler import dispatch, step_plan
from graphoffload.compiler.step_plan import StepPlan
from graphoffload.facts.goals import MeetBudget, WithinSlowdown
from graphoffload.facts.recipe import FITTED
from graphoffload.planner.step import fit
from graphoffload.planner.step.facts import StepProblem
from graphoffload.planner.step.fit import choices_of
from graphoffload.planner.step.solve import StepSolution
from tests.runtime.stepping import (
    PLENTY,
    Model,
    Whole,
    assert_equal,
    batch,
    compiled,
    gradients,
    kept,
    lazy,
    loss_of,
    plan_now,
    slow_link,
    step,
)

__all__ = ["lazy"]

WORDS = batch(length=64)
WITHOUT_COPIES: dict[str, Any] = {"host_budget": 0}


def model_of() -> Model:
    torch.manual_seed(0)
    return Model(Whole(64, 3), Whole(96, 3))


def planned(model: Model, share: float, order: Sequence[int] = (0, 1), **options: Any) -> StepPlan:
    """The plan for a share of what is kept, and the model trained by it."""
    model.order = order
    compiled(model, PLENTY, **WITHOUT_COPIES, **options)
    for _ in range(3):
        step(model, WORDS)
    roomy = plan_now(len(order))
    assert roomy is not None
    graphoffload.set_budget(int(share * roomy.solution.keep_timeline.peak_bytes))
    step(model, WORDS)
    plan = plan_now(len(order))
    assert plan is not None
    return plan


def names_of(plan: StepPlan) -> list[str]:
    return [plan.facts.variant(call, chosen).name for call, chosen in enumerate(plan.solution.chosen)]


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_each_activation_is_chosen_by_itself(lazy: LazyStreams, monkeypatch: pytest.MonkeyPatch, inner: str) -> None:
    model = model_of()
    twin = copy.deepcopy(model)
    twin.order = (0, 1)
    (expected,) = kept(twin, [WORDS], inner=inner)
    plan = planned(model, 0.6, inner=inner)
    if inner == "aot_eager":
        assert names_of(plan) == [f"{FITTED} 1"] * 2
    ran = [call[0].plan.variant for call in plan.calls if call[0].plan is not None]
    assert ran == names_of(plan), "what was chosen is what runs"
    solution = plan.solution
    assert solution.timeline.peak_bytes <= 0.6 * solution.keep_timeline.peak_bytes
    assert_equal(gradients(model, loss_of(model, WORDS)), expected)
    if inner == "inductor":
        return  # so small a net has few activations that are not fused away
    assert solution.lower_bound_s is not None
    assert solution.timeline.time_s <= solution.lower_bound_s + 0.015 * solution.keep_timeline.time_s
    torch._dynamo.reset()
    monkeypatch.setattr(step_plan, "choices_of", lambda *_: {})
    without = planned(model_of(), 0.6, inner=inner)
    assert not any(name.startswith(FITTED) for name in names_of(without))
    assert without.solution.slowdown > solution.slowdown


def test_a_graph_that_is_called_twice_has_none(lazy: LazyStreams) -> None:
    asked = list[tuple[StepProblem, StepSolution]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_plan, "choices_of", lambda *given: asked.append(given) or {})
        planned(model_of(), 0.6, (0, 1, 0))
    problem, solution = asked[-1]
    dear = replace(solution, lower_bound_s=None, timeline=replace(solution.timeline, time_s=1.0))
    assert list(choices_of(problem, dear)) == [1]
    assert choices_of(replace(problem, goal=WithinSlowdown(0.1)), dear) == {}
    assert choices_of(replace(problem, facts=replace(problem.facts, in_flight=2)), dear) == {}
    assert choices_of(replace(problem, goal=MeetBudget(1)), dear) == {}
    other = problem.facts.bounds[1]
    large = replace(other, candidates=tuple(replace(one, nbytes=100 * one.nbytes) for one in other.candidates))
    beside_large = replace(problem, facts=replace(problem.facts, bounds=(large, other)))
    assert choices_of(beside_large, dear) == {}
    near = replace(dear, lower_bound_s=dear.timeline.time_s)
    assert choices_of(problem, near) == {}


@pytest.mark.long
def test_another_budget_gets_another_one_and_no_more_than_three(lazy: LazyStreams) -> None:
    model = model_of()
    plan = planned(model, 0.6)
    peak = plan.solution.keep_timeline.peak_bytes
    for share in (0.85, 0.7, 0.5, 0.45, 0.75, 0.65):
        graphoffload.set_budget(int(share * peak))
        step(model, WORDS)
    found = plan_now(2)
    assert found is not None
    for variants in found.facts.graphs:
        fitted = [variant.name for variant in variants if variant.name.startswith(FITTED)]
        assert fitted == [f"{FITTED} {number}" for number in range(1, len(fitted) + 1)]
        assert 1 < len(fitted) <= dispatch._MOST_FITTED


def test_copies_have_time_to_spare(lazy: LazyStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variant is chosen for a slower link: it computes more again, and copies less, than one for the link as it is."""
    asked = list[tuple[StepProblem, StepSolution]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_plan, "choices_of", lambda *given: asked.append(given) or {})
        model = model_of()
        model.order = (0, 1)
        compiled(model, PLENTY, hardware=slow_link(2e9))
        for _ in range(3):
            step(model, WORDS)
        roomy = plan_now(2)
        assert roomy is not None
        graphoffload.set_budget(int(0.5 * roomy.solution.keep_timeline.peak_bytes))
        step(model, WORDS)
    problem, solution = asked[-1]
    dear = replace(solution, lower_bound_s=None, timeline=replace(solution.timeline, time_s=1.0))
    sizes = [{one.name: one.nbytes for one in bound.candidates} for bound in problem.facts.bounds]
    found = dict[float, int]()
    for link in (1.0, 0.9, 0.5):
        monkeypatch.setattr(fit, "_LINK", link)
        choices = choices_of(problem, dear)
        found[link] = sum(sizes[graph][name] for graph, names in choices.items() for name in names)
    assert found[0.5] > found[0.9] >= found[1.0] > 0
    monkeypatch.undo()
    assert fit._LINK < 1.0


def test_a_variant_that_cannot_be_made_is_no_error(lazy: LazyStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    made = dispatch.family_of

    def fails(graph: Any, again: Any, recipes: Any = None) -> Any:
        if recipes is not None:
            raise RuntimeError("cannot be traced")
        return made(graph, again, recipes)

    monkeypatch.setattr(dispatch, "family_of", fails)
    assert not any(name.startswith(FITTED) for name in names_of(planned(model_of(), 0.6)))


def test_one_that_turns_out_no_faster_is_not_taken(lazy: LazyStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan before stays, by the numbers that its variants have."""
    seen: list[StepSolution] = []

    def never(problem: StepProblem, found: StepSolution, before: StepSolution) -> bool:
        seen.append(before)
        return False

    monkeypatch.setattr(step_plan, "is_worth", never)
    plan = planned(model_of(), 0.6)
    assert plan.solution is seen[-1]
    assert not any(name.startswith(FITTED) for name in names_of(plan))
    assert [call[0].plan.variant for call in plan.calls if call[0].plan is not None] == names_of(plan)
