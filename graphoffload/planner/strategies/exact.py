"""Exact search where assignments are few: bound all of them, then simulate them from the best bound until none can win.

    time   >= compute + recompute times + slowdown of compute under the copies     of candidates that backward itself needs
              + what the host is late for each of the copies                       while it stands still, nothing slows it down
    memory >= fixed + kept between its last uses + anything from its own first backward use to its last

Both bounds hold for every assignment: chains only make a first use earlier and a last use later, and stalls only add time. So
the search ends at the first bound that is no better than the best simulated score: best-first branch and bound on one level.
The result is optimal for an unbounded window.
"""

from __future__ import annotations

import numpy as np

from graphoffload.facts.plan import Action
from graphoffload.planner.arrays import Arrays, Floats, Ints
from graphoffload.planner.goals import Evaluator, MeetBudget, Proposal

_MOST = 60_000
_SHARE = 0.7


def search_exactly(evaluator: Evaluator) -> tuple[Proposal | None, bool]:
    """The best assignment and whether that is proven; (None, False) where there are too many."""
    arrays = evaluator.arrays
    choices = [candidate.actions for candidate in arrays.program.candidates]
    count = 1
    for choice in choices:
        count *= len(choice)
        if count > _MOST:
            return None, False
    index = _assignments([len(choice) for choice in choices], count)
    seconds, peaks, hosts = _bounds(arrays, choices, index)
    budget_goal = isinstance(evaluator.goal, MeetBudget)
    possible = peaks <= evaluator.limit_bytes if budget_goal else seconds <= evaluator.limit_s
    if evaluator.host_budget_bytes is not None:
        possible &= hosts <= evaluator.host_budget_bytes
    bound = seconds if budget_goal else peaks.astype(np.float64)
    wanted = np.flatnonzero(possible)
    wanted = wanted[np.lexsort((peaks[wanted] if budget_goal else seconds[wanted], bound[wanted]))]
    best: Proposal | None = None
    for position in wanted.tolist():
        if best is not None and best.feasible and bound[position] > best.score[1] * (1.0 + 1e-9):
            return best, True
        if evaluator.count > evaluator.budget * _SHARE:
            return best, False
        found = evaluator.propose([choice[int(i)] for choice, i in zip(choices, index[:, position], strict=True)], "exact")
        if best is None or found.score < best.score:
            best = found
    return best, best is not None and best.feasible


def _assignments(sizes: list[int], count: int) -> Ints:
    """All `count` assignments as columns, the last choice changing fastest. np.indices stops at 64 candidates."""
    index, rest = np.empty((len(sizes), count), dtype=np.int64), np.arange(count)
    for row in reversed(range(len(sizes))):
        rest, index[row] = np.divmod(rest, sizes[row])
    return index


def _bounds(arrays: Arrays, choices: list[tuple[Action, ...]], index: Ints) -> tuple[Floats, Ints, Ints]:
    """Least seconds, least peak and least host bytes of every assignment (a column of `index`)."""
    forward_steps, count = arrays.forward_steps, index.shape[1]
    slow = arrays.hardware.compute_slowdown_while_copying
    seconds, hosts = np.full(count, arrays.compute_s * (1.0 - 1e-9)), np.zeros(count, dtype=np.int64)
    lives: list[Ints] = []
    for k, choice in enumerate(choices):
        steps = np.zeros((len(choice), len(arrays.base_bytes)), dtype=np.int64)
        time_s = np.zeros(len(choice))
        host = np.zeros(len(choice), dtype=np.int64)
        if arrays.first_use[k] < arrays.backward_steps:
            for rank, action in enumerate(choice):
                end = forward_steps + (arrays.kept_until if action == "keep" else arrays.last_use)[k] + 1
                begin = arrays.last_forward_use[k] + 1 if action == "keep" else forward_steps + arrays.first_use[k]
                steps[rank, begin:end] = arrays.nbytes[k]
                time_s[rank] = arrays.recompute_s[k] if action == "recompute" else 0.0
                if action == "offload":
                    copied_s = arrays.d2h_s[k] + arrays.h2d_s[k]
                    time_s[rank] = (slow * copied_s + arrays.hardware.host_s_per_copy) / (1.0 + slow)
                    host[rank] = arrays.nbytes[k]
        lives.append(steps)
        seconds += time_s[index[k]]
        hosts += host[index[k]]
    return seconds, _peaks(arrays.base_bytes + arrays.workspace_bytes, lives, index), hosts


def _peaks(fixed: Ints, lives: list[Ints], index: Ints) -> Ints:
    """Largest column sums; steps in which the same tensors live are one column, with the largest fixed part."""
    stacked = np.concatenate([np.zeros((1, len(fixed)), dtype=np.int64), *lives])
    _, same = np.unique(stacked, axis=1, return_inverse=True)
    same = same.reshape(-1)
    peaks = np.zeros(index.shape[1], dtype=np.int64)
    for column in range(int(same.max(initial=-1)) + 1):
        steps = np.flatnonzero(same == column)
        total = np.full(index.shape[1], fixed[steps].max(), dtype=np.int64)
        for k, steps_of in enumerate(lives):
            if steps_of[:, steps[0]].any():
                total += steps_of[index[k], steps[0]]
        np.maximum(peaks, total, out=peaks)
    return peaks
