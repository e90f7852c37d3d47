"""The pool of host memory: what it holds, what it gives up, what it has ready, and what happens when memory is refused.

Page-locking is a stand-in that counts; nothing here needs a GPU.
"""

from __future__ import annotations

import gc
import itertools
import threading
import types
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graphoffload
from graphoffload.errors import HostMemoryError, PageableMemoryWarning
from graphoffload.facts.plan import Plan, Transfer
from graphoffload.runtime import registry
from graphoffload.runtime.pinned import pool, slabs
from graphoffload.runtime.pinned import preallocation as ahead
from graphoffload.runtime.pinned.pool import POOL, HostPool
from graphoffload.runtime.pinned.slabs import HostBuffer, Slab

KIB = 1024


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A driver that page-locks whatever it is told to."""
    made = types.SimpleNamespace(locked=[], refuses=0)

    def register(address: int, nbytes: int, flags: int) -> int:
        assert flags == 1, "page-locked for one device only"
        if not made.refuses:
            made.locked.append(address)
        return int(made.refuses)

    def unregister(address: int) -> int:
        made.locked.remove(address)
        return 0

    stand_in = types.SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: stand_in)
    return made


class Event:
    """A copy's event: reached after `queries` questions, or when waited for."""

    def __init__(self, queries: int = 10**9) -> None:
        self.queries, self.waited = queries, 0

    def query(self) -> bool:
        """Whether the copy is done."""
        self.queries -= 1
        return self.queries < 0

    def synchronize(self) -> None:
        """Wait."""
        self.waited += 1


def take(memory: HostPool, sizes: list[int]) -> list[HostBuffer]:
    return [memory.acquire(size, pin=True, device=0) for size in sizes]


def step(memory: HostPool, sizes: list[int]) -> None:
    """One forward and backward; buffers in flight are distinct memory."""
    buffers = take(memory, sizes)
    spans = sorted((buffer.address, buffer.address + buffer.nbytes) for buffer in buffers)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for number, buffer in enumerate(buffers):
        buffer.flat(torch.uint8).fill_(number)
    for number, buffer in enumerate(buffers):
        assert buffer.flat(torch.uint8).eq(number).all()
        memory.give_back(buffer)


SIZES = st.lists(st.integers(1, 64).map(lambda n: n * 64 * KIB // 16), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(base=SIZES, scales=st.permutations([1, 2, 3, 5]))
def test_shape_buckets_share_their_memory(base: list[int], scales: list[int]) -> None:
    """Batches of several lengths: never more page-locked than 1.05 of the largest set in flight, and nothing is page-locked
    again once each was seen, in whatever order they come."""
    memory, largest = HostPool(), 0
    buckets = {str(scale): [size * scale for size in base] for scale in scales}
    for bucket in buckets.values():
        memory.prepare(bucket, pin=True, device=0, wait=True)  # compiled
        largest = max(largest, sum(bucket))
        assert memory.snapshot().pinned_bytes <= 1.05 * largest
        allocations = memory.snapshot().allocations
        step(memory, bucket)
        assert memory.snapshot().allocations == allocations  # not in a step
    for name, bucket in (*buckets.items(), *reversed(buckets.items()), *buckets.items()):
        memory.arrange(name, bucket, pin=True, device=0)
        step(memory, bucket)
    assert memory.snapshot().allocations == allocations
    assert memory.snapshot().in_use_bytes == 0
    assert memory.snapshot().pinned_bytes <= 1.05 * largest
    assert memory.release_idle() >= largest
    assert memory.snapshot().held_bytes == memory.snapshot().pinned_bytes == memory.snapshot().buffers == 0


@settings(max_examples=100, deadline=None)
@given(buckets=st.lists(SIZES, min_size=2, max_size=4))
def test_unlike_sets_come_to_rest(buckets: list[list[int]]) -> None:
    """Sets of quite different sizes that nobody announced: page-locking ends, and little is held beyond what they need."""
    memory = HostPool()
    for _ in range(3):
        for number, bucket in enumerate(buckets):
            memory.arrange(str(number), bucket, pin=True, device=0)
            step(memory, bucket)
    allocations = memory.snapshot().allocations
    for number, bucket in enumerate(buckets):
        memory.arrange(str(number), bucket, pin=True, device=0)
        step(memory, bucket)
    assert memory.snapshot().allocations == allocations
    assert memory.snapshot().pinned_bytes <= 2 * max(map(sum, buckets))


def test_another_size_is_cut_from_idle_memory(driver: types.SimpleNamespace) -> None:
    """The same bytes serve other sizes, and the copies that used them are over by then."""
    memory = HostPool()
    (large,) = take(memory, [64 * KIB])
    large.last_copy = event = Event()
    memory.give_back(large)
    small = take(memory, [16 * KIB] * 4)
    assert event.waited == 1
    assert len(driver.locked) == memory.snapshot().allocations == 1
    assert {buffer.address - large.address for buffer in small} == {0, 16 * KIB, 32 * KIB, 48 * KIB}
    assert all(buffer.last_copy is None and buffer.pinned for buffer in small)


def test_the_same_size_keeps_the_event_of_its_last_copy() -> None:
    """The next user's stream waits for it; the host does not."""
    memory = HostPool()
    (buffer,) = take(memory, [64 * KIB])
    buffer.last_copy = event = Event()
    memory.give_back(buffer)
    assert take(memory, [64 * KIB]) == [buffer]
    assert (buffer.last_copy, event.waited) == (event, 0)


def test_devices_do_not_share() -> None:
    """Events belong to a device, so do the buffers that carry them."""
    memory = HostPool()
    memory.give_back(memory.acquire(KIB, pin=True, device=0))
    memory.acquire(KIB, pin=True, device=1)
    memory.acquire(KIB, pin=False)
    assert memory.snapshot().allocations == 3


def test_budget_is_for_what_is_in_use_and_idle_memory_makes_room(driver: types.SimpleNamespace) -> None:
    """Idle memory goes before more is held than host_budget; what a backward still needs is named in the error."""
    memory = HostPool()
    memory.budget_bytes = 100 * KIB
    small = take(memory, [20 * KIB] * 4)
    for buffer in small[1:]:
        memory.give_back(buffer)
    kept = [small[0], *take(memory, [70 * KIB])]
    assert memory.snapshot().held_bytes == 90 * KIB
    assert len(driver.locked) == 2
    with pytest.raises(HostMemoryError, match=r"host_budget=100.0 KiB is spent: b needs 20.0 KiB, and 90.0 KiB are in use"):
        memory.acquire(20 * KIB, pin=True, device=0, name="b")
    for buffer in kept:
        memory.give_back(buffer)
    assert memory.acquire(20 * KIB, pin=True, device=0, name="b").nbytes == 20 * KIB


def test_dead_handles_are_asked_for_first() -> None:
    """A miss looks for buffers of dropped handles before it takes memory."""
    memory = HostPool()
    (buffer,) = take(memory, [KIB])
    memory.reclaim = lambda: memory.give_back(buffer) if memory.snapshot().in_use_bytes else None
    assert take(memory, [KIB]) == [buffer]
    assert memory.snapshot().allocations == 1


def test_memory_is_ready_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, by a thread beside the compiler; a tensor that comes early waits for its chunk and takes no memory twice."""
    memory, go, made = HostPool(), threading.Event(), []

    class Slow(Slab):
        __slots__ = ()

        def __init__(self, *args: Any) -> None:
            assert go.wait(30)
            made.append(threading.current_thread().name)
            super().__init__(*args)

    monkeypatch.setattr(slabs, "Slab", Slow)
    monkeypatch.setattr(pool, "_CHUNK_BYTES", 4 * KIB)
    memory.prepare([KIB, 2 * KIB, 2 * KIB, 3 * KIB, 0], pin=True, device=0)
    assert memory.snapshot().held_bytes == 0
    threading.Timer(0.05, go.set).start()
    step(memory, [3 * KIB, 2 * KIB, KIB, 2 * KIB])
    assert made == ["graphoffload-host-memory"] * 3
    assert memory.snapshot().pinned_bytes == 8 * KIB


def test_plans_that_run_together_do_not_count_on_the_same_memory() -> None:
    """Two graphs of one step, both compiled before the first runs; a third one whose predecessors have run."""
    memory = HostPool()
    memory.prepare([KIB, KIB], pin=True, device=0, wait=True)
    memory.prepare([KIB], pin=True, device=0, wait=True)
    assert memory.snapshot().held_bytes == 3 * KIB
    step(memory, [KIB] * 3)
    memory.prepare([KIB, 2 * KIB], pin=True, device=0, wait=True)
    assert memory.snapshot().held_bytes == 3 * KIB


def test_the_next_step_is_planned_into_the_memory_of_the_last() -> None:
    """Its activations are dead, and nobody has looked yet: they are not in use beside those of the next one."""
    memory = HostPool()
    dead = take(memory, [2 * KIB, KIB])

    def reclaim() -> None:
        while dead:
            memory.give_back(dead.pop())

    memory.reclaim = reclaim
    memory.prepare([KIB, 2 * KIB], pin=True, device=0, wait=True)
    assert memory.snapshot().held_bytes == 3 * KIB


@pytest.mark.parametrize("error", [MemoryError("refused"), PageableMemoryWarning("refused")])
def test_memory_refused_ahead_is_asked_for_again(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever, and the error comes where it can be handled."""
    memory = HostPool()

    def refuse(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(slabs, "Slab", refuse)
        memory.prepare([KIB], pin=True, device=0)
        with pytest.raises((HostMemoryError, PageableMemoryWarning)):
            take(memory, [KIB])
    assert memory.snapshot().held_bytes == memory.snapshot().in_use_bytes == 0
    step(memory, [KIB])


def test_page_locking_refused_is_an_error_if_told_so(driver: types.SimpleNamespace) -> None:
    """By the warning's name; the pool is as before, and works when the limit is raised."""
    memory = HostPool()
    driver.refuses = 2
    with warnings.catch_warnings():
        warnings.simplefilter("error", PageableMemoryWarning)
        with pytest.raises(PageableMemoryWarning, match="simplefilter"):
            take(memory, [KIB])
    assert memory.snapshot().held_bytes == memory.snapshot().in_use_bytes == memory.snapshot().buffers == 0
    driver.refuses = 0
    step(memory, [KIB])
    assert memory.snapshot().pinned_bytes == KIB


def test_what_page_locking_took_is_shown(driver: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds for each GiB that was page-locked, memory given back since included; nothing without any."""
    memory, clock = HostPool(), itertools.count()
    monkeypatch.setattr(slabs.time, "perf_counter", lambda: float(next(clock)))
    take(memory, [KIB])
    memory.prepare([64 * KIB], pin=True, device=0, wait=True)
    locked = memory.snapshot().pinned_bytes
    assert memory.snapshot().pinning_s_per_gib == pytest.approx(len(driver.locked) * 2**30 / locked)
    memory.release_idle()
    assert memory.snapshot().pinned_bytes < locked
    assert memory.snapshot().pinning_s_per_gib == pytest.approx(2 * 2**30 / locked)
    assert HostPool().snapshot().pinning_s_per_gib is None


def test_poison_overwrites_what_is_given_back() -> None:
    """After the copy that still read it."""
    memory = HostPool()
    memory.poison = True
    (buffer,) = take(memory, [KIB])
    buffer.flat(torch.uint8).zero_()
    buffer.last_copy = event = Event()
    memory.give_back(buffer)
    assert event.waited == 1
    assert buffer.flat(torch.uint8).eq(0xFF).all()


def plan_for(device: str, key: str) -> Plan:
    transfers = tuple(
        Transfer(id=id, tensor=f"a{id}", nbytes=nbytes, offload_after="", release_after=None, reload_before="", wait_before="")
        for id, nbytes in enumerate((KIB, None, 2 * KIB))
    )
    return Plan(key=key, graph="graph0", transfers=transfers, device=device)


def test_only_plans_that_will_run_on_a_gpu_take_memory_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """explain() registers plans too, and so does a CPU."""
    memory = HostPool()
    monkeypatch.setattr(ahead, "POOL", memory)
    for show in (registry.explained, registry.register):  # by explain(), and by a partitioner whose caller may not run it
        show(plan_for("cuda:0", "explained"))
    ahead.allow(10 * KIB)
    registry.register(plan_for("cpu", "cpu"), runs=True, store=False)
    assert memory.snapshot().held_bytes == 0
    for _ in range(2):
        registry.register(plan_for("cuda:0", "compiled"), runs=True, store=False)  # again from the compile cache
    ahead.allow(5 * KIB)
    step(memory, [KIB, 2 * KIB])
    assert memory.snapshot().pinned_bytes == 3 * KIB
    assert memory.budget_bytes == 10 * KIB


def test_who_holds_host_memory() -> None:
    """By tensor and module while a backward is to come."""
    x = torch.randn(KIB)
    gc.collect()
    before = graphoffload.host_memory()
    handle = torch.ops.graphoffload.offload(x, "who", 3)
    torch.ops.graphoffload.release(x, handle, "who", 3)
    held = graphoffload.host_memory()
    assert {name: held.by_tensor[name] for name in held.by_tensor.keys() - before.by_tensor.keys()} == {"tensor 3": 4 * KIB}
    assert held.in_use_bytes - before.in_use_bytes == 4 * KIB
    assert hash(held) is not None
    del handle
    assert graphoffload.host_memory().by_tensor == before.by_tensor


def test_pieces_of_a_slab_join() -> None:
    """Whatever the order of return."""
    slab = Slab(10 * 64, (False, -1))
    buffers = [HostBuffer(slab, offset * 64, 64) for offset in range(10)]
    assert slab.free == []
    for number in (3, 5, 4, 0, 9, 8, 1, 2, 7, 6):
        slab.put(buffers[number].offset, 64)
    assert slab.unused
    assert slabs.rounded(65) == 128


@pytest.mark.parametrize("in_advance", [False, True])
def test_the_peak_is_what_was_in_use(in_advance: bool) -> None:
    """Memory that is allocated in advance counts once it is used, and then it does."""
    memory = HostPool()
    if in_advance:
        memory.prepare([KIB, KIB], pin=False, wait=True)
        assert memory.snapshot().peak_bytes == 0
    buffers = [memory.acquire(KIB, pin=False) for _ in range(2)]
    for buffer in buffers:
        memory.give_back(buffer)
    assert memory.snapshot().peak_bytes == 2 * KIB


def test_the_peak_is_in_stats() -> None:
    """The most that was ever in use, not what is now; reset_stats() leaves it, as it is of the process."""
    before = graphoffload.stats()["host_peak_bytes"]
    buffer = POOL.acquire(before + 4096, pin=False)
    POOL.give_back(buffer)
    graphoffload.reset_stats()
    assert graphoffload.stats()["host_peak_bytes"] >= before + 4096
    POOL.release_idle()
