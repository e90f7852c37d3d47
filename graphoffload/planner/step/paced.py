"""Reloads that start where a call's backward starts, no more of them than are copied until it ends.

    backward    | call 2                  | call 1                  | call 0
    just in time     |== 1 ==|     |======|== 0 ==|                       call 1's end falls into a copy
    paced       |== 1 ==|           |==    0    ==|

Code between calls may copy to the device as well, as FSDP2's does. A GPU has one copy engine a direction, which takes copies in
the order in which they are ready. So compute waits between two calls for every reload that has started (decision 38). A copy
that starts with a call and is done before its end is in nobody's way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from graphoffload.planner.arrays import Arrays
from graphoffload.planner.prefetch import Again, first_free, less_displaced
from graphoffload.planner.simulator import Scheduled, Timeline
from graphoffload.planner.step.joint import Joined

_SHARES = (0.85, 1.0)


def paced_reloads(
    joined: Joined, just_in_time: Timeline, again: Again, arrays: Arrays, ends: Sequence[int], *, limit_bytes: int
) -> Iterator[Timeline]:
    """Timelines of the same actions with such reloads, done in 85 % of a call's backward and in all of it, where they are free.

    ends: where the backwards end, in order. Code between two calls begins there.
    A reload that finds no memory at the start of a call starts where it does. One that starts in a call just in time starts
    in it at the latest, whether it is done in it or not.
    """
    limit_bytes = less_displaced(joined.program, just_in_time, limit_bytes)
    order = sorted(just_in_time.schedule, key=lambda item: (item.wait_at, item.candidate))
    for share in _SHARES:
        places = _places(joined, just_in_time, order, arrays, ends, share, limit_bytes)
        if found := first_free(just_in_time, [again(places)], limit_bytes):
            yield found


def _places(
    joined: Joined,
    timeline: Timeline,
    order: Sequence[Scheduled],
    arrays: Arrays,
    ends: Sequence[int],
    share: float,
    limit_bytes: int,
) -> dict[int, int]:
    """By candidate, the backward step before which its reload is issued at the latest."""
    memory = np.array(timeline.memory[timeline.forward_steps :], dtype=np.int64)
    sums = arrays.backward_sum_s
    places: dict[int, int] = {}
    waiting = deque(order)
    for begin, end in zip(sorted(joined.backward_start), ends, strict=True):
        done_s, until_s = sums[begin], sums[begin] + share * (sums[end] - sums[begin])
        while waiting:
            item = waiting[0]
            nbytes, stays = int(arrays.nbytes[item.candidate]), item.reload_at
            full = np.flatnonzero(memory[begin:stays] + nbytes > limit_bytes)
            at = begin + int(full[-1]) + 1 if len(full) else min(begin, stays)
            done_s = max(done_s, sums[at]) + arrays.h2d_s[item.candidate]
            if done_s > until_s and stays >= end:
                break
            memory[at:stays] += nbytes
            places[item.candidate] = at
            waiting.popleft()
    return places
