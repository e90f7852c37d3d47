"""A call of a planned step follows its schedule: what stays, what is waited for, and what comes back early.

    forward    f0 |== x ===|           f1 |== y ===|S              x is released pending: nobody waits for its copy yet.
                                                                   S: an event of f1 whose count covers x: compute waits for
                                                                   x's copy, which is done by then, and x's memory is free
    backward   b1 |... P ...|          b0 |T                       P: an event of b1 that starts x's copy back.
                                                                   T: b0's reload takes what is there

The runtime acts only where an op runs, or a backward starts. The schedule is made for these events (planner/step/events.py). A
call that the plan does not expect puts the run off its plan: everything pending is waited for, and from then on each release
waits for its own copy. That costs time, never a gradient. What stays is as in the schedule. Without one, inputs stay while
memory is free, and everything else while plenty is, or where the host's is used up.

Sources that are pending are safe since nothing inside a linked graph reuses their memory (decision 6). Memory is freed only
after the stream that owns it waits for the copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphoffload.runtime.counters import COUNTERS
from graphoffload.runtime.offloaded_tensors import COPYING, LOCK, OffloadedTensor, is_sole_owner
from graphoffload.runtime.pinned.pool import POOL
from graphoffload.runtime.step.call import StepCall
from graphoffload.runtime.step.calls import STEPS
from graphoffload.runtime.step.early import take_early
from graphoffload.torch_internals.storages import lasting


def enter(entry: OffloadedTensor) -> bool:
    """Make an offload part of the call that runs; False where no call was announced for its plan."""
    call = STEPS.call
    if call is None or call.key != entry.run.key or entry.id in call.entries:
        return False
    call.entries[entry.id] = entry
    entry.call = call
    return True


def stays(entry: OffloadedTensor, call: StepCall) -> bool:
    """Whether an offload is skipped: as the schedule says; without one, if memory is plenty or the host has none left."""
    streams, source = entry.streams, entry.source
    if streams is None or not entry.run.linked or streams.capturing() or source is None:
        return False
    nbytes, run, schedule = entry.layout.nbytes, call.run, call.schedule
    full = schedule is None and not POOL.has_room(nbytes)
    must = full and call.is_variant  # nobody has decided that the host takes it
    if source.untyped_storage().nbytes() != nbytes and not must:  # a part would hold more than is counted
        return False
    if schedule is not None:
        if entry.id in schedule.goes:
            return False
    elif entry.id in entry.run.inputs:
        if not run.room.take_input(nbytes) and not full:
            return False
    elif not must and (not call.is_variant or not run.room.take(nbytes)):
        return False
    entry.let_stay(streams.compute())
    return True


def offloaded(entry: OffloadedTensor, call: StepCall) -> None:
    """A copy to the host has started, or the tensor stays."""
    if entry.state is COPYING:
        call.run.copies.append(entry)
        if call.run.recording and entry.id in entry.run.inputs and entry.source is not None:
            call.gone[entry.id] = lasting(entry.source.untyped_storage()), entry.layout.nbytes
    call.run.happened(call, ("offload", entry.id))


def defers(entry: OffloadedTensor, call: StepCall) -> bool:
    """Leave a release pending; False where the op has to wait for the copy itself."""
    run, streams = call.run, entry.streams
    if call.schedule is None or run.off or run.turned or streams is None or entry.host is None or entry.host.written is None:
        return False
    with LOCK:
        entry.leave_release_pending(streams.compute())
        COUNTERS.deferred += 1
        run.happened(call, ("release", entry.id))
    return True


def reloading(entry: OffloadedTensor, call: StepCall) -> None:
    """Backward asks for a tensor. A recorded run notes whether others hold an input as well: to offload it frees nothing."""
    if not call.run.recording or entry.id not in entry.run.inputs:
        return
    if entry.source is None:
        if entry.id in call.gone and not call.gone[entry.id][0].expired():
            call.held[entry.id] = call.gone[entry.id]
    elif not is_sole_owner(entry.source):
        call.held[entry.id] = lasting(entry.source.untyped_storage()), entry.layout.nbytes


def take(
    entry: OffloadedTensor, call: StepCall, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor | None:
    """The tensor that came back early, if backward asks for it in this form and on this stream."""
    return take_early(entry, call.run.ahead, call.run.drop, size, stride, dtype)
