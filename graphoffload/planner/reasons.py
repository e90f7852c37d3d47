"""The reason for each candidate's action, in words with numbers."""

from __future__ import annotations

from collections.abc import Sequence

from graphoffload.facts.plan import Action
from graphoffload.planner.arrays import Arrays
from graphoffload.planner.simulator import Evaluation

NO_CHOICE = "can neither be offloaded nor recomputed"
"""Of a candidate that can only be kept; why so is known to who made the instance."""


def reasons_for(arrays: Arrays, actions: Sequence[Action], result: Evaluation, *, fits: bool) -> tuple[str, ...]:
    """One reason a candidate."""
    waits: dict[int, float] = {}
    for index, _, seconds in result.stalls:
        waits[index] = waits.get(index, 0.0) + seconds
    return tuple(_reason(arrays, index, action, result, waits, fits) for index, action in enumerate(actions))


def _reason(arrays: Arrays, index: int, action: Action, result: Evaluation, waits: dict[int, float], fits: bool) -> str:
    candidate = arrays.program.candidates[index]
    if candidate.fixed is not None:
        return f"fixed to {candidate.fixed}"
    if result.first[index] >= arrays.backward_steps:
        return "not needed in backward"
    if action == "offload":
        copies = f"{arrays.d2h_s[index] * 1e3:.2f} + {arrays.h2d_s[index] * 1e3:.2f} ms of copies"
        return f"{copies}, hidden" if index not in waits else f"{copies}, {waits[index] * 1e3:.2f} ms waited for"
    if action == "recompute":
        return f"{arrays.recompute_s[index] * 1e3:.3f} ms again"
    if fits:
        return "fits"
    if len(candidate.actions) == 1:
        return NO_CHOICE
    begin, end = candidate.last_forward_use + 1, arrays.forward_steps + result.first[index]
    if not begin <= result.peak_step < end:
        return "moving it does not lower the peak"
    return "cheaper to keep than what was moved instead"
