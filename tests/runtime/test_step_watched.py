"""How a running step learns of its backwards: by the compiled functions themselves, or by hooks where those are not called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from graphoffload.runtime.step.calls import STEPS, StepRun
from tests.runtime.stepping import (
    PLENTY,
    assert_equal,
    batch,
    compiled,
    counted,
    fresh,
    gradients,
    lazy,
    loss_of,
    plan_now,
    planned,
    step,
)

__all__ = ["lazy"]
CPU = torch.device("cpu")


def run_now() -> StepRun:
    """The latest run."""
    return STEPS.runs[CPU]


def with_hooks(model: nn.Module, words: Tensor) -> int:
    """How many hooks a step sets."""
    own = RemovableHandle.__init__
    with mock.patch.object(RemovableHandle, "__init__", autospec=True, side_effect=own) as made:
        step(model, words)
    return made.call_count


@pytest.fixture
def compiled_autograd() -> Iterator[Any]:
    """A context in which backwards run by compiled autograd."""
    yield lambda: torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager"))
    torch._dynamo.compiled_autograd.reset()


@pytest.mark.usefixtures("lazy")
def test_a_planned_step_sets_no_hooks() -> None:
    model, _ = planned()
    assert with_hooks(model, batch()) == 0
    run = run_now()
    assert run.plan is not None
    assert run.is_nested
    assert all(call.began and call.ended for call in run.calls)
    assert counted("deferred") > 0
    assert counted("prefetch_hits") > 0


@pytest.mark.long
def test_hooks_come_back_where_the_compiled_function_is_not_called(compiled_autograd: Any) -> None:
    model = compiled(fresh(), PLENTY)
    for _ in range(4):
        step(model, batch())
    assert plan_now() is not None
    with compiled_autograd():
        for _ in range(3):
            outputs = loss_of(model, batch())  # held, as a training loop does, until the next forward is over
            outputs.backward()
        run = run_now()
        assert run.hooked
        assert run.is_nested
        assert run.plan is not None
        assert not run.off
    for _ in range(2):
        step(model, batch())
    assert with_hooks(model, batch()) == 0, "and they go again"


@pytest.mark.long
def test_a_step_under_compiled_autograd_is_planned(compiled_autograd: Any) -> None:
    model = compiled(fresh(), PLENTY)
    with compiled_autograd():
        for _ in range(4):
            loss_of(model, batch()).backward()
        run = run_now()
        assert run.plan is not None
        assert run.is_nested


@pytest.mark.usefixtures("lazy")
def test_checkpoints_that_come_around_planned_blocks() -> None:
    """What runs again in backward is the variant whose backward waits for it, not the one that is planned for another call."""
    model, expected = planned()
    for _ in range(3):
        for checkpointed in ((0, 1, 2, 3), (1, 3)):
            model.zero_grad()
            x = model.embedding(batch())
            for index, layer in enumerate(model.layers):
                x = checkpoint(layer, x, use_reentrant=False) if index in checkpointed else layer(x)
            F.cross_entropy(model.head(x).flatten(0, 1), batch().flatten()).backward()
            assert_equal(gradients(model), expected)
        assert_equal(step(model, batch()), expected)
    assert_equal(step(model, batch()), expected)
    assert run_now().plan is not None
    assert not run_now().off, "and the plan is followed again"


class Passing(nn.Module):
    """A block that returns a view of its input as well, and first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.unflatten(0, (2, -1)), torch.tanh(self.inner(x))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(16, 16), nn.ModuleList(Passing() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.first(x), torch.zeros(())
        for layer in self.layers:
            before, x = layer(x)
            total = total + before.sum()
        return total + x.sum()


def test_a_view_of_an_input_is_not_taken_for_the_call_that_made_it() -> None:
    torch.manual_seed(0)
    model: Any = compiled(Chain(), PLENTY)  # type: ignore[arg-type]
    x = torch.randn(4, 16)
    for _ in range(4):
        model(x).backward()
    run = run_now()
    assert run.is_nested
    assert run.plan is not None
    assert len(run.calls) == len(model.layers)


class Deep(nn.Module):
    """A block whose outputs are views of views of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(self.inner(x)).view(2, 2, 3, 16).transpose(0, 1).unsqueeze(0)
        y = y.permute(0, 2, 1, 3, 4).squeeze(0).flatten(0, 1)
        return y[:, 0], y[:, 1], y[:, 2]


class Adding(nn.Module):
    """A block that writes to its input, and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, total: Tensor, x: Tensor) -> None:
        total.add_(torch.tanh(self.inner(x)))


class Several(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(16, 16), nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        total = x * 1.0
        for layer in self.layers:
            if isinstance(layer, Adding):
                layer(total, x)
            else:
                a, b, c = layer(x)
                x = a * b + c
        return (total + x).sum()


def test_a_call_is_known_by_views_of_views_that_it_returns() -> None:
    torch.manual_seed(0)
    model: Any = compiled(Several(Deep), PLENTY)  # type: ignore[arg-type]
    for _ in range(4):
        model(torch.ones(4, 16)).backward()
    assert len(run_now().calls) == len(model.layers)
    assert run_now().is_nested
    assert run_now().plan is not None


def test_calls_whose_backward_nobody_sees_make_no_run_without_an_end() -> None:
    torch.manual_seed(0)
    model: Any = compiled(Several(Adding), PLENTY)  # type: ignore[arg-type]
    for _ in range(4):
        model.zero_grad()
        model(torch.ones(4, 16)).backward()
        assert len(run_now().calls) <= len(model.layers)
