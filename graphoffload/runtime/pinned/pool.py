"""Host memory for offloaded activations: buffers of exact size out of page-locked slabs, reused step after step.

torch's own pinned allocator rounds every request up to a power of two, which can take twice the planned RAM. This pool
page-locks the exact size. Page-locking takes a quarter of a second to a second per GiB. It is therefore done in advance, while
graphs compile (`prepare`), and memory is kept from step to step.

    acquire   an idle buffer of this size                     every step except the first
              else one is cut from free memory                another shape: idle buffers are joined and cut again
              else excess memory is given up, and new memory is allocated and page-locked

Idle memory goes back to the system

    turn      where training did not need it for a long while (pinned/window.py): slabs that are half used are replaced by one
    acquire   where the total would exceed the largest set ever in flight by more than 5 %, or the system has no more memory
    on request, and by torch._dynamo.reset()

A copy may still read or write a buffer that returns to the pool. The buffer carries the event of that copy, and the next user's
stream waits for it. The host waits only for idle buffers that are to be cut again.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import torch

from graphoffload.errors import HostMemoryError, PageableMemoryWarning
from graphoffload.runtime.pinned.slabs import HostBuffer, HostMemory, Key, Kind, Slab, allocated, in_background, rounded
from graphoffload.runtime.pinned.window import TURNS, Window, half_used, not_needed
from graphoffload.units import format_bytes, parse_size, per_gib

_SLACK = 1.05
_SAME = 0.1  # what training uses goes back once, until it needs so much more or less, or a plan takes more in advance
_CHUNK_BYTES = parse_size("1GiB", field="chunk")


class HostPool:
    """Buffers by exact size. Thread-safe: forward and backward run on different threads, and a third page-locks in advance."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._slabs: list[Slab] = []
        self._idle: dict[Key, list[HostBuffer]] = {}
        self._coming: Counter[Key] = Counter()
        self._in_use_bytes = self._for_good_bytes = self._peak_bytes = self._count = self._allocations = 0
        self._pinned_ever_bytes = self._returned_bytes = self._settled_for_bytes = 0
        self._window, self._arranged_for, self._pinning_s = Window(0), "", 0.0
        self.budget_bytes: int | None = None
        self.reclaim: Callable[[], object] = lambda: None
        self.poison = False

    def acquire(self, nbytes: int, *, pin: bool, name: str = "", device: int = -1) -> HostBuffer:
        """A buffer of exactly `nbytes`; its `last_copy` event, if any, must be waited for by the stream that writes it.

        `device`: index of the device that copies; events belong to one device, so its buffers go to no other.

        Raises:
            HostMemoryError: the operating system refuses the memory, or more would be in use than `budget_bytes`.
        """
        key = (nbytes, pin, device)
        with self._lock:
            idle = self._idle.get(key)
            if idle:
                return self._hand_out(idle.pop())
        return self._acquire_slowly(key, name)

    def acquire_for_good(self, nbytes: int, *, name: str, device: int) -> HostBuffer:
        """A page-locked buffer for a CUDA graph that is being captured: no other copy uses it, and it stays with the graph.

        Called in `relaxed_capture`.

        Raises:
            HostMemoryError: as for `acquire`.
        """
        key = (nbytes, True, device)
        with self._lock:
            idle = self._idle.get(key)
            buffer = self._hand_out(idle.pop()) if idle else None
        if buffer is None:
            buffer = self._acquire_slowly(key, name, reclaim=False)
        if buffer.last_copy is not None:
            buffer.last_copy.synchronize()
            buffer.last_copy = None
        with self._lock:
            self._for_good_bytes += nbytes
            buffer.for_good = True
        return buffer

    def _hand_out(self, buffer: HostBuffer) -> HostBuffer:
        buffer.fresh = False
        window = self._window
        buffer.slab.last_window = window.number
        self._in_use_bytes = in_use = self._in_use_bytes + buffer.nbytes
        if in_use > window.peak_bytes:
            window.peak_bytes = in_use
        if in_use > self._peak_bytes:
            self._peak_bytes = in_use
        return buffer

    def _acquire_slowly(self, key: Key, name: str, *, reclaim: bool = True) -> HostBuffer:
        if reclaim:
            self.reclaim()
        with self._lock:
            while not self._idle.get(key) and self._coming[key] > 0:
                self._arrived.wait()
            idle = self._idle.get(key)
            buffer = idle.pop() if idle else self._cut(key)
            if buffer is not None:
                return self._hand_out(buffer)
            self._within_budget(key[0], name)
            closing = self._oversize(rounded(key[0]))
        slab = self._allocate(rounded(key[0]), key[1:], closing, name)
        with self._lock:
            self._slabs.append(slab)
            return self._hand_out(self._buffer(slab, 0, key[0]))

    def _buffer(self, slab: Slab, offset: int, nbytes: int) -> HostBuffer:
        self._count += 1
        return HostBuffer(slab, offset, nbytes)

    def has_room(self, nbytes: int) -> bool:
        """Whether so much more may be in use."""
        return self.budget_bytes is None or self._in_use_bytes + nbytes <= self.budget_bytes

    def _within_budget(self, nbytes: int, name: str) -> None:
        if not self.has_room(nbytes):
            raise HostMemoryError(
                f"host_budget={format_bytes(self.budget_bytes or 0)} is spent: {name or 'an offloaded tensor'} needs "
                f"{format_bytes(nbytes)}, and {format_bytes(self._in_use_bytes)} are in use by activations whose backward is "
                "still to come. Raise host_budget, or keep fewer microbatches in flight."
            )

    def _allocate(self, nbytes: int, kind: Kind, closing: list[Slab], name: str, *, ahead: bool = False) -> Slab:
        """Memory from the operating system. `ahead`: for later, so that other memory made in advance does not go for it."""
        self._close(closing)
        make_room = partial(self.release_idle, fresh=not ahead)
        try:
            slab = allocated(nbytes, kind, make_room if self._held() > self._in_use_bytes else None)
        except (RuntimeError, MemoryError) as error:
            raise HostMemoryError(
                f"No host memory for {name or 'an offloaded tensor'}: {format_bytes(nbytes)} asked for, "
                f"{format_bytes(self._held())} held already. Lower host_budget, or call graphoffload.release_host_memory()."
            ) from error
        slab.last_window = self._window.number
        self._allocations += 1
        if slab.pinned:
            self._pinned_ever_bytes += slab.nbytes
            self._pinning_s += slab.pinning_s
        return slab

    def _close(self, slabs: list[Slab]) -> int:
        """Give memory back that is no longer the pool's; returns its bytes."""
        for slab in slabs:
            slab.close()
        returned = sum(slab.nbytes for slab in slabs)
        with self._lock:
            self._returned_bytes += returned
        return returned

    def _held(self) -> int:
        return sum(slab.nbytes for slab in self._slabs)

    def _cut(self, key: Key) -> HostBuffer | None:
        """A buffer from free memory: first from memory that is free, then from idle buffers without copies, then from all idle
        buffers."""
        for attempt in range(3):
            if attempt and not self._melt(key[1:], everything=attempt == 2):
                continue
            if (buffer := self._cut_free(key)) is not None:
                return buffer
        return None

    def _cut_free(self, key: Key) -> HostBuffer | None:
        gaps = ((gap, slab) for slab in self._slabs if slab.kind == key[1:] and (gap := slab.smallest_gap(rounded(key[0]))))
        found = min(gaps, key=lambda item: item[0], default=None)
        return None if found is None else self._buffer(found[1], found[0][1], key[0])

    def _melt(self, kind: Kind | None, *, everything: bool, keep: Counter[Key] | None = None) -> int:
        """Turn idle buffers into free memory; those made in advance, or in a copy that the host must wait for, only on request.

        `keep`: how many buffers of each key remain. Returns how many were turned.
        """
        if _capturing():
            return 0
        melted = 0
        for key, buffers in self._idle.items():
            if kind is not None and key[1:] != kind:
                continue
            staying = buffers[: keep[key]] if keep is not None else []
            for buffer in buffers[len(staying) :]:
                busy = buffer.last_copy is not None and not buffer.last_copy.query()
                if not everything and (busy or buffer.fresh):
                    staying.append(buffer)
                    continue
                if busy:
                    buffer.last_copy.synchronize()
                buffer.slab.put(buffer.offset, rounded(buffer.nbytes))
                melted += 1
            self._idle[key] = staying
        self._count -= melted
        return melted

    def _oversize(self, nbytes: int, *, promised: int = 0) -> list[Slab]:
        """Unused slabs to close before `nbytes` more are allocated, smallest first, so that little excess is held."""
        needed = max(self._peak_bytes, self._in_use_bytes + nbytes, promised)
        limit = needed * _SLACK if self.budget_bytes is None else min(needed * _SLACK, self.budget_bytes)
        closing, held = list[Slab](), self._held()
        for slab in sorted((slab for slab in self._slabs if slab.unused), key=lambda slab: slab.nbytes):
            if held + nbytes <= limit:
                break
            closing.append(slab)
            held -= slab.nbytes
        self._slabs = [slab for slab in self._slabs if slab not in closing]
        return closing

    def prepare(self, sizes: Iterable[int], *, pin: bool, device: int = -1, wait: bool = False) -> None:
        """Have a buffer of each of these sizes ready; missing memory is allocated in the background.

        An `acquire` of a size that is being allocated waits for it. Buffers made in advance for one plan are not counted for
        the next; those of the last step are. Memory that the system refuses is requested again, with an error, when needed.
        """
        self.reclaim()
        kind = (pin, device)
        with self._lock:
            wanted = Counter[Key]((nbytes, pin, device) for nbytes in sizes if nbytes)
            preallocated = sum(buffer.nbytes for idle in self._idle.values() for buffer in idle if buffer.fresh)
            promised = self._in_use_bytes + preallocated + sum(key[0] * count for key, count in wanted.items())
            self._window.peak_bytes = max(self._window.peak_bytes, promised)
            missing = wanted - Counter({key: sum(not buffer.fresh for buffer in idle) for key, idle in self._idle.items()})
            if missing:
                self._melt(kind, everything=False, keep=wanted)
            made = self._cut_all(missing)
            keys = list((missing - Counter(buffer.key for buffer in made)).elements())
            if keys and promised >= self._peak_bytes:
                # The largest set so far: memory of its own, in few pieces, of which every smaller set can be cut.
                for buffer in made:
                    buffer.slab.put(buffer.offset, rounded(buffer.nbytes))
                self._count -= len(made)
                made = []
                self._melt(kind, everything=False)
                keys = list(wanted.elements())
            for buffer in made:
                buffer.fresh = True
                self._idle.setdefault(buffer.key, []).append(buffer)
            self._coming.update(keys)
            self._settled_for_bytes = 0 if keys else self._settled_for_bytes
        if not keys:
            return

        def beside() -> None:
            if device >= 0 and torch.cuda.is_available():
                torch.cuda.set_device(device)  # of this thread: page-locking must not wake another device
            self._bring(keys, promised)

        thread = threading.Thread(target=beside, name="graphoffload-host-memory")
        if wait or not in_background(thread):
            self._bring(keys, promised)

    def arrange(self, plan: str, sizes: Iterable[int], *, pin: bool, device: int = -1) -> None:
        """A forward of another plan starts while nothing is in use: cut idle memory for the sizes that it had last time."""
        with self._lock:
            if plan == self._arranged_for or self._in_use_bytes > self._for_good_bytes:
                return
            self._arranged_for = plan
            wanted = Counter[Key]((nbytes, pin, device) for nbytes in sizes if nbytes)
            if wanted - Counter({key: len(idle) for key, idle in self._idle.items()}):
                self._melt((pin, device), everything=True)
                for buffer in self._cut_all(wanted):
                    self._idle.setdefault(buffer.key, []).append(buffer)

    def _cut_all(self, keys: Counter[Key]) -> list[HostBuffer]:
        """Cut buffers from free memory while there is enough, the largest first."""
        found = (self._cut_free(key) for key in sorted(keys.elements(), reverse=True))
        return [buffer for buffer in found if buffer is not None]

    def _bring(self, keys: list[Key], promised: int) -> None:
        """Allocate memory for buffers of these keys, a chunk at a time, so that the first are ready soon."""
        left = list(keys)
        try:
            while left and threading.main_thread().is_alive():
                chunk = [left[0]]
                while len(chunk) < len(left) and sum(rounded(key[0]) for key in left[: len(chunk) + 1]) <= _CHUNK_BYTES:
                    chunk.append(left[len(chunk)])
                total = sum(rounded(key[0]) for key in chunk)
                with self._lock:
                    closing = self._oversize(total, promised=promised)
                slab = self._allocate(total, chunk[0][1:], closing, "what was planned", ahead=True)
                del left[: len(chunk)]
                self._deliver(slab, chunk)
        except (HostMemoryError, PageableMemoryWarning):
            return  # the acquire that needs the memory asks again and raises
        finally:
            with self._lock:
                self._coming.subtract(left)
                self._arrived.notify_all()

    def _deliver(self, slab: Slab, keys: list[Key]) -> None:
        with self._lock:
            self._slabs.append(slab)
            offset = 0
            for key in keys:
                buffer = self._buffer(slab, offset, key[0])
                buffer.fresh = True
                self._idle.setdefault(key, []).append(buffer)
                offset += rounded(key[0])
            self._coming.subtract(keys)
            self._arrived.notify_all()

    def give_back(self, buffer: HostBuffer) -> None:
        """Return a buffer; `last_copy` is the event of a copy that still uses it."""
        if self.poison:
            if buffer.last_copy is not None:
                buffer.last_copy.synchronize()
            buffer.flat(torch.uint8).fill_(0xFF)
        with self._lock:
            self._in_use_bytes -= buffer.nbytes
            if buffer.for_good:
                self._for_good_bytes -= buffer.nbytes
                buffer.for_good = False
            self._idle.setdefault(buffer.key, []).append(buffer)

    def turn(self) -> int:
        """Training goes from a backward to a forward: idle memory that it did not need for a long while goes back to the
        operating system. Returns its bytes."""
        with self._lock:
            if not self._window.turn():
                return 0
        self.reclaim()  # a plan that keeps everything has no ops that would do so
        with self._lock:
            window = self._window
            resting = not any(self._coming.values()) and not _capturing()
            needed = max(window.peak_bytes, self._in_use_bytes)
            excess = self._held() - _SLACK * needed if resting else 0
            settled = abs(needed - self._settled_for_bytes) <= _SAME * needed
            spare, idle = 0 if settled else excess, self._idle.values()
            closing = not_needed(self._slabs, idle, window.number, spare) if excess > 0 else []
            halves: list[Slab] = []
            if spare > 0 and window.turns >= TURNS:
                halves = half_used([slab for slab in self._slabs if slab not in closing], idle, needed)
                closing = [*closing, *halves]
            if not closing and window.turns < TURNS:
                return 0
            if closing and not window.is_over(sum(slab.pinning_s for slab in closing)):
                return 0
            self._window = Window(self._in_use_bytes, window.number + 1)
            if closing or excess <= 0:
                self._settled_for_bytes = needed
            gone = {id(slab) for slab in closing}
            for key, buffers in self._idle.items():
                self._idle[key] = [buffer for buffer in buffers if id(buffer.slab) not in gone]
                self._count -= len(buffers) - len(self._idle[key])
            self._slabs = [slab for slab in self._slabs if id(slab) not in gone]
            left = self._held()
        returned = self._close(closing)
        if halves:
            self._pack(int(_SLACK * needed) - left, halves[0].kind)
        return returned

    def _pack(self, nbytes: int, kind: Kind) -> None:
        """Memory in one piece for what training needs, in the place of slabs that were half used."""
        try:
            slabs = [self._allocate(rounded(nbytes), kind, [], "what training needs", ahead=True)] if nbytes > 0 else []
        except (HostMemoryError, PageableMemoryWarning):
            return  # the acquire that needs the memory asks again and raises
        with self._lock:
            self._slabs += slabs
            self._arranged_for = ""

    def release_idle(self, *, fresh: bool = True) -> int:
        """Give idle memory back to the operating system; returns its bytes. Waits for copies that still use it.

        `fresh`: memory made in advance as well; without it nothing is waited for.
        """
        with self._lock:
            self._melt(None, everything=fresh)
            closing = [slab for slab in self._slabs if slab.unused]
            self._slabs = [slab for slab in self._slabs if not slab.unused]
        return self._close(closing)

    def snapshot(self) -> HostMemory:
        """The bytes held now."""
        with self._lock:
            pinned = sum(slab.nbytes for slab in self._slabs if slab.pinned)
            took = per_gib(self._pinning_s, self._pinned_ever_bytes) if self._pinned_ever_bytes else None
            return HostMemory(
                self._held(), self._in_use_bytes, pinned, self._peak_bytes, self._count, self._allocations,
                pinning_s_per_gib=took, returned_bytes=self._returned_bytes,
            )  # fmt: skip


def _capturing() -> bool:
    """Whether a CUDA graph is captured: to ask an event would break it."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


POOL = HostPool()
