"""MLPs in slices of the tokens on a GPU: the budget is kept, and gradients are those of everything kept but for rounding."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphoffload
from graphoffload.compiler.step_runs import OVERRIDE
from graphoffload.errors import BudgetError

DEVICE, BLOCKS, WIDTH, TOKENS = "cuda", 4, 1024, 16384


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    y = x
    for block in model:  # type: ignore[attr-defined]
        y = block(y)
    y.square().mean().backward()
    return [p.grad.cpu() for p in model.parameters() if p.grad is not None]


def model_of(budget: int | str) -> nn.Module:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS))).to(DEVICE)
    for block in model:
        options = {"device_budget": budget, "reserve": 0, "verify": "checksum"}
        block.compile(backend="graphoffload", options=options, dynamic=False)
    return model


@pytest.fixture(autouse=True)
def nothing_set() -> None:
    OVERRIDE.options, OVERRIDE.configs = {}, frozenset()


def test_a_budget_that_needs_slices() -> None:
    x = torch.randn(1, TOKENS, WIDTH, device=DEVICE).requires_grad_()
    model = model_of("70GiB")
    for _ in range(3):
        expected = step(model, x)
    graphoffload.set_budget("1B")
    with pytest.raises(BudgetError) as refused:
        step(model, x)
    assert refused.value.least_bytes is not None
    budget = int(1.01 * refused.value.least_bytes)
    graphoffload.set_budget(budget)
    step(model, x)
    plan = graphoffload.last_plans()[-1]
    assert "slices of the tokens" in (plan.summary or "") + (plan.hint or "")
    for _ in range(4):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        found = step(model, x)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        print("peak", peak, "budget", budget, plan.summary)
        assert peak <= 1.005 * budget
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours - theirs).norm() <= 1e-4 * theirs.norm() + 1e-12
