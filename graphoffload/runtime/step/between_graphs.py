"""What one graph leaves to the next: copies that outlive their forward, and reloads that start before their backward.

    forward    graph 0  |== offloads ==|R       releases at its end do not wait: graph 1 follows, as in the last two forwards
               graph 1        |W= offloads =|   the runtime holds graph 0's sources; as graph 1's offloads fill the window,
               ...                              compute waits for the oldest copy and frees its source
               last graph              |~~~~    backward reads its tensors at once: they stay; its end settles all pending
    backward   last graph  |= reloads =|P       after its last reload, those of the graph before it start
               graph before  |T ...             its reload uses the tensor that is already there

The order is learned. A call of a compiled forward (`Call`) is expected to be followed by another one if it was in the last two
forwards. A wrong guess costs time, or memory up to the window, never a gradient. A pending source is freed at the first reload
at the latest. A prefetched tensor that no reload used is freed when the backward of another graph or the next forward starts.
Both are freed only after their stream has waited for the copy.

The tensors that the last graph offloads stay, as far as they fit in the window, since nothing would overlap with their copies.
Reload hands their memory back. They do not stay if a goal was given: under a shared budget resident.py decides what stays, and
a plan for another goal relies on its copies. They do not stay in a graph that is not downstream of another: it is the whole
model.

Only plans that the backend linked take part: there Inductor reuses no buffer within a graph, and captures no CUDA graph.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import torch

from graphoffload.runtime.counters import COUNTERS
from graphoffload.runtime.hooks import ACTIVE
from graphoffload.runtime.offloaded_tensors import COPYING, LOCK, PREFETCHED, RELEASE_PENDING, OffloadedTensor
from graphoffload.runtime.registry import RunPlan
from graphoffload.runtime.step import follow
from graphoffload.runtime.step.call import StepCall
from graphoffload.runtime.step.early import Copy, reload_early, take_early
from graphoffload.runtime.step.resident import Staying
from graphoffload.runtime.streams.protocol import CopyStreams

_LONGEST = 4096  # calls of one forward whose order is learnt
_SHARE = 4  # Share of a forward's offloaded bytes that may be outstanding between its graphs, unless the user gave a number.


class Call:
    """One call of a compiled forward, and later of its backward.

    entries: living ones, by id. before: the call before it in the same forward, while it has entries. followed: another call is
    expected to follow. as_before: up to here the forward is like the last two. left: bytes of `nbytes` that were left to later
    calls. stayed: bytes; in the last call including earlier forwards' bytes that still stay. room: bytes that may stay in the
    last call without a budget. reloading: ids in the order of its latest backward's reloads.
    """

    __slots__ = (
        "as_before", "before", "entries", "followed", "left", "nbytes", "reloading", "room", "run", "seen", "stayed", "track",
    )  # fmt: skip

    def __init__(self, run: RunPlan, track: Track, before: Call | None, *, followed: bool, as_before: bool) -> None:
        self.run, self.track, self.before, self.followed, self.as_before = run, track, before, followed, as_before
        self.entries: dict[int, OffloadedTensor] = {}
        self.seen: set[int] = set()
        self.nbytes = self.left = self.stayed = self.room = 0
        self.reloading: list[int] = []

    def leave(self, entry: OffloadedTensor) -> None:
        """A tensor of this call is closed: free its pending source and its prefetched target, after their copies."""
        with LOCK:
            if entry.state is RELEASE_PENDING:
                _free(entry)
            elif entry.state is PREFETCHED:
                _drop(entry)
            if self.entries.get(entry.id) is entry:
                del self.entries[entry.id]
            if not self.entries:
                self.before = None
            entry.call = None


class Track:
    """The calls of one thread's forwards on one device: their order, and what is pending, prefetched and resident."""

    __slots__ = (
        "_as_before", "_calls", "_last", "_now", "_second_last", "ahead", "backward", "call", "forward_bytes", "kept",
        "largest_bytes", "pending", "pending_bytes", "staying",
    )  # fmt: skip

    def __init__(self) -> None:
        self.call: Call | None = None
        self.backward: Call | None = None
        self.pending: deque[OffloadedTensor] = deque()
        self.pending_bytes = 0
        self.ahead: list[OffloadedTensor] = []
        self.kept: list[OffloadedTensor] = []  # what stayed in last calls; those that still do have a source
        self.largest_bytes = self.forward_bytes = 0
        self.staying = Staying()
        self._calls: list[Call] = []
        self._now: list[str] = []
        self._last: tuple[str, ...] = ()
        self._second_last: tuple[str, ...] = ()
        self._as_before = False

    def begin(self, run: RunPlan, streams: CopyStreams | None) -> Call:
        """A compiled forward starts."""
        at = len(self._now)
        if at == 0:
            drop_prefetched(self)
            self.backward = None
            self._as_before = self._last == self._second_last
            if self.staying.budget is not None and streams is not None:
                alone = not any(call.entries for call in self._calls)  # no earlier forward's tensors share the room
                self.staying.begin_forward(self._last, *streams.allocated_bytes(), as_before=self._as_before and alone)
            self._calls = []
        self.staying.set_budget(run.budget)
        self._count_largest()
        self._as_before = self._as_before and at < len(self._last) and self._last[at] == run.key
        known = self._as_before and run.linked and streams is not None and not streams.capturing()
        followed = known and at + 1 < len(self._last)
        if at < _LONGEST:
            self._now.append(run.key)
        self.call = Call(run, self, self.call, followed=followed, as_before=self._as_before)
        if known and at and not followed:  # forwards whose backward is still to come, or was dropped, share one window
            self.kept = [entry for entry in self.kept if entry.source is not None]
            self.call.stayed = sum(entry.layout.nbytes for entry in self.kept)
            self.call.room = self.window_bytes(run)
        if at < _LONGEST:
            self._calls.append(self.call)
        return self.call

    def turn(self) -> None:
        """The first reload: forward has ended."""
        self._second_last, self._last, self._now = self._last, tuple(self._now), []
        self.forward_bytes = sum(entry.layout.nbytes for call in self._calls for entry in call.entries.values())
        self.staying.end_forward()
        self._count_largest()
        self.call = None

    def _count_largest(self) -> None:
        if self.call is not None:
            self.largest_bytes = max(self.largest_bytes, self.call.nbytes)

    @property
    def forward_runs(self) -> bool:
        """Whether a call was made since the last reload."""
        return bool(self._now)

    def window_bytes(self, run: RunPlan) -> int:
        """Bytes that may be outstanding across calls: max_inflight_bytes, else what the largest call offloads, up to a share of
        all."""
        return run.window_bytes if run.window_bytes is not None else min(self.largest_bytes, self.forward_bytes // _SHARE)


class _Tracks(threading.local):
    """This thread's tracks by device."""

    def __init__(self) -> None:
        self.of: dict[torch.device, Track] = {}


_TRACKS = _Tracks()


def forget() -> None:
    """Nothing that this thread ran is called again: what is pending or came back early is freed, after its copy."""
    with LOCK:
        for track in _TRACKS.of.values():
            _settle(track, len(track.pending))
            drop_prefetched(track)
    _TRACKS.of.clear()


def enter(entry: OffloadedTensor) -> None:
    """Find the call that an offload belongs to: a call offloads each id once."""
    device, run = entry.layout.device, entry.run
    if entry.streams is None:  # synchronous copies; some attention kernels return seeds on the CPU
        return
    if follow.enter(entry):
        return
    track = _TRACKS.of.get(device)
    if track is None:
        track = _TRACKS.of[device] = Track()
    call = track.call
    if call is None or call.run is not run or entry.id in call.seen:
        with LOCK:
            call = track.begin(run, entry.streams)
    call.seen.add(entry.id)
    call.entries[entry.id] = entry
    entry.call = call


def offloaded(entry: OffloadedTensor) -> None:
    """Make room in the window for the latest offload."""
    call = entry.call
    if call is None:
        return
    if isinstance(call, StepCall):
        follow.offloaded(entry, call)
        return
    if entry.state is COPYING:
        call.nbytes += entry.layout.nbytes
    else:
        call.stayed += entry.layout.nbytes
        if call.track.staying.budget is None:
            call.track.kept.append(entry)
    track = call.track
    if track.pending:
        room = max(track.window_bytes(call.run) - call.stayed, track.staying.left_bytes()) - call.nbytes + call.left
        with LOCK:
            while track.pending and track.pending_bytes > room:
                _settle(track, 1)


def stays(entry: OffloadedTensor) -> bool:
    """Whether an offload is skipped: a shared budget has room for its source, or backward reads it at once."""
    call, nbytes = entry.call, entry.layout.nbytes
    if isinstance(call, StepCall):
        return follow.stays(entry, call)
    if call is None or not call.run.linked or (call.track.staying.budget is None and not (call.room and call.run.downstream)):
        return False
    streams = entry.streams
    if streams is None or streams.capturing():
        return False
    assert entry.source is not None
    whole = entry.source.untyped_storage().nbytes() == nbytes  # a part would hold more than is counted
    if call.track.staying.budget is not None:
        may_stay = call.track.staying.offer(nbytes, may_stay=whole and call.as_before and call.run.budget is not None)
    else:
        may_stay = whole and call.stayed + nbytes <= call.room
    if not may_stay:
        return False
    entry.let_stay(streams.compute())
    return True


def defers(entry: OffloadedTensor) -> bool:
    """Whether a release is left to later graphs; if so, it is pending from now on."""
    call = entry.call
    if isinstance(call, StepCall):
        return follow.defers(entry, call)
    if call is None or not call.followed or not (entry.id in entry.run.at_end or entry.run.downstream):
        return False
    if entry.host is None or entry.host.written is None:
        return False
    streams, track = entry.streams, call.track
    assert streams is not None
    with LOCK:
        entry.leave_release_pending(streams.compute())
        track.pending.append(entry)
        track.pending_bytes += entry.layout.nbytes
        call.left += entry.layout.nbytes
        COUNTERS.deferred += 1
        while track.pending_bytes > max(track.window_bytes(call.run), track.staying.left_bytes()):
            _settle(track, 1)
    return True


def passed(entry: OffloadedTensor) -> None:
    """Release a source that stays. After all offloads of the last call, where memory peaks, nothing is pending."""
    call = entry.call
    if isinstance(call, StepCall):
        call.run.happened(call, ("release", entry.id))
        return
    if call is not None and call.track.pending and not call.followed and len(call.seen) == call.run.transfers:
        with LOCK:
            _settle(call.track, len(call.track.pending))


def released(entry: OffloadedTensor) -> None:
    """Compute waited for this entry's copy. Copies run in order, so copies that earlier calls left pending are done as well."""
    call = entry.call
    if isinstance(call, StepCall):
        call.run.happened(call, ("release", entry.id))
        return
    if call is None or not call.track.pending or entry.host is None or entry.host.written is None:
        return
    streams = entry.streams
    with LOCK:
        pending = call.track.pending
        if streams is not None and all(older.stream is streams.compute() for older in pending):
            while pending and pending[0].call is not call:
                _free(pending[0], waited=True)


def _settle(track: Track, count: int) -> None:
    """Let compute wait for the copies of the oldest `count` pending sources, then free them."""
    for entry in list(track.pending)[:count]:
        _free(entry)


def _free(entry: OffloadedTensor, *, waited: bool = False) -> None:
    """Settle a pending source; `waited`: its stream has waited for its copy, or for a later one."""
    assert isinstance(entry.call, Call)
    track = entry.call.track
    source = entry.settle(waited=waited)
    track.pending.remove(entry)
    track.pending_bytes -= entry.layout.nbytes
    COUNTERS.released(entry.layout.nbytes)
    if ACTIVE.release is not None and source is not None:
        ACTIVE.release(source, entry.name)


def reloading(entry: OffloadedTensor) -> None:
    """A reload comes: forward has ended, everything pending is settled, and tensors prefetched for other calls are dropped."""
    call = entry.call
    if call is None:
        return
    if isinstance(call, StepCall):
        call.run.turn()
        follow.reloading(entry, call)
        return
    track = call.track
    with LOCK:
        if track.forward_runs:
            track.turn()
        if track.pending:
            _settle(track, len(track.pending))
        if track.backward is not call:
            track.backward = call
            _sample(track, entry)
            drop_prefetched(track, but=call)
        if entry.id in call.reloading:  # a second backward of a retained graph
            call.reloading = []
        call.reloading.append(entry.id)


def _sample(track: Track, entry: OffloadedTensor) -> None:
    """Read the peak once a call: a benchmark may reset it between steps."""
    streams = entry.streams
    if track.staying.budget is not None and streams is not None:
        track.staying.sample(streams.allocated_bytes()[1])


def take(entry: OffloadedTensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
    """The tensor that was prefetched for an entry, if backward asks for it in this form and on this stream."""
    if isinstance(entry.call, StepCall):
        return follow.take(entry, entry.call, size, stride, dtype)
    if entry.call is None:
        return None
    return take_early(entry, entry.call.track.ahead, _drop, size, stride, dtype)


def reloaded(entry: OffloadedTensor, copy: Copy) -> None:
    """A reload is issued: start those that the schedule starts here, or that are expected next."""
    if isinstance(entry.call, StepCall):
        entry.call.run.start_early(entry.call, ("reload", entry.id))
    else:
        prefetch(entry.call, copy)


def waited(entry: OffloadedTensor) -> None:
    """Compute waits for a reload."""
    if isinstance(entry.call, StepCall):
        entry.call.run.start_early(entry.call, ("wait", entry.id))


def prefetch(call: Call | None, copy: Copy) -> None:
    """After a call's last reload: start those of the call before it, in the order of last time, as far as memory allows.

    `copy(y, entry)` starts the copy to y and leaves its event in `entry.host.read`.
    """
    if call is None or len(call.reloading) != len(call.seen):
        return
    call.run.order = tuple(call.reloading)
    if call.before is None or not call.run.linked:
        return
    with LOCK:
        before = call.before
        if before is None or not before.run.linked or before.run.transfers == 0:
            return
        found = [e for id in before.run.order if (e := before.entries.get(id)) is not None and not e.stays]
        if not found or not all(entry.layout.device == found[0].layout.device for entry in found):
            return
        streams = found[0].streams
        if streams is None or streams.capturing():
            return
        left = min(streams.headroom_bytes(), before.track.window_bytes(before.run))
        for entry in found:
            left -= entry.layout.nbytes
            if left < 0 or not reload_early(entry, copy, before.track.ahead):
                return


def drop_prefetched(track: Track, *, but: Call | None = None) -> None:
    """Drop the tensors that were prefetched for other calls."""
    for entry in list(track.ahead):
        if entry.call is not but:
            _drop(entry)


def _drop(entry: OffloadedTensor) -> None:
    """Drop a prefetched tensor, after the stream that owns its memory has waited for the copy."""
    assert isinstance(entry.call, Call)
    entry.drop_prefetched()
    entry.call.track.ahead.remove(entry)
