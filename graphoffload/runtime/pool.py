"""Host memory for offloaded activations: buffers of exact size, page-locked once, reused step after step.

torch's own pinned allocator rounds every request up to a power of two, up to twice the RAM that was planned. A buffer here is
ordinary memory, touched by all intra-op threads (so that its pages exist) and then page-locked as it is. Page-locking costs
a quarter to a whole second per GiB, so a buffer is given back to the operating system only on request or when another size
needs the room.

A buffer may still be read or written by a copy when it returns to the pool: it carries the event of that copy, and the next
user's stream waits for it. The host never waits.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

from graphoffload.errors import HostMemoryError, PageableMemoryWarning, warn
from graphoffload.units import format_bytes

_PAGE = 4096
_PORTABLE = 1  # page-locked for every device of the process, not only the current one


class HostBuffer:
    """`nbytes` of host memory; `pinned` says whether copies from it can overlap with compute."""

    __slots__ = ("_flat", "_owner", "address", "key", "last_copy", "nbytes", "pinned")

    def __init__(self, nbytes: int, *, pin: bool, device: int = -1) -> None:
        self.nbytes = nbytes
        self.key = (nbytes, pin, device)
        self.last_copy: Any = None
        self._owner = torch.empty(nbytes + (_PAGE if pin else 0), dtype=torch.uint8)
        start = -self._owner.data_ptr() % _PAGE if pin else 0
        raw = self._owner[start : start + nbytes]
        self.pinned = pin and nbytes > 0 and _page_lock(raw)
        self._flat = {torch.uint8: raw}
        self.address = raw.data_ptr()

    def flat(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole buffer as a one-dimensional tensor of `dtype`."""
        view = self._flat.get(dtype)
        if view is None:
            view = self._flat[dtype] = self._flat[torch.uint8].view(dtype)
        return view

    def close(self) -> None:
        """Undo page-locking. The caller has made sure that no copy is under way."""
        if self.pinned:
            self.pinned = False
            torch.cuda.cudart().cudaHostUnregister(self.address)


def _page_lock(raw: torch.Tensor) -> bool:
    raw.zero_()  # first touch by all intra-op threads: page-locking untouched memory faults it in on one
    code = int(torch.cuda.cudart().cudaHostRegister(raw.data_ptr(), raw.numel(), _PORTABLE))
    if code == 0:
        return True
    warn(
        PageableMemoryWarning,
        f"{format_bytes(raw.numel())} of host memory could not be page-locked (CUDA error {code}): copies of this tensor run "
        "through pageable memory, block the host and hide behind nothing. Raise the memlock limit (ulimit -l) or lower "
        "host_budget.",
    )
    return False


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What the pool holds: bytes in all, of them in use by offloaded tensors, page-locked, the peak in use, and buffers."""

    held_bytes: int
    in_use_bytes: int
    pinned_bytes: int
    peak_bytes: int
    buffers: int


class HostPool:
    """Buffers by exact size. Thread-safe: forward and backward run on different threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[tuple[int, bool, int], list[HostBuffer]] = {}
        self._held_bytes = 0
        self._pinned_bytes = 0
        self._in_use_bytes = 0
        self._peak_bytes = 0
        self._count = 0
        self.poison = False

    def acquire(self, nbytes: int, *, pin: bool, name: str = "", device: int = -1) -> HostBuffer:
        """A buffer of exactly `nbytes`; its `last_copy` event, if any, must be waited for by the stream that writes it.

        `device`: index of the device that copies; events belong to one device, so its buffers go to no other.

        Raises:
            HostMemoryError: the operating system refuses the memory.
        """
        with self._lock:
            idle = self._idle.get((nbytes, pin, device))
            buffer = idle.pop() if idle else None
            if buffer is not None:
                self._take(nbytes)
                return buffer
        buffer = self._allocate(nbytes, pin=pin, name=name, device=device)
        with self._lock:
            self._take(nbytes)
        return buffer

    def _take(self, nbytes: int) -> None:
        self._in_use_bytes += nbytes
        if self._in_use_bytes > self._peak_bytes:
            self._peak_bytes = self._in_use_bytes

    def _allocate(self, nbytes: int, *, pin: bool, name: str, device: int) -> HostBuffer:
        try:
            buffer = HostBuffer(nbytes, pin=pin, device=device)
        except (RuntimeError, MemoryError) as error:
            raise HostMemoryError(
                f"No host memory for {name or 'an offloaded tensor'}: {format_bytes(nbytes)} asked for, "
                f"{format_bytes(self._held_bytes)} held already. Lower host_budget, or call graphoffload.release_host_memory()."
            ) from error
        with self._lock:
            self._held_bytes += nbytes
            self._count += 1
            self._pinned_bytes += nbytes if buffer.pinned else 0
        return buffer

    def give_back(self, buffer: HostBuffer) -> None:
        """Return a buffer; a copy that still uses it is named by its `last_copy` event."""
        if self.poison and buffer.last_copy is None:
            buffer.flat(torch.uint8).fill_(0xFF)
        with self._lock:
            self._in_use_bytes -= buffer.nbytes
            self._idle.setdefault(buffer.key, []).append(buffer)

    def release_idle(self) -> int:
        """Give idle buffers back to the operating system; returns their bytes. Waits for copies that still use them."""
        with self._lock:
            idle, self._idle = self._idle, {}
        released = 0
        for buffers in idle.values():
            for buffer in buffers:
                if buffer.last_copy is not None:
                    buffer.last_copy.synchronize()
                with self._lock:
                    self._held_bytes -= buffer.nbytes
                    self._pinned_bytes -= buffer.nbytes if buffer.pinned else 0
                    self._count -= 1
                released += buffer.nbytes
                buffer.close()
        return released

    def snapshot(self) -> HostMemory:
        """What is held now."""
        with self._lock:
            return HostMemory(self._held_bytes, self._in_use_bytes, self._pinned_bytes, self._peak_bytes, self._count)


POOL = HostPool()
