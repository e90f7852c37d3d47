"""Runs inside another run: a part of a step has its backward before other forwards come, as in a GAN."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lazy import LazyStreams, clean_slate, lazy_steps, once
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import graphoffload
from graphoffload.compiler.dispatch import GRAPHS
from graphoffload.compiler.step_again import Known
from graphoffload.compiler.step_runs import _PLANNER
from graphoffload.errors import BudgetError, GraphOffloadWarning
from graphoffload.monitor import step_memory
from graphoffload.runtime.handles import ENTRIES
from graphoffload.runtime.step.calls import LATEST, STEPS
from graphoffload.torch_internals import allocator
from tests.runtime.stepping import OPTIONS, PLENTY, assert_equal
from tests.runtime.test_step_truth import CLOSE, WIDTH, Block, Counter

__all__ = ["clean_slate", "once"]

CPU = torch.device("cpu")
ROWS, STEPS_OF_A_TEST = 256, 6
HOST = 2**28
ONE = ROWS * WIDTH * 4
"""Bytes of what a block returns. Where a run is recorded, the gradient of an output lives until its backward ends; else not."""


class Net(nn.Module):
    """Blocks in one graph."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Nets(nn.Module):
    """A generator and its critic; each is compiled as a whole."""

    def __init__(self, budget: int | None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.critic = Net(3), Net(2)
        asked = {"policy": "keep"} if budget is None else {"device_budget": budget}
        for net in self.children():
            net.compile(backend=graphoffload.OffloadBackend(**{**OPTIONS, **asked, **options}), dynamic=False)


Way = Callable[[Nets], list[Tensor | None]]


def noise(seed: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def gradients(module: nn.Module) -> list[Tensor | None]:
    """Those that are there, which go."""
    found = [p.grad for p in module.parameters()]
    module.zero_grad()
    return found


def gan(nets: Nets) -> list[Tensor | None]:
    """The critic learns from a real and a made batch at once, then the generator through the critic; what both leave."""
    made = nets.generator(noise(1))
    real, fake = nets.critic(noise(2)), nets.critic(made.detach())
    (real.square().mean() - fake.abs().mean()).backward()
    of_the_critic = gradients(nets.critic)
    nets.critic(made).cos().mean().backward()
    return of_the_critic + gradients(nets)


def gan_by_turns(nets: Nets) -> list[Tensor | None]:
    """As torch's own example: the critic's two losses have a backward each."""
    made = nets.generator(noise(1))
    nets.critic(noise(2)).square().mean().backward()
    nets.critic(made.detach()).abs().mean().backward()
    of_the_critic = gradients(nets.critic)
    nets.critic(made).cos().mean().backward()
    return of_the_critic + gradients(nets)


WAYS = (gan, gan_by_turns)


def kept(way: Way) -> list[Tensor | None]:
    """What a step leaves with everything kept."""
    found = way(Nets(None))
    torch._dynamo.reset()
    return found


class OneRecord(Counter):
    """A counter whose record goes on where a run inside another one is recorded as well."""

    def _start(self) -> bool:
        return True


@pytest.fixture
def counter() -> Iterator[Counter]:
    """Bytes are those that live."""
    torch._dynamo.reset()
    gc.collect()
    counter = OneRecord()
    with counter.counting():
        graphoffload.reset_stats()
        yield counter


@pytest.fixture
def lazy() -> Iterator[LazyStreams]:
    """Nothing is allocated: budgets are for activations alone."""
    torch._dynamo.reset()
    with lazy_steps() as lazy:
        graphoffload.reset_stats()
        yield lazy


def known() -> list[Known]:
    """What is known of the sequences that come in each step."""
    return list(_PLANNER.known.values())


def predicted() -> int:
    """The highest predicted peak of the runs of a step."""
    return max(each.plan.solution.timeline.peak_bytes for each in known() if each.plan is not None)


def trained(way: Way, budget: int, expected: Sequence[Tensor | None], counter: Counter) -> int:
    """The counted peak of the last of some steps; all leave what was expected."""
    nets = Nets(budget, host_budget=HOST)
    for _ in range(STEPS_OF_A_TEST):
        counter.peak_bytes = counter.now()
        assert_equal(way(nets), expected)
    return counter.peak_bytes


@pytest.mark.parametrize("way", WAYS)
def test_a_step_with_runs_inside_is_planned(way: Way, counter: Counter) -> None:
    """The critic's turn is a run inside that of the generator. Each has a plan, the peak is the one that they say, and a budget
    is kept."""
    expected = kept(way)
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphOffloadWarning)
        most = trained(way, PLENTY, expected, counter)
        assert most * (1 - CLOSE) <= predicted() <= most + ONE
        assert all(each.plan is not None and not each.alone for each in known())
        assert [len(each.sequence) for each in known() if not each.inside] == [3 if way is gan else 2]
        assert any(each.inside for each in known())
        torch._dynamo.reset()
        gc.collect()
        budget = int(0.83 * most)
        counted = trained(way, budget, expected, counter)
    assert counted <= budget
    assert counted * (1 - CLOSE) <= predicted() <= counted + ONE
    assert graphoffload.stats()["offloads"] > 0
    hosts = {each.inside: each.asked.host_budget_bytes for each in known() if each.asked is not None}
    assert hosts[False] == HOST
    assert hosts[True] is not None
    assert hosts[True] < HOST, "what the run around has there stays"


def test_a_graph_called_before_the_backward_of_another_is_one_of_several(lazy: LazyStreams) -> None:
    """By a plan of its own, the critic would keep as if the generator held nothing."""
    nets = Nets(PLENTY)
    gan(nets)
    assert [graph.is_variant for graph in GRAPHS.values()][-3:] == [False, True, True]


def test_a_run_that_waited_for_nothing_is_given_up(lazy: LazyStreams) -> None:
    """What was made lives on, and never has a backward: the next step's runs are planned all the same, and nothing stays."""
    nets, held = Nets(PLENTY), []
    nets.critic(noise(2)).square().mean().backward()
    expected = gradients(nets.critic)
    for _ in range(4):
        held.append(nets.generator(noise(1)))
        nets.critic(noise(2)).square().mean().backward()
        assert_equal(gradients(nets.critic), expected)
    assert len(STEPS.alive[CPU]) <= 1
    held.clear()
    gc.collect()
    ENTRIES.sweep()


def test_a_run_that_waits_outlives_no_more_than_some(lazy: LazyStreams) -> None:
    """A critic that learns for long while the generator waits."""
    nets = Nets(PLENTY)
    made = nets.generator(noise(1))
    fooled = nets.critic(made.detach()).sum()
    fooled.backward()
    for seed in range(40):
        nets.critic(noise(seed)).square().mean().backward()
    assert len(STEPS.alive[CPU]) == 1
    nets.zero_grad()
    nets.critic(made).cos().mean().backward()
    found = gradients(nets)
    other = Nets(None)
    other.critic(other.generator(noise(1))).cos().mean().backward()
    assert_equal(found, gradients(other))


def test_a_shortage_is_of_the_run_that_waits(lazy: LazyStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the run inside is over, activations of the one around it still live."""
    nets = Nets(PLENTY)
    made = nets.generator(noise(1))
    nets.critic(noise(2)).square().mean().backward()
    nets.critic(noise(3)).square().mean().backward()
    around, inside = STEPS.alive[CPU]
    assert (around.waits, inside.waits, inside.inside) == (True, False, True)
    cuda = torch.device("cuda", 0)
    properties = mock.Mock(total_memory=2**30)
    monkeypatch.setitem(LATEST, cuda, inside)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 2**29)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 2**29)
    step_memory._failed(0, 2**20, 2**29, 2**10)
    shortage = step_memory.shortage_of(cuda)
    assert shortage is not None
    assert (shortage.where, around.aborted) == ("eager code before the backward of call 0", True)
    assert shortage.lacking_bytes > 0
    made.sum().backward()


def test_what_is_recorded_at_once_is_recorded_till_all_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch records for one; who else asks is refused, but runs inside one another read the same record."""
    asked: list[Any] = []
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: bool(asked) and asked[-1] == "all", raising=False)
    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", lambda _: {"device_traces": []}, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda enabled, **_: asked.append(enabled))
    assert not allocator.join()
    assert [allocator.start(), allocator.start(), allocator.join()] == [True, False, True]
    assert asked == ["all"]
    allocator.stop(0)
    assert asked == ["all"]
    allocator.stop(0)
    assert asked == ["all", None]
    asked.append("all")  # by the user
    assert not allocator.start()
    assert not allocator.join()


Act = tuple[str, int]


@st.composite
def programs(draw: st.DrawFn) -> list[Act]:
    """Forwards of one of three nets, of a new batch, or of the latest output: cut off from it, or not; and backwards of the
    latest outputs."""
    acts: list[Act] = []
    waiting = 0
    for _ in range(draw(st.integers(3, 8))):
        what = draw(st.sampled_from(["new", "detached", "attached", "backward"] if waiting else ["new"]))
        acts.append((what, draw(st.integers(1, min(waiting, 2)) if what == "backward" else st.integers(0, 2))))
        waiting += {"new": 1, "detached": 1, "attached": 0, "backward": -acts[-1][1]}[what]
    return acts + [("backward", 1)] * waiting


def run(nets: Sequence[nn.Module], acts: Sequence[Act]) -> list[Tensor | None]:
    """What a program leaves."""
    waiting: list[Tensor] = []
    for seed, (what, which) in enumerate(acts):
        if what == "backward":
            sum(y.sin().mean() for y in waiting[-which:]).backward()  # type: ignore[union-attr]
            del waiting[-which:]
        else:
            x = noise(seed) if what == "new" else waiting[-1].detach() if what == "detached" else waiting.pop()
            waiting.append(nets[which](x))
    found = [p.grad for net in nets for p in net.parameters()]
    for net in nets:
        net.zero_grad()
    return found


def nets_of(budget: int | None) -> list[nn.Module]:
    torch.manual_seed(0)
    asked = {"policy": "keep"} if budget is None else {"device_budget": budget}
    nets: list[nn.Module] = [Net(2), Net(1), Net(1)]
    for net in nets:
        net.compile(backend=graphoffload.OffloadBackend(**{**OPTIONS, **asked}), dynamic=False)
    return nets


@pytest.mark.parametrize("examples", [4, pytest.param(60, marks=pytest.mark.long)])
def test_any_order_of_forwards_and_backwards(examples: int) -> None:
    """Never a wrong gradient, never a copy on free memory, and nothing is held at the end. A budget that is refused is said."""

    @settings(max_examples=examples, deadline=None, derandomize=examples < 10)
    @given(programs(), st.sampled_from([4.0, 5.0, 7.0, 1000.0]))
    def check(acts: list[Act], budget_mb: float) -> None:
        torch._dynamo.reset()
        expected = run(nets_of(None), acts)
        torch._dynamo.reset()
        with lazy_steps():
            nets = nets_of(int(budget_mb * 1e6))
            for _ in range(5):
                try:
                    assert_equal(run(nets, acts), expected)
                except (BudgetError, BackendCompilerFailed) as error:
                    if not isinstance(getattr(error, "inner_exception", error), BudgetError):
                        raise
                    for net in nets:
                        net.zero_grad()
            gc.collect()
            ENTRIES.sweep()

    check()
