"""A model in one graph with an eager loss: what the loss takes is in the plan."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphoffload.errors import BudgetExceededWarning
from graphoffload.facts.plan import Plan
from graphoffload.runtime import registry

WORDS, WIDTH, LAYERS, ROWS, LENGTH = 32_000, 1024, 12, 8, 2048
STEPS = 6


class Scores(nn.Module):
    """Scores of words, the loss of which is computed in eager."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(LAYERS))
        self.downs = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """words: of [rows, length]; the scores: of [rows, length, WORDS]."""
        x = self.embedding(words)
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(F.gelu(up(norm(x))))
        scores: Tensor = self.head(x)
        return scores


@pytest.fixture
def words() -> Iterator[Tensor]:
    """A batch, in a process that may use the whole device again afterwards."""
    yield torch.randint(0, WORDS, (ROWS, LENGTH), device="cuda")
    torch.cuda.set_per_process_memory_fraction(1.0)


def scores() -> nn.Module:
    """A model, always with the same parameters."""
    torch.manual_seed(0)
    return Scores().to("cuda", torch.bfloat16)


class Losses(nn.Module):
    """The same with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Scores()

    def forward(self, words: Tensor) -> Tensor:
        """The loss of predicting the same words."""
        return F.cross_entropy(self.body(words).float().flatten(0, 1), words.flatten())


class Both(Losses):
    """The same, which returns its scores as well."""

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Loss and scores."""
        scores = self.body(words)
        return F.cross_entropy(scores.float().flatten(0, 1), words.flatten()), scores


def trained(model: nn.Module, words: Tensor) -> tuple[list[Tensor], int]:
    """Steps that leave the parameters as they are: the gradients of the last one, and the highest peak of the last three."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    for number in range(STEPS):
        if number == STEPS - 3:
            torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        F.cross_entropy(model(words).float().flatten(0, 1), words.flatten()).backward()
        optimizer.step()
    return [p.grad for p in model.parameters() if p.grad is not None], torch.cuda.max_memory_allocated()


def assert_alike(found: list[Tensor], expected: list[Tensor]) -> None:
    """But for how kernels round that are fused otherwise."""
    for one, other in zip(found, expected, strict=True):
        assert (one.float() - other.float()).norm() <= 0.02 * other.float().norm()


def predicted(plan: Plan) -> int:
    """With what is reserved."""
    return plan.prediction.with_reserve(plan.prediction.predicted_peak_bytes)


def plain(words: Tensor) -> tuple[list[Tensor], int]:
    """The same under plain torch.compile: gradients and peak."""
    model = scores()
    model.compile(dynamic=False)
    found, peak = trained(model, words)
    return [gradient.cpu() for gradient in found], peak


def test_a_budget_that_an_eager_loss_breaks_is_kept_from_the_third_step_on(words: Tensor) -> None:
    expected, keep = plain(words)
    torch._dynamo.reset()
    model = scores()
    budget = int(0.88 * keep)
    model.compile(backend="graphoffload", options={"device_budget": budget}, dynamic=False)
    with pytest.warns(BudgetExceededWarning, match="in the first steps: between the forward and the backward"):
        found, peak = trained(model, words)
    assert_alike([gradient.cpu() for gradient in found], expected)
    plan = registry.last_plans()[-1]
    assert plan.changes_anything
    assert plan.turn_bytes == pytest.approx(12 * words.numel() * WORDS, rel=0.2)
    assert peak <= budget
    assert peak == pytest.approx(predicted(plan), rel=0.01)


def accumulated(words: Tensor, ema_from: int, **how: Any) -> tuple[list[Tensor], int]:
    """Steps of two microbatches, with an average of the parameters from one of them on: gradients of the last step, and the
    peak of the last two."""
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    model = Losses().to("cuda", torch.bfloat16)
    model.compile(dynamic=False, **how)
    optimizer, average = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True), None
    for number in range(STEPS):
        if number == ema_from:
            average = copy.deepcopy([p.detach().float() for p in model.parameters()])
        if number == STEPS - 2:
            torch.cuda.reset_peak_memory_stats()
        for half in words.chunk(2):
            model(half).backward()
        optimizer.step()
        if number < STEPS - 1:
            optimizer.zero_grad()
    assert average is not None
    return [p.grad.cpu() for p in model.parameters() if p.grad is not None], torch.cuda.max_memory_allocated()


def test_what_is_allocated_later_is_planned_with(words: Tensor, capsys: pytest.CaptureFixture[str]) -> None:
    """The gradients that a second microbatch finds, and an average of the parameters in the middle of training."""
    expected, keep = accumulated(words, 3)
    budget = int(0.93 * keep)
    found, peak = accumulated(words, 3, backend="graphoffload", options={"device_budget": budget})
    assert capsys.readouterr().err.count("more are allocated outside") in (1, 2)
    assert_alike(found, expected)
    assert registry.last_plans()[-1].changes_anything
    assert peak <= budget


def holding_scores(words: Tensor, **how: Any) -> tuple[list[Tensor], int]:
    """Steps that hold what the model returned: gradients of the last step, and the highest peak of the last three."""
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    model = Both().to("cuda", torch.bfloat16)
    model.compile(dynamic=False, **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    for number in range(STEPS):
        if number == STEPS - 3:
            torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        out = model(words)
        out[0].backward()
        optimizer.step()
    return [p.grad.cpu() for p in model.parameters() if p.grad is not None], torch.cuda.max_memory_allocated()


def test_outputs_that_are_held_are_planned_with(words: Tensor) -> None:
    """Backward has read the scores early on, and they stay until the next step has its own."""
    expected, keep = holding_scores(words)
    budget = int(0.8 * keep)
    with pytest.warns(BudgetExceededWarning, match="in the first steps: the backward of"):
        found, peak = holding_scores(words, backend="graphoffload", options={"device_budget": budget})
    assert_alike(found, expected)
    assert registry.last_plans()[-1].changes_anything
    assert peak <= budget


def test_what_only_just_fits_with_its_loss_is_never_out_of_memory(words: Tensor) -> None:
    """No options, and a device that is too small to keep everything: the first step has room for the loss."""
    expected, keep = plain(words)
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(0.95 * keep / total)
    model = scores()
    model.compile(backend="graphoffload", dynamic=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetExceededWarning)
        found, peak = trained(model, words)
    assert_alike([gradient.cpu() for gradient in found], expected)
    assert registry.last_plans()[-1].changes_anything
    assert peak <= 0.95 * keep
