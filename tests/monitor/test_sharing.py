"""One budget over several graphs."""

from __future__ import annotations

import warnings
from typing import Any, cast
from unittest import mock

import pytest
import torch
from lazy import learned
from torch import nn

import graphoffload
from graphoffload.compiler import dispatch
from graphoffload.errors import SharedBudgetWarning
from graphoffload.facts.limits import Limits
from graphoffload.facts.plan import Decision, Plan
from graphoffload.facts.saved_tensors import SavedTable, SavedTensor
from graphoffload.monitor import shared_budget as sharing
from graphoffload.runtime import registry
from graphoffload.testing import ZOO
from graphoffload.testing.attention import Blocks

__all__ = ["learned"]
COUNT = 5


def backend(budget: Any) -> graphoffload.OffloadBackend:
    """Planned for a GPU that is not here."""
    config = graphoffload.OffloadConfig(
        device_budget=budget, reserve=0, inner="aot_eager", hardware="h200-sxm", min_tensor_bytes=0
    )
    return graphoffload.OffloadBackend(config)


def steps(model: nn.Module, count: int = 2) -> list[str]:
    """Train; the warnings of this kind."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(count):
            model(*ZOO["three_blocks"].example("cpu", seed=seed)).square().sum().backward()
    return [str(item.message) for item in caught if issubclass(item.category, SharedBudgetWarning)]


def blocks(budget: Any) -> nn.Module:
    torch._dynamo.reset()
    sharing._FORWARDS.clear()
    model = Blocks(COUNT)
    for layer in model.layers:
        layer.compile(backend=backend(budget))
    return model


@pytest.fixture(scope="module")
def block_peak() -> int:
    """Predicted peak of one block with everything kept."""
    model = Blocks(1)
    report = graphoffload.explain(model.layers[0], backend("1GiB").config)(*ZOO["three_blocks"].example("cpu", seed=0))
    return int(report.keep_peak_bytes)


def test_blocks_that_fit_alone_and_not_together(block_peak: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing reaches from graph to graph: said once, behind the first forward, with the numbers and a budget to try."""
    monkeypatch.setenv("GRAPHOFFLOAD_ACROSS_GRAPHS", "0")
    budget = int(block_peak * 1.1)
    found = steps(blocks(budget))
    assert len(found) == 1
    assert f"each of 1 graphs alone, and {COUNT} calls of them ran in one forward" in found[0]
    assert "too much. Compile the whole model as one graph, or plan each for its share: device_budget=" in found[0]


@pytest.mark.parametrize("budget", ["1GiB", "auto"])
def test_nothing_to_say(budget: str) -> None:
    """Enough for all, or no number given."""
    assert steps(blocks(budget)) == []


def test_a_whole_model_is_planned_as_a_whole(block_peak: int) -> None:
    """One graph, one call."""
    torch._dynamo.reset()
    sharing._FORWARDS.clear()
    model = Blocks(2)
    model.compile(backend=backend("1GiB"))
    with mock.patch.object(sharing, "judge") as judged:
        assert steps(model) == []
    (calls, _), _ = judged.call_args
    assert sum(calls.values()) == 1


def test_a_second_model_is_counted_on_its_own(block_peak: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same configuration: a judged forward is over."""
    monkeypatch.setenv("GRAPHOFFLOAD_ACROSS_GRAPHS", "0")
    budget = int(block_peak * 1.1)
    assert len(steps(blocks(budget))) == 1
    torch._dynamo.reset()
    second = Blocks(COUNT)
    for layer in second.layers:
        layer.compile(backend=backend(budget))
    assert len(steps(second)) == 1


def test_forwards_that_were_dropped_do_not_count(block_peak: int) -> None:
    """What a call without a backward kept is gone; what several microbatches in flight keep is not."""
    torch._dynamo.reset()
    sharing._FORWARDS.clear()
    model = Blocks(1)
    model.compile(backend=backend(int(block_peak * 1.02)))
    inputs = ZOO["three_blocks"].example("cpu", seed=0)
    for _ in range(4):
        model(*inputs)
    assert steps(model) == []

    sharing._FORWARDS.clear()
    torch._dynamo.reset()
    model.compile(backend=backend(int(block_peak * 1.02)))
    outputs = [model(*inputs) for _ in range(3)]
    with pytest.warns(SharedBudgetWarning, match="3 calls of them"):
        outputs[0].square().sum().backward()


class Broken(nn.Module):
    """Something that is trained, and blocks behind it with a graph break after each: one graph runs for all blocks."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.blocks = Blocks(count)
        for layer in self.blocks.layers:
            layer.register_forward_hook(lambda *_: torch._dynamo.graph_break())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        torch._dynamo.graph_break()
        return cast("torch.Tensor", self.blocks(x))


def test_explain_plans_as_training_does(block_peak: int) -> None:
    """Graphs of one forward are one step in both: the same variants, as often."""
    torch._dynamo.reset()
    report = graphoffload.explain(Broken(COUNT), backend("1GiB").config)(*ZOO["three_blocks"].example("cpu", seed=0))
    assert sorted(report.calls) == [1, COUNT]
    assert report.step is not None
    graphs = [graph for graph, _ in report.step.calls]
    assert graphs == [graphs[0]] + [graphs[1]] * COUNT
    assert f"one step runs {graphs[0]}: keep; {COUNT} x {graphs[1]}: keep x {COUNT}" in str(report)
    assert type(report).from_json(report.to_json()) == report

    torch._dynamo.reset()
    model = Broken(COUNT)
    with mock.patch("graphoffload.compiler.backend.may_join", dispatch.may_join):  # as outside of this file
        model.compile(backend=backend("1GiB"))
        registry.forget()
        assert steps(model, 4) == []
    trained = graphoffload.OffloadReport(plans=tuple(graphoffload.last_plans()))
    assert [plan.variant for plan in trained._running] == [plan.variant for plan in report.plans]
    assert trained.offloaded_bytes == report.offloaded_bytes == 0


def test_explain_warns_as_training_does(block_peak: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs that fit alone and not together: explain() says it, training would at its first backward."""
    torch._dynamo.reset()
    model = Broken(COUNT)
    static = sum(p.nbytes for p in model.parameters())
    alone = mock.patch.object(sharing, "may_link", return_value=False)
    monkeypatch.setenv("GRAPHOFFLOAD_ACROSS_GRAPHS", "0")
    with alone, pytest.warns(SharedBudgetWarning, match=f"{COUNT + 1} calls of them"):
        graphoffload.explain(model, backend(static + block_peak).config)(*ZOO["three_blocks"].example("cpu", seed=0))


def test_a_share_of_nothing_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lives outside leaves none of the budget: "0 B" was offered."""
    saved = SavedTable((SavedTensor(name="a", views=(), nbytes=8, dtype="", shape=(), strides=(), op=""),))
    plan = Plan(key="k", graph="g", saved=saved, decisions=(Decision("a", "keep", ""),))
    monkeypatch.setattr(registry, "of_key", lambda key: plan)
    texts = []
    for static in (100, 0):
        with pytest.warns(SharedBudgetWarning) as caught:
            sharing.judge({"k": 9}, Limits(device_budget_bytes=8, static_bytes=static))
        texts.append(str(caught[0].message))
    for text, fixed in zip(texts, ("100 B", "0 B"), strict=True):
        assert 'device_budget="' not in text
        assert f"make the batch or the sequence smaller: {fixed} leave no share of the budget" in text
    with pytest.warns(SharedBudgetWarning, match=r'plan each for its share: device_budget="102 B"'):
        sharing.judge({"k": 9}, Limits(device_budget_bytes=120, static_bytes=100))


@pytest.mark.parametrize("explained", [False, True], ids=["trained", "explained"])
def test_a_first_block_does_not_plan_for_the_others(explained: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """Hidden states of a frozen embedding, made to require a gradient, are a leaf: the first block comes after nothing, and
    keeps what fits; the others are one compile of their own, and share the budget. They ran its plan, and kept as much.
    """
    torch._dynamo.reset()
    sharing._FORWARDS.clear()
    registry.forget()
    model = Blocks(COUNT)
    x = ZOO["three_blocks"].example("cpu", seed=0)[0].detach().requires_grad_()
    if explained:
        for layer in model.layers:
            layer.register_forward_hook(lambda *_: torch._dynamo.graph_break())
        report = graphoffload.explain(model, backend("1GiB").config)(x)
        plans, calls = report.plans, report.calls
    else:
        for layer in model.layers:
            layer.compile(backend=backend("1GiB"))
        for _ in range(3):
            model(x).square().sum().backward()
        plans, calls = graphoffload.last_plans(), (1, COUNT - 1)
    assert calls == (1, COUNT - 1)
    first, others = plans
    if explained:
        assert [plan.variant for plan in plans] == ["keep", "keep"], "one step, and it fits"
        return
    assert first.bytes_of("keep") > 0 == first.offloaded_bytes
    assert others.offloaded_bytes == first.bytes_of("keep"), "goes, or stays where it fits"
    assert "the peak is this graph's alone, one of several" in capfd.readouterr().err


def test_a_budget_is_kept_whatever_the_first_block_starts_from(block_peak: int) -> None:
    """A budget that one block fits alone, and all together do not, if each keeps everything."""
    kept: list[int] = []
    for leaf in (False, True):
        model = blocks(int(block_peak * 1.1))
        x = ZOO["three_blocks"].example("cpu", seed=0)[0].detach().requires_grad_()
        registry.forget()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                model(x if leaf else x * 1).square().sum().backward()
        assert not [item for item in caught if issubclass(item.category, SharedBudgetWarning)]
        kept.append(sum(plan.bytes_of("keep") for plan in graphoffload.last_plans()))
    behind, first = kept
    assert behind == 0
    assert 0 < first < block_peak


def test_a_leaf_is_no_reason_to_compile_again_without_a_shared_budget() -> None:
    """Nothing in the plan depends on it."""
    torch._dynamo.reset()
    registry.forget()
    model = Blocks(COUNT)
    for layer in model.layers:
        layer.compile(backend=backend("auto"))
    model(ZOO["three_blocks"].example("cpu", seed=0)[0].detach().requires_grad_()).sum().backward()
    assert len(graphoffload.last_plans()) == 1
