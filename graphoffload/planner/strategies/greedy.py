"""Greedy: recompute or offload the candidate that frees most memory-time above the target per second, then simulate again.

    gain  bytes x time of the steps above the target that the move vacates, no more bytes than a step is above it
    cost  recompute: its time, and the stall of an offloaded tensor it reads earlier
          offload: what the host is late for it, the slowdown of compute under both copies, and the copy time that does not
              hide: with O the offloaded,
              slack of D2H for k  = min over p <= produced_at(k) of  end of forward - end(p) - sum of D2H of {o in O: o >= p}
              slack of H2D for k  = min over j >= first use(k)   of  start(j) - sum of H2D of {o in O: first use <= j}

This is the greedy rule for knapsacks: the best ratio of gain and cost first. Bytes count only at the steps above the target.
Costs and gains are estimates on the timeline of the last evaluation. A batch covers half of the excess, so that an evaluation
is paid per halving and not per tensor. Greedy is wrong if two moves only pay together; local search finds those.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from graphoffload.facts.plan import Action
from graphoffload.planner.arrays import Arrays, Floats
from graphoffload.planner.goals import Evaluator
from graphoffload.planner.simulator import Evaluation

_FINE = 48
_ROUNDS = 60


class Prices:
    """Gain and cost of single moves on one evaluated timeline."""

    def __init__(self, arrays: Arrays, actions: Sequence[Action], result: Evaluation, target_bytes: int) -> None:
        self.arrays, self.actions, self.result = arrays, actions, result
        self.over_bytes: Floats = np.maximum(result.memory - target_bytes, 0).astype(np.float64)
        times = np.concatenate([arrays.forward_time_s, arrays.backward_time_s])
        self.times: Floats = times + times.mean()
        self.gain_sums: dict[int, Floats] = {}  # by size, over the steps before each
        self.nbytes: list[int] = arrays.nbytes.tolist()
        factor = arrays.hardware.compute_slowdown_while_copying
        self.drag = factor / (1.0 + factor)
        self.used_d2h_s = self.used_h2d_s = 0.0
        self._slacks()

    def _slacks(self) -> None:
        arrays, first = self.arrays, self.result.first
        copies_out_s, copies_in_s = np.zeros(arrays.forward_steps + 1), np.zeros(arrays.backward_steps + 1)
        for index, _, need in self.result.loads:
            copies_out_s[arrays.produced_at[index]] += arrays.d2h_s[index]
            copies_in_s[need] += arrays.h2d_s[index]
        queue = np.cumsum(copies_out_s[::-1])[::-1][:-1]
        room = arrays.forward_sum_s[-1] - np.cumsum(arrays.forward_time_s) - queue
        self.slack_d2h: Floats = np.minimum.accumulate(room)
        extra = np.zeros(arrays.backward_steps + 1)
        for index, _ in arrays.chains:
            if self.actions[index] == "recompute" and first[index] < arrays.backward_steps:
                extra[first[index] + 1 :][:1] += arrays.recompute_s[index]
        start = np.asarray(arrays.backward_sum_s) + np.cumsum(extra)
        late = start[:-1] - np.cumsum(copies_in_s)[:-1]
        self.slack_h2d: Floats = np.minimum.accumulate(late[::-1])[::-1]

    def _vacated(self, size: int, begin: int, end: int) -> float:
        if end <= begin:
            return 0.0
        sums = self.gain_sums.get(size)
        if sums is None:
            useful = np.minimum(self.over_bytes, size) * self.times
            sums = self.gain_sums[size] = np.concatenate([[0.0], np.cumsum(useful)])
        return float(sums[end] - sums[begin])

    def gain(self, index: int, action: Action) -> float:
        """Weighted byte-time that the move takes off the steps above the target."""
        arrays, forward_steps = self.arrays, self.arrays.forward_steps
        first, last, size = self.result.first[index], self.result.last[index], self.nbytes[index]
        begin = arrays.last_forward_use[index] + 1
        if action == "recompute":
            gain = self._vacated(size, begin, forward_steps + first)
            for read in self._reads(index):
                held = self.result.last[read]
                if first > held:
                    start = forward_steps + held + 1 if held >= 0 else arrays.last_forward_use[read] + 1
                    gain -= self._vacated(self.nbytes[read], start, forward_steps + first + 1)
            return gain
        produced = arrays.produced_at[index]
        done_s = arrays.forward_sum_s[produced + 1] + arrays.d2h_s[index]
        release = min(max(begin, bisect_left(arrays.forward_sum_s, done_s)), forward_steps)
        reload = bisect_right(arrays.backward_sum_s, arrays.backward_sum_s[first] - arrays.h2d_s[index]) - 1
        away = self._vacated(size, release, forward_steps + max(0, reload))
        return away - self._vacated(size, forward_steps + first, forward_steps + last)

    def _reads(self, index: int) -> tuple[int, ...]:
        recompute = self.arrays.program.candidates[index].recompute
        return recompute.reads if recompute else ()

    def cost(self, index: int, action: Action) -> float:
        """Time that the move adds, as long as nothing else moves."""
        arrays, first = self.arrays, self.result.first[index]
        if action == "recompute":
            cost = float(arrays.recompute_s[index])
            for read in self._reads(index):
                if self.actions[read] == "offload" and self.result.first[read] > first:
                    cost += max(0.0, arrays.h2d_s[read] - max(0.0, float(self.slack_h2d[first])))
            return cost
        d2h_s, h2d_s = arrays.d2h_s[index], arrays.h2d_s[index]
        late_d2h = d2h_s - max(0.0, float(self.slack_d2h[arrays.produced_at[index]]) - self.used_d2h_s)
        late_h2d = h2d_s - max(0.0, float(self.slack_h2d[first]) - self.used_h2d_s)
        host_s = arrays.hardware.host_s_per_copy
        return host_s + self.drag * (d2h_s + h2d_s) + max(0.0, late_d2h) + max(0.0, late_h2d)


def greedy_moves(
    evaluator: Evaluator,
    actions: Sequence[Action],
    target_bytes: int,
    *,
    allowed: Sequence[Action] = ("offload", "recompute"),
    limit_s: float = float("inf"),
    barred: frozenset[int] = frozenset(),
) -> tuple[Action, ...]:
    """Actions with a peak of at most `target_bytes`, or as near as single moves get at a time of at most `limit_s`.

    `barred`: candidates that stay as they are.
    """
    arrays = evaluator.arrays
    state = list(actions)
    fine = len(state) <= _FINE
    best: tuple[Action, ...] = tuple(state)
    best_peak = evaluator.evaluate(state)[0].peak_bytes
    for _ in range(4 * _FINE if fine else _ROUNDS):
        result = evaluator.evaluate(state)[0]
        if result.peak_bytes <= best_peak and result.time_s <= limit_s:
            best, best_peak = tuple(state), result.peak_bytes
        if result.peak_bytes <= target_bytes or result.time_s > limit_s or evaluator.exhausted:
            break
        most = 1 if fine else len(state)
        if not _batch(arrays, state, result, target_bytes, allowed, most, evaluator.host_budget_bytes, barred):
            break
    return best


def _batch(
    arrays: Arrays,
    state: list[Action],
    result: Evaluation,
    target_bytes: int,
    allowed: Sequence[Action],
    most: int,
    host_budget_bytes: int | None,
    barred: frozenset[int],
) -> int:
    """Apply the best moves until they free half of the excess at the peak. Returns their number."""
    prices = Prices(arrays, state, result, target_bytes)
    host_left = float("inf") if host_budget_bytes is None else host_budget_bytes - result.host_bytes
    heap: list[tuple[float, int, Action, float]] = []
    for index, candidate in enumerate(arrays.program.candidates):
        if state[index] != "keep" or index in barred or result.first[index] >= arrays.backward_steps:
            continue
        for action in candidate.actions:
            if action in allowed and (gain := prices.gain(index, action)) > 0.0:
                heap.append((prices.cost(index, action) / gain, index, action, gain))
    heapq.heapify(heap)
    need_bytes, moved = (result.peak_bytes - target_bytes) / 2, 0
    while heap and moved < most and (need_bytes > 0 or not moved):
        ratio, index, action, gain = heapq.heappop(heap)
        if state[index] != "keep" or (action == "offload" and prices.nbytes[index] > host_left):
            continue
        now = prices.cost(index, action) / gain
        if heap and now > ratio and now > heap[0][0]:
            heapq.heappush(heap, (now, index, action, gain))
            continue
        state[index] = action
        moved += 1
        need_bytes -= prices.nbytes[index]
        if action == "offload":
            host_left -= prices.nbytes[index]
            prices.used_d2h_s += arrays.d2h_s[index]
            prices.used_h2d_s += arrays.h2d_s[index]
    return moved
