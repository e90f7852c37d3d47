"""Random sequences of what training loops do, with every copy as late as possible.

Loop trains blocks that are compiled one by one. Graphs calls the four ops itself, so that it can stop between any two of them
and look at every offloaded tensor's state.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from lazy import LazyStreams, clean_slate, lazy_steps, learned, once
from torch import Tensor

import graphoffload
from graphoffload.errors import RuntimeStateError
from graphoffload.runtime import host_memory, ops, twin_copies
from graphoffload.runtime.handles import ENTRIES
from graphoffload.runtime.offloaded_tensors import State
from graphoffload.runtime.pinned.pool import POOL
from graphoffload.runtime.registry import run_plan
from graphoffload.runtime.step import between_graphs as between
from graphoffload.runtime.step.resident import Budget
from graphoffload.testing import weighted_loss
from graphoffload.torch_internals import autograd
from tests.runtime.test_between import SEEDS, Model, batch, lazy, per_block, track
from tests.runtime.test_offloaded_tensors import check

ORDERS = ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [2, 1], [3], [0, 1, 2, 3, 4, 2, 1])
__all__ = ["clean_slate", "lazy", "learned", "once"]


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


Key = tuple[int, int]
"""Place of a graph in its forward, and the transfer."""
EXAMPLES = itertools.count()
SIZES = (64, 100)  # elements of a graph's two tensors
BUDGET_BYTES = 2**20
ROUNDS = 6
CALLS = torch.ops.graphoffload


class Microbatch:
    """A forward whose backward is to come: handles, the values that must come back, what stayed, and what was handed over."""

    def __init__(self) -> None:
        self.handles: dict[Key, Tensor] = {}
        self.values: dict[Key, float] = {}
        self.stayed: set[Key] = set()
        self.gone: set[Key] = set()


class Graphs(RuleBasedStateMachine):
    """Up to three graphs in a row, two tensors each; any op may be the last, and any copy may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.waiting: list[Microbatch] = []
        self.numbers = itertools.count(1)
        self.retains = False
        self.seen: set[State] = set()

    @initialize(
        window=st.sampled_from([None, 300, 700, 2**20]), shared=st.booleans(), behind=st.booleans(), all_at_end=st.booleans()
    )
    def begin(self, window: int | None, shared: bool, behind: bool, all_at_end: bool) -> None:
        """Plans, streams, and autograd's word on whether a second backward may come."""
        self.lazy = self.stack.enter_context(lazy_steps())
        answer = self.stack.enter_context(mock.patch.object(autograd, "keeps_graph"))
        answer.side_effect = lambda: self.retains
        gc.collect()
        ENTRIES.sweep()  # what an example that failed has left
        self.others = self.books()
        self.plans = [run_plan(f"graph {number} of example {next(EXAMPLES)}") for number in range(3)]
        for run in self.plans:
            run.link(window, Budget(BUDGET_BYTES, 0, 0) if shared else None, downstream=behind and not shared)
            run.transfers, run.at_end = len(SIZES), frozenset(range(len(SIZES)) if all_at_end else [1])

    def teardown(self) -> None:
        """Nothing is held in the end: lazy_steps looks."""
        self.waiting.clear()
        self.stack.close()

    def run_forward(self, length: int, stops: int) -> Microbatch | None:
        """Offloads and releases; None where it stopped before the end."""
        found, calls = Microbatch(), 0
        for place, run in enumerate(self.plans[:length]):
            tensors = []
            for id, size in enumerate(SIZES):
                if (calls := calls + 1) > stops:
                    return None
                value, stays = float(next(self.numbers)), graphoffload.stats()["stays"]
                tensors.append(torch.full((size,), value))
                found.handles[place, id], found.values[place, id] = CALLS.offload(tensors[id], run.key, id), value
                if graphoffload.stats()["stays"] > stays:
                    found.stayed.add((place, id))
            for id in reversed(range(len(SIZES))):
                if (calls := calls + 1) > stops:
                    return None
                CALLS.release(tensors[id], found.handles[place, id], run.key, id)
        return found

    def run_backward(self, found: Microbatch, stops: int) -> bool:
        """Reloads and waits, from the last graph to the first; whether it came to its end."""
        calls = 0
        for place in reversed(range(len(found.handles) // len(SIZES))):
            run, targets = self.plans[place], []
            for id, size in enumerate(SIZES):
                if (calls := calls + 1) > stops:
                    return False
                key, handle = (place, id), found.handles[place, id]
                if key in found.gone:
                    with pytest.raises(RuntimeStateError, match="handed to a backward that did not come to its end"):
                        CALLS.reload(handle, run.key, id, (size,), (1,), torch.float32)
                    return False
                if key in found.stayed and not self.retains:
                    found.gone.add(key)
                targets.append(CALLS.reload(handle, run.key, id, (size,), (1,), torch.float32))
            self.look()
            for id, y in enumerate(targets):
                if (calls := calls + 1) > stops:
                    return False
                CALLS.wait(y, found.handles[place, id], run.key, id)
                assert torch.equal(y, torch.full_like(y, found.values[place, id]))
                y.fill_(-1.0)  # backward may write to what it got
        return True

    @rule(length=st.integers(1, 3), stops=st.integers(0, 16), room=st.integers(-500, 3000))
    def forward(self, length: int, stops: int, room: int) -> None:
        """One more microbatch in flight, or a forward that is interrupted: its handles go with it."""
        self.lazy.allocated = 0, BUDGET_BYTES - room
        if len(self.waiting) < 4 and (found := self.run_forward(length, stops)) is not None:
            self.waiting.append(found)

    @rule(headroom=st.sampled_from([0, 300, 2**20]), room=st.integers(0, 3000), backwards=st.integers(1, 3))
    def steps(self, headroom: int, room: int, backwards: int) -> None:
        """The usual loop for a while, so that an order is learnt."""
        self.lazy.headroom, self.lazy.allocated = headroom, (0, BUDGET_BYTES - room)
        for _ in range(3):
            found = self.run_forward(3, 100)
            assert found is not None
            for left in reversed(range(backwards)):
                self.retains = left > 0
                assert self.run_backward(found, 100)

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 3), retains=st.booleans(), stops=st.integers(0, 16), again=st.booleans())
    def backward(self, which: int, retains: bool, stops: int, again: bool) -> None:
        """Of any microbatch in flight. One that is interrupted may be tried again."""
        found = self.waiting.pop(which % len(self.waiting))
        self.retains = retains
        ended = self.run_backward(found, stops)
        if retains or (again and not ended):
            self.waiting.append(found)

    @rule(in_forward=st.booleans(), at=st.integers(0, 8))
    def a_copy_fails(self, in_forward: bool, at: int) -> None:
        """The error ends the step; also of a copy that was started ahead."""
        calls = itertools.count()
        name = "_copy_to_host" if in_forward else "_copy_to_device"
        original: Callable[..., Any] = getattr(ops, name)

        def fails(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == at:
                raise KeyError("injected")
            return original(*args, **kwargs)

        self.retains = False
        with mock.patch.object(ops, name, fails), contextlib.suppress(KeyError):
            found = self.run_forward(3, 100)
            assert found is not None
            self.run_backward(found, 100)

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 3))
    def drop(self, which: int) -> None:
        """Outputs go without a backward."""
        self.waiting.pop(which % len(self.waiting))

    @rule()
    def sweep(self) -> None:
        """What host_memory() and a full pool do."""
        ENTRIES.sweep()

    @invariant()
    def look(self) -> None:
        """Books and states agree, each tensor holds what its state says, and no copy ran on free memory."""
        living = [entry for entry in ENTRIES.living() if entry.run in self.plans]
        self.seen |= {entry.state for entry in living}
        for entry in living:
            check(entry)
        assert self.books() == self.others
        assert not self.lazy.complaints
        if (found := between._TRACKS.of.get(torch.device("cpu"))) is not None:
            assert self.ids(found.pending) == self.ids(entry for entry in living if entry.state is State.RELEASE_PENDING)
            assert self.ids(found.ahead) == self.ids(entry for entry in living if entry.state is State.PREFETCHED)
            assert found.pending_bytes == sum(entry.layout.nbytes for entry in found.pending)

    @staticmethod
    def books() -> tuple[int, int]:
        """Bytes that are counted as in use on the host and as in flight, and that no living tensor has."""
        living = ENTRIES.living()
        copies = [entry.host for entry in living if entry.host is not None]
        held = sum(copy.buffer.nbytes for copy in copies if copy.buffer is not None)
        in_flight = sum(entry.layout.nbytes for entry in living if entry.in_flight)
        return POOL.snapshot().in_use_bytes - held, graphoffload.stats()["inflight_bytes"] - in_flight

    @staticmethod
    def ids(found: Any) -> list[int]:
        """To compare who is in a list, whatever the order."""
        return sorted(id(entry) for entry in found)


@pytest.mark.parametrize("examples", [25, pytest.param(500, marks=pytest.mark.long)])
@pytest.mark.filterwarnings("ignore::graphoffload.errors.SharedBudgetWarning")
def test_any_sequence_of_ops(examples: int) -> None:
    """Values come back to the bit, whatever was interrupted, retained, dropped or started ahead; the states occur."""
    seen: set[State] = set()

    class Watched(Graphs):
        def teardown(self) -> None:
            super().teardown()
            seen.update(self.seen)

    rare = {State.LENT, State.HANDED_OVER, State.HANDING_OVER} if examples < 100 else set()
    wanted = set(State) - {State.NEW, State.STAYING, State.CLOSED} - rare  # the first two end with an op or a graph
    for _ in range(ROUNDS):  # examples are drawn anew each time, and 25 may lack a state
        run_state_machine_as_test(Watched, settings=settings(max_examples=examples, stateful_step_count=30, deadline=None))
        if seen >= wanted:
            return
    pytest.fail(f"{wanted - seen} did not occur in {ROUNDS * examples} examples")
