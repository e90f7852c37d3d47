"""The predicted peak of a step under Inductor against what its code allocates: one microbatch, and several in flight.

Inductor's code asks C++ for its buffers, which no mode sees. Here it asks torch, so that each buffer counts until the code
frees it. Kernels compute nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lazy import clean_slate, once
from torch import Tensor, nn
from torch._C._dynamo import guards
from torch._inductor import config, ir

import graphoffload
from graphoffload.compiler import compile_variant
from tests.runtime.stepping import OPTIONS, PLENTY
from tests.runtime.test_step_flight import BLOCKS, Stage, one_forward_one_backward, plan_of, step
from tests.runtime.test_step_truth import WIDTH, Block, Counter

__all__ = ["clean_slate", "once"]

ROWS, SETTLED = 512, 6
CLOSE = 0.0005  # of the peak: single numbers


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down = nn.RMSNorm(WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def allocated(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    """A buffer of Inductor's code."""
    return torch.empty_strided(size, stride, dtype=dtype)


@pytest.fixture
def counter(kernels_that_do_nothing: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """Bytes are those that live; code is made as for a GPU, and not taken from a cache."""
    monkeypatch.setattr(ir, "is_cpu", lambda _: False)
    monkeypatch.setattr(guards, "_empty_strided_cpu", allocated)
    gc.collect()
    counter = Counter()
    caches = config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False)
    with caches[0], caches[1], counter.counting():
        yield counter


def peaks(counter: Counter, block: type[nn.Module], budget: int, in_flight: int) -> tuple[int, int]:
    """(predicted, counted) of a step under this budget."""
    torch._dynamo.reset()
    gc.collect()
    module = Stage()
    module.layers = nn.ModuleList(block() for _ in range(BLOCKS))
    options = {**OPTIONS, "inner": "inductor", "device_budget": budget}
    for layer in module.layers:
        layer.compile(backend=graphoffload.OffloadBackend(**options), dynamic=False)
    for _ in range(SETTLED):
        step(module, one_forward_one_backward, in_flight)
    module.zero_grad()
    gc.collect()  # what compiling left
    counter.peak_bytes = counter.now()
    one_forward_one_backward(module, in_flight)
    plan = plan_of()
    assert plan.solution.in_flight == in_flight
    return plan.solution.timeline.peak_bytes, counter.peak_bytes


@pytest.mark.parametrize("block", [Block, pytest.param(Gated, marks=pytest.mark.long)])
@pytest.mark.parametrize("in_flight", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("share", [pytest.param(0.8, marks=pytest.mark.long), 0.65])
def test_peaks_under_inductor(
    block: type[nn.Module], in_flight: int, share: float, counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.runtime.test_step_flight.ROWS", ROWS)
    keep, counted = peaks(counter, block, PLENTY, in_flight)
    assert keep == pytest.approx(counted, rel=CLOSE)
    graphoffload.reset_stats()
    budget = int(share * keep)
    predicted, counted = peaks(counter, block, budget, in_flight)
    assert predicted == pytest.approx(counted, rel=CLOSE)
    assert counted <= budget * (1 + CLOSE)
    assert graphoffload.stats()["offloads"] > 0


@pytest.mark.long
def test_the_gradient_of_slices_is_allocated_whole(counter: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLPs in slices: their gradients are written into one tensor, which is there from the first slice on."""
    monkeypatch.setattr("tests.runtime.test_step_flight.ROWS", ROWS)
    monkeypatch.setattr(compile_variant, "LEAST_SLICED", 1)
    keep, _ = peaks(counter, Gated, PLENTY, 1)
    predicted, counted = peaks(counter, Gated, int(0.472 * keep), 1)
    assert predicted == pytest.approx(counted, rel=CLOSE)
    assert any("slices" in call[0].plan.variant for call in plan_of().calls)
