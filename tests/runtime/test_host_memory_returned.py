"""Page-locked memory that training does not need goes back to the system: after a while, or where the system runs short.

Page-locking and the clock are stand-ins; nothing here needs a GPU. tests/gpu/test_step_soak.py has the real ones.
"""

from __future__ import annotations

import gc
import random
import types
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lazy import LazyStreams, lazy_steps

import graphoffload
from graphoffload.compiler.compile_variant import Compiled
from graphoffload.compiler.dispatch import Dispatched
from graphoffload.compiler.step_plan import StepPlan
from graphoffload.compiler.step_runs import _PLANNER
from graphoffload.errors import HostMemoryError, PageableMemoryWarning
from graphoffload.hardware import host_memory
from graphoffload.hardware.host_memory import HostRam
from graphoffload.runtime.offloaded_tensors import OffloadedTensor
from graphoffload.runtime.pinned import slabs, window
from graphoffload.runtime.pinned.pool import POOL, HostPool
from graphoffload.runtime.pinned.slabs import HostBuffer, Slab
from graphoffload.runtime.pinned.window import TURNS, TURNS_IF_SHORT
from graphoffload.runtime.step.call import StepCall
from graphoffload.runtime.step.calls import STEPS, StepRun
from tests.runtime import stepping
from tests.runtime.stepping import PLENTY, assert_equal, batch, budget_at, compiled, fresh, gradients, kept, loss_of, step

KIB = 1024


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A clock, the memory that the system has left, and a driver that page-locks unless it is told to refuse."""
    this = types.SimpleNamespace(now_s=0.0, available_bytes=2**40, locked=[], refuses=0)

    def register(address: int, nbytes: int, flags: int) -> int:
        if this.refuses:
            this.refuses -= 1
            return 2
        this.locked.append(address)
        return 0

    def unregister(address: int) -> int:
        this.locked.remove(address)
        return 0

    stand_in = types.SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: stand_in)
    monkeypatch.setattr(window.time, "monotonic", lambda: this.now_s)
    monkeypatch.setattr(slabs.time, "perf_counter", lambda: 0.0)
    monkeypatch.setattr(host_memory, "for_this_process", lambda: HostRam(2**40, this.available_bytes))
    return this


class Event:
    """A copy that is over when a test says so."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        """Whether it is over."""
        return self.done

    def synchronize(self) -> None:
        """Nothing in these tests waits."""
        raise AssertionError("the host waited for a copy")


def take(memory: HostPool, sizes: list[int]) -> list[HostBuffer]:
    return [memory.acquire(size, pin=True, device=0) for size in sizes]


def turns(memory: HostPool, sizes: list[int], count: int) -> int:
    """Steps with these sizes; the bytes that went back."""
    returned = 0
    for _ in range(count):
        returned += memory.turn()
        for buffer in take(memory, sizes):
            memory.give_back(buffer)
    return returned


def test_memory_that_nothing_needs_goes_back(system: types.SimpleNamespace) -> None:
    """Within two windows; what is needed stays, and nothing is page-locked again."""
    memory = HostPool()
    turns(memory, [64 * KIB, 32 * KIB, 16 * KIB], 10)
    assert turns(memory, [32 * KIB], TURNS - 10 - 1) == 0
    assert turns(memory, [32 * KIB], TURNS + 1) == 80 * KIB
    assert memory.snapshot().pinned_bytes == 32 * KIB
    assert memory.snapshot().buffers == len(system.locked) == 1
    assert memory.snapshot().returned_bytes == 80 * KIB
    assert turns(memory, [32 * KIB], 10 * TURNS) == 0
    assert memory.snapshot().allocations == 3
    assert turns(memory, [], 2 * TURNS) == 32 * KIB
    assert system.locked == []


def prepared(memory: HostPool, sizes: list[int]) -> HostPool:
    """With memory for these sizes taken in advance, in one piece."""
    memory.prepare(sizes, pin=True, device=0, wait=True)
    return memory


def test_slabs_that_are_half_used_are_replaced(system: types.SimpleNamespace) -> None:
    """A large goal, then a smaller one, which uses some of the one slab: one of what is needed takes its place, once."""
    large, small = [64 * KIB] * 16, [48 * KIB] * 4
    memory = prepared(HostPool(), large)
    turns(memory, large, TURNS)
    assert (memory.snapshot().pinned_bytes, memory.snapshot().allocations) == (1024 * KIB, 1)
    assert turns(memory, small, 2 * TURNS) == 1024 * KIB
    assert sum(small) <= memory.snapshot().pinned_bytes <= 1.06 * sum(small)
    assert (memory.snapshot().allocations, len(system.locked)) == (2, 1)
    assert turns(memory, small, 10 * TURNS) == 0
    assert memory.snapshot().allocations == 2
    turns(prepared(memory, large), large, 2 * TURNS)
    turns(memory, small, 2 * TURNS)
    assert memory.snapshot().pinned_bytes <= 1.06 * sum(small), "also the second time"


def test_many_goals_and_shapes_hold_what_was_needed_lately(system: types.SimpleNamespace) -> None:
    """Five shapes in turn, another goal every 200 steps: nothing is page-locked while a goal lasts, once it is known."""
    draws = random.Random(0)
    memory = HostPool()
    for goal in range(12):
        share = draws.choice((0.1, 0.3, 0.5, 0.9))
        shapes = [[(64 + 8 * shape) * KIB * k for k in (1, 1, 3, 4, 11) * 8 if draws.random() < share] for shape in range(5)]
        for sizes in shapes:
            prepared(memory, sizes)
        for at in range(200):
            memory.arrange(f"{goal} {at % 5}", shapes[at % 5], pin=True, device=0)
            turns(memory, shapes[at % 5], 1)
            if at == 2 * TURNS:
                allocations = memory.snapshot().allocations
        most = max(map(sum, shapes))
        assert memory.snapshot().pinned_bytes <= 1.3 * most, f"goal {goal}"
        assert memory.snapshot().allocations == allocations, f"goal {goal}: page-locked in the middle of steady steps"


def test_sets_that_fit_only_in_pieces_are_not_packed_again_and_again(system: types.SimpleNamespace) -> None:
    """Two microbatches in flight hold the middle of the slab in turn: what is missing then is taken once, and stays."""
    memory = prepared(HostPool(), [64 * KIB] * 16)
    turns(memory, [64 * KIB] * 16, TURNS)

    def step() -> None:
        memory.turn()
        first = take(memory, [40 * KIB, 8 * KIB, 40 * KIB, 8 * KIB])
        for buffer in first[::2]:
            memory.give_back(buffer)
        second = take(memory, [72 * KIB])
        for buffer in [*first[1::2], *second]:
            memory.give_back(buffer)

    for _ in range(3 * TURNS):
        step()
    allocations, pinned = memory.snapshot().allocations, memory.snapshot().pinned_bytes
    for _ in range(20 * TURNS):
        step()
    assert (memory.snapshot().allocations, memory.snapshot().pinned_bytes) == (allocations, pinned)


def test_half_used_slabs_in_a_copy_or_in_use_are_not_replaced(system: types.SimpleNamespace) -> None:
    memory = prepared(HostPool(), [64 * KIB] * 16)
    turns(memory, [64 * KIB] * 16, TURNS)
    (held,) = take(memory, [64 * KIB])
    assert turns(memory, [64 * KIB], 3 * TURNS) == 0, "in use"
    held.last_copy = event = Event()
    memory.give_back(held)
    assert turns(memory, [], 3 * TURNS) == 0, "in a copy"
    event.done = True
    assert turns(memory, [64 * KIB], 2 * TURNS) == 1024 * KIB


def test_a_refused_replacement_is_taken_when_it_is_needed(system: types.SimpleNamespace) -> None:
    memory = prepared(HostPool(), [64 * KIB] * 16)
    turns(memory, [64 * KIB] * 16, TURNS)
    system.refuses = 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", PageableMemoryWarning)
        assert turns(memory, [64 * KIB] * 2, 2 * TURNS) == 1024 * KIB
    assert memory.snapshot().pinned_bytes == 128 * KIB


def test_memory_that_is_needed_now_and_then_stays(system: types.SimpleNamespace) -> None:
    """A large batch once in a window: no page-locking ever again."""
    memory = HostPool()
    for _ in range(40):
        turns(memory, [KIB] * 8, 1)
        turns(memory, [KIB] * 2, TURNS - 2)
    assert memory.snapshot().allocations == 8
    assert memory.snapshot().returned_bytes == 0


def test_as_little_as_page_locking_again_is_worth(system: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """What took a second to page-lock is held for 100 seconds, however fast the steps are."""
    memory = HostPool()
    ticks = iter([0.0, 1.0])
    monkeypatch.setattr(slabs.time, "perf_counter", lambda: next(ticks))
    turns(memory, [64 * KIB], 1)
    for second in range(99):
        system.now_s = second
        assert turns(memory, [], TURNS) == 0
    system.now_s = 220.0
    assert turns(memory, [], TURNS) == 64 * KIB


def test_what_only_looks_as_if_it_were_in_use_goes_back(system: types.SimpleNamespace) -> None:
    """Nobody asks for host memory once a plan keeps everything: the pool itself looks for handles that are gone."""
    memory = HostPool()
    gone = take(memory, [64 * KIB])

    def reclaim() -> None:
        while gone:
            memory.give_back(gone.pop())

    memory.reclaim = reclaim
    assert turns(memory, [], 2 * TURNS) == 64 * KIB


def test_slabs_in_use_or_in_a_copy_stay(system: types.SimpleNamespace) -> None:
    """The copy's event is asked, and never waited for."""
    memory = HostPool()
    held, copied = take(memory, [64 * KIB, 32 * KIB])
    copied.last_copy = event = Event()
    memory.give_back(copied)
    assert turns(memory, [], 3 * TURNS) == 0
    held.flat(torch.uint8).fill_(7)
    event.done = True
    assert turns(memory, [], TURNS) == 32 * KIB
    assert held.flat(torch.uint8).eq(7).all()
    memory.give_back(held)
    assert turns(memory, [], 2 * TURNS) == 64 * KIB


def test_a_slab_goes_as_a_whole_or_not_at_all(system: types.SimpleNamespace) -> None:
    """One piece of it is in use: the idle ones stay as they are."""
    memory = HostPool()
    memory.prepare([16 * KIB] * 4, pin=True, device=0, wait=True)
    (held,) = take(memory, [16 * KIB])
    assert turns(memory, [], 3 * TURNS) == 0
    assert memory.snapshot().buffers == 4
    memory.give_back(held)
    assert turns(memory, [], 2 * TURNS) == 64 * KIB
    assert memory.snapshot().buffers == memory.snapshot().held_bytes == 0


def test_less_of_every_slab(system: types.SimpleNamespace) -> None:
    """Each slab was used a little: one of what is needed takes their place, and nothing is taken after that."""
    memory = HostPool()
    for _ in range(4):
        memory.prepare([16 * KIB] * 4, pin=True, device=0, wait=True)
    assert memory.snapshot().allocations == 4
    buffers = take(memory, [16 * KIB] * 16)
    one_each = [
        next(buffer for buffer in buffers if buffer.slab is slab) for slab in {id(b.slab): b.slab for b in buffers}.values()
    ]
    for buffer in (*(buffer for buffer in buffers if buffer not in one_each), *one_each):
        memory.give_back(buffer)
    assert turns(memory, [16 * KIB] * 4, 2 * TURNS) == 4 * 64 * KIB
    assert 64 * KIB <= memory.snapshot().held_bytes <= 1.06 * 64 * KIB
    assert turns(memory, [16 * KIB] * 4, 4 * TURNS) == 0
    assert memory.snapshot().allocations == 5


def test_memory_made_in_advance_is_not_taken_for_idle(system: types.SimpleNamespace) -> None:
    """A plan that is made when a window ends finds its memory; one that never runs gives it back."""
    memory = HostPool()
    turns(memory, [64 * KIB], 1)
    turns(memory, [], 2 * TURNS - 2)
    memory.prepare([48 * KIB], pin=True, device=1, wait=True)
    assert memory.turn() == 64 * KIB
    buffer = memory.acquire(48 * KIB, pin=True, device=1)
    assert memory.snapshot().allocations == 2
    memory.give_back(buffer)
    memory.prepare([32 * KIB], pin=True, device=2, wait=True)
    turns(memory, [], 3 * TURNS)
    assert memory.snapshot().held_bytes == 0


def test_a_system_that_runs_short_gets_it_back_sooner(system: types.SimpleNamespace) -> None:
    memory = HostPool()
    turns(memory, [64 * KIB, 32 * KIB], TURNS - 1)
    system.available_bytes = 2**30
    assert turns(memory, [32 * KIB], 2 * TURNS_IF_SHORT) == 64 * KIB
    assert turns(memory, [32 * KIB], TURNS) == 0


def test_idle_memory_goes_before_the_system_runs_short(system: types.SimpleNamespace) -> None:
    """An allocation that would leave too little takes the place of what is idle; what was made in advance stays."""
    for available_bytes, idle in ((2**40, 5), (2**30, 0)):
        memory = HostPool()
        small = take(memory, [20 * KIB] * 8)
        for buffer in small[1:]:
            memory.give_back(buffer)
        system.available_bytes = available_bytes
        (large,) = take(memory, [30 * KIB])
        assert memory.snapshot().held_bytes == (20 + 30 + idle * 20) * KIB
    memory.give_back(large)
    memory.prepare([256 * KIB], pin=True, device=0, wait=True)
    memory.prepare([512 * KIB], pin=True, device=0, wait=True)
    assert memory.snapshot().held_bytes == (20 + 256 + 512) * KIB


@pytest.mark.parametrize("error", [MemoryError("refused"), RuntimeError("refused")])
def test_refused_memory_is_asked_for_again_without_what_is_idle(
    system: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A system that has room for so much."""
    room = [200 * KIB]
    memory = HostPool()

    def limited(nbytes: int, *rest: Any) -> Slab:
        if memory.snapshot().held_bytes + nbytes > room[0]:
            raise error
        return Slab(nbytes, *rest)

    monkeypatch.setattr(slabs, "Slab", limited)
    small = take(memory, [20 * KIB] * 8)
    for buffer in small[1:]:
        memory.give_back(buffer)
    room[0] = 60 * KIB
    take(memory, [30 * KIB])
    assert memory.snapshot().held_bytes == 50 * KIB
    assert memory.snapshot().returned_bytes == 140 * KIB
    with pytest.raises(HostMemoryError, match="No host memory for"):
        take(memory, [30 * KIB])


def test_refused_page_locking_is_tried_again_without_what_is_idle(system: types.SimpleNamespace) -> None:
    """No slow copies, and no warning, while idle memory is page-locked."""
    memory = HostPool()
    turns(memory, [64 * KIB] * 3, 1)
    system.refuses = 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", PageableMemoryWarning)
        (buffer,) = take(memory, [128 * KIB])
    assert buffer.pinned
    assert memory.snapshot().held_bytes == memory.snapshot().pinned_bytes == 128 * KIB
    system.refuses = 1
    with pytest.warns(PageableMemoryWarning, match="could not be page-locked"):
        take(memory, [KIB])


@pytest.fixture
def lazy() -> Iterator[LazyStreams]:
    stepping.peaks()
    graphoffload.release_host_memory()
    with lazy_steps() as lazy:
        yield lazy


def trained(steps: int) -> int:
    """Steps of a planned model, first with a small budget, then with plenty; the bytes held in between."""
    model = fresh()
    (expected,) = kept(model, [batch()])
    compiled(model, budget_at(0.05))
    for _ in range(5):
        assert_equal(step(model, batch()), expected)
    held = graphoffload.host_memory().held_bytes
    assert held > 0
    graphoffload.set_budget(PLENTY)
    for _ in range(steps):
        step(model, batch())
    assert_equal(step(model, batch()), expected)
    left = graphoffload.host_memory().held_bytes
    assert left == 0, f"{left} of {held} bytes are held for what is kept on the device"
    graphoffload.set_budget(budget_at(0.05))
    for _ in range(2):
        assert_equal(step(model, batch()), expected)
    return held


def test_a_step_that_keeps_everything_gives_memory_back(lazy: LazyStreams) -> None:
    """Though none of its ops runs; and a later budget takes it again."""
    before = graphoffload.stats()["host_returned_bytes"]
    held = trained(2 * TURNS)
    assert graphoffload.stats()["host_returned_bytes"] - before >= held
    assert graphoffload.host_memory().held_bytes > 0


ALIVE = (OffloadedTensor, StepRun, StepCall, StepPlan, Compiled, Dispatched, HostBuffer, Slab)


def alive() -> dict[str, int]:
    """Objects of the runtime and of compiled graphs."""
    gc.collect()
    counts = Counter(type(thing) for thing in gc.get_objects())
    return {kind.__name__: counts[kind] for kind in ALIVE if counts[kind]}


@pytest.mark.parametrize(
    "ends",
    [
        "with its backward",
        pytest.param("with a forward", marks=pytest.mark.long),
        pytest.param("in a forward", marks=pytest.mark.long),
        "in a backward",
    ],
)
def test_what_a_deleted_model_leaves(lazy: LazyStreams, ends: str) -> None:
    """After a reset nothing: neither memory nor plans, whatever its last step was."""
    before = alive()
    model = compiled(fresh(), budget_at(0.3))
    for _ in range(4):
        step(model, batch())
    if ends == "with a forward":
        model(batch())
    elif ends == "in a forward":
        model.order = [0, 1, 99]
        with pytest.raises(IndexError):
            model(batch())
    elif ends == "in a backward":
        model.layers[1].register_full_backward_pre_hook(stop)
        with pytest.raises(KeyError):
            step(model, batch())
    del model
    torch._dynamo.reset()
    assert alive() == before
    assert POOL.snapshot().held_bytes == 0
    assert lazy.complaints == []


def stop(*_: Any) -> None:
    raise KeyError("stopped")


def test_a_reset_between_forward_and_backward(lazy: LazyStreams) -> None:
    """The backward finds its tensors; and the model trains on, compiled anew."""
    model = fresh()
    (expected,) = kept(model, [batch()])
    compiled(model, budget_at(0.1))
    for _ in range(2):
        for _ in range(4):
            assert_equal(step(model, batch()), expected)
        loss = loss_of(model, batch())
        torch._dynamo.reset()
        assert_equal(gradients(model, loss), expected)


def test_every_reset_is_heard(lazy: LazyStreams) -> None:
    """Also the second one, of a model that was compiled again after the first."""
    model = compiled(fresh(), budget_at(0.05))
    for _ in range(2):
        for _ in range(4):
            step(model, batch())
        assert STEPS.runs
        model.zero_grad()
        torch._dynamo.reset()
        assert not STEPS.runs
        assert not _PLANNER.known
        assert POOL.snapshot().held_bytes == 0
