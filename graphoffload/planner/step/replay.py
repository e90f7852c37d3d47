"""replay_step(): time and memory of copies that start and are waited for at given moments, instead of as late as they can.

    forward    |f0|f1|  wait for the first k copies  |f2|      a source is free from its own moment on
    backward   |  start these copies  |b0|b1|  wait |b2|       memory is taken where a copy is started

It has the simulator's clock, channels and memory. The difference is who decides: the simulator releases a source when its copy
is done, and issues a reload as late as it is still in time. Here both happen where the runtime has an event for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from graphoffload.facts.plan import Action
from graphoffload.planner.arrays import Arrays, needs
from graphoffload.planner.clock import Clock
from graphoffload.planner.simulator import Evaluation, fill_memory


@dataclass(frozen=True, slots=True)
class Moments:
    """When what happens, by position: the number of steps of that half of the program that ran before.

    Attributes:
        copies: candidates in the order in which their copies to the host are issued, right after `produced_at`.
        settle: (position, how many of `copies` compute waits for there), by position.
        release: for each of `copies`, the last forward step at which its source is allocated; None: until the forward ends.
        reloads: (position, candidate) in the order in which copies back are started.
        drains: where, in the backward, compute waits for all copies back that have started.
        stays: candidates that are kept, in code that could copy them: another call of it does. What their ops give is a view of
            them, so that no kernel writes its result over them.
    """

    copies: tuple[int, ...]
    settle: tuple[tuple[int, int], ...]
    release: Mapping[int, int | None]
    reloads: tuple[tuple[int, int], ...]
    drains: tuple[int, ...] = ()
    stays: tuple[int, ...] = ()


def replay_step(arrays: Arrays, actions: Sequence[Action], moments: Moments) -> Evaluation:
    """What these actions come to at these moments. No action is "recompute"."""
    first, last = needs(arrays, actions)
    for index in moments.stays:
        last[index] = max(last[index], arrays.last_use[index])
    out = Evaluation(0.0, 0, 0, 0, arrays.base_bytes, [], first, last, dict(moments.release), [], [], [], [], 0.0, 0, 0.0)
    clock = _forward(arrays, moments, out)
    _backward(arrays, moments, clock, out)
    out.time_s, out.stalls, out.compute = clock.now_s, clock.stalls, clock.compute
    out.host_bytes = int(arrays.nbytes[list(moments.copies)].sum()) if moments.copies else 0
    fill_memory(arrays, actions, out)
    return out


def _forward(arrays: Arrays, moments: Moments, out: Evaluation) -> Clock:
    """Run the forward; fills d2h of `out`."""
    sums, clock = arrays.forward_sum_s, Clock(1.0 + arrays.hardware.compute_slowdown_while_copying)
    nbytes, copies, late_s = arrays.nbytes, moments.copies, arrays.late_s
    done_s: list[float] = []
    running: deque[tuple[float, int]] = deque()
    inflight_bytes = settled = 0
    counts = dict(moments.settle)
    positions = sorted({0, arrays.forward_steps, *counts, *(arrays.produced_at[k] + 1 for k in copies)})
    for before, position in pairwise([0, *positions]):
        clock.run(sums[position] - sums[before])
        while len(done_s) < len(copies) and arrays.produced_at[copies[len(done_s)]] + 1 == position:
            index = copies[len(done_s)]
            if late_s:
                clock.stand(late_s, index, position - 1)
            start_s, end_s = clock.copy(arrays.d2h_s[index])
            done_s.append(end_s)
            out.d2h.append((start_s, end_s, index))
            running.append((done_s[-1], int(nbytes[index])))
            inflight_bytes += running[-1][1]
        while settled < counts.get(position, 0):
            clock.wait(done_s[settled], copies[settled], position - 1)
            settled += 1
        while running and running[0][0] <= clock.now_s:
            inflight_bytes -= running.popleft()[1]
        out.inflight_peak_bytes = max(out.inflight_peak_bytes, inflight_bytes)
    for index, until_s in zip(copies[settled:], done_s[settled:], strict=True):
        clock.wait(until_s, index, arrays.forward_steps - 1)
    clock.close()
    out.forward_end_s = clock.now_s
    return clock


def _backward(arrays: Arrays, moments: Moments, clock: Clock, out: Evaluation) -> None:
    """Run the backward; fills loads and h2d of `out`."""
    out.backward_sum_s = sums = arrays.backward_sum_s
    first, late_s = out.first, arrays.late_s
    drains = [(position, 0, -1) for position in moments.drains]
    starts = [(position, 1, index) for position, index in moments.reloads]
    waits = [(first[index], 2, index) for _, index in moments.reloads]
    done_s: dict[int, float] = {}
    before, newest = 0, -1
    for position, kind, index in sorted((*drains, *starts, *waits), key=lambda item: item[:2]):
        clock.run(sums[position] - sums[before])
        before = position
        if kind != 1:
            awaited = index if kind else newest
            if awaited >= 0:
                clock.wait(done_s[awaited], awaited, arrays.forward_steps + position)
            if kind and late_s:
                clock.owed.append((late_s, index, arrays.forward_steps + position))
            continue
        newest = index
        start_s, done_s[index] = clock.copy(arrays.h2d_s[index])
        out.h2d.append((start_s, done_s[index], index))
        out.loads.append((index, position, first[index]))
    clock.run(sums[arrays.backward_steps] - sums[before])
    clock.pay()
    clock.close()
