"""Room for the optimizer: a step whose state came after the plan stays within the budget."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphoffload
from graphoffload.errors import BudgetExceededWarning
from graphoffload.runtime import registry

WIDTH, ROWS, LAYERS = 2048, 16384, 8


class Stack(nn.Module):
    """Layers whose parameters and activations are both worth counting."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.bfloat16) for _ in range(LAYERS))
        self.downs = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.layers, self.downs, strict=True):
            x = x + down(torch.nn.functional.gelu(up(x)))
        return x.float().square().mean()


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda p: torch.optim.AdamW(p, fused=True), id="adamw"),
        pytest.param(lambda p: torch.optim.SGD(p, momentum=0.9, fused=True), id="momentum"),
    ],
)
@pytest.mark.parametrize("resumed", [False, True], ids=["new", "resumed"])
def test_the_state_that_comes_fits_the_budget(make: Callable[[Any], torch.optim.Optimizer], resumed: bool) -> None:
    """As much as keep-all takes, and the state beside it only in part: other models' optimizers change nothing."""
    other = nn.Linear(8, 8, device="cuda")
    others = torch.optim.AdamW(other.parameters())
    other(torch.ones(2, 8, device="cuda")).sum().backward()
    others.step()
    gc.collect()
    torch.cuda.empty_cache()
    with torch.device("cuda"):
        model, x = Stack(), torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    parameters = sum(p.nbytes for p in model.parameters())
    optimizer = make(model.parameters())
    state = parameters * (2 if isinstance(optimizer, torch.optim.AdamW) else 1)
    if resumed:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()
    keep = graphoffload.explain(model, reserve=0, policy="keep")(x).predicted_peak_bytes
    budget = keep + (0 if resumed else state) - 2**29
    model.compile(backend="graphoffload", options={"device_budget": budget})
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetExceededWarning)
        for step in range(12):
            if step == 2:
                torch.cuda.reset_peak_memory_stats()
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    plan = registry.last_plans()[-1]
    blocks = 0 if resumed else 512 * 2 * len(list(model.parameters()))  # of the allocator: counters of steps, rounding
    assert plan.prediction.reserve_bytes == pytest.approx(0 if resumed else state, abs=blocks)
    assert plan.changes_anything
    peak = torch.cuda.max_memory_allocated()
    assert peak <= budget
    assert peak == pytest.approx(plan.prediction.predicted_peak_bytes + plan.prediction.reserve_bytes, rel=0.02)
