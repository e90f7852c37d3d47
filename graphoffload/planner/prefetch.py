"""Slack: reloads a little earlier and releases a little later than just in time, where memory is free.

    just in time   |==x==|use          earlier |==x==|....|use       as far as `PREFETCH_SHARES` of the step and the memory
                   |==x==|release      later   |==x==|....|release   limit allow

Predictions are off by a few percent, and GPUs share links: with slack, a copy that runs late is still in time. Actions and
predicted time stay the same. Capuchin (Peng et al., ASPLOS 2020) moves a prefetch earlier if its copy was late in a running
step; here the distance is fixed before the step runs.

A compiler may run a reload a few kernels before its place. So room for the two largest transfers is left. Without it, measured
peaks of some plans were one or two tensors above the predicted ones.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np

from graphoffload.planner.problem import Program
from graphoffload.planner.simulator import Timeline

PREFETCH_SHARES = (0.02, 0.01, 0.005)
"""Shares of keep-all's time by which reloads move earlier: the first that costs nothing is taken. Releases use the first."""
_FREE = 1.0005
_DISPLACED = 2


Again = Callable[[Mapping[int, int]], Timeline]
"""Simulates the same actions, each reload issued at the latest before a backward step, by candidate."""


def with_slack(program: Program, just_in_time: Timeline, again: Again, *, limit_bytes: int, late: bool = True) -> Timeline:
    """Both, at a peak of at most `limit_bytes`; releases stay where they are unless `late`."""
    ahead = prefetch_reloads(program, just_in_time, again, limit_bytes=limit_bytes)
    return release_later(program, ahead, limit_bytes=limit_bytes) if late else ahead


def prefetch_reloads(program: Program, just_in_time: Timeline, again: Again, *, limit_bytes: int) -> Timeline:
    """The timeline of the same actions with earlier reloads, at a peak of at most `limit_bytes` and without costing time."""
    if not just_in_time.schedule:
        return just_in_time
    limit_bytes = less_displaced(program, just_in_time, limit_bytes)
    places = (
        _places(program, just_in_time, share * just_in_time.keep_time_s, limit_bytes) for share in PREFETCH_SHARES
    )
    return first_free(just_in_time, map(again, places), limit_bytes) or just_in_time


def first_free(just_in_time: Timeline, found: Iterable[Timeline], limit_bytes: int) -> Timeline | None:
    """The first that takes no more time, and no more memory than the limit or than what just in time takes."""
    highest = max(limit_bytes, just_in_time.peak_bytes)
    free = (one for one in found if one.peak_bytes <= highest and one.time_s <= just_in_time.time_s * _FREE)
    return next(free, None)


def release_later(program: Program, timeline: Timeline, *, limit_bytes: int) -> Timeline:
    """The same timeline with releases later, at a peak of at most `limit_bytes`, or as it is.

    Compute waits for the copy at a release, and only memory needs that: just in time, a copy that is slower than predicted
    costs time.
    """
    if not timeline.schedule:
        return timeline
    limit_bytes = less_displaced(program, timeline, limit_bytes)
    memory = np.array(timeline.memory, dtype=np.int64)
    forward_ends_s = timeline.ends_s[: timeline.forward_steps]
    later: dict[int, int] = {}
    for item in sorted(timeline.schedule, key=lambda item: (item.release_at is None, item.release_at or 0, item.candidate)):
        if item.release_at is None:
            continue
        nbytes, at = program.candidates[item.candidate].nbytes, item.release_at
        wanted = bisect_left(forward_ends_s, forward_ends_s[at] + PREFETCH_SHARES[0] * timeline.keep_time_s, at)
        wanted = min(wanted, len(forward_ends_s) - 1)
        full = np.flatnonzero(memory[at + 1 : wanted + 1] + nbytes > limit_bytes)
        later[item.candidate] = at + int(full[0]) if len(full) else wanted
        memory[at + 1 : later[item.candidate] + 1] += nbytes
    schedule = tuple(replace(item, release_at=later.get(item.candidate, item.release_at)) for item in timeline.schedule)
    peak_step = int(memory.argmax())
    return replace(
        timeline, schedule=schedule, memory=tuple(memory.tolist()), peak_step=peak_step, peak_bytes=int(memory[peak_step])
    )


def less_displaced(program: Program, timeline: Timeline, limit_bytes: int) -> int:
    """The limit, less room for what a compiler runs a few kernels before its place."""
    return limit_bytes - _DISPLACED * max(program.candidates[item.candidate].nbytes for item in timeline.schedule)


def _places(program: Program, timeline: Timeline, ahead_s: float, limit_bytes: int) -> dict[int, int]:
    """By candidate, the backward step before which its reload is issued at the latest; in the order of their copies."""
    forward_steps = timeline.forward_steps
    memory = np.array(timeline.memory[forward_steps:], dtype=np.int64)
    starts_s = timeline.ends_s[forward_steps - 1 : -1] if forward_steps else (0.0, *timeline.ends_s[:-1])
    places: dict[int, int] = {}
    earliest = 0
    for item in sorted(timeline.schedule, key=lambda item: (item.reload_at, item.wait_at)):
        nbytes, at = program.candidates[item.candidate].nbytes, item.reload_at
        wanted = bisect_right(starts_s, starts_s[at] - ahead_s, 0, at) - 1 if at < len(starts_s) else at
        wanted = max(wanted, earliest, 0)
        full = np.flatnonzero(memory[wanted:at] + nbytes > limit_bytes)
        earliest = wanted + int(full[-1]) + 1 if len(full) else min(wanted, at)
        memory[earliest:at] += nbytes
        places[item.candidate] = earliest
    return places
