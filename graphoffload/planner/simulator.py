"""The simulator: time and memory of a set of actions. Every solver, the report and the schedule use this one model.

    compute  |f0|f1|f2|f3|stall|   b0|b1|wait|b2|b3|
    D2H         [=f0==][=f1==]                            FIFO, issued when the tensor is produced
    H2D                          [==f1==][==f0==]         FIFO, issued as late as still in time
    memory of f0: ######......            ###########     from f0 to its release, from its reload to its last use

The model, exactly:

* A D2H copy is issued after `produced_at` and runs after all earlier ones. Its source is released after the first forward
  step by whose end the copy is done and the last forward use past. What is not done by the end of the forward is waited for
  there (`release_at` is None). Hence no D2H copy overlaps an H2D copy of the same program, and each
  direction has its full rate; for traffic from elsewhere there is `HardwareProfile.scaled`.
* More than `max_inflight_bytes` outstanding: compute waits for the oldest copy, repeatedly; one copy alone is always allowed.
* A reload's first use is the first consumer that must run: its own backward uses, or a recompute chain that reads it. From
  the last use to the first, each copy ends no later than its need and than the next one's start; it is issued before the
  backward step that runs at that moment. Need times are those of compute without stalls or slowdown: early rather than late.
  Where the channel runs late, a reload is issued at the last step that starts before the channel is free for it. So its
  memory is taken when its copy can run and not before, and no copy starts later for it. A reload that cannot run between two
  steps (`Program.reload_steps`) takes its memory before both. Time is counted as if it could.
* A recompute chain runs right before the first use of what it makes, after the chains of what it reads.
* Compute that overlaps a copy takes (1 + compute_slowdown_while_copying) times as long.
* Compute stands still for half of `host_s_per_copy` where a copy is issued, and where compute waits for its way back.
Capuchin (Peng et al., ASPLOS 2020) adjusts a reload's place, its in-trigger, by feedback at run time; here it is computed.
Wrong when: the host cannot issue kernels as fast as the device runs them; the allocator fragments; kernels overlap each other.
Cost: O(candidates log steps) plus a few vector operations over the steps.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from graphoffload.errors import PlanError
from graphoffload.facts.plan import Action
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.planner.arrays import Arrays, Ints, arrays_of, needs
from graphoffload.planner.clock import TIME_EPSILON_S, Clock
from graphoffload.planner.moments import wall_times_s
from graphoffload.planner.problem import Program

_NONE: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Stall:
    """Compute waited for `candidate`'s copy before (forward: after) step `where`."""

    candidate: str
    where: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Positions of one transfer; offload_at and release_at are forward steps, reload_at and wait_at backward steps.

    offload after `offload_at`; release after `release_at` (None: at the end of the forward); reload before `reload_at`;
    wait before `wait_at`.
    """

    candidate: int
    offload_at: int
    release_at: int | None
    reload_at: int
    wait_at: int


@dataclass(frozen=True, slots=True)
class Interval:
    """A stretch of a lane for drawing; `candidate` is None for compute."""

    start_s: float
    end_s: float
    candidate: int | None = None


@dataclass(frozen=True, slots=True)
class Lanes:
    """What ran when. Gaps in `compute` are stalls; `forward_end_s` is where backward starts."""

    compute: tuple[Interval, ...]
    d2h: tuple[Interval, ...]
    h2d: tuple[Interval, ...]
    forward_end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What one forward and backward with these actions is predicted to do. Bytes include static ones, not the reserve."""

    time_s: float
    keep_time_s: float
    stalls: tuple[Stall, ...]
    peak_bytes: int
    peak_step: int
    memory: tuple[int, ...]
    schedule: tuple[Scheduled, ...]
    lanes: Lanes
    host_bytes: int
    inflight_peak_bytes: int
    recompute_s: float
    ends_s: tuple[float, ...] = ()  # of each step: `memory` against time
    forward_steps: int = 0

    @property
    def slowdown(self) -> float:
        """Extra time relative to keep-all: 0.02 is 2 %."""
        return self.time_s / self.keep_time_s - 1.0 if self.keep_time_s else 0.0

    @property
    def stall_s(self) -> float:
        """All waiting of compute for copies, and for the host where it is late for them."""
        return sum(stall.seconds for stall in self.stalls)


@dataclass(slots=True)
class Evaluation:
    """Result of `evaluate`: what solvers look at, and the raw parts of a Timeline."""

    time_s: float
    peak_bytes: int
    peak_step: int
    host_bytes: int
    memory: Ints
    stalls: list[tuple[int, int, float]]
    first: list[int]
    last: list[int]
    release: dict[int, int | None]
    loads: list[tuple[int, int, int]]
    d2h: list[tuple[float, float, int]]
    h2d: list[tuple[float, float, int]]
    compute: list[tuple[float, float]]
    forward_end_s: float
    inflight_peak_bytes: int
    recompute_s: float
    backward_sum_s: list[float] = field(default_factory=list)


def _forward(arrays: Arrays, copies: list[int], max_inflight_bytes: int | None, out: Evaluation) -> Clock:
    """Run the forward; fills release and d2h of `out`."""
    sums, clock = arrays.forward_sum_s, Clock(1.0 + arrays.hardware.compute_slowdown_while_copying)
    nbytes, last_use, late_s = arrays.nbytes, arrays.last_forward_use, arrays.late_s
    queue: deque[tuple[float, int]] = deque()
    done_steps = inflight_bytes = 0

    def advance(end: int) -> None:
        nonlocal done_steps, inflight_bytes
        start_s = clock.now_s
        clock.run(sums[end] - sums[done_steps])
        while queue and queue[0][0] <= clock.now_s + TIME_EPSILON_S:
            done_s, index = queue.popleft()
            work_s = sums[done_steps] + max(0.0, done_s - start_s) / clock.factor - TIME_EPSILON_S
            position = min(bisect_left(sums, work_s, min(done_steps + 1, end), end), end) - 1
            out.release[index] = max(position, last_use[index], arrays.produced_at[index])
            inflight_bytes -= int(nbytes[index])
        done_steps = end

    for index in copies:
        position = arrays.produced_at[index]
        advance(position + 1)
        if late_s:
            clock.stand(late_s, index, position)
        start_s, done_s = clock.copy(arrays.d2h_s[index])
        out.d2h.append((start_s, done_s, index))
        queue.append((done_s, index))
        inflight_bytes += int(nbytes[index])
        while max_inflight_bytes is not None and inflight_bytes > max_inflight_bytes and len(queue) > 1:
            done_s, oldest = queue.popleft()
            clock.wait(done_s, oldest, position)
            out.release[oldest] = max(position, last_use[oldest])
            inflight_bytes -= int(nbytes[oldest])
        out.inflight_peak_bytes = max(out.inflight_peak_bytes, inflight_bytes)
    advance(arrays.forward_steps)
    for done_s, index in queue:
        out.release[index] = None
        clock.wait(done_s, index, arrays.forward_steps - 1)
    clock.close()
    out.forward_end_s = clock.now_s
    return clock


def _backward(
    arrays: Arrays, actions: Sequence[Action], copies: list[int], reload_by: Mapping[int, int], clock: Clock, out: Evaluation
) -> None:
    """Place the reloads and run the backward; fills loads and h2d of `out`."""
    first, steps, sums = out.first, arrays.backward_steps, arrays.backward_sum_s
    again = [k for k, _ in arrays.chains if actions[k] == "recompute" and first[k] < steps]
    if again:
        times = arrays.backward_time_s.copy()
        np.add.at(times, [first[k] for k in again], arrays.recompute_s[again])
        out.recompute_s = float(arrays.recompute_s[again].sum())
        sums = [0.0, *np.cumsum(times).tolist()]
    out.backward_sum_s = sums
    latest, next_start_s = dict[int, int](), float("inf")
    order = sorted(copies, key=lambda k: (first[k], k))
    for index in reversed(order):
        next_start_s = min(sums[first[index]], next_start_s) - arrays.h2d_s[index]
        latest[index] = max(0, bisect_right(sums, next_start_s + TIME_EPSILON_S, 0, first[index] + 1) - 1)
        latest[index] = min(latest[index], reload_by.get(index, latest[index]))
    done_steps, waited, late_s = 0, 0, arrays.late_s
    done_s: list[float] = []

    def wait_for_next() -> None:
        nonlocal done_steps, waited
        need = first[order[waited]]
        clock.run(sums[need] - sums[done_steps])
        done_steps = need
        clock.wait(done_s[waited], order[waited], arrays.forward_steps + need)
        if late_s:
            clock.owed.append((late_s, order[waited], arrays.forward_steps + need))
        waited += 1

    for rank, index in enumerate(order):
        by, need = latest[index], first[index]
        while True:
            busy_s = clock.busy_until_s - clock.now_s
            work_s = busy_s / clock.factor + TIME_EPSILON_S if busy_s > 0.0 else TIME_EPSILON_S
            position = bisect_right(sums, sums[done_steps] + work_s, done_steps) - 1
            position = min(position if position > by else by, need)
            if waited == rank or first[order[waited]] > position:
                break
            wait_for_next()
        clock.run(sums[position] - sums[done_steps])
        done_steps = position
        start_s, end_s = clock.copy(arrays.h2d_s[index])
        done_s.append(end_s)
        out.h2d.append((start_s, end_s, index))
        out.loads.append((index, arrays.reload_steps[position], first[index]))
    while waited < len(order):
        wait_for_next()
    clock.run(sums[steps] - sums[done_steps])
    clock.pay()
    clock.close()


def fill_memory(arrays: Arrays, actions: Sequence[Action], out: Evaluation) -> None:
    """The memory curve; fills memory, peak_bytes and peak_step of `out`."""
    forward_steps, never = arrays.forward_steps, arrays.backward_steps
    starts: list[int] = []
    ends: list[int] = []
    owners: list[int] = []
    workspace, after_last = arrays.workspace_bytes, arrays.last_forward_use
    reload_at = {index: position for index, position, _ in out.loads}
    copied = False
    for index, action in enumerate(actions):
        first, last = out.first[index], out.last[index]
        if first >= never:
            continue
        owners.append(index)
        ends.append(forward_steps + last + 1)
        if action == "keep":
            starts.append(after_last[index] + 1)
        elif action == "recompute":
            starts.append(forward_steps + first)
            if not copied:
                workspace, copied = workspace.copy(), True
            workspace[forward_steps + first] = max(workspace[forward_steps + first], arrays.temp_bytes[index])
        else:
            starts.append(forward_steps + reload_at[index])
            owners.append(index)
            starts.append(after_last[index] + 1)
            release = out.release[index]
            ends.append((forward_steps - 1 if release is None else release) + 1)
    change = np.zeros(len(arrays.base_bytes) + 1, dtype=np.int64)
    sizes = arrays.nbytes[owners]
    np.add.at(change, starts, sizes)
    np.subtract.at(change, ends, sizes)
    out.memory = arrays.base_bytes + np.cumsum(change)[:-1] + workspace
    if len(out.memory):
        out.peak_step = int(out.memory.argmax())
        out.peak_bytes = int(out.memory[out.peak_step])


def evaluate(
    arrays: Arrays, actions: Sequence[Action], *, max_inflight_bytes: int | None = None, reload_by: Mapping[int, int] = _NONE
) -> Evaluation:
    """As `simulate`, without checks and without the parts that only people read."""
    first, last = needs(arrays, actions)
    out = Evaluation(0.0, 0, 0, 0, arrays.base_bytes, [], first, last, {}, [], [], [], [], 0.0, 0, 0.0)
    copies = [k for k in arrays.production_order if actions[k] == "offload" and first[k] < arrays.backward_steps]
    clock = _forward(arrays, copies, max_inflight_bytes, out)
    _backward(arrays, actions, copies, reload_by, clock, out)
    out.time_s, out.stalls, out.compute = clock.now_s, clock.stalls, clock.compute
    out.host_bytes = int(arrays.nbytes[copies].sum()) if copies else 0
    fill_memory(arrays, actions, out)
    return out


def simulate(
    program: Program,
    actions: Sequence[Action],
    hardware: HardwareProfile,
    *,
    max_inflight_bytes: int | None = None,
    reload_by: Mapping[int, int] = _NONE,
) -> Timeline:
    """Time, memory, stalls and schedule of one forward and backward. See the module's text for the model.

    Args:
        actions: one a candidate, by index.
        max_inflight_bytes: bytes being copied to the host before compute waits; None: no limit.
        reload_by: of some candidates, the backward step before which their reload is issued at the latest; it buys safety with
            memory.

    Raises:
        PlanError: wrong number of actions, or one that its candidate cannot do.
    """
    if len(actions) != len(program.candidates):
        raise PlanError(f"{len(actions)} actions for {len(program.candidates)} candidates; give one each, in order.")
    for candidate, action in zip(program.candidates, actions, strict=True):
        possible = action == "keep" or (candidate.can_offload if action == "offload" else candidate.recompute is not None)
        if not possible:
            raise PlanError(f"candidate {candidate.name!r} cannot {action}; it allows {', '.join(candidate.actions)}.")
    arrays = arrays_of(program, hardware)
    result = evaluate(arrays, actions, max_inflight_bytes=max_inflight_bytes, reload_by=reload_by)
    return timeline_of(arrays, result)


def timeline_of(arrays: Arrays, result: Evaluation) -> Timeline:
    """An Evaluation in the form that people and the report read."""
    program, names = arrays.program, [candidate.name for candidate in arrays.program.candidates]

    def lane(intervals: list[tuple[float, float, int]]) -> tuple[Interval, ...]:
        return tuple(Interval(*interval) for interval in intervals)

    return Timeline(
        time_s=result.time_s,
        keep_time_s=arrays.compute_s,
        stalls=tuple(Stall(names[k], program.step_name(where), seconds) for k, where, seconds in result.stalls),
        peak_bytes=result.peak_bytes,
        peak_step=result.peak_step,
        memory=tuple(result.memory.tolist()),
        schedule=tuple(
            Scheduled(k, arrays.produced_at[k], result.release[k], reload_at, wait_at) for k, reload_at, wait_at in result.loads
        ),
        lanes=Lanes(tuple(Interval(a, b) for a, b in result.compute), lane(result.d2h), lane(result.h2d), result.forward_end_s),
        host_bytes=result.host_bytes,
        inflight_peak_bytes=result.inflight_peak_bytes,
        recompute_s=result.recompute_s,
        ends_s=_ends_s(arrays, result),
        forward_steps=arrays.forward_steps,
    )


def _ends_s(arrays: Arrays, result: Evaluation) -> tuple[float, ...]:
    """When each step ends."""
    forward_s = arrays.forward_sum_s[-1]
    work_s = [*arrays.forward_sum_s[1:], *(forward_s + done_s for done_s in result.backward_sum_s[1:])]
    copies = ((start_s, end_s) for start_s, end_s, _ in (*result.d2h, *result.h2d))
    return wall_times_s(work_s, result.compute, copies, 1.0 + arrays.hardware.compute_slowdown_while_copying)
