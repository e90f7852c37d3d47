"""Random sequences of what training loops do, on blocks compiled one by one, with every copy as late as possible."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from lazy import LazyStreams, clean_slate, once
from test_between import SEEDS, Model, batch, lazy, per_block, track
from torch import Tensor

import graphoffload
from graphoffload.runtime import host_memory, ops, twin_copies
from graphoffload.runtime.handles import ENTRIES
from graphoffload.testing import weighted_loss

ORDERS = ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [2, 1], [3], [0, 1, 2, 3, 4, 2, 1])
__all__ = ["clean_slate", "lazy", "once"]


class Loop:
    """A model in training: losses whose backward is still to come, and the gradients that each must give."""

    def __init__(self, model: Model, seed: int) -> None:
        self.model, self.draw = model, random.Random(seed)
        self.waiting: list[tuple[tuple[int, int], Tensor]] = []
        self.expected = self._references()

    def _references(self) -> dict[tuple[int, int], list[Tensor | None]]:
        found: dict[tuple[int, int], list[Tensor | None]] = {}
        with twin_copies():
            for which in range(len(ORDERS)):
                for seed in SEEDS[:2]:
                    found[which, seed] = self.gradients(self.loss(which, seed))
        return found

    def loss(self, which: int, seed: int) -> Tensor:
        """A forward."""
        self.model.order = ORDERS[which]
        return weighted_loss(self.model(*(x.requires_grad_() * 1.0 for x in batch(seed))))  # as if behind something

    def gradients(self, loss: Tensor, *, retain: bool = False) -> list[Tensor | None]:
        """A backward."""
        self.model.zero_grad()
        loss.backward(retain_graph=retain)
        return [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]

    def check(self, key: tuple[int, int], found: list[Tensor | None]) -> None:
        """To the bit."""
        for one, other in zip(found, self.expected[key], strict=True):
            assert (one is None) == (other is None)
            assert one is None or other is None or torch.equal(one, other)

    def forward(self) -> None:
        """One more microbatch in flight."""
        which, seed = self.draw.randrange(len(ORDERS)), self.draw.randrange(2)
        self.waiting.append(((which, seed), self.loss(which, seed)))

    def steps(self) -> None:
        """The usual loop for a while, so that an order is learnt."""
        for _ in range(3):
            self.check((0, 0), self.gradients(self.loss(0, 0)))

    def backward(self, *, retain: bool = False) -> None:
        """Of any microbatch in flight."""
        if self.waiting:
            key, loss = self.waiting.pop(self.draw.randrange(len(self.waiting)))
            self.check(key, self.gradients(loss, retain=retain))
            if retain:
                self.waiting.append((key, loss))

    def again(self) -> None:
        """A backward that keeps its graph."""
        self.backward(retain=True)

    def drop(self) -> None:
        """Outputs go without a backward."""
        if self.waiting:
            self.waiting.pop(self.draw.randrange(len(self.waiting)))

    def evaluate(self) -> None:
        """No gradients."""
        with torch.no_grad():
            self.model(*batch(1))

    def fault(self) -> None:
        """A copy fails in forward or backward; the step is lost."""
        name, after = self.draw.choice(["_copy_to_host", "_copy_to_device"]), self.draw.randrange(1, 30)
        original: Callable[..., Any] = getattr(ops, name)
        calls = 0

        def fails(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == after:
                raise KeyError("injected")
            return original(*args, **kwargs)

        with mock.patch.object(ops, name, fails):
            try:
                self.check((0, 0), self.gradients(self.loss(0, 0)))
            except KeyError:
                self.model.zero_grad()


ACTIONS = ("forward", "forward", "backward", "backward", "again", "steps", "drop", "evaluate", "fault")


@pytest.fixture(autouse=True)
def _retain() -> Iterator[None]:
    """torch refuses a second backward where it donated buffers."""
    with torch._functorch.config.patch("donated_buffer", False):
        yield


def run(loop: Loop, lazy: LazyStreams, before: Callable[[], None] = lambda: None) -> None:
    """Forty actions, each behind `before`; at the end nothing is held."""
    for _ in range(40):
        before()
        getattr(loop, loop.draw.choice(ACTIONS))()
        if len(loop.waiting) > 3:
            loop.backward()
        assert not lazy.complaints
    loop.waiting.clear()
    loop.steps()
    gc.collect()
    ENTRIES.sweep()
    assert host_memory().in_use_bytes == 0
    assert not track().pending


@pytest.mark.parametrize("seed", range(8))
def test_any_sequence(lazy: LazyStreams, seed: int) -> None:
    """Gradients equal to the bit, no copy on free memory, and at the end nothing is held."""
    loop = Loop(per_block(max_inflight_bytes=(2**17, 20_000)[seed % 2]), seed)
    graphoffload.reset_stats()
    lazy.headroom = (2**40, 10_000)[seed // 2 % 2]
    run(loop, lazy)
    assert graphoffload.stats()["deferred"] > 0
    assert graphoffload.stats()["prefetch_hits"] > 0


@pytest.mark.parametrize("seed", range(20, 25))
def test_any_sequence_under_a_shared_budget(lazy: LazyStreams, seed: int) -> None:
    """How much stays changes all the time, as the peak says; nothing else does."""
    budget = 2**30
    lazy.allocated = 0, budget
    loop = Loop(per_block(policy="auto", device_budget=budget, reserve=0, max_inflight_bytes=None), seed)
    graphoffload.reset_stats()

    def another_peak() -> None:
        lazy.allocated = 0, budget - loop.draw.choice([-5_000, 0, 10_000, 50_000, 200_000])

    run(loop, lazy, before=another_peak)
    assert graphoffload.stats()["stays"] > 0
    assert graphoffload.stats()["offloads"] > 0
