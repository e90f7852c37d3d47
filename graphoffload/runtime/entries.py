"""Handles and what they stand for.

`offload` returns a handle: a (1,) int64 tensor on the source's device that travels through autograd in the source's place.
What it stands for is an Entry, found by the identity of the handle's storage: a weak reference keeps that identity from being
used twice and tells when the last owner dropped the handle, which is when the host buffer goes back to the pool.

Saved-tensor hooks around the model may copy handles, and identity is lost. While such hooks are active the entry's ticket is
written into the handle, and reload reads it back (one device synchronisation each). Nobody can tell when the copies die, so of
each (plan, id) the latest `KEPT_COPIES` stay.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import defaultdict, deque
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphoffload.errors import BackwardNeverCameWarning, RuntimeStateError, warn
from graphoffload.runtime.counters import COUNTERS
from graphoffload.runtime.pool import POOL, HostBuffer
from graphoffload.runtime.streams import streams_of
from graphoffload.units import format_bytes

KEPT_COPIES = 8
DROPPED_BEFORE_WARNING = 16


class Entry:
    """One offloaded tensor: where its bytes are, in which layout, and which copies are under way."""

    __slots__ = (
        "buffer", "clone", "d2h_done", "device", "digest", "dtype", "h2d_done", "inflight", "name", "nbytes", "pin", "plan",
        "reloads", "size", "source", "source_ptr", "stride", "target", "target_digest", "ticket", "weak",
    )  # fmt: skip

    def __init__(self, source: torch.Tensor, *, plan: str, name: str, stride: tuple[int, ...]) -> None:
        self.plan = plan
        self.name = name
        self.device = source.device
        self.dtype = source.dtype
        self.size = tuple(source.shape)
        self.stride = stride
        self.nbytes = source.numel() * source.element_size()
        self.source: torch.Tensor | None = source
        self.source_ptr = source.data_ptr()
        self.ticket = 0
        self.weak: StorageWeakRef | None = None
        self.buffer: HostBuffer | None = None
        self.pin = False
        self.clone: torch.Tensor | None = None
        self.d2h_done: Any = None
        self.h2d_done: Any = None
        self.target: torch.Tensor | None = None
        self.digest: torch.Tensor | None = None
        self.target_digest: torch.Tensor | None = None
        self.reloads = 0
        self.inflight = False


class Entries:
    """All living entries of this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._by_storage: dict[int, Entry] = {}
        self._by_ticket: dict[int, Entry] = {}
        self._copied: dict[tuple[str, str], deque[Entry]] = defaultdict(deque)
        self._forwards_dropped = 0
        self._bytes_dropped = 0
        self._warned = False
        self._tickets = itertools.count(secrets.randbits(61))

    def __len__(self) -> int:
        return len(self._by_storage) + sum(len(queue) for queue in self._copied.values())

    def add(self, handle: torch.Tensor, entry: Entry, *, may_be_copied: bool) -> None:
        """Tie an entry to its handle's storage, and to its content where hooks may copy the handle."""
        entry.ticket = next(self._tickets)
        storage = handle.untyped_storage()
        with self._lock:
            if may_be_copied:
                handle.fill_(entry.ticket)
                self._by_ticket[entry.ticket] = entry
                queue = self._copied[entry.plan, entry.name]
                queue.append(entry)
                if len(queue) > KEPT_COPIES:
                    self._close(queue.popleft())
            else:
                entry.weak = StorageWeakRef(storage)
                self._by_storage[entry.weak.cdata] = entry

    def find(self, handle: torch.Tensor, *, plan: str, name: str) -> Entry:
        """The entry that a handle stands for.

        Raises:
            RuntimeStateError: there is none, or it is another tensor's.
        """
        entry = self._by_storage.get(handle.untyped_storage()._cdata)
        if entry is None and self._by_ticket:
            entry = self._by_ticket.get(int(handle.item()))
        if entry is None:
            raise RuntimeStateError(
                f"The host copy of {name} is gone (plan {plan}): its handle was dropped, or copied by a saved-tensors hook "
                f"that was not active in forward, or more than {KEPT_COPIES} forwards ran between it and this backward."
            )
        if entry.plan != plan or entry.name != name:
            raise RuntimeStateError(
                f"A handle for {entry.name} (plan {entry.plan}) was passed where {name} (plan {plan}) was expected. "
                "The graph's saved values are out of order; please report this with a graph dump (GRAPHOFFLOAD_DUMP_DIR)."
            )
        return entry

    def sweep(self) -> int:
        """Close entries whose handle nobody owns any more; returns how many. Called at the start of every forward."""
        with self._lock:
            dead = [key for key, entry in self._by_storage.items() if entry.weak is not None and entry.weak.expired()]
            entries = [self._by_storage.pop(key) for key in dead]
            for entry in entries:
                self._close(entry)
        self._count_dropped(entries)
        return len(dead)

    def _count_dropped(self, entries: list[Entry]) -> None:
        """Warn once after many forwards in a row whose offloaded activations no backward asked for."""
        if any(entry.reloads for entry in entries):
            self._forwards_dropped = self._bytes_dropped = 0
        elif entries:
            self._forwards_dropped += 1
            self._bytes_dropped += sum(entry.nbytes for entry in entries)
        if self._forwards_dropped < DROPPED_BEFORE_WARNING or self._warned:
            return
        self._warned = True
        warn(
            BackwardNeverCameWarning,
            f"{self._forwards_dropped} forwards in a row offloaded {format_bytes(self._bytes_dropped)} that no backward asked "
            "for: the copies were for nothing. Run evaluation under torch.no_grad() or torch.inference_mode().",
            stacklevel=5,
        )

    def _close(self, entry: Entry) -> None:
        self._by_ticket.pop(entry.ticket, None)
        if entry.reloads == 0:
            COUNTERS.dropped += 1
        if entry.inflight:
            entry.inflight = False
            COUNTERS.inflight_bytes -= entry.nbytes
        streams = streams_of(entry.device)
        if streams is not None:
            # After an exception a source or a target can still be in a copy; its memory must not be reused before that.
            if entry.source is not None and entry.d2h_done is not None:
                streams.compute_waits(entry.d2h_done)
            if entry.target is not None and entry.h2d_done is not None:
                streams.compute_waits(entry.h2d_done)
        entry.source = entry.target = entry.clone = None
        if entry.buffer is not None:
            entry.buffer.last_copy = entry.h2d_done if entry.h2d_done is not None else entry.d2h_done
            POOL.give_back(entry.buffer, pin=entry.pin)
            entry.buffer = None
        if streams is not None and entry.h2d_done is not None:
            streams.recycle(entry.d2h_done)


ENTRIES = Entries()
