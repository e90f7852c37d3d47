"""Models whose blocks are compiled one by one, for tests of the running step: budgets, gradients to the bit, what was planned.

Parameters stay as they are: the gradient of a batch is the same in every step, and equal to that of the same model with
everything kept. Nothing is allocated on lazy streams, so that a budget is one for activations.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lazy import LazyStreams, lazy_steps
from torch import Tensor, nn

import graphoffload
from graphoffload.cache_files import write_whole
from graphoffload.compiler.step_plan import StepPlan
from graphoffload.compiler.step_runs import _PLANNER
from graphoffload.errors import BudgetError
from graphoffload.hardware.measurement import resolve_hardware
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.testing.attention import HIDDEN, Block

WORDS, COUNT = 50, 4
PLENTY = 2**30
OPTIONS: dict[str, Any] = {"reserve": 0, "inner": "aot_eager", "hardware": "h200-sxm", "min_tensor_bytes": 1}


class Model(nn.Module):
    """An embedding and a head in eager around blocks; `order`: the blocks that are called."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.ModuleList(blocks or (Block() for _ in range(COUNT)))
        self.head = nn.Linear(HIDDEN, WORDS)
        self.order: Sequence[int] = range(len(self.layers))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for index in self.order:
            x = self.layers[index](x)
        return self.head(x)


@dataclasses.dataclass
class Moment:
    """An event on a stream, and whether it was reached."""

    at_ms: float
    reached: bool = True

    def query(self) -> bool:
        """Whether it was reached."""
        return self.reached

    def synchronize(self) -> None:
        """What is tested here asks, and waits for nothing."""
        raise AssertionError("nobody waits")

    def elapsed_time(self, end: Moment, /) -> float:
        """As torch.cuda.Event."""
        return end.at_ms - self.at_ms


class Wide(nn.Module):
    """One class of blocks in several sizes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, width), nn.Linear(width, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class Whole(nn.Module):
    """Blocks in one graph."""

    def __init__(self, width: int = 64, count: int = COUNT) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Wide(width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def batch(seed: int = 0, rows: int = 2, length: int = 32) -> Tensor:
    """Words."""
    return torch.randint(0, WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


def compiled(model: Model, budget: Any, *, dynamic: bool | None = False, **options: Any) -> Model:
    """Each block is compiled in place."""
    config = graphoffload.OffloadConfig(**{**OPTIONS, "device_budget": budget, **options})
    for layer in model.layers:
        layer.compile(backend=graphoffload.OffloadBackend(config), dynamic=dynamic)
    return model


def fresh(*blocks: nn.Module) -> Model:
    """A model, always with the same parameters."""
    torch.manual_seed(0)
    return Model(*blocks)


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    """Of predicting the same words."""
    return F.cross_entropy(model(words).flatten(0, 1), words.flatten())


def gradients(model: nn.Module, loss: Tensor | None = None, **how: Any) -> list[Tensor | None]:
    """What a backward leaves, or what is there now."""
    if loss is not None:
        model.zero_grad()
        loss.backward(**how)
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def step(model: nn.Module, words: Tensor) -> list[Tensor | None]:
    """Forward and backward; what they leave."""
    return gradients(model, loss_of(model, words))


def assert_equal(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    """To the bit."""
    for at, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert (one is None) == (other is None), at
        assert one is None or other is None or torch.equal(one, other), f"gradient {at} differs"


def kept(model: Model, batches: Sequence[Tensor], **options: Any) -> list[list[Tensor | None]]:
    """The gradients of each batch with everything kept, of a copy that is compiled likewise."""
    twin = compiled(copy.deepcopy(model), "auto", policy="keep", **options)
    twin.order = model.order
    return [step(twin, words) for words in batches]


def plan_now(sequence_length: int | None = None) -> StepPlan | None:
    """The plan of the latest sequence with this many calls."""
    for known in reversed(_PLANNER.known.values()):
        if sequence_length is None or len(known.sequence) == sequence_length:
            return known.plan
    return None


@functools.cache
def peaks() -> tuple[int, int]:
    """Predicted peaks of a step of `Model()`: the least that a plan reaches, and with everything kept.

    The search for the least takes ten seconds: whoever needs it first keeps it for the other workers of the run.
    """
    file = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "peaks.json")
    if not file.exists():
        write_whole(file, json.dumps(found_peaks()))
    least, most = json.loads(file.read_text())
    return least, most


def found_peaks() -> tuple[int, int]:
    """The same, found."""
    torch._dynamo.reset()
    with lazy_steps():
        model = compiled(fresh(), "1B")
        step(model, batch())
        step(model, batch())
        with pytest.raises(BudgetError) as info:
            step(model, batch())
    with lazy_steps():
        model = compiled(fresh(), PLENTY)
        for _ in range(3):
            step(model, batch())
        plan = plan_now()
        model.zero_grad()
    torch._dynamo.reset()
    assert plan is not None
    assert info.value.least_bytes is not None
    return info.value.least_bytes, plan.solution.keep_timeline.peak_bytes


def budget_at(share: float) -> int:
    """Between the least peak (0) and that with everything kept (1)."""
    least, most = peaks()
    return int(least + share * (most - least))


def slow_link(bytes_per_s: float) -> HardwareProfile:
    """An H200 whose link to the host is slow."""
    fast = resolve_hardware("h200-sxm", "cuda")
    return dataclasses.replace(fast, name="slow link", d2h_bytes_per_s=bytes_per_s, h2d_bytes_per_s=bytes_per_s)


@pytest.fixture
def lazy() -> Iterator[LazyStreams]:
    """For a file that imports this: lazy streams, and budgets at shares of the peaks that plans reach on them."""
    peaks()
    with lazy_steps() as lazy:
        graphoffload.reset_stats()
        yield lazy


def counted(name: str) -> int:
    """Of the runtime, since the test began."""
    return graphoffload.stats()[name]


def planned(share: float = 0.1, **options: Any) -> tuple[Model, list[Tensor | None]]:
    """A model in training whose step is planned, and its gradients."""
    model = fresh()
    (expected,) = kept(model, [batch()])
    compiled(model, budget_at(share), **options)
    for _ in range(4):
        assert_equal(step(model, batch()), expected)
    assert plan_now() is not None
    return model, expected


def lines_of_plans_again(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """The lines since the last call that say that a step was planned again."""
    return [line for line in capfd.readouterr().err.splitlines() if "planned again" in line]


def trained(
    capfd: pytest.CaptureFixture[str], steps: int, share: float = 0.5, bytes_per_s: float = 1e9
) -> tuple[Model, list[str]]:
    """A model after steps within a budget, on a slow link; their gradients are those of keep-all. Its lines of plans again."""
    model = fresh()
    (expected,) = kept(model, [batch()])
    compiled(model, budget_at(share), hardware=slow_link(bytes_per_s))
    for _ in range(steps):
        assert_equal(step(model, batch()), expected)
    return model, lines_of_plans_again(capfd)
