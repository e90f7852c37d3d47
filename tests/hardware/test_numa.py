"""The node of a GPU from a made-up /sys, and threads that are bound to it while they make a slab."""

from __future__ import annotations

import ctypes
import os
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from graphoffload.hardware import numa
from graphoffload.runtime.pinned.pool import HostPool
from graphoffload.runtime.pinned.slabs import Slab

ADDRESS = "0000:9a:00.0"
GPU = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x9A, pci_device_id=0)


class Machine:
    """A thread's CPUs as the system has them, and a tree of /sys."""

    def __init__(self, root: Path) -> None:
        self.root, self.cpus, self.bound, self.refuses = root, set(range(8)), [], ()

    def gpu(self, node: str = "1\n", cpus: str = "4-5,7\n") -> None:
        folder = self.root / "bus/pci/devices" / ADDRESS
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "numa_node").write_text(node)
        (folder / "local_cpulist").write_text(cpus)

    def get(self, thread: int) -> set[int]:
        assert thread == 0, "the calling thread"
        return set(self.cpus)

    def set(self, thread: int, cpus: set[int]) -> None:
        assert thread == 0, "the calling thread"
        if len(self.bound) in self.refuses:
            self.bound.append("refused")
            raise OSError(22, "Invalid argument")
        self.cpus = set(cpus)
        self.bound.append(sorted(cpus))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(numa, "SYSTEM", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", made.get, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", made.set, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: GPU)
    return made


def test_the_node_of_a_device(machine: Machine) -> None:
    machine.gpu()
    assert numa.pci_address(GPU) == ADDRESS
    assert numa.node_of(0) == numa.Node(1, frozenset({4, 5, 7}))
    assert str(numa.node_of(0)) == "NUMA node 1 (CPUs 4-5,7)"


@pytest.mark.parametrize(
    ("node", "cpus"), [("-1\n", "0-7\n"), ("1\n", "\n"), ("x\n", "0-7\n"), ("1\n", "a-b\n"), ("", ""), (None, None)]
)
def test_a_node_that_is_not_known(node: str | None, cpus: str | None, machine: Machine) -> None:
    """-1, no CPUs, files that say something else, no files: nothing is bound, and the body runs."""
    if node is not None and cpus is not None:
        machine.gpu(node, cpus)
    assert numa.node_of(0) is None
    with numa.on_node_of(0) as bound:
        assert bound is None
    assert machine.bound == []


def test_a_torch_that_does_not_say_the_address(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.gpu()
    assert numa.pci_address(types.SimpleNamespace(name="x")) == ""
    assert numa.node_at("") is None

    def fails(index: int) -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fails)
    assert numa.node_of(0) is None


def test_a_thread_is_bound_and_has_its_cpus_back(machine: Machine) -> None:
    """To those of the node's CPUs that are its own; also after an error."""
    machine.gpu()
    machine.cpus = {0, 5, 7}
    with pytest.raises(MemoryError), numa.on_node_of(0) as node:  # noqa: PT012
        assert node is not None
        assert machine.cpus == {5, 7}
        raise MemoryError
    assert machine.bound == [[5, 7], [0, 5, 7]]


@pytest.mark.parametrize(("cpus", "device"), [({0, 1}, 0), ({4, 5}, 0), ({0, 4}, -1)])
def test_a_thread_is_left_alone(cpus: set[int], device: int, machine: Machine) -> None:
    """It may use none of the node's CPUs, or no others; memory of no device."""
    machine.gpu()
    machine.cpus = cpus
    with numa.on_node_of(device) as node:
        assert node is None
    assert machine.bound == []


@pytest.mark.parametrize("refuses", [(0,), (1,)])
def test_a_system_that_refuses(refuses: tuple[int, ...], machine: Machine) -> None:
    """To bind, or to undo it: nothing is raised."""
    machine.gpu()
    machine.refuses = refuses
    with numa.on_node_of(0) as node:
        assert (node is None) == (refuses == (0,))


def test_a_system_without_affinities(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.gpu()
    monkeypatch.delattr(os, "sched_getaffinity")
    with numa.on_node_of(0) as node:
        assert node is None


@pytest.mark.parametrize(("nbytes", "threads"), [(1, 4), (10_000, 1), (10_000, 3), (9_999, 64), (4096, 2)])
def test_all_bytes_are_written_and_no_others(nbytes: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "_PIECE_BYTES", 1024)
    memory = torch.full((nbytes + 64,), 7, dtype=torch.uint8)
    numa.fault_in(memory.data_ptr() + 32, nbytes, threads)
    assert not memory[32 : 32 + nbytes].any()
    assert memory[:32].eq(7).all()
    assert memory[32 + nbytes :].eq(7).all()


def test_memory_is_written_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "_PIECE_BYTES", 1024)

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    memory = torch.full((10_000,), 7, dtype=torch.uint8)
    numa.fault_in(memory.data_ptr(), 10_000, 4)
    assert not memory.any()


class Driver:
    """Page-locks anything; notes the thread's CPUs when it does."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.seen = machine, []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.seen.append((sorted(self.machine.cpus), bytes((ctypes.c_char * nbytes).from_address(address)) == bytes(nbytes)))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0


@pytest.fixture
def driver(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver(machine)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


def test_a_slab_is_made_on_the_devices_node(machine: Machine, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faulted in by threads that are bound, and page-locked by one; pageable memory and memory of no device are left alone."""
    machine.gpu()
    touched: list[list[int]] = []
    fault_in = numa.fault_in

    def watched(address: int, nbytes: int, threads: int) -> None:
        touched.append(sorted(machine.cpus))
        fault_in(address, nbytes, threads)

    monkeypatch.setattr(numa, "fault_in", watched)
    slab = Slab(10_000, (True, 0))
    assert slab.pinned
    assert touched == [[4, 5, 7]]
    assert driver.seen == [([4, 5, 7], True)]
    assert machine.cpus == set(range(8))
    Slab(10_000, (True, -1))
    Slab(10_000, (False, 0))
    assert touched == [[4, 5, 7]]
    assert machine.bound == [[4, 5, 7], list(range(8))]


def test_memory_in_advance_and_at_need_is_on_the_node(machine: Machine, driver: Driver) -> None:
    machine.gpu()
    pool = HostPool()
    pool.prepare([4096, 8192], pin=True, device=0, wait=True)
    pool.acquire(1 << 20, pin=True, device=0)
    assert [cpus for cpus, _ in driver.seen] == [[4, 5, 7]] * 2
    assert all(zero for _, zero in driver.seen)


def test_a_slab_where_nothing_is_known(machine: Machine, driver: Driver) -> None:
    slab = Slab(10_000, (True, 0))
    assert slab.pinned
    assert driver.seen == [(list(range(8)), True)]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinities here")
def test_threads_inherit_the_cpus_of_the_one_that_starts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the system itself: the threads that fault memory in run where this one is bound, and it alone of the others is."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("one CPU")
    one = min(allowed)
    other, asked = threading.Event(), threading.Event()
    elsewhere: list[set[int]] = []

    def beside() -> None:
        asked.wait(10)
        elsewhere.append(os.sched_getaffinity(0))
        other.set()

    bystander = threading.Thread(target=beside)
    bystander.start()
    made = Machine(tmp_path)
    made.gpu("0\n", f"{one}\n")
    monkeypatch.setattr(numa, "SYSTEM", tmp_path)
    monkeypatch.setattr(numa, "_PIECE_BYTES", 4096)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: GPU)
    seen: list[set[int]] = []
    memset = ctypes.memset
    monkeypatch.setattr(ctypes, "memset", lambda *given: (seen.append(os.sched_getaffinity(0)), memset(*given)))
    memory = torch.ones(40_000, dtype=torch.uint8)
    with numa.on_node_of(0) as node:
        assert node is not None
        asked.set()
        other.wait(10)
        numa.fault_in(memory.data_ptr(), 40_000, 4)
    bystander.join()
    assert seen == [{one}] * len(seen)
    assert len(seen) > 2
    assert elsewhere == [allowed]
    assert os.sched_getaffinity(0) == allowed
    assert not memory.any()
