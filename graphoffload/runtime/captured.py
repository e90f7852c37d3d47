"""The four ops inside a captured CUDA graph: copies are branches of the graph, and every replay makes them again.

    capture   compute  |== layer 0 ==|== layer 1 ==| R |        R, W: the branch joins again, as every branch must
              D2H         \\= sign, copy =========/
    replay    no Python: kernels and copies as captured, to and from the host buffer of the capture

The host buffers belong to one capture of a forward, as its saved activations do. torch keeps captures apart: microbatches in
flight are captured one after the other, each with its own memory. torch does not keep apart a handle that was copied. So each
replay of a forward increments a number on the device and writes it to its handles. Each replay of a backward compares, before
its first copy, the handle with the number of the forward that its buffers belong to. If they differ, the buffers hold another
step's bytes, and the device stops. One number and one comparison serve all transfers of a capture, since the handles of a
backward are of one forward, and tiny kernels beside large ones cost a small model more than the copies do.

A reload also finds its buffer by the number: while it is captured, or when torch calls it without a graph. Code that runs
before a capture (torch's warm-up) or instead of one uses the ops of ops.py.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from graphoffload.errors import CaptureError, RuntimeStateError
from graphoffload.runtime import ops
from graphoffload.runtime.counters import COUNTERS
from graphoffload.runtime.handles import ENTRIES
from graphoffload.runtime.offloaded_tensors import CLOSED, HostCopy, OffloadedTensor
from graphoffload.runtime.pinned.pool import POOL
from graphoffload.runtime.registry import run_plan
from graphoffload.runtime.streams.copy_streams import capture_streams_of, streams_of
from graphoffload.runtime.streams.memcpy import relaxed_capture
from graphoffload.runtime.streams.protocol import CaptureStreams
from graphoffload.torch_internals.fake_tensors import outside_fake_mode
from graphoffload.torch_internals.streams import assert_async

TAGS = (torch.Tag.flexible_layout,)
NAMES = ("offload", "release", "reload", "wait")
_ROWS = 1 << 18
"""The most forwards that may be captured on a device, over all shapes and microbatches in flight."""
_SHIFT = 32  # replays are counted in the lower half of a number; the upper half is the capture's
_GONE = "graphoffload: a forward was replayed from a CUDA graph whose host buffers were given back. Please report this."
_STALE = (
    "graphoffload: a backward replayed from a CUDA graph met a host buffer that a later forward has written to. "
    "Run with mode=None, and please report this."
)


class Forward:
    """One capture of a forward: its number, the row that counts its replays, and the entries of its offloads by id."""

    __slots__ = ("entries", "number", "plan", "row")

    def __init__(self, plan: str, number: int, row: int) -> None:
        self.plan, self.number, self.row = plan, number, row
        self.entries: dict[int, OffloadedTensor] = {}


class Ledger:
    """The forwards captured on one device, by the upper half of their numbers, and the replay counts.

    counts, flags, alive: by row. A row belongs to one capture and is not used again.
    """

    __slots__ = ("_next", "alive", "counts", "flags", "forwards", "rows", "streams")

    def __init__(self, device: torch.device, streams: CaptureStreams | None) -> None:
        self.streams = streams
        self.counts = torch.zeros(_ROWS, dtype=torch.int64, device=device)
        self.flags = torch.ones(_ROWS, dtype=torch.bool, device=device)
        self.alive = torch.ones(_ROWS, dtype=torch.bool, device=device)
        self.forwards: dict[int, Forward] = {}
        first = secrets.randbits(30)
        torch.add(self.counts, torch.arange(first, first + _ROWS, device=device) << _SHIFT, out=self.counts)
        self.rows = range(first, first + _ROWS)
        self._next = first

    def add(self, plan: str) -> Forward:
        """A row for a captured forward.

        Raises:
            CaptureError: more was captured than there are rows.
        """
        with _LOCK:
            if self._next not in self.rows:
                raise CaptureError(
                    f"{_ROWS} forwards with offloads were captured in CUDA graphs of this process, and no more can be. "
                    "Shapes that are captured anew again and again cost memory each time: pad them to a few sizes."
                )
            number = self._next
            self._next += 1
            forward = self.forwards[number] = Forward(plan, number, self.rows.index(number))
        return forward

    def count(self, forward: Forward) -> torch.Tensor:
        """The number of a forward with its replays, on the device."""
        return self.counts[forward.row : forward.row + 1]

    def forget(self, entries: list[OffloadedTensor], begun: Forward | None) -> None:
        """Remove entries from their captures, which need not be the latest; drop captures that have none left."""
        with _LOCK:
            for number, forward in list(self.forwards.items()):
                gone = [id for id, entry in forward.entries.items() if entry in entries]
                for id in gone:
                    del forward.entries[id]
                if not forward.entries and (gone or forward is begun):
                    del self.forwards[number]

    def entry(self, number: int, id: int) -> tuple[Forward, OffloadedTensor] | tuple[None, None]:
        """The capture that a handle's number belongs to, and the entry of this transfer in it."""
        forward = self.forwards.get(number >> _SHIFT)
        entry = forward.entries.get(id) if forward is not None else None
        return (forward, entry) if forward is not None and entry is not None else (None, None)


class _Open(threading.local):
    """This thread's captures: offloads and reloads that were not released or waited for yet, by plan and id; the forward and
    the backward that the next one may be part of.

    A graph captures each of its transfers once and always in the same order, also if its capture was given up. A transfer that
    is already present therefore begins another capture.
    """

    def __init__(self) -> None:
        self.offloads: dict[tuple[str, int], tuple[OffloadedTensor, Any]] = {}
        self.reloads: dict[tuple[str, int], tuple[OffloadedTensor, int, Any]] = {}
        self.forward: Forward | None = None
        self.checked: tuple[Forward | None, set[int]] = None, set()

    def forward_of(self, ledger: Ledger, plan: str, id: int) -> tuple[Forward, bool]:
        """The capture that an offload is part of, and whether the offload is its first."""
        forward = self.forward
        known = forward is not None and ledger.forwards.get(forward.number) is forward  # on this device, and not given back
        if forward is None or not known or forward.plan != plan or id in forward.entries:
            self.forward = ledger.add(plan)
            return self.forward, True
        return forward, False

    def begins_backward(self, forward: Forward, id: int) -> bool:
        """Whether a reload is the first of a capture of `forward`'s backward; notes it."""
        of, ids = self.checked
        if first := of is not forward or id in ids:
            ids = set()
        self.checked = forward, ids | {id}
        return first


_LEDGERS: dict[torch.device, Ledger] = {}
_OWNERS: dict[str, list[weakref.ref[Any]]] = {}
_OPEN = _Open()
_LOCK = threading.Lock()


def prepare(device: torch.device) -> bool:
    """Objects that captures on a device need; False if there are none. Call it first: memory allocated in a capture belongs to
    it."""
    streams = capture_streams_of(device)
    if streams is None:
        return False
    device = torch.device(device.type, streams.index)
    with _LOCK, outside_fake_mode():  # compilers run under fake tensors
        if device not in _LEDGERS:
            _LEDGERS[device] = Ledger(device, streams)
    return True


def is_captured(device: torch.device) -> bool:
    """Whether the current stream of a device is being captured."""
    streams = streams_of(device)
    return streams is not None and streams.capturing()


def _ledger(device: torch.device, name: str) -> tuple[Ledger, CaptureStreams]:
    ledger = _LEDGERS.get(device)
    if ledger is None or ledger.streams is None:
        raise CaptureError(
            f"{name}: a CUDA graph is captured on {device}, for which its model was not compiled with CUDA graphs on. "
            'Compile it with mode="reduce-overhead".'
        )
    return ledger, ledger.streams


def _offload(x: torch.Tensor, plan: str, id: int) -> torch.Tensor:
    if not is_captured(x.device):
        handle = ops.offload(x, plan, id)
        if not ops.handles_may_be_copied():
            handle.fill_(-1)  # no capture has this number
        return handle
    with _joined_on_error():
        return _capture_offload(x, plan, id)


def _capture_offload(x: torch.Tensor, plan: str, id: int) -> torch.Tensor:
    run = run_plan(plan)
    layout = run.layout(x, id)
    ledger, streams = _ledger(layout.device, run.name(id))
    if ops.handles_may_be_copied():
        raise CaptureError(
            f"{run.name(id)}: saved-tensor hooks are active while a CUDA graph is captured, and copies of handles cannot be "
            "told apart in replays. Compile under the hooks, or with mode=None."
        )
    handle = torch.empty(1, dtype=ops.HANDLE_DTYPE, device=layout.device)
    forward, first = _OPEN.forward_of(ledger, plan, id)
    entry = OffloadedTensor(x, layout, run, id)
    entry.start_copy()
    if layout.nbytes:
        with relaxed_capture():
            ENTRIES.sweep(settled=True)  # those of the warm-up
            entry.host = HostCopy(POOL.acquire_for_good(layout.nbytes, name=entry.name, device=streams.index))
    _OPEN.offloads[plan, id], forward.entries[id] = (entry, None), entry
    count, alive = ledger.count(forward), ledger.alive[forward.row : forward.row + 1]

    def sign() -> None:
        if first:
            assert_async(alive, _GONE)
            count.add_(1)
        handle.copy_(count)

    done = streams.copy("d2h", entry, (), *ops.copy_to_host(x, entry), first=sign)
    _OPEN.offloads[plan, id] = entry, done  # the event is the graph's, and nothing outside may wait for it
    COUNTERS.captured += 1
    COUNTERS.captured_bytes += layout.nbytes
    return handle


def _release(x: torch.Tensor, handle: torch.Tensor, plan: str, id: int) -> None:
    if not is_captured(x.device):
        ops.release(x, handle, plan, id)
        return
    entry, done = _OPEN.offloads.get((plan, id), (None, None))
    with _joined_on_error():
        if entry is None or x.data_ptr() != entry.source_ptr:
            raise _other_memory("release", "offload", plan, id)
    del _OPEN.offloads[plan, id]
    _, streams = _ledger(entry.layout.device, entry.name)
    streams.compute_waits(done)
    entry.release()


def _reload(
    handle: torch.Tensor, plan: str, id: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    if not is_captured(handle.device):
        return ops.reload(handle, plan, id, size, stride, dtype)
    with _joined_on_error():
        return _capture_reload(handle, plan, id, size, stride, dtype)


def _capture_reload(
    handle: torch.Tensor, plan: str, id: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    run = run_plan(plan)
    ledger, streams = _ledger(torch.device(handle.device), run.name(id))
    forward, entry = ledger.entry(streams.read(handle), id)
    if entry is None or forward is None or forward.plan != plan:
        raise CaptureError(
            f"{run.name(id)}: its backward is being captured in a CUDA graph, but its forward was not: torch ran it without "
            f"one, as it does after too many re-recordings, or a saved-tensors hook copied its handle (plan {plan}). Every "
            "replay would use this one host buffer. Compile with mode=None."
        )
    as_it_lies = ops.checked_layout(entry, size, stride, dtype)
    y = torch.empty_strided(size, stride, dtype=dtype, device=handle.device)
    count, flag = ledger.count(forward), ledger.flags[forward.row : forward.row + 1]

    def check() -> None:
        torch.eq(handle, count, out=flag)
        assert_async(flag, _STALE)

    first = check if _OPEN.begins_backward(forward, id) else None
    done = streams.copy("h2d", entry, (), *ops.copy_to_device(y, entry, as_it_lies=as_it_lies), first=first)
    _OPEN.reloads[plan, id] = entry, y.data_ptr(), done
    return y


def _wait(y: torch.Tensor, handle: torch.Tensor, plan: str, id: int) -> None:
    if not is_captured(y.device):
        ops.wait(y, handle, plan, id)
        return
    entry, pointer, done = _OPEN.reloads.get((plan, id), (None, 0, None))
    with _joined_on_error():
        if entry is None or pointer != y.data_ptr():
            raise _other_memory("wait", "reload", plan, id)
    del _OPEN.reloads[plan, id]
    _, streams = _ledger(entry.layout.device, entry.name)
    streams.compute_waits(done)


def find(handle: torch.Tensor, id: int) -> OffloadedTensor | None:
    """The entry of captured offload `id` whose handle came out of a replay, for a reload outside of a graph.

    Raises:
        RuntimeStateError: a later replay has written to its host buffer.
    """
    ledger = _LEDGERS.get(handle.device)
    if ledger is None or not ledger.forwards:
        return None
    value = int(handle.item())
    forward, entry = ledger.entry(value, id)
    if entry is not None and forward is not None and int(ledger.count(forward).item()) != value:
        raise RuntimeStateError(
            f"{entry.name}: its host copy was overwritten by a later replay of its forward's graph (plan {entry.run.key}). "
            "Call torch.compiler.cudagraph_mark_step_begin() only between steps, and keep no old loss for another backward."
        )
    return entry


def living() -> list[OffloadedTensor]:
    """Entries of every capture of an offload that may still be replayed."""
    forwards = [forward for ledger in list(_LEDGERS.values()) for forward in list(ledger.forwards.values())]
    return [entry for forward in forwards for entry in list(forward.entries.values())]


def _other_memory(op: str, first: str, plan: str, id: int) -> RuntimeStateError:
    return RuntimeStateError(
        f"{run_plan(plan).name(id)}: {op} was captured with other memory than its {first}, or without it (plan {plan}). "
        "Please report this with a graph dump (GRAPHOFFLOAD_DUMP_DIR)."
    )


@contextlib.contextmanager
def _joined_on_error() -> Iterator[None]:
    try:
        yield
    except BaseException:
        _abandon()
        raise


def _abandon() -> None:
    """After an error in a capture: join its open branches, so that torch can end it, and free its host buffers."""
    events = [*_OPEN.offloads.values(), *[(entry, done) for entry, _, done in _OPEN.reloads.values()]]
    entries = [entry for entry, _ in _OPEN.offloads.values()]
    forward, _OPEN.forward, _OPEN.checked = _OPEN.forward, None, (None, set())
    _OPEN.offloads, _OPEN.reloads = {}, {}
    with contextlib.suppress(Exception):  # the first error counts
        for entry, done in events:
            if done is not None:
                _ledger(entry.layout.device, entry.name)[1].compute_waits(done)
    for ledger in list(_LEDGERS.values()):
        ledger.forget(entries, forward)
    for entry in entries:
        if entry.state is not CLOSED:  # its plan's captures were given back after this one had been given up
            entry.close()


def own(plan: str, owner: object) -> None:
    """The compiled functions that may still replay forwards or backwards of a plan; several compiles may share a plan."""
    with _LOCK:
        owners = _OWNERS.setdefault(plan, [])
        owners[:] = [ref for ref in owners if ref() is not None and ref() is not owner]
        owners.append(weakref.ref(owner))


def collect() -> None:
    """Free the host buffers of plans that no compiled function can replay any more. It waits for the device: no finalizer calls
    it."""
    if any(is_captured(device) for device in list(_LEDGERS)):
        return
    with _LOCK:
        gone = [plan for plan, owners in _OWNERS.items() if all(ref() is None for ref in owners)]
        for plan in gone:
            del _OWNERS[plan]
    for plan in gone:
        give_back(plan)


def give_back(plan: str) -> None:
    """Drop a plan's captures and free their host buffers. A replay that happens nevertheless stops the device."""
    for ledger in list(_LEDGERS.values()):
        gone = [forward for forward in list(ledger.forwards.values()) if forward.plan == plan]
        rows = [forward.row for forward in gone]
        if rows:
            with outside_fake_mode():
                ledger.alive[rows] = False
                ledger.counts[rows] += 1
            if ledger.streams is not None:
                torch.cuda.synchronize(ledger.streams.device)
        for forward in gone:
            del ledger.forwards[forward.number]
            for entry in forward.entries.values():
                entry.close()


_KERNELS: dict[str, Callable[..., Any]] = {"offload": _offload, "release": _release, "reload": _reload, "wait": _wait}
for _name in NAMES:
    ops.define(_name, f"{_name}_captured", _KERNELS[_name], TAGS)
ENTRIES.captured = find
