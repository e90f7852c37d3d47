"""The rule for offload alone: earliest produced first, until the D2H queue fills the forward.

Right when nothing may be recomputed and the peak is where forward meets backward: what is produced first lives longest and has
most time to travel both ways. Wrong when early tensors are read by a recompute chain at backward's start, and blind to budgets.
"""

from __future__ import annotations

import numpy as np

from graphoffload.hardware import HardwareProfile
from graphoffload.plan.arrays import arrays_of
from graphoffload.plan.program import Program
from graphoffload.plan.simulator import needs
from graphoffload.saved import Action


def fill_link(program: Program, hardware: HardwareProfile, need_bytes: int | None = None) -> tuple[Action, ...]:
    """Actions that offload the earliest-produced tensors: until `need_bytes` are offloaded, or while every copy hides.

    Without `need_bytes` a tensor is taken when, at compute's speed alone, its D2H copy ends within the forward and reloads
    still arrive in time for each first use in backward. One that does not fit is passed over for a smaller one behind it.
    """
    arrays = arrays_of(program, hardware)
    actions: list[Action] = program.keep_actions()
    first, _ = needs(arrays, actions)
    taken = [k for k, action in enumerate(actions) if action == "offload" and first[k] < arrays.backward_steps]
    moved_bytes = sum(program.candidates[k].nbytes for k in taken)
    busy_until_s = 0.0
    slack = np.cumsum(arrays.backward_time_s) - arrays.backward_time_s
    for index in taken:
        slack[first[index] :] -= arrays.h2d_s[index]
    for index in arrays.production_order:
        candidate = program.candidates[index]
        if index in taken:
            busy_until_s = max(busy_until_s, arrays.forward_sum_s[candidate.produced_at + 1]) + arrays.d2h_s[index]
        if actions[index] != "keep" or "offload" not in candidate.actions or first[index] >= arrays.backward_steps:
            continue
        if need_bytes is not None and moved_bytes >= need_bytes:
            break
        end_s = max(busy_until_s, arrays.forward_sum_s[candidate.produced_at + 1]) + arrays.d2h_s[index]
        hides = end_s <= arrays.forward_sum_s[-1] and slack[first[index] :].min() >= arrays.h2d_s[index]
        if need_bytes is None and not hides:
            continue
        actions[index], busy_until_s = "offload", end_s
        moved_bytes += candidate.nbytes
        slack[first[index] :] -= arrays.h2d_s[index]
    return tuple(actions)
