"""The NUMA node of a GPU, and host memory that lies on it.

    /sys/bus/pci/devices/0000:9a:00.0/numa_node        1                    the node whose memory is nearest to the GPU
                                      local_cpulist    48-95,144-191        its CPUs

Linux places a page of memory on the node of the CPU that writes to it first. So the thread that allocates memory for copies of
a GPU, and the threads that it starts to fault the memory in, run on the CPUs of that node meanwhile:

    with on_node_of(device_index) as node:
        ...                                                 allocate
        if node is not None: fault_in(address, nbytes)      by threads that inherit the CPUs
        ...                                                 page-lock

Only the calling thread is bound, to those of its CPUs that are the node's, and it gets its CPUs back at the end. torch's
intra-op threads belong to the process and keep the CPUs that they were started with: `fault_in` starts threads of its own.

Everything stays as it is where the node is not known (a machine with one node says -1; a container without /sys), where the
thread may use no CPU of the node, or only such CPUs already, and where the system refuses: memory on another node is slower,
and never wrong.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphoffload.log import log

SYSTEM = Path("/sys")
_PIECE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node: its number and its CPUs."""

    number: int
    cpus: frozenset[int]

    def __str__(self) -> str:
        return f"NUMA node {self.number} (CPUs {_ranges(self.cpus)})"


def pci_address(properties: Any) -> str:
    """Such as "0000:9a:00.0", of what torch.cuda.get_device_properties gave; "" where this torch does not say."""
    found = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    if not all(isinstance(part, int) for part in found):
        return ""
    domain, bus, device = found
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def node_at(address: str) -> Node | None:
    """The node of the device at a PCI address; None where it is not known."""
    folder = SYSTEM / "bus/pci/devices" / address
    try:
        number = int((folder / "numa_node").read_text())
        cpus = frozenset(_numbers((folder / "local_cpulist").read_text()))
    except (OSError, ValueError):
        return None
    return Node(number, cpus) if address and number >= 0 and cpus else None


def node_of(device_index: int) -> Node | None:
    """The node of a CUDA device; None where it is not known."""
    import torch

    try:
        return node_at(pci_address(torch.cuda.get_device_properties(device_index)))
    except Exception as error:  # a driver's: no reason to stop, the memory is allocated anywhere
        log.debug("the NUMA node of cuda:%d is not known: %s", device_index, error)
        return None


@contextlib.contextmanager
def on_node_of(device_index: int) -> Iterator[Node | None]:
    """Run on the CPUs of a CUDA device's node (-1: of none). The node; None where the thread is left alone."""
    node = node_of(device_index) if device_index >= 0 else None
    before = _bound_to(node) if node is not None else None
    try:
        yield node if before is not None else None
    finally:
        if before is not None:
            try:
                os.sched_setaffinity(0, before)
            except OSError as error:  # none of these CPUs is the process's any more
                log.debug("this thread stays on %s: %s", node, error)


def _bound_to(node: Node) -> set[int] | None:
    """Bind this thread to a node. The CPUs that it had; None where nothing was changed."""
    try:
        before = os.sched_getaffinity(0)
        here = before & node.cpus
        if not here or here == before:
            return None
        os.sched_setaffinity(0, here)
    except (AttributeError, OSError, ValueError) as error:  # a system without affinities, or one that refuses
        log.debug("this thread is not bound to %s: %s", node, error)
        return None
    return before


def fault_in(address: int, nbytes: int, threads: int) -> None:
    """Write zeros to memory, by at most so many threads that inherit this one's CPUs; it returns when all are done."""
    share = -(-nbytes // max(1, threads))
    piece = max(_PIECE_BYTES, -(-share // _PIECE_BYTES) * _PIECE_BYTES)
    started = []
    for offset in range(piece, nbytes, piece):
        thread = threading.Thread(target=ctypes.memset, args=(address + offset, 0, min(piece, nbytes - offset)))
        try:
            thread.start()
        except RuntimeError:  # the program is ending, or may have no more threads
            ctypes.memset(address + offset, 0, nbytes - offset)
            break
        started.append(thread)
    ctypes.memset(address, 0, min(piece, nbytes))
    for thread in started:
        thread.join()


def _numbers(text: str) -> Iterator[int]:
    """Of a list such as "0-2,8"."""
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _ranges(numbers: frozenset[int]) -> str:
    """The list of these numbers, such as "0-2,8"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
