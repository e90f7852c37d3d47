"""MLPs in slices of the tokens, planned and trained: smaller budgets are met, and gradients differ by rounding alone."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from lazy import LazyStreams
from torch import Tensor, nn

import graphoffload
from graphoffload.analysis.token_regions import regions_by_token
from graphoffload.compiler import compile_variant, dispatch, slices
from graphoffload.errors import BudgetError
from graphoffload.facts.limits import Limits
from graphoffload.facts.recipe import SMALLEST
from graphoffload.monitor.pattern_coverage import WHOLE
from graphoffload.options.config import OffloadConfig
from graphoffload.passes.slices import compute_in_slices
from graphoffload.planner.step.together import _recipe_from_json, _recipe_to_json
from graphoffload.runtime.step.calls import StepRun
from graphoffload.runtime.step.schedule import Room
from tests.runtime.stepping import OPTIONS, PLENTY, Wide, batch, compiled, fresh, lazy, plan_now, step

__all__ = ["lazy"]

WIDTH, SLICES = 512, slices.SLICES
WORDS = batch(rows=1, length=256)


@pytest.fixture(autouse=True)
def small_ones_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_variant, "LEAST_SLICED", 1)


@pytest.mark.parametrize("least", [1, 64 << 20])
def test_small_ones_are_never_in_slices(monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    """So gradients of what holds little are those of everything kept, to the bit."""
    monkeypatch.setattr(compile_variant, "LEAST_SLICED", least)
    model, x = whole()
    held: list[int] = []

    def backend(gm: Any, _: Any) -> Any:
        held.append(slices.held_at_once(gm))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, dynamic=False)(x)
    assert held == [2 * 256 * WIDTH * 4 if least == 1 else 0]


def model_of() -> Any:
    return fresh(*(Wide(WIDTH) for _ in range(4)))


def refused(model: nn.Module) -> int:
    """The least budget of a step that is asked for one byte."""
    graphoffload.set_budget("1B")
    with pytest.raises(BudgetError) as info:
        step(model, WORDS)
    assert info.value.least_bytes is not None
    graphoffload.set_budget(PLENTY)  # or a model that is compiled alike would keep to one byte
    return info.value.least_bytes


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Have MLPs in slices, or not."""

    def switch(on: bool) -> None:
        monkeypatch.setattr(compile_variant, "LEAST_SLICED", 1 << 60 if on else 1)

    return switch


def least_of() -> int:
    torch._dynamo.reset()
    model = compiled(model_of(), PLENTY)
    for _ in range(3):
        step(model, WORDS)
    return refused(model)


def variants() -> set[str]:
    """Those that the step's plan runs."""
    plan = plan_now()
    assert plan is not None
    return {compiled.plan.variant for compiled, _, _ in plan.calls if compiled.plan is not None}


def assert_close(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_blocks_meet_a_budget_that_needs_slices(lazy: LazyStreams, at_once: Callable[[bool], None], inner: str) -> None:
    at_once(True)
    whole = least_of()
    at_once(False)
    sliced = least_of()
    assert sliced < 0.9 * whole
    torch._dynamo.reset()
    model = compiled(model_of(), PLENTY, inner=inner)
    for _ in range(3):
        expected = step(model, WORDS)
    assert variants() == {"keep"}, "nothing is in slices while all fits"
    recipes = [recipe for graph in dispatch.GRAPHS.values() for recipe in graph.family.recipes]
    assert not any(recipe.slices for recipe in recipes), "nor are there variants in slices, which take long to make"
    least = refused(model)
    graphoffload.set_budget(least)
    for _ in range(3):
        assert_close(step(model, WORDS), expected)
    assert any(f"in {SLICES} slices" in name for name in variants())
    plan = plan_now()
    assert plan is not None
    assert plan.solution.timeline.peak_bytes <= least
    assert f"MLPs in {SLICES} slices of the tokens" in plan.summary
    graphoffload.set_budget(PLENTY)
    for _ in range(2):
        assert_close(step(model, WORDS), expected)
    assert variants() == {"keep"}


def test_the_first_compile_fits_as_well(lazy: LazyStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of the step, and one MLP at once would take more than the device has."""
    least = least_of()
    monkeypatch.setattr(slices, "_most_bytes", lambda device: least)
    torch._dynamo.reset()
    model = compiled(model_of(), least + 1)
    step(model, WORDS)
    (graph,) = (graph for graph in dispatch.GRAPHS.values() if graph.first.tight)
    assert graph.room(StepRun(lazy, recording=False)) == Room(0, 0), "nothing stays on the device"
    names = {plan.variant for plan in graphoffload.last_plans() if plan.variant}
    assert f"smallest in {SLICES} slices" in names
    for _ in range(3):
        step(model, WORDS)
    plan = plan_now()
    assert plan is not None
    assert plan.solution.timeline.peak_bytes <= least + 1


@pytest.mark.parametrize("fails", [pytest.param("in_slices", marks=pytest.mark.long), "compile_by"])
@pytest.mark.usefixtures("lazy")
def test_a_first_compile_that_fails_is_at_once(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    plain = model_of()
    other, at_once = copy.deepcopy(plain), getattr(slices, fails)
    expected = step(compiled(plain, PLENTY), WORDS)

    def fail(graph: Any, *rest: Any) -> Any:
        if fails == "in_slices" or graph.slices:
            raise RuntimeError("not in slices")
        return at_once(graph, *rest)

    monkeypatch.setattr(slices, "_most_bytes", lambda device: 1)
    monkeypatch.setattr(slices, fails, fail)
    torch._dynamo.reset()
    assert_close(step(compiled(other, PLENTY), WORDS), expected)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Wide(WIDTH) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y.square().mean()


def whole() -> tuple[Whole, Tensor]:
    torch.manual_seed(0)
    model = Whole()
    return model, torch.randn(1, 256, model.layers[0].up.in_features)


def least_of_one_graph(inner: str) -> int:
    torch._dynamo.reset()
    model, x = whole()
    with pytest.raises(BudgetError) as info:
        graphoffload.explain(model, OffloadConfig(**{**OPTIONS, "device_budget": "1B", "inner": inner}))(x)
    assert info.value.least_bytes is not None
    return info.value.least_bytes


@pytest.mark.long
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_one_graph_meets_a_budget_that_needs_slices(
    at_once: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch, inner: str
) -> None:
    """In training and in explain; without slices it is refused. Of half as many slices, which are planned in half the time."""
    monkeypatch.setattr(slices, "SLICES", SLICES // 2)
    least = least_of_one_graph(inner)
    options = {**OPTIONS, "device_budget": least, "inner": inner}
    model, x = whole()
    model(x).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    torch._dynamo.reset()
    model.zero_grad()
    model.compile(backend=graphoffload.OffloadBackend(**options), dynamic=False)
    model(x).backward()
    assert_close([parameter.grad for parameter in model.parameters()], expected)
    plan = graphoffload.last_plans()[-1]
    assert plan.hint is not None
    assert re.search(f"MLPs in {slices.SLICES} slices", plan.hint)
    assert plan.prediction.predicted_peak_bytes <= least
    torch._dynamo.reset()
    report = graphoffload.explain(whole()[0], OffloadConfig(**options))(x)
    assert report.predicted_peak_bytes <= least
    assert f"MLPs in {slices.SLICES} slices" in str(report)
    torch._dynamo.reset()
    other, _ = whole()
    at_once(True)
    other.compile(backend=graphoffload.OffloadBackend(**options), dynamic=False)
    if inner == "aot_eager":
        with pytest.raises(Exception, match="no plan was found"):
            other(x)


@pytest.mark.parametrize(
    ("plain", "sliced", "named", "calls"),
    [
        (10, 8, 8, [(True, 0), (False, SLICES)]),
        (10, 12, 11, [(True, 0), (False, SLICES), (False, 0)]),
        (10, None, 11, [(True, 0), (False, SLICES), (False, 0)]),
    ],
)
def test_a_refusal_names_its_least_budget_once(
    monkeypatch: pytest.MonkeyPatch, plain: int, sliced: int | None, named: int, calls: list[tuple[bool, int]]
) -> None:
    """Where slices are tried next, nobody searches what the graph as written needs; that of slices is named if it is less."""
    seen: list[tuple[bool, int]] = []
    graph = compile_variant.Graph(torch.fx.symbolic_trace(whole()[0]), (), OffloadConfig(), Limits(), WHOLE, "graph0", "cpu")

    def make(one: compile_variant.Graph) -> None:
        seen.append((one.has_resort, one.slices))
        if one.slices and sliced is None:
            raise RuntimeError("not in slices")
        error = BudgetError("no plan")
        error.least_bytes = (sliced if one.slices else plain if one.has_resort else 11) or 0
        raise error

    monkeypatch.setattr(slices, "_has_regions", lambda _: True)
    monkeypatch.setattr(slices, "_written", lambda graph, _: replace(graph, slices=SLICES))
    with pytest.raises(BudgetError) as raised:
        slices.made_or_in_slices(graph, lambda: graph.module, make)
    assert raised.value.least_bytes == named
    assert seen == calls
    monkeypatch.setattr(slices, "_has_regions", lambda _: False)
    with pytest.raises(BudgetError):
        slices.made_or_in_slices(graph, lambda: graph.module, make)
    assert seen[len(calls) :] == [(False, 0)]


def test_explain_of_a_step_says_what_training_does() -> None:
    torch._dynamo.reset()
    model = compiled(model_of(), "1B")
    with pytest.raises(BudgetError) as info:
        graphoffload.explain(model, OffloadConfig(**{**OPTIONS, "device_budget": "1B"}))(WORDS)
    torch._dynamo.reset()
    assert info.value.least_bytes is not None
    budget = int(1.01 * info.value.least_bytes)
    report = graphoffload.explain(compiled(model_of(), budget), OffloadConfig(**{**OPTIONS, "device_budget": budget}))(WORDS)
    assert report.predicted_peak_bytes <= budget
    assert f"MLPs in {SLICES} slices" in str(report)


def test_a_failed_look_is_no_error(lazy: LazyStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is planned as if there were no slices."""

    def fail(*_: Any) -> None:
        raise RuntimeError("not in slices")

    monkeypatch.setattr(dispatch, "in_slices", fail)
    model = compiled(model_of(), PLENTY)
    for _ in range(3):
        step(model, WORDS)
    least = refused(model)
    graphoffload.set_budget(least)
    step(model, WORDS)
    assert not any("slices" in name for name in variants())


def test_sums_over_slices_are_as_good() -> None:
    """Gradients in bfloat16 against those of float64: slices add less than half of what rounding does anyway."""
    model, x = whole()

    def error(count: int) -> float:
        torch._dynamo.reset()
        low = Whole()
        low.load_state_dict(model.state_dict())
        low.to(torch.bfloat16)

        def backend(gm: Any, _: Any) -> Any:
            regions = regions_by_token(gm.graph, count) if count else []
            assert len(regions) == (2 if count else 0)
            return compute_in_slices(gm, regions, count).forward

        torch.compile(low, backend=backend, dynamic=False)(x.bfloat16()).backward()
        truth = [parameter.grad.double() for parameter in exact.parameters() if parameter.grad is not None]
        ours = [parameter.grad.double() for parameter in low.parameters() if parameter.grad is not None]
        return math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(ours, truth, strict=True)))

    exact, _ = whole()
    exact.double()(x.double()).backward()
    assert error(8) < 1.5 * error(0)


def test_ranks_tell_each_other_of_slices() -> None:
    recipe = replace(SMALLEST.in_slices(SLICES), recomputes=frozenset({"mm"}), offloads=frozenset())
    assert _recipe_from_json(json.loads(json.dumps(_recipe_to_json(recipe)))) == recipe
    assert recipe.identity != SMALLEST.identity
