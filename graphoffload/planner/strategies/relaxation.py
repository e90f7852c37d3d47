"""The LP relaxation: a lower bound on every plan, and fractions that a solver can round.

Variables per class of candidates (count c, bytes n, copies d and h, recompute time r): O, R offloaded and recomputed, N needed
in backward (c when backward uses them, else at least R of each class whose chains read them); O + R <= N <= c.
Tf, Tb: length of forward and backward; E(g): when forward step g starts; M: peak. With s' = s / (1 + s), s the slowdown, and
l what the host is late at each end of a transfer, while compute stands still and is not slowed down:

    Tf >= end(p) + sum of d O {produced after p} + sum of (s' d + (1 - s') l) O {the others}    copies follow production
    Tb >= sum of h O {first use by j} + rest(j) + r R {first use after j} + sum of (s' h + (1 - s') l) O {the others}
    Tf >= E(g) + rest(g), E(g) >= start(g)
    M  >= fixed(g) + n (N - O - R) {alive at g} + n (O or R) {in use at g} + what D2H cannot have copied by E(g)
       and n O alone {in use at g, if a kernel writes over those that are kept}
    minimise Tf + Tb with M <= budget, or M with Tf + Tb <= limit

The bound is sound, since each line holds for the 0/1 values of any actions and the timeline that the simulator makes of them.
Rows are added where the solution breaks them most (Kelley's cutting planes), for a few rounds: fewer rows only lower the bound.

Checkmate (Jain et al., MLSys 2020) relaxes its integer program as well. Its variables are a tensor and a step, and it derives
the recomputations from the rounded choice of saved tensors. Here the variables are an action and a class of equal tensors, and
the order of the steps is given.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graphoffload.planner.arrays import Arrays, Floats
from graphoffload.planner.goals import Goal, MeetBudget
from graphoffload.planner.strategies.folds import Fold, fold

_ROUNDS = 10
_TOLERANCE = 1e-6


@dataclass(slots=True)
class Relaxed:
    """Optimum of the relaxation: the bound, and how many of each class are offloaded and recomputed; None: no plan exists."""

    value: float | None
    classes: list[Fold]
    offload: Floats
    recompute: Floats


class _Rows:
    """Sparse rows a.x <= b, each scaled to a largest entry of 1, so that the solver's tolerance means the same in all."""

    def __init__(self) -> None:
        self.data: list[float] = []
        self.columns: list[int] = []
        self.starts: list[int] = [0]
        self.right: list[float] = []

    def add(self, entries: dict[int, float], right: float) -> None:
        """One row."""
        scale = max((abs(v) for v in entries.values()), default=1.0) or 1.0
        for column, value in entries.items():
            if value:
                self.columns.append(column)
                self.data.append(value / scale)
        self.starts.append(len(self.columns))
        self.right.append(right / scale)


class Relaxation:
    """The LP of one instance and goal. Times in units of keep-all's, bytes of all there are: LP solvers like numbers near 1."""

    def __init__(self, arrays: Arrays, goal: Goal, host_budget_bytes: int | None, limit_s: float) -> None:
        self.arrays, self.goal, self.limit_s = arrays, goal, limit_s
        self.classes = fold(arrays)
        count = len(self.classes)
        self.o, self.r, self.n = range(count), range(count, 2 * count), range(2 * count, 3 * count)
        self.tf, self.tb, self.m = 3 * count, 3 * count + 1, 3 * count + 2
        self.columns = 3 * count + 3
        self.bounds: list[tuple[float, float | None]] = []
        self.rows = _Rows()
        self.seen_forward: set[int] = set()
        self.seen_backward: set[int] = set()
        self.seen_memory: set[int] = set()
        slow = arrays.hardware.compute_slowdown_while_copying
        self.drag = slow / (1.0 + slow)
        self.out_s = [self.drag * c.d2h_s + (1.0 - self.drag) * arrays.late_s for c in self.classes]
        self.back_s = [self.drag * c.h2d_s + (1.0 - self.drag) * arrays.late_s for c in self.classes]
        others = sum(c.recompute_s + c.d2h_s + c.h2d_s for c in self.classes)
        self.unit_s = arrays.compute_s or others or 1.0
        self.unit_bytes = float(
            max(1, int((arrays.base_bytes + arrays.workspace_bytes).max(initial=1)), int(arrays.nbytes.sum()))
        )
        self.elapsed: dict[int, int] = {}
        self._fixed_rows(host_budget_bytes)

    def _fixed_rows(self, host_budget_bytes: int | None) -> None:
        classes, arrays, rows = self.classes, self.arrays, self.rows
        self.bounds = [(0.0, float(c.count) if c.can_offload else 0.0) for c in classes]
        self.bounds += [(0.0, float(c.count) if c.can_recompute else 0.0) for c in classes]
        self.bounds += [(float(c.count) if c.own_use else 0.0, float(c.count)) for c in classes]
        top = self.goal.device_budget_bytes - arrays.program.reserve_bytes if isinstance(self.goal, MeetBudget) else None
        if top is not None and top < 0:
            top = 0
        self.bounds += [(0.0, None), (0.0, None), (0.0, None if top is None else top / self.unit_bytes)]
        owner = {k: index for index, c in enumerate(classes) for k in c.members}
        for index, c in enumerate(classes):
            rows.add({self.o[index]: 1.0, self.r[index]: 1.0, self.n[index]: -1.0}, 0.0)
            if not c.can_keep:
                rows.add({self.o[index]: -1.0, self.r[index]: -1.0, self.n[index]: 1.0}, 0.0)
            self._need_rows(index, owner)
        copies = {self.o[i]: float(c.nbytes) for i, c in enumerate(classes)}
        if host_budget_bytes is not None and copies:
            rows.add(copies, float(host_budget_bytes))
        self._plain_times()
        if top is None:
            rows.add({self.tf: 1.0, self.tb: 1.0}, self.limit_s / self.unit_s)

    def _need_rows(self, index: int, owner: dict[int, int]) -> None:
        """What a chain of class `index` reads is needed once it runs. One read a member and class, and it must be its own."""
        fold, linked = self.classes[index], dict[int, list[int]]()
        for k in fold.members if fold.can_recompute else ():
            recompute, seen = self.arrays.program.candidates[k].recompute, set()
            for read in recompute.reads if recompute else ():
                target = owner.get(read, -1)
                if target >= 0 and target not in seen and not self.classes[target].own_use:
                    seen.add(target)
                    linked.setdefault(target, []).append(read)
        for target, reads in linked.items():
            if len(set(reads)) == len(reads):
                self.rows.add({self.r[index]: 1.0, self.n[target]: -1.0}, float(fold.count - len(reads)))
            elif self.classes[target].count == 1:
                self.rows.add({self.r[index]: 1.0, self.n[target]: -float(len(reads))}, float(fold.count - len(reads)))

    def _plain_times(self) -> None:
        arrays, unit = self.arrays, self.unit_s
        forward = {self.o[i]: seconds / unit for i, seconds in enumerate(self.out_s)}
        self.rows.add({**forward, self.tf: -1.0}, -arrays.forward_sum_s[-1] / unit)
        backward = {self.o[i]: seconds / unit for i, seconds in enumerate(self.back_s)}
        backward |= {self.r[i]: c.recompute_s / unit for i, c in enumerate(self.classes)}
        self.rows.add({**backward, self.tb: -1.0}, -float(arrays.backward_time_s.sum()) / unit)

    def cut_forward(self, position: int) -> None:
        """Copies of what is produced at `position` or later follow its end."""
        row = {self.tf: -1.0}
        for i, c in enumerate(self.classes):
            before_s = self.out_s[i] if c.produced[-1] < position else self.drag * c.d2h_s
            row[self.o[i]] = (c.d2h_s if c.produced[0] >= position else before_s) / self.unit_s
        self.rows.add(row, -self.arrays.forward_sum_s[position + 1] / self.unit_s)

    def cut_backward(self, position: int) -> None:
        """Copies of what is used first by `position` come before it; recomputation for later steps after it."""
        row = {self.tb: -1.0}
        for i, c in enumerate(self.classes):
            after_s = self.back_s[i] if c.early_first > position else self.drag * c.h2d_s
            row[self.o[i]] = (c.h2d_s if c.late_first <= position else after_s) / self.unit_s
            if c.early_first >= position:
                row[self.r[i]] = c.recompute_s / self.unit_s
        self.rows.add(row, -float(self.arrays.backward_time_s[position:].sum()) / self.unit_s)

    def cut_memory(self, step: int) -> None:
        """Memory at one global step."""
        arrays, forward_steps = self.arrays, self.arrays.forward_steps
        constant = float(arrays.base_bytes[step] + arrays.workspace_bytes[step])
        row: dict[int, float] = {self.m: -self.unit_bytes}
        waiting: dict[int, float] = {}
        for i, c in enumerate(self.classes):
            if step < forward_steps:
                alive = sum(last < step for last in c.last_forward)
                if alive == c.count and c.can_offload:
                    waiting[self.o[i]] = float(c.nbytes)
            elif c.own_use:
                alive = sum(forward_steps + last >= step for last in c.kept_until)
                first, last = forward_steps + max(c.own_first), forward_steps + min(c.own_last)
                if not alive and c.can_offload and first <= step <= last:  # a kept one is written over, a reloaded one is not
                    row[self.o[i]] = float(c.nbytes)
            else:
                alive = c.count if step <= forward_steps + c.early_first else 0
            if not alive or 2 * alive < c.count:
                continue
            used = c.own_use and alive == c.count and step >= forward_steps + max(c.own_first)
            if not used:
                row[self.o[i]] = row[self.r[i]] = -float(c.nbytes)
            row[self.n[i]] = float(c.nbytes)
            constant -= float(c.nbytes) * (c.count - alive)
        if any(waiting.values()):
            self._in_flight(step, row, waiting)
        for column in row:
            row[column] /= self.unit_bytes
        self.rows.add(row, -constant / self.unit_bytes)

    def _in_flight(self, step: int, row: dict[int, float], waiting: dict[int, float]) -> None:
        """Bytes that cannot have been copied when `step` starts: a variable in the memory row, at least 0."""
        arrays, sums = self.arrays, self.arrays.forward_sum_s
        rate = max(c.nbytes / c.d2h_s for c in self.classes if c.d2h_s > 0)
        begin_s = sums[min(c.produced[0] for c in self.classes if c.can_offload) + 1]
        elapsed, queued = self.columns, self.columns + 1
        self.columns += 2
        self.bounds += [(sums[step] / self.unit_s, None), (0.0, None)]
        self.elapsed[step] = elapsed
        self.rows.add({elapsed: 1.0, self.tf: -1.0}, -(sums[arrays.forward_steps] - sums[step]) / self.unit_s)
        scale = self.unit_bytes
        limit = {column: nbytes / scale for column, nbytes in waiting.items()}
        self.rows.add({**limit, elapsed: -rate * self.unit_s / scale, queued: -1.0}, -rate * begin_s / scale)
        row[queued] = scale

    def solve(self) -> Relaxed:
        """Cutting planes; the value is valid after any number of rounds."""
        from scipy.optimize import linprog  # late: a second to import, and a plan that needs no bound has none
        from scipy.sparse import csr_matrix

        none = np.zeros(len(self.classes))
        value: float | None = None
        offload, recompute = none, none
        if len(self.arrays.base_bytes):
            self.cut_memory(int((self.arrays.base_bytes + self.arrays.workspace_bytes).argmax()))
        for _ in range(_ROUNDS):
            cost = np.zeros(self.columns)
            if isinstance(self.goal, MeetBudget):
                cost[[self.tf, self.tb]] = 1.0
            else:
                cost[self.m] = 1.0
            rows = self.rows
            matrix = csr_matrix((rows.data, rows.columns, rows.starts), shape=(len(rows.right), self.columns))
            result = linprog(cost, A_ub=matrix, b_ub=rows.right, bounds=self.bounds, method="highs")
            if result.status == 2:
                return Relaxed(None, self.classes, none, none)
            if result.status != 0:
                break
            value, x = float(result.fun), result.x
            offload, recompute = x[: len(none)], x[len(none) : 2 * len(none)]
            if not self._cut(x):
                break
        unit = self.unit_s if isinstance(self.goal, MeetBudget) else self.unit_bytes
        return Relaxed(0.0 if value is None else value * unit * (1.0 - _TOLERANCE), self.classes, offload, recompute)

    def _cut(self, x: Floats) -> bool:
        """Add the rows that `x` breaks most; whether there were any."""
        before, arrays = len(self.rows.right), self.arrays
        offload, recompute = x[: len(self.classes)], x[len(self.classes) : 2 * len(self.classes)]
        end = np.asarray(arrays.forward_sum_s[1:])
        queue, early, again = (
            np.zeros(arrays.forward_steps + 1),
            np.zeros(arrays.backward_steps + 1),
            np.zeros(arrays.backward_steps + 1),
        )
        for i, c in enumerate(self.classes):
            queue[c.produced[0]] += offload[i] * (c.d2h_s - self.out_s[i])
            early[max(c.late_first, 0)] += offload[i] * (c.h2d_s - self.back_s[i])
            again[c.early_first] += recompute[i] * c.recompute_s
        drag_d, drag_h = float(np.dot(offload, self.out_s)), float(np.dot(offload, self.back_s))
        least_f = end + np.cumsum(queue[::-1])[::-1][:-1] + drag_d
        rest = np.cumsum((arrays.backward_time_s + again[:-1])[::-1])[::-1]
        least_b = np.cumsum(early)[:-1] + rest + drag_h
        for least, have, seen, add in (
            (least_f, x[self.tf] * self.unit_s, self.seen_forward, self.cut_forward),
            (least_b, x[self.tb] * self.unit_s, self.seen_backward, self.cut_backward),
        ):
            for position in _worst(least - have, 1e-7 * self.unit_s, seen):
                add(position)
        memory = self._memory(x)
        for step in _worst(memory - x[self.m] * self.unit_bytes, 1e-6 * self.unit_bytes, self.seen_memory):
            self.cut_memory(step)
        return len(self.rows.right) > before

    def _memory(self, x: Floats) -> Floats:
        """Memory at every step as `cut_memory` would count it, what is in flight left out."""
        arrays, forward_steps, count = self.arrays, self.arrays.forward_steps, len(self.classes)
        change = np.zeros(len(arrays.base_bytes) + 1)
        for i, c in enumerate(self.classes):
            gone = x[self.o[i]] + x[self.r[i]]
            kept = (x[2 * count + i] - gone) / c.count
            for member in range(c.count):
                begin = c.last_forward[member] + 1
                end = forward_steps + (c.kept_until[member] if c.own_use else c.early_first) + 1
                change[begin] += c.nbytes * kept
                change[end] -= c.nbytes * kept
                if c.own_use and gone > 0:
                    change[forward_steps + c.own_first[member]] += c.nbytes * gone / c.count
                    change[end] -= c.nbytes * gone / c.count
                if c.own_use and end <= forward_steps + c.own_last[member]:
                    change[end] += c.nbytes * x[self.o[i]] / c.count
                    change[forward_steps + c.own_last[member] + 1] -= c.nbytes * x[self.o[i]] / c.count
        return arrays.base_bytes + arrays.workspace_bytes + np.cumsum(change)[:-1]


def _worst(excess: Floats, tolerance: float, seen: set[int], most: int = 4) -> list[int]:
    """Positions with the largest excess, one of each stretch above the tolerance, not seen before; they are marked seen."""
    found: list[int] = []
    if not len(excess):
        return found
    above = np.flatnonzero(excess > tolerance)
    above = above[~np.isin(above, list(seen))] if seen else above
    for run in np.split(above, np.flatnonzero(np.diff(above) > 1) + 1) if len(above) else []:
        found.append(int(run[excess[run].argmax()]))
    found = sorted(found, key=lambda p: -excess[p])[:most]
    seen.update(found)
    return found
