"""Graphs behind others under policy="offload": what is left to the next graph, what stays in the last, and how much of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from lazy import LazyStreams, lazy_steps, learned
from torch import Tensor, nn

import graphoffload
from graphoffload.runtime import twin_copies
from graphoffload.runtime.handles import ENTRIES
from graphoffload.runtime.registry import run_plan
from graphoffload.runtime.step import between_graphs as between
from graphoffload.testing import Result, assert_equal_bits, run_step, weighted_loss
from graphoffload.testing.attention import HIDDEN, Block, Blocks
from tests.runtime.test_between import SLOW_LINK, backend

__all__ = ["learned"]
FAST_LINK = dataclasses.replace(SLOW_LINK, name="fast link", d2h_bytes_per_s=1e12, h2d_bytes_per_s=1e12)
SEEDS = range(6)


class Behind(nn.Module):
    """Layers behind something in eager that is trained, as an embedding is."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return x


def compiled(*layers: nn.Module, **options: Any) -> Behind:
    """Each layer is a graph of its own."""
    for layer in layers:
        layer.compile(backend=backend(hardware=FAST_LINK, **options), dynamic=False)
    return Behind(*layers)


def step(module: nn.Module, seed: int) -> Result:
    return run_step(module, batch(seed), seed=seed)


def batch(seed: int) -> tuple[Tensor]:
    return (torch.randn(2, 16, HIDDEN, generator=torch.Generator().manual_seed(seed)),)


def references(module: nn.Module) -> list[Result]:
    with twin_copies():
        return [step(module, seed) for seed in SEEDS]


def staying_bytes() -> int:
    """Device memory of all that stays at this moment."""
    return sum(entry.layout.nbytes for entry in ENTRIES.living() if entry.stays and entry.source is not None)


def track() -> between.Track:
    return between._TRACKS.of[torch.device("cpu")]


@pytest.fixture
def lazy() -> Iterator[LazyStreams]:
    torch.manual_seed(0)
    with lazy_steps() as lazy:
        yield lazy


@pytest.mark.parametrize("window", [None, 2**15])
def test_a_whole_model_behind_an_embedding_releases_as_planned(lazy: LazyStreams, window: int | None) -> None:
    """One graph: nobody follows and nobody is before it, so its sources go in the middle of forward, as the plan says."""
    module = compiled(Blocks(4), max_inflight_bytes=window)
    for seed in range(4):
        graphoffload.reset_stats()
        step(module, seed)
        stats = graphoffload.stats()
        assert stats["stays"] == stats["deferred"] == 0
        assert 0 < stats["inflight_peak_bytes"] < stats["d2h_bytes"] / 2


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_releases_in_the_middle_are_left_to_the_next_graph(lazy: LazyStreams, inner: str) -> None:
    """The link may be busy with the copies of graphs before; the window bounds what is outstanding of all of them.

    What is pending is overwritten when it goes, and its copy is made only then: a graph that wrote to it before would show.
    """
    most: list[int] = []
    offloaded = between.offloaded

    def watched(entry: Any) -> None:
        offloaded(entry)
        most.append(graphoffload.stats()["inflight_bytes"])

    for window in (2**20, 60_000):
        between._TRACKS.of.clear()
        module = compiled(*(Block() for _ in range(4)), max_inflight_bytes=window, inner=inner)
        expected = references(module)
        for seed in SEEDS[:3]:
            assert_equal_bits(step(module, seed), expected[seed])
        plan = graphoffload.last_plans()[-1]
        assert any("runs downstream of other graphs" in note for note in plan.notes)
        assert any(transfer.release_after is not None for transfer in plan.transfers)
        graphoffload.reset_stats()
        lazy.log.clear()
        with mock.patch.object(between, "offloaded", watched):
            assert_equal_bits(step(module, 3), expected[3])
        assert graphoffload.stats()["deferred"] == 3 * len(plan.transfers)
        assert 0 < max(most) <= window
        most.clear()


def test_nothing_is_pending_over_the_loss(lazy: LazyStreams) -> None:
    """Also where all of the last graph stays, and no release is at its end."""
    ops, runs = torch.ops.graphoffload, [run_plan("before"), run_plan("last")]
    for run in runs:
        run.link(2**20, downstream=True)
        run.transfers = 1
    for _ in range(4):
        graphoffload.reset_stats()
        values, handles = [], []
        for run in runs:
            x = torch.randn(64)
            values.append(x.clone())
            handles.append(ops.offload(x, run.key, 0))
            ops.release(x, handles[-1], run.key, 0)
            del x
        assert not track().pending
        for run, handle, value in list(zip(runs, handles, values, strict=True))[::-1]:
            y = ops.reload(handle, run.key, 0, (64,), (1,), torch.float32)
            ops.wait(y, handle, run.key, 0)
            assert torch.equal(y, value)
        del handles, handle, y
    assert graphoffload.stats()["deferred"] == graphoffload.stats()["stays"] == 1


def test_microbatches_in_flight_stay_in_one_window(lazy: LazyStreams) -> None:
    """1F1B: each forward has a last graph, and its backward comes several forwards later."""
    module = compiled(*(Block() for _ in range(3)), max_inflight_bytes=2**20)
    expected = references(module)
    for seed in SEEDS[:3]:
        step(module, seed)
    waiting = [(0, weighted_loss(module(*batch(0))))]
    window = staying_bytes() * 3 // 2
    assert window > 0
    for layer in module.layers:
        layer.compile(backend=backend(hardware=FAST_LINK, max_inflight_bytes=window), dynamic=False)
    found = []
    for turn in range(12):
        seed = turn % len(SEEDS)
        waiting.append((seed, weighted_loss(module(*batch(seed)))))
        found.append(staying_bytes())
        if len(waiting) > 3:
            before, loss = waiting.pop(0)
            module.zero_grad()
            loss.backward()
            for name, parameter in module.named_parameters():
                assert parameter.grad is not None
                assert torch.equal(parameter.grad, expected[before].grads[name]), name
            del loss
    assert 0 < max(found[-6:]) <= window
    waiting.clear()
    ENTRIES.sweep()
    assert staying_bytes() == 0


def test_what_stays_goes_with_a_forward_that_is_dropped(lazy: LazyStreams) -> None:
    """Nothing is left behind, whatever the loop does: dropped outputs, evaluation with gradients on, a loss that fails."""
    module = compiled(*(Block() for _ in range(3)), max_inflight_bytes=2**20)
    for turn in range(5):
        step(module, turn)
        module(*batch(turn))
        step(module, turn)
    graphoffload.reset_stats()
    for turn in range(5):
        module(*batch(turn))
        with torch.no_grad():
            module(*batch(turn))
    step(module, 0)
    ENTRIES.sweep()
    assert staying_bytes() == len(ENTRIES) == 0


@pytest.mark.parametrize("count", [2, 3, 8])
def test_without_a_number_a_quarter_is_outstanding_at_most(lazy: LazyStreams, count: int) -> None:
    """Of a model of two graphs, half would be: of what was asked to be offloaded, most is."""
    module = compiled(*(Blocks(1) for _ in range(count)), max_inflight_bytes=None)
    expected = references(module)
    between._TRACKS.of.clear()
    for seed in SEEDS:
        graphoffload.reset_stats()
        assert_equal_bits(step(module, seed), expected[seed])
    stats = graphoffload.stats()
    whole = stats["d2h_bytes"] + stats["stayed_bytes"]
    assert 0 < stats["stayed_bytes"] <= whole / 4
    if count == 8:
        assert stats["stayed_bytes"] >= 0.9 * whole / count, "all of the last block"
