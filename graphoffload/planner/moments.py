"""When each step ends: from the compute time so far, the stalls, and the copies that run beside compute.

    work   |--f0--|--f1--|--f2--|            compute time alone, one mark a step
    wall   |--f0---|---f1---|xxxx|--f2--|    longer beside a copy, standing still in a stall

Only pictures look at these moments; solvers never need them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

Span = tuple[float, float]
_TOLERANCE = 1e-9


def wall_times_s(work_s: Sequence[float], compute: Sequence[Span], copies: Iterable[Span], factor: float) -> tuple[float, ...]:
    """The first moment by which so much compute is done, for each of `work_s`: a stall comes after what ends before it.

    Args:
        work_s: seconds of undisturbed compute, not falling.
        compute: stretches in which compute runs, in order. copies: stretches in which a copy does.
        factor: how much longer compute takes beside a copy, at least 1.0.
    """
    busy = _united(copies)
    edges = sorted({0.0, *(edge for span in (*compute, *busy) for edge in span)})
    done = [0.0]
    for start, end in pairwise(edges):
        middle = (start + end) / 2
        rate = (1.0 / factor if _inside(busy, middle) else 1.0) if _inside(compute, middle) else 0.0
        done.append(done[-1] + (end - start) * rate)
    if len(edges) < 2:
        return (0.0,) * len(work_s)
    work, sums, walls = np.asarray(work_s, dtype=np.float64), np.array(done), np.array(edges)
    right = np.clip(np.searchsorted(sums, work - _TOLERANCE * sums[-1]), 1, len(sums) - 1)
    gained = sums[right] - sums[right - 1]
    share = np.divide(work - sums[right - 1], gained, out=np.zeros_like(work), where=gained > 0)
    moments = walls[right - 1] + np.clip(share, 0.0, 1.0) * (walls[right] - walls[right - 1])
    return tuple(moments.tolist())


def _united(spans: Iterable[Span]) -> list[Span]:
    """Spans in order, those that touch as one."""
    united: list[Span] = []
    for start, end in sorted(spans):
        if united and start <= united[-1][1]:
            united[-1] = (united[-1][0], max(end, united[-1][1]))
        else:
            united.append((start, end))
    return united


def _inside(spans: Sequence[Span], moment: float) -> bool:
    at = bisect_right(spans, moment, key=lambda span: span[0]) - 1
    return at >= 0 and moment < spans[at][1]
