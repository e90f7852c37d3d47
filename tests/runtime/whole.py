"""A model that is compiled as a whole, for tests of graphs that are planned alone: what its steps allocate, and its plans.

Nothing is allocated on lazy streams: a step says what the device has at each moment, as the plan that it runs by predicts it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from lazy import LazyStreams, lazy_steps
from torch import Tensor, nn

import graphoffload
from graphoffload.compiler import alone, own_plans
from graphoffload.compiler.dispatch import Dispatched
from graphoffload.compiler.step_runs import GRAPHS
from graphoffload.errors import BudgetExceededWarning
from graphoffload.facts.plan import Plan
from graphoffload.report.predictions import predicted_of
from graphoffload.runtime.step.call import StepCall
from graphoffload.runtime.step.calls import StepRun
from graphoffload.testing.attention import HIDDEN
from tests.runtime.stepping import OPTIONS, Whole

CONFIG = graphoffload.OffloadConfig(**{**OPTIONS, "device_budget": "auto"})


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch) -> Iterator[LazyStreams]:
    """Every byte counts, and no step before this one does."""
    torch._dynamo.reset()
    monkeypatch.setattr(alone, "_ROUNDED", 1)
    monkeypatch.setattr(own_plans, "_STATIC_STEP", 1)
    monkeypatch.setattr(own_plans, "_BUDGET_STEP", 1)
    monkeypatch.setattr(alone, "tolerated_bytes", lambda _: 0)
    with lazy_steps() as lazy:
        yield lazy
    torch._dynamo.reset()


class Scores(Whole):
    """A model in one graph, which returns scores of words."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(HIDDEN, 8 * HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """As it says."""
        y: Tensor = self.head(super().forward(x))
        return y


def plain() -> nn.Module:
    """A model, always with the same parameters."""
    torch.manual_seed(0)
    return Scores()


def inputs() -> Tensor:
    """Of a batch, always the same."""
    return torch.randn(64, 32, HIDDEN, generator=torch.Generator().manual_seed(0))


def whole(*, dynamic: bool | None = None, **options: Any) -> nn.Module:
    """A model that is compiled as a whole."""
    model, config = plain(), graphoffload.OffloadConfig(**{**OPTIONS, **options})
    model.compile(backend=graphoffload.OffloadBackend(config), dynamic=dynamic)
    return model


def plan_of(**options: Any) -> Plan:
    """What is planned for a model, without training."""
    (plan,) = graphoffload.explain(plain(), graphoffload.OffloadConfig(**{**OPTIONS, **options}))(inputs()).plans
    return plan


def left_by(plan: Plan) -> int:
    """What is allocated where the forward of a plan ends."""
    predicted = predicted_of(plan.key)
    return 0 if predicted is None else predicted.timeline.memory[predicted.timeline.forward_steps - 1] - predicted.turn_bytes


@contextlib.contextmanager
def leaving(lazy: LazyStreams, more: int) -> Iterator[None]:
    """Where a forward ends, what its plan leaves is allocated, and so much more."""
    ended = StepRun.forward_ended

    def forward_ended(run: StepRun, call: StepCall, outputs: Any, since: int) -> None:
        own = graph().own
        left = left_by(now()) + own.graph.limits.static_bytes - own.limits.static_bytes + more
        lazy.allocated = left, left
        ended(run, call, outputs, since)

    with mock.patch.object(StepRun, "forward_ended", forward_ended):
        yield


@contextlib.contextmanager
def holding(lazy: LazyStreams, held: int) -> Iterator[None]:
    """A backward has its plan's peak, and so much more."""
    ended = StepRun.backward_ended

    def backward_ended(run: StepRun, call: StepCall) -> None:
        own, left = graph().own, lazy.allocated[0]
        peak = backward_of(now()) + own.graph.limits.static_bytes - own.limits.static_bytes + held
        lazy.allocated = left, max(peak, lazy.allocated[1])
        ended(run, call)

    with mock.patch.object(StepRun, "backward_ended", backward_ended):
        yield


def backward_of(plan: Plan) -> int:
    """The peak of a plan's backward."""
    predicted = predicted_of(plan.key)
    return 0 if predicted is None else max(predicted.timeline.memory[predicted.timeline.forward_steps :])


def step(
    model: nn.Module, lazy: LazyStreams, taken: int = 0, *, more: int = 0, freed: int = 0, held: int | None = None
) -> tuple[list[Tensor | None], list[str]]:
    """One step whose loss takes so many bytes. Its gradients, and its warnings.

    more: allocated throughout, beside what was planned with. freed: allocated until the loss is there. held: in backward,
    beyond its plan; None: of backward only what it begins with is seen.
    """
    model.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lazy.allocated = more + freed, more + freed
        with leaving(lazy, more + freed):
            result = model(inputs())
        left = lazy.allocated[0] - freed
        lazy.allocated = left + freed, left + freed + taken
        loss = result.square().sum()
        lazy.allocated = left, left + freed + taken
        with contextlib.nullcontext() if held is None else holding(lazy, held):
            loss.backward()
        lazy.allocated = more + freed, left + freed + taken
    texts = [str(w.message) for w in caught if issubclass(w.category, BudgetExceededWarning)]
    return [parameter.grad for parameter in model.parameters()], texts


def budget_of(share: float) -> int:
    """Between the least peak and that of keep-all."""
    keep = plan_of(policy="keep").prediction.keep_peak_bytes
    least = plan_of(policy="offload").prediction.predicted_peak_bytes
    return int(least + share * (keep - least))


def graph() -> Dispatched:
    """That of the latest model."""
    return GRAPHS[max(GRAPHS)]


def now() -> Plan:
    """What the latest model runs by."""
    plan = graph().first.plan
    assert plan is not None
    return plan
