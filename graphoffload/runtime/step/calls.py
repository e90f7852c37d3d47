"""A running step: the calls of compiled graphs from the first forward to the last backward, and what is seen of them.

    forward    |f0|f1|...|fN|   loss   |bN|...|b1|b0|   optimizer   |f0| ...
    StepRun    |<--------------------------------->|                |<--- the next one

A run begins with the first forward after a backward, or after a forward that was dropped. Where several microbatches are in
flight, as in a pipeline, each is a run: the next one begins when a forward is whole, and the ones before it are still alive.
Where a part of a step has its backward before other forwards come, a run waits, and others lie inside it:

    a GAN      |f0|f1|f2|  loss  |b2|b1|       |f3|  loss  |b3|       |b0|      f0: the generator, the rest: its critic
    runs       |<------------------------------------------------------->|      f0, f1, f2; it waits while
    inside it                          |<-------------------->|                 f3 runs with its backward

While nothing is planned, a run is recorded: what is allocated at the start and the end of each forward and backward, how much
of it our graphs hold, and when it was (`Mark`). A run that is planned follows its schedule (step/follow.py).
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from graphoffload.errors import RuntimeStateError
from graphoffload.runtime.counters import COUNTERS
from graphoffload.runtime.hooks import ACTIVE
from graphoffload.runtime.offloaded_tensors import COPYING, LOCK, PREFETCHED, RELEASE_PENDING, OffloadedTensor
from graphoffload.runtime.pinned.pool import POOL
from graphoffload.runtime.step.call import StepCall
from graphoffload.runtime.step.early import Copy, reload_early
from graphoffload.runtime.step.pace import Pace
from graphoffload.runtime.step.schedule import START, Event, Mark, Room
from graphoffload.runtime.streams.copy_streams import streams_of
from graphoffload.runtime.streams.protocol import CopyStreams
from graphoffload.torch_internals import allocator, autograd

_OUTLIVED = 16  # younger runs that end before one: it does not count as in flight any more, and what it holds is outside


class StepRun:
    """One run of a step on one device.

    plan: what gives each call its schedule; None where nothing is planned. recording: moments are marked. watches: what the
    allocator does is recorded as well; `changes` are found at the run's end. holding: the device waits where a gap
    between two calls begins, or the gap would take what a host takes that is late.
    copies: what is copied to the host, in the order in which the copies start; the first `settled` of them are waited for.
    hooked: its calls are told of their backwards by hooks. tells: a backward came by a function that is `told`.
    ahead: what is reloaded before its call asks. off: the calls are not those of the plan. turned: a backward has begun.
    aborted: an error ended it, or nobody sees when it ends. learnt: it is over, and what it taught is known.
    step: the sequence of calls that is expected, if it is known. flies: a forward of it is followed by other microbatches'.
    alive: all runs on the device that are not over, oldest first. outlived: younger ones that ended before it.
    inside: it began while another run waited.
    start_peak_bytes, peak_bytes: the device's peak so far, when it began and when its last backward ended. room: what may stay.
    twin: its copies are clones on the device, which no plan has. pace: looks at how fast it is; None: nobody does.
    """

    __slots__ = (
        "aborted", "ahead", "alive", "calls", "changes", "copies", "ended", "flies", "holding", "hooked", "inside", "learnt",
        "marks", "off", "outlived", "pace", "peak_bytes", "plan", "recording", "room", "settled", "start_peak_bytes", "step",
        "streams", "tells", "turned", "twin", "watches",
    )  # fmt: skip

    def __init__(
        self,
        streams: CopyStreams | None,
        *,
        recording: bool,
        watching: bool = False,
        holding: bool = False,
        plan: Any = None,
        hooked: bool = True,
        step: Sequence[int] = (),
        flies: bool = False,
    ) -> None:
        self.streams = streams
        self.watches = watching and streams is not None and (allocator.start() or allocator.join())
        self.changes: list[allocator.Change] = []
        self.recording, self.holding, self.hooked = recording, holding, hooked or recording
        self.plan, self.step, self.flies = plan, step, flies
        self.alive: list[StepRun] = []
        self.calls: list[StepCall] = []
        self.marks: list[Mark] = []
        self.copies: list[OffloadedTensor] = []
        self.ahead: list[OffloadedTensor] = []
        self.ended: list[int] = []
        self.settled, self.outlived, self.room = 0, 0, Room()
        self.start_peak_bytes = streams.allocated_bytes()[1] if streams is not None else 0
        self.peak_bytes, self.twin = 0, ACTIVE.twin
        self.pace: Pace | None = None
        self.turned = self.off = self.aborted = self.learnt = self.tells = self.inside = False

    def begin(self, graph: int) -> StepCall:
        """A forward of `graph` starts."""
        call = StepCall(self, len(self.calls), graph)
        self.calls.append(call)
        self._mark("forward", call)
        return call

    def forward_ended(self, call: StepCall, outputs: Any, since: int) -> None:
        """Its outputs are there, of nodes made `since` it began; its backward is watched from now on."""
        node = autograd.compiled_node(outputs, since)
        if node is not None:
            autograd.leave_with_node(node, call)
            call.node = weakref.ref(node)
            if self.hooked:
                call.hooked = True
                node.register_prehook(call.begin)
                node.register_hook(call.end)
        elif len(self.calls) == 1:  # nobody sees its backward: a run of such calls alone would go on through all steps
            self.aborted = True
        if self.recording:
            call.output_bytes = {} if node is None else autograd.output_bytes(outputs, node)
            call.returns(outputs)
        self._mark("forward end", call)

    def backward_began(self, call: StepCall, gradients: Sequence[Any] = ()) -> None:
        """The backward of a call starts, in autograd's thread; `gradients` of its outputs, before autograd fills in zeros."""
        call.began = True
        self._mark("backward", call, autograd.zeros_bytes(call.output_bytes, gradients) if self.recording else 0)
        if not self.turned:
            self.turn()
        if call.schedule is not None:
            self.start_early(call, START)

    def backward_ended(self, call: StepCall) -> None:
        """The backward of a call is issued."""
        call.ended = True
        self.ended.append(call.index)
        if call.index == 0 and self.streams is not None and not self.twin:
            self.peak_bytes = self.streams.allocated_bytes()[1]
        self._mark("backward end", call)
        if self.recording and call.index == 0 and self.streams is not None and len(self.calls) > 1:
            self.streams.empty_cache()  # or an optimizer's first state lies in pieces of what activations left

    @property
    def is_nested(self) -> bool:
        """Whether each call had its one backward, in the reverse order of the forwards."""
        return self.ended == list(range(len(self.calls) - 1, -1, -1))

    @property
    def sequence(self) -> tuple[int, ...]:
        """The graphs of its calls."""
        if self.plan is not None and not self.off and len(self.calls) == len(self.plan.sequence):
            return self.plan.sequence  # type: ignore[no-any-return]
        return tuple(call.graph for call in self.calls)

    @property
    def is_over(self) -> bool:
        """Whether the next forward belongs to another run: backward has begun, the forward was dropped, or it is whole and
        other microbatches follow."""
        return self.is_done or (self.flies and len(self.calls) == len(self.step))

    @property
    def is_done(self) -> bool:
        """Whether backward has begun, or the forward was dropped."""
        return self.turned or self.aborted or not self.calls or self.calls[-1].dropped

    @property
    def waits(self) -> bool:
        """Whether backwards are still to come, and may, after those of all later calls: other runs may lie between."""
        left = len(self.calls) - len(self.ended)
        if self.aborted or self.flies or not 0 < left < len(self.calls):
            return False
        return self.ended == [*range(len(self.calls) - 1, left - 1, -1)] and all(call.waits for call in self.calls[:left])

    def beside(self) -> Iterator[StepRun]:
        """Other microbatches of this step in flight."""
        return (run for run in self.alive if run is not self and run.step == self.step and not run.is_done)

    def ours_bytes(self) -> int:
        """Device bytes that the calls hold for their backwards."""
        return sum(call.held_bytes() for call in self.calls)

    def happened(self, call: StepCall, event: Event) -> None:
        """An event of forward: settle the copies that the schedule has settled by now."""
        count = 0 if call.schedule is None or self.off else call.schedule.settle.get(event, 0)
        if count > self.settled:
            self.settle(count)

    def settle(self, count: int) -> None:
        """Let compute wait for the first `count` copies of the step, and free their sources.

        One whose release has not come is settled by the event of its release, which counts it as well.
        """
        with LOCK:
            copies = self.copies
            for entry in copies[self.settled : count]:
                if entry.state is RELEASE_PENDING:
                    self._settle_one(entry)
            while self.settled < min(count, len(copies)) and copies[self.settled].state is not COPYING:
                self.settled += 1

    @staticmethod
    def _settle_one(entry: OffloadedTensor) -> None:
        try:
            source = entry.settle()
        finally:
            COUNTERS.released(entry.layout.nbytes)
        if ACTIVE.release is not None and source is not None and entry.id not in entry.run.inputs:
            ACTIVE.release(source, entry.name)

    def leave_plan(self) -> None:
        """The calls are not those of the plan: nothing stays pending from now on."""
        self.off, self.hooked, self.pace = True, True, None
        self.settle(len(self.copies))

    def rest(self) -> None:
        """Another microbatch begins, or a backward: everything pending is settled."""
        self.settle(len(self.copies))

    def leave_alone(self) -> None:
        """It is no part of what runs any more: a backward that is still to come asks for its tensors by itself."""
        self.off = True
        self.finish()

    def turn(self) -> None:
        """Forward is over: everything pending is settled, and that of other microbatches, whose backward comes later."""
        if not self.turned:
            self.turned = True
            for run in (self, *self.beside()):
                run.rest()

    def start_early(self, call: StepCall, event: Event) -> None:
        """An event of backward: start the copies back that the schedule starts here."""
        if call.schedule is None or self.off:
            return
        wanted = call.schedule.prefetch.get(event)
        if wanted is None:
            return
        with LOCK:
            for index, id in wanted:
                entry = self.calls[index].entries.get(id) if index < len(self.calls) else None
                if entry is None or entry.reloads:  # a second backward of a retained graph asks by itself
                    continue
                if entry.streams is not None and not entry.streams.capturing():
                    reload_early(entry, STEPS.copy_back, self.ahead)

    def drop(self, entry: OffloadedTensor) -> None:
        """An early copy that nobody asked for is freed, after the stream that owns its memory has waited for it."""
        entry.drop_prefetched()
        if entry in self.ahead:
            self.ahead.remove(entry)

    def finish(self) -> None:
        """Another run begins: what is pending, or came back early without being asked for, is freed."""
        if self.watches and self.streams is not None:
            self.watches = False
            self.changes = allocator.stop(self.streams.index)
        with LOCK:
            for entry in self.copies:
                if entry.state is RELEASE_PENDING:
                    with contextlib.suppress(RuntimeStateError):  # of a forward that was dropped
                        self._settle_one(entry)
            for entry in list(self.ahead):
                if entry.state is PREFETCHED:
                    self.drop(entry)
            self.ahead.clear()
            self.copies.clear()

    def _mark(self, kind: str, call: StepCall, soon_bytes: int = 0) -> None:
        """Note this moment, if someone looks at the run. soon_bytes: allocated at once after it; they count as if they were."""
        if self.pace is not None:
            self.pace.mark(kind, call.index)
        if not self.recording:
            return
        if kind in ("forward", "backward"):
            for other in self.calls:
                if not other.ended:
                    other.look_at_outputs((kind, call.index))
        streams = self.streams
        now, peak = (0, 0) if streams is None else streams.allocated_bytes()
        now_us = time.time_ns() // 1000
        if streams is not None and self.holding and kind.endswith("end"):
            self._hold(streams)
        event = None if streams is None else streams.timed_event()
        beside = list(self.beside())
        ours = self.ours_bytes() + sum(run.ours_bytes() for run in beside)
        self.marks.append(Mark(kind, call.index, now + soon_bytes, peak, ours, event, now_us, len(beside), soon_bytes))

    def _hold(self, streams: CopyStreams) -> None:
        """A gap begins: its work is there before the device comes to it. A device that is a call behind waits for none."""
        if not streams.capturing() and self.marks and self.marks[-1].event.query():
            streams.hold_compute()


class Steps(threading.local):
    """This thread's runs, by device, and the call whose forward is running.

    copy_back: `copy_back(y, entry)` starts a copy back to y; the ops set it, for all threads.
    """

    copy_back: Copy

    def __init__(self) -> None:
        self.runs: dict[torch.device, StepRun] = {}
        self.alive: dict[torch.device, list[StepRun]] = {}
        self.call: StepCall | None = None

    def of(self, device: torch.device) -> StepRun | None:
        """The latest run on a device."""
        return self.runs.get(device)

    def start(self, device: torch.device, make: Callable[[CopyStreams | None], StepRun]) -> StepRun:
        """Another run on a device; whoever starts it has finished those that are done."""
        run = self.runs[device] = LATEST[device] = make(streams_of(device))
        run.alive = self.alive.setdefault(device, [])
        run.inside = any(other.waits for other in run.alive)
        run.alive.append(run)
        POOL.turn()
        return run

    def done(self, device: torch.device, graph: int) -> list[StepRun]:
        """Runs on a device that are over and were alive until now, oldest first, now that `graph` is called. One that waits is
        over where its own first graph comes again. One that outlives many younger ones is left alone: its backward may never
        come."""
        alive, done = self.alive.get(device, []), list[StepRun]()
        for run in alive[::-1]:
            waits = run.waits and run.calls[0].graph != graph
            over = run.is_done and not waits  # asked once: an output may go at any time
            run.outlived += len(done)
            if over:
                done.insert(0, run)
            elif run.outlived >= _OUTLIVED:
                run.leave_alone()
            if over or run.outlived >= _OUTLIVED:
                alive.remove(run)
        return done

    def forget(self) -> None:
        """Nothing that this thread ran is called again: its runs end, and what they hold goes with them."""
        for device, last in self.runs.items():
            for run in {id(run): run for run in (last, *self.alive.get(device, ()))}.values():
                run.leave_alone()
            if LATEST.get(device) is last:
                del LATEST[device]
        self.runs.clear()
        self.alive.clear()


STEPS = Steps()
LATEST: dict[torch.device, StepRun] = {}
"""The run that began last on each device, for other threads."""
