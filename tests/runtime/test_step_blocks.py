"""Steps whose variants compute whole blocks again, on lazy streams: gradients are those of everything kept, to the bit."""

from __future__ import annotations

import gc
import re
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lazy import LazyStreams
from torch import Tensor, nn

import graphoffload
from graphoffload.compiler import step_plan
from graphoffload.errors import BudgetError
from graphoffload.facts.goals import MeetBudget
from graphoffload.planner.step.facts import StepProblem
from graphoffload.runtime.step.pace import Issued, Pace
from tests.runtime.stepping import OPTIONS, PLENTY, lazy, plan_now, slow_link

__all__ = ["lazy"]

WIDTH, HEADS, TOKENS = 64, 4, 128


class Attention(nn.Module):
    """A block whose attention no chain of single activations runs again, and whose MLP numbers its layers; `drops`: it draws
    random numbers as well, `everywhere` in attention too."""

    def __init__(self, drops: float, everywhere: bool) -> None:
        super().__init__()
        self.norm, self.qkv, self.drops = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), drops
        self.inside = drops if everywhere else 0.0
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.view(1, -1, HEADS, WIDTH // HEADS).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(*heads, dropout_p=self.inside, is_causal=True)
        x = x + mixed.transpose(1, 2).reshape(x.shape)
        return x + F.dropout(self.mlp(x), self.drops)


class Model(nn.Module):
    """Blocks, two in a graph or each in its own, and a loss in eager."""

    def __init__(self, drops: float, count: int, *, everywhere: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(drops, everywhere) for _ in range(count))
        self.halves = self.half, self.half

    def half(self, x: Tensor, start: int) -> Tensor:
        for block in self.blocks[start::2]:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        for start, half in enumerate(self.halves):
            x = half(x, start)
        return x.square().mean()


def gradients(model: Model, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    model(x).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.long
@pytest.mark.parametrize(("parts", "drops"), [("each block", 0.2), ("each block", 0.0), ("halves", 0.0), ("halves", 0.2)])
def test_gradients_of_blocks_that_run_again(
    lazy: LazyStreams, monkeypatch: pytest.MonkeyPatch, parts: str, drops: float
) -> None:
    """A variant that is made for the step would take their place where it is faster (test_step_fit.py has its gradients)."""
    monkeypatch.setattr(step_plan, "choices_of", lambda *_: {})
    torch.manual_seed(0)
    model, x = Model(drops, 8), torch.randn(TOKENS, WIDTH)
    backend: Any = graphoffload.OffloadBackend(**OPTIONS, device_budget=PLENTY, host_budget=0)
    if parts == "halves":
        model.halves = tuple(torch.compile(model.half, backend=backend, dynamic=False) for _ in range(2))  # type: ignore
    else:
        for block in model.blocks:
            block.compile(backend=backend, dynamic=False)
    for _ in range(3):
        expected = gradients(model, x)
    graphoffload.set_budget("1B")
    with pytest.raises(BudgetError) as refused:
        gradients(model, x)
    assert refused.value.least_bytes is not None
    graphoffload.set_budget(refused.value.least_bytes)
    for _ in range(3):
        found = gradients(model, x)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    plan = plan_now()
    assert plan is not None
    variants = {compiled.plan.variant for compiled, _, _ in plan.calls if compiled.plan is not None}
    assert "blocks" in variants
    assert plan.solution.timeline.peak_bytes <= refused.value.least_bytes
    assert plan.solution.slowdown > 0
    assert plan.solution.lower_bound_s is None, "chains of single activations do not bound what blocks do"
    assert re.search("blocks computed again whole", plan.summary)


def test_some_of_the_blocks_of_a_graph_run_again(lazy: LazyStreams) -> None:
    """Between the least budget and everything kept: the last blocks of a graph again, the first ones as chains allow."""
    torch.manual_seed(0)
    model, x = Model(0.2, 8, everywhere=True), torch.randn(TOKENS, WIDTH)
    backend: Any = graphoffload.OffloadBackend(**OPTIONS, device_budget=PLENTY, host_budget=0)
    model.halves = tuple(torch.compile(model.half, backend=backend, dynamic=False) for _ in range(2))  # type: ignore
    for _ in range(3):
        expected = gradients(model, x)
    plan = plan_now()
    assert plan is not None
    most = plan.solution.timeline.peak_bytes
    graphoffload.set_budget("1B")
    with pytest.raises(BudgetError) as refused:
        gradients(model, x)
    least = refused.value.least_bytes
    assert least is not None
    graphoffload.set_budget(budget := least + int(0.15 * (most - least)))
    for _ in range(3):
        found = gradients(model, x)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    plan = plan_now()
    assert plan is not None
    assert plan.solution.timeline.peak_bytes <= budget
    variants = {compiled.plan.variant for compiled, _, _ in plan.calls if compiled.plan is not None}
    assert variants & {"third of blocks", "two thirds of blocks"}, variants
    assert re.search("the last (block|3 blocks) computed again whole", plan.summary), plan.summary


@pytest.mark.long
def test_planning_holds_nothing_of_those_who_called(lazy: LazyStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that was caught in planning is a cycle with the frames of its traceback. Those hold the frames that called them,
    with what these have on the device: the first block's input and result, and whatever a user's loop has."""
    monkeypatch.setattr(step_plan, "choices_of", lambda *_: {})
    monkeypatch.setattr(Pace, "found", lambda _: Issued(step_s=10.0, host_s=10.0, idle=1.0))
    refused = list[bool]()
    solve = step_plan.plan_flight

    def noted(problem: StepProblem, *rest: Any) -> Any:
        refused.append(True)
        if problem.hardware.host_s_per_copy:  # with fewer copies it does not fit
            problem = replace(problem, goal=MeetBudget(1))
        solved = solve(problem, *rest)
        refused[-1] = False
        return solved

    torch.manual_seed(0)
    model, x = Model(0.0, 4), torch.randn(TOKENS, WIDTH)
    backend: Any = graphoffload.OffloadBackend(**{**OPTIONS, "hardware": slow_link(1e9)}, device_budget=PLENTY)
    for block in model.blocks:
        block.compile(backend=backend, dynamic=False)
    for _ in range(3):
        gradients(model, x)
    graphoffload.set_budget("1B")
    with pytest.raises(BudgetError) as error:
        gradients(model, x)
    graphoffload.set_budget(error.value.least_bytes)
    monkeypatch.setattr(step_plan, "plan_flight", noted)

    def own_step() -> weakref.ref[Tensor]:
        own = torch.zeros(1)
        gradients(model, x)
        return weakref.ref(own)

    del error
    gc.collect()
    gc.disable()
    try:
        left = [own_step()() is not None for _ in range(12)]
    finally:
        gc.enable()
    assert refused == [False, True], "as it was asked for, and with fewer copies"
    assert not any(left), left
