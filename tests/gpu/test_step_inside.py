"""A GAN, whose critic has its backward while the generator's is still to come: budgets kept, peaks as predicted under Inductor,
gradients equal to the bit to those of synchronous copies under delayed copies, and not equal where a wait is left out."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from gpu.races import AFTER, BEFORE, RANDOM, Disturbance, disturbances
from gpu.test_step_races import DEVICE, ROWS, SLOW_COPIES, WIDTH, Block, without
from lazy import forget_steps
from torch import Tensor, nn

import graphoffload
from graphoffload.compiler import step_again
from graphoffload.compiler.step_again import Known
from graphoffload.compiler.step_runs import _PLANNER, OVERRIDE
from graphoffload.errors import BudgetError
from graphoffload.runtime import twin_copies

REPEATS, PLENTY = 4, 2**40


class Net(nn.Module):
    """Blocks in one graph."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def noise(seed: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def step(nets: nn.ModuleList, seed: int = 0) -> list[Tensor]:
    """The critic's gradients of its own losses, then all of the generator's loss; on the host."""
    generator, critic = nets
    nets.zero_grad()
    made = generator(noise(seed))
    critic(noise(seed + 10)).square().mean().backward()
    critic(made.detach()).cos().mean().backward()
    found = [p.grad.cpu() for p in critic.parameters() if p.grad is not None]
    critic.zero_grad()
    critic(made).sin().mean().backward()
    return found + [p.grad.cpu() for p in nets.parameters() if p.grad is not None]


def compiled(inner: str) -> nn.ModuleList:
    torch.manual_seed(0)
    nets = nn.ModuleList([Net(6), Net(3)]).to(DEVICE)
    options = {"device_budget": PLENTY, "reserve": 0, "inner": inner, "min_tensor_bytes": 1}  # measured: workspaces are known
    for net in nets:
        net.compile(backend="graphoffload", options=options)
    return nets


def known() -> list[Known]:
    """What is known of the runs of a step, which all have a plan."""
    found = list(_PLANNER.known.values())
    assert all(each.plan is not None for each in found)
    assert [each.inside for each in found].count(True) >= 1
    return found


def least(nets: nn.ModuleList) -> int:
    """The least budget that an error names: its plan copies."""
    graphoffload.set_budget(torch.cuda.memory_allocated() + 2**20)
    with pytest.raises(BudgetError) as caught:
        step(nets)
    found = caught.value.least_bytes
    assert found is not None
    del caught  # its frames hold what the step computed
    gc.collect()
    return found


def planned(inner: str, share: float) -> tuple[nn.ModuleList, int]:
    """Nets in training, and their budget: at a share of the way from the least to that of keep-all."""
    nets = compiled(inner)
    for _ in range(4):
        step(nets)
    most = max(each.plan.solution.timeline.peak_bytes for each in known() if each.plan is not None)
    low = least(nets)
    budget = int(1.01 * low + share * (most - low))
    graphoffload.set_budget(budget)
    for _ in range(4):
        step(nets)
    return nets, budget


@pytest.fixture(autouse=True)
def by_itself() -> Iterator[None]:
    """Nothing of another test counts, and what is asked for here is not for the next."""
    torch._dynamo.reset()
    forget_steps()
    gc.collect()
    with mock.patch.object(step_again, "_SAME_BYTES", 2**20):
        yield
    OVERRIDE.options, OVERRIDE.configs = {}, frozenset()
    forget_steps()
    torch._dynamo.reset()


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_run_inside_another(inner: str) -> None:
    nets, _ = planned(inner, 0.0)
    with twin_copies():
        references = [step(nets, seed) for seed in (0, 1)]
    graphoffload.reset_stats()
    for disturbance in (BEFORE, AFTER, RANDOM, SLOW_COPIES):
        for repeat in range(REPEATS):
            differ = disturbed(nets, disturbance, repeat, references)
            assert not differ, f"{disturbance.name}, repeat {repeat}: gradients {differ} differ"
    assert graphoffload.stats()["offloads"] > 0


def disturbed(nets: nn.ModuleList, disturbance: Disturbance, repeat: int, references: list[list[Tensor]]) -> list[int]:
    """Gradients that differ from the twin's."""
    with disturbances(disturbance, seed=repeat):
        found = step(nets, repeat % 2)
        torch.cuda.synchronize()
    pairs = zip(found, references[repeat % 2], strict=True)
    return [at for at, (got, expected) in enumerate(pairs) if not torch.equal(got, expected)]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("event", ["settle", "wait"])
def test_a_run_around_another_that_does_not_wait_shows(event: str) -> None:
    nets, _ = planned("aot_eager", 0.0)
    with twin_copies():
        references = [step(nets, seed) for seed in (0, 1)]
    assert not disturbed(nets, SLOW_COPIES, 0, references)
    with without(event):
        assert any(disturbed(nets, SLOW_COPIES, repeat, references) for repeat in range(REPEATS)), f"nothing noticed {event}"
    torch.cuda.synchronize()
    assert not disturbed(nets, SLOW_COPIES, 0, references)


@pytest.mark.parametrize("share", [0.2, 0.6])
def test_the_peak_of_runs_inside_one_another(share: float) -> None:
    """As predicted by the plans, and within the budget; gradients as with everything kept, but for rounding."""
    plain = compiled("inductor")
    expected = step(plain)
    del plain
    torch._dynamo.reset()
    forget_steps()
    gc.collect()
    nets, budget = planned("inductor", share)
    torch.cuda.reset_peak_memory_stats()
    found = step(nets)
    peak = torch.cuda.max_memory_allocated()
    predicted = max(each.plan.solution.timeline.peak_bytes for each in known() if each.plan is not None)
    assert peak <= budget + 2**20
    assert predicted == pytest.approx(peak, rel=0.01)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
