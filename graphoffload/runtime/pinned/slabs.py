"""Slabs: host memory from the operating system, page-locked in one piece and cut into buffers.

A slab of a GPU lies on the GPU's NUMA node, where that is known: the thread that makes it runs there meanwhile
(hardware/numa.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from graphoffload.errors import PageableMemoryWarning, warn
from graphoffload.hardware import host_memory, numa
from graphoffload.units import format_bytes

ALIGNMENT = 64
_PAGE = 4096
_SPARE_SHARE = 0.05  # of the system's memory: left free by a slab, if idle memory can go instead
_PORTABLE = 1  # page-locked for every device of the process, not only the current one

Kind = tuple[bool, int]
"""Whether page-locked, and the index of the device that copies (-1 without one): events belong to one device."""
Key = tuple[int, bool, int]
"""Bytes of a buffer, and its kind."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of the pool: in total, in use by offloaded tensors, page-locked, and the peak in use.

    buffers: pieces in use or idle. allocations: how often memory was allocated from the operating system (and page-locked).
    by_tensor: bytes in use by tensor; several microbatches in flight are added up. pinning_s_per_gib: seconds of page-locking
    for each GiB, over all memory that was ever page-locked, including threads that run during compiling; None if there is none.
    returned_bytes: idle memory that went back to the operating system so far.
    """

    held_bytes: int
    in_use_bytes: int
    pinned_bytes: int
    peak_bytes: int
    buffers: int
    allocations: int = 0
    by_tensor: dict[str, int] = field(default_factory=dict, hash=False)
    pinning_s_per_gib: float | None = None
    returned_bytes: int = 0


def rounded(nbytes: int) -> int:
    """Bytes that a buffer occupies in its slab."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Slab:
    """`nbytes` of host memory; `pinned` says whether copies from it can overlap with compute; `free` lists (offset, bytes).

    `pinning_s`: what it took to fault the memory in and to page-lock it. `last_window`: the last one in which it was used.
    `make_room`: gives memory back where page-locking is refused, so that it is tried again; returns how much.

    Raises:
        RuntimeError, MemoryError: the operating system refuses the memory.
        PageableMemoryWarning: where warnings of this class are errors and the memory cannot be page-locked.
    """

    __slots__ = ("_owner", "_raw", "address", "free", "kind", "last_window", "nbytes", "pinned", "pinning_s")

    def __init__(self, nbytes: int, kind: Kind, make_room: Callable[[], int] | None = None) -> None:
        pin = kind[0]
        self.last_window = -1
        self.kind = kind
        self.nbytes = nbytes
        with numa.on_node_of(kind[1] if pin else -1) as node:
            self._owner = torch.empty(nbytes + (_PAGE if pin else 0), dtype=torch.uint8)
            start = -self._owner.data_ptr() % _PAGE if pin else 0
            self._raw = self._owner[start : start + nbytes]
            self.address = self._raw.data_ptr()
            began = time.perf_counter()
            self.pinned = pin and nbytes > 0 and _page_lock(self._raw, make_room, on_node=node is not None)
            self.pinning_s = time.perf_counter() - began if self.pinned else 0.0
        self.free = [(0, nbytes)]

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """Some of the bytes."""
        return self._raw[offset : offset + nbytes]

    def smallest_gap(self, nbytes: int) -> tuple[int, int] | None:
        """Bytes and offset of the smallest free piece that holds `nbytes`."""
        return min(((length, offset) for offset, length in self.free if length >= nbytes), default=None)

    def take(self, offset: int, nbytes: int) -> None:
        """Mark the front of the free piece at `offset` as in use."""
        at = next(i for i, piece in enumerate(self.free) if piece[0] == offset)
        length = self.free[at][1]
        self.free[at : at + 1] = [(offset + nbytes, length - nbytes)] if length > nbytes else []

    def put(self, offset: int, nbytes: int) -> None:
        """Free these bytes again and join them with free neighbors. No copy of them may be running."""
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self.free, (offset, nbytes)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self.free = merged

    @property
    def unused(self) -> bool:
        """Whether nothing is cut from it."""
        return self.free == [(0, self.nbytes)]

    def close(self) -> None:
        """Undo page-locking. The caller has made sure that no copy is running."""
        if self.pinned:
            self.pinned = False
            torch.cuda.cudart().cudaHostUnregister(self.address)


def allocated(nbytes: int, kind: Kind, make_room: Callable[[], int] | None) -> Slab:
    """A slab. `make_room` gives idle memory back, and returns how much: before the system is out of memory, since it does not
    refuse memory but ends processes; and where the slab is refused all the same.

    Raises:
        RuntimeError, MemoryError, PageableMemoryWarning: as Slab.
    """
    if make_room is not None:
        ram = host_memory.for_this_process()
        if ram.available_bytes - nbytes < _SPARE_SHARE * ram.total_bytes:
            make_room()
    try:
        return Slab(nbytes, kind, make_room)
    except (RuntimeError, MemoryError):
        if make_room is None or not make_room():
            raise
    return Slab(nbytes, kind)


class HostBuffer:
    """A piece of a slab. `last_copy`: event of a copy that may still use it; `fresh`: made in advance, never used yet.

    `for_good`: a captured CUDA graph copies to it.
    """

    __slots__ = ("_flat", "address", "for_good", "fresh", "key", "last_copy", "nbytes", "offset", "slab")

    def __init__(self, slab: Slab, offset: int, nbytes: int) -> None:
        self.slab = slab
        self.offset = offset
        self.nbytes = nbytes
        self.key: Key = (nbytes, *slab.kind)
        self.address = slab.address + offset
        self.last_copy: Any = None
        self.fresh = self.for_good = False
        self._flat: dict[torch.dtype, torch.Tensor] = {}
        slab.take(offset, rounded(nbytes))

    @property
    def pinned(self) -> bool:
        """Whether it is page-locked."""
        return self.slab.pinned

    def flat(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole buffer as a one-dimensional tensor of `dtype`."""
        view = self._flat.get(dtype)
        if view is None:
            view = self._flat[dtype] = self.slab.view(self.offset, self.nbytes).view(dtype)
        return view


def _page_lock(raw: torch.Tensor, make_room: Callable[[], int] | None, *, on_node: bool) -> bool:
    # First touch by several threads: page-locking untouched memory faults it in on one. Those of torch run on any node.
    if on_node:
        numa.fault_in(raw.data_ptr(), raw.numel(), torch.get_num_threads())
    else:
        raw.zero_()

    def register() -> int:
        return int(torch.cuda.cudart().cudaHostRegister(raw.data_ptr(), raw.numel(), _PORTABLE))

    code = register()
    if code != 0 and make_room is not None and make_room():
        code = register()
    if code == 0:
        return True
    warn(
        PageableMemoryWarning,
        f"{format_bytes(raw.numel())} of host memory could not be page-locked (CUDA error {code}): copies of this tensor run "
        "through pageable memory, block the host and overlap with nothing. Raise the memlock limit (ulimit -l) or lower "
        'host_budget. To stop instead: warnings.simplefilter("error", graphoffload.errors.PageableMemoryWarning).',
    )
    return False


def in_background(thread: threading.Thread) -> bool:
    """Start a thread unless the program is ending."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True
