"""A planned step with copies delayed, compute lagging and freed memory overwritten: equal to the bit to the same schedule with
synchronous copies; and with a wait left out on purpose, not equal."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from gpu.races import AFTER, BEFORE, RANDOM, Disturbance, disturbances
from torch import Tensor, nn

import graphoffload
from graphoffload.compiler import step_host
from graphoffload.compiler.step_runs import OVERRIDE
from graphoffload.errors import BudgetError
from graphoffload.facts.recipe import FITTED
from graphoffload.hardware.profile import PROFILES, HardwareProfile
from graphoffload.planner.step.runs import Run, Runs
from graphoffload.runtime import twin_copies
from graphoffload.runtime.offloaded_tensors import OffloadedTensor
from graphoffload.runtime.step.calls import STEPS, StepRun

DEVICE, BLOCKS, WIDTH, ROWS = "cuda", 6, 512, 2048
REPEATS = 6
SLOW_COPIES = Disturbance("slow copies", before_ms=5.0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Part(nn.Module):
    """Several blocks in one graph."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Model(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(parts or (Block() for _ in range(BLOCKS)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def step(model: Model, seed: int) -> list[Tensor]:
    """Its gradients, on the host: on the device they would take what the next step was planned with."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad.cpu() for p in model.parameters() if p.grad is not None]


def compiled(inner: str, budget: int | str, *counts: int, hardware: str | HardwareProfile = "h200-sxm") -> Model:
    """Blocks compiled one by one, or parts of so many blocks."""
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    model = Model(*map(Part, counts)).to(DEVICE)
    options = {"device_budget": budget, "reserve": 0, "inner": inner, "min_tensor_bytes": 1, "hardware": hardware}
    for layer in model.layers:
        layer.compile(backend="graphoffload", options=options)
    return model


def planned(inner: str) -> Model:
    """A model whose step copies: at the least budget that an error names, and a little more."""
    model = compiled(inner, torch.cuda.memory_allocated() + 2**20)
    for seed in range(2):
        step(model, seed)
    with pytest.raises(BudgetError) as caught:
        step(model, 2)
    least = caught.value.least_bytes
    assert least is not None
    del caught  # its frames hold what the step computed
    gc.collect()
    graphoffload.set_budget(int(least * 1.02))
    for seed in range(3):
        step(model, seed)
    assert copies(last_run()), "the plan copies"
    return model


def last_run() -> StepRun:
    run = STEPS.of(torch.device(DEVICE, torch.cuda.current_device()))
    assert run is not None
    assert run.plan is not None
    return run


def copies(run: StepRun) -> bool:
    return any(call.schedule.goes for call in run.calls if call.schedule is not None)


def variants(run: StepRun) -> list[str]:
    return [run.plan.facts.variant(call, chosen).name for call, chosen in enumerate(run.plan.solution.chosen)]


def planned_with_a_variant_of_its_own() -> Model:
    """A step of two graphs, each called once, of which one runs a variant that was made for this step, with copies."""
    slow = {"d2h_bytes_per_s": 8e9, "h2d_bytes_per_s": 8e9, "both_ways_bytes_per_s": 1.2e10}
    model = compiled("aot_eager", "100GiB", 3, 4, hardware=replace(PROFILES["h200-sxm"], **slow))
    for seed in range(3):
        step(model, seed)
    base = torch.cuda.memory_allocated()
    peak = last_run().plan.solution.keep_timeline.peak_bytes
    for share in (0.4, 0.35, 0.45, 0.5):
        graphoffload.set_budget(int(base + share * (peak - base)))
        with contextlib.suppress(BudgetError):
            for seed in range(2):
                step(model, seed)
        if copies(last_run()) and any(name.startswith(FITTED) for name in variants(last_run())):
            return model
    raise AssertionError("no plan has a variant of its own, and copies")


@pytest.fixture(autouse=True)
def as_compiled() -> Iterator[None]:
    """What one test sets is not for the next."""
    yield
    OVERRIDE.options, OVERRIDE.configs = {}, frozenset()


@contextlib.contextmanager
def all_late() -> Iterator[list[int]]:
    """No copy back starts before its first use: a plan's copies that come late, at their most. What it moved is listed."""
    original, moved = Runs.run, [0]

    def late(self: Runs, chosen: Sequence[int], *, evaluations: int) -> Run:
        run = original(self, chosen, evaluations=evaluations)
        planned = tuple(replace(item, reload_at=item.wait_at) for item in run.timeline.schedule)
        if planned:
            moved[0] += sum(item.reload_at < item.wait_at for item in run.timeline.schedule)
            run = self._scheduled(run.chosen, run.joined, run.actions, run.window_bytes, run.solver, planned)
        return run

    with mock.patch.object(Runs, "run", late):
        yield moved


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("late", [False, True], ids=["in time", "late"])
def test_a_planned_step(inner: str, late: bool) -> None:
    with all_late() if late else contextlib.nullcontext([1]) as moved:
        model = planned(inner)
    assert moved[0] > 0
    assert_equal_when_disturbed(model)


@pytest.mark.usefixtures("deterministic")
def test_a_variant_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_host, "_IDLE", 2.0)  # a slow host would have the copies taken out of the plan
    assert_equal_when_disturbed(planned_with_a_variant_of_its_own())
    assert copies(last_run())
    assert any(name.startswith(FITTED) for name in variants(last_run()))


def assert_equal_when_disturbed(model: Model) -> None:
    """Its gradients are the twin's to the bit, whatever is late."""
    with twin_copies():
        references = [step(model, seed) for seed in (0, 1)]
    graphoffload.reset_stats()
    for disturbance in (BEFORE, AFTER, RANDOM, SLOW_COPIES):
        for repeat in range(REPEATS):
            differ = disturbed(model, disturbance, repeat, references)
            assert not differ, f"{disturbance.name}, repeat {repeat}: gradients {differ} differ"
    stats = graphoffload.stats()
    assert stats["deferred"] > 0
    assert stats["offloads"] > 0


def disturbed(model: Model, disturbance: Disturbance, repeat: int, references: list[list[Tensor]]) -> list[int]:
    """Gradients that differ from the twin's."""
    with disturbances(disturbance, seed=repeat):
        found = step(model, repeat % 2)
        torch.cuda.synchronize()
    pairs = zip(found, references[repeat % 2], strict=True)
    return [at for at, (got, expected) in enumerate(pairs) if not torch.equal(got, expected)]


@contextlib.contextmanager
def without(event: str) -> Iterator[None]:
    """One event of offloaded tensors does not wait for its copy."""
    original = getattr(OffloadedTensor, event)

    def careless(self: OffloadedTensor, *args: object, **kwargs: object) -> object:
        host, self.host = self.host, None
        try:
            return original(self, *args, **kwargs)
        finally:
            self.host = host

    with mock.patch.object(OffloadedTensor, event, careless):
        yield


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("event", ["settle", "wait"])
def test_a_planned_step_that_does_not_wait_shows(event: str) -> None:
    model = planned("aot_eager")
    with twin_copies():
        references = [step(model, seed) for seed in (0, 1)]
    assert not disturbed(model, SLOW_COPIES, 0, references)
    with without(event):
        assert any(disturbed(model, SLOW_COPIES, repeat, references) for repeat in range(REPEATS)), f"nothing noticed {event}"
    torch.cuda.synchronize()
    assert not disturbed(model, SLOW_COPIES, 0, references)
