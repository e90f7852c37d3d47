"""Handles, and the table that finds the offloaded tensor that each stands for.

`offload` returns a handle: a (1,) int64 tensor on the source's device that autograd saves instead of the source. The table
finds it by the identity of its storage. A weak reference prevents that this identity is used twice, and tells when the last
owner drops the handle; the host buffer then goes back to the pool.

Saved-tensor hooks around the model may copy handles, and a copy has another identity. While such hooks are active a ticket is
written into the handle, and reload reads it back (one device synchronization each). Such a tensor is closed after the wait of a
backward that leaves autograd no second one. It is not known when copies die that no backward reads. Those of the last
`KEPT_TURNS` times that training went from backward to forward are kept, at most `KEPT_COPIES` for each (plan, id).
"""

from __future__ import annotations

import itertools
import secrets
from collections import defaultdict, deque
from collections.abc import Callable

import torch

from graphoffload.errors import BackwardNeverCameWarning, RuntimeStateError, warn
from graphoffload.runtime.counters import COUNTERS
from graphoffload.runtime.offloaded_tensors import LOCK, OffloadedTensor, Ticket
from graphoffload.runtime.pinned.pool import POOL
from graphoffload.runtime.registry import run_plan
from graphoffload.torch_internals.storages import expired, free_weak_ref, weak_ref
from graphoffload.torch_internals.storages import identity as identity_of
from graphoffload.units import format_bytes

KEPT_TURNS = 8
KEPT_COPIES = 256  # calls of one graph in a forward: equal blocks compiled one by one share a plan
DROPPED_BEFORE_WARNING = 16


class Entries:
    """All living offloaded tensors of this process, by plan and by the identity of their handles' storages."""

    def __init__(self) -> None:
        self._lock = LOCK
        self._by_storage: dict[str, dict[int, OffloadedTensor]] = defaultdict(dict)
        self._by_ticket: dict[int, OffloadedTensor] = {}
        self._copied: dict[tuple[str, int], deque[OffloadedTensor]] = defaultdict(deque)
        self.reloaded = False
        self.captured: Callable[[torch.Tensor, int], OffloadedTensor | None] | None = None
        self._last: OffloadedTensor | None = None
        self._turns = 0
        self._forwards_dropped = 0
        self._bytes_dropped = 0
        self._warned = False
        self._tickets = itertools.count(secrets.randbits(61))

    def __len__(self) -> int:
        return sum(map(len, self._by_storage.values())) + sum(map(len, self._copied.values()))

    def living(self) -> list[OffloadedTensor]:
        """All entries at this moment."""
        with self._lock:
            groups = [list(group.values()) for group in self._by_storage.values()]
            return [entry for group in (*groups, *self._copied.values()) for entry in group]

    def add(self, handle: torch.Tensor, entry: OffloadedTensor, *, may_be_copied: bool) -> None:
        """Register an entry under its handle's storage, and under its content if hooks may copy the handle."""
        if may_be_copied:
            self._add_ticket(handle, entry)
            return
        entry.weak = weak_ref(handle.untyped_storage())
        with self._lock:
            self._by_storage[entry.run.key][entry.weak] = self._last = entry

    def _add_ticket(self, handle: torch.Tensor, entry: OffloadedTensor) -> None:
        ticket = next(self._tickets)
        handle.fill_(ticket)
        with self._lock:
            entry.ticket = Ticket(ticket, self._turns)
            self._by_ticket[ticket] = entry
            queue = self._copied[entry.run.key, entry.id]
            queue.append(entry)
            while len(queue) > KEPT_COPIES or self._is_old(queue[0]):
                self._close(queue.popleft())

    def _is_old(self, entry: OffloadedTensor) -> bool:
        return entry.ticket is not None and entry.ticket.turn < self._turns - KEPT_TURNS

    def finish(self, entry: OffloadedTensor) -> None:
        """Close the entry of a ticket, after the last backward that may read it."""
        with self._lock:
            queue = self._copied[entry.run.key, entry.id]
            if entry in queue:
                queue.remove(entry)
                self._close(entry)

    def find(self, handle: torch.Tensor, plan: str, id: int) -> OffloadedTensor:
        """The entry that a handle stands for.

        Raises:
            RuntimeStateError: there is none, or it is another tensor's.
        """
        identity = identity_of(handle.untyped_storage())
        entries = self._by_storage.get(plan)
        entry = None if entries is None else entries.get(identity)
        if entry is None:
            entry = self._look_elsewhere(handle, identity, plan, id)
        if entry.id != id or entry.run.key != plan:
            raise RuntimeStateError(
                f"A handle for {entry.name} (plan {entry.run.key}) was passed where {run_plan(plan).name(id)} (plan {plan}) "
                "was expected. The graph's saved values are out of order; please report this with a graph dump "
                "(GRAPHOFFLOAD_DUMP_DIR)."
            )
        return entry

    def _look_elsewhere(self, handle: torch.Tensor, identity: int, plan: str, id: int) -> OffloadedTensor:
        with self._lock:
            for entries in self._by_storage.values():
                if identity in entries:
                    return entries[identity]
        entry = self._by_ticket.get(int(handle.item())) if self._by_ticket else None
        if entry is None and self.captured is not None:
            entry = self.captured(handle, id)
        if entry is None:
            raise RuntimeStateError(
                f"The host copy of {run_plan(plan).name(id)} is gone (plan {plan}): its handle was dropped, copied by a "
                "saved-tensors hook that was not active in forward or converts integers (let pass what is no float), or more "
                f"than {KEPT_TURNS} steps or {KEPT_COPIES} calls ran between it and this backward."
            )
        return entry

    def start_forward(self, plan: str) -> bool:
        """Close finished entries: of all plans after a backward or after a dropped forward, else of this plan, if its oldest or
        its latest one is finished.

        Many graphs cost no more than one this way, nor do many calls of one. Buffers of a dropped forward would otherwise block
        memory for other sizes. Returns whether training goes from a backward to a forward.
        """
        turned = self.reloaded
        if turned or self._dropped():
            self._turns += turned
            self.reloaded = False
            self.sweep()
            self._close_old()
        elif self._has_finished(plan):
            self.sweep(plan)
        return turned

    def _has_finished(self, plan: str) -> bool:
        """Whether the oldest or the latest handle of a plan has no owner any more."""
        with self._lock:
            entries = self._by_storage[plan]
            return bool(entries) and (expired(next(iter(entries))) or expired(next(reversed(entries))))

    def _close_old(self) -> None:
        """Close entries of tickets that no backward has asked for in so many turns; no hook may be active ever again."""
        if self._by_ticket:
            with self._lock:
                for queue in self._copied.values():
                    while queue and self._is_old(queue[0]):
                        self._close(queue.popleft())

    def _dropped(self) -> bool:
        """Whether the handle of the last offload has no owner any more."""
        with self._lock:
            last = self._last
            return last is not None and last.weak != 0 and expired(last.weak)

    def sweep(self, plan: str | None = None, *, settled: bool = False) -> int:
        """Close entries (of one plan, or of all) whose handle has no owner any more; returns how many.

        `settled`: only those whose copies compute has waited for, so that nothing is issued to its stream.
        """
        with self._lock:
            groups = list(self._by_storage.values()) if plan is None else [self._by_storage[plan]]
            dead = []
            for group in groups:
                keys = [key for key, entry in group.items() if expired(key) and (entry.settled or not settled)]
                dead += [group.pop(key) for key in keys]
            for entry in dead:
                self._close(entry)
        if dead:
            self._count_dropped(dead)
        return len(dead)

    def _count_dropped(self, entries: list[OffloadedTensor]) -> None:
        """Warn once after many forwards in a row whose offloaded activations no backward read."""
        if any(entry.reloads for entry in entries):
            self._forwards_dropped = self._bytes_dropped = 0
        else:
            self._forwards_dropped += 1
            self._bytes_dropped += sum(entry.layout.nbytes for entry in entries)
        if self._forwards_dropped < DROPPED_BEFORE_WARNING or self._warned:
            return
        self._warned = True
        warn(
            BackwardNeverCameWarning,
            f"{self._forwards_dropped} forwards in a row offloaded {format_bytes(self._bytes_dropped)} that no backward asked "
            "for: the copies were for nothing. Run evaluation under torch.no_grad() or torch.inference_mode().",
        )

    def abandon(self, entry: OffloadedTensor) -> None:
        """Undo an offload that failed; its entry was never added, or was the last one added."""
        with self._lock:
            self._by_storage[entry.run.key].pop(entry.weak, None)
            if entry.ticket is not None:
                self._copied[entry.run.key, entry.id].remove(entry)
            self._close(entry, came_about=False)

    def _close(self, entry: OffloadedTensor, *, came_about: bool = True) -> None:
        COUNTERS.dropped += came_about and entry.reloads == 0
        if self._last is entry:
            self._last = None
        if entry.call is not None:
            entry.call.leave(entry)
        if entry.weak:
            free_weak_ref(entry.weak)
            entry.weak = 0
        if entry.ticket is not None:
            self._by_ticket.pop(entry.ticket.number, None)
        if came_about and entry.in_flight:
            COUNTERS.inflight_bytes -= entry.layout.nbytes
        entry.close()


ENTRIES = Entries()
POOL.reclaim = ENTRIES.sweep
