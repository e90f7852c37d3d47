"""The tensors that hold the memory at one step: a message names them where a budget cannot be met."""

from __future__ import annotations

from collections.abc import Sequence

from graphoffload.facts.plan import Action
from graphoffload.planner.arrays import Arrays
from graphoffload.planner.simulator import Evaluation
from graphoffload.units import format_bytes


def held_at(arrays: Arrays, actions: Sequence[Action], result: Evaluation, step: int) -> list[tuple[str, int]]:
    """Everything allocated at a global step as (what, bytes), largest first. The sizes add up to `result.memory[step]`."""
    program, forward_steps = arrays.program, arrays.forward_steps
    held = [("parameters and other static memory", program.static_bytes)]
    held += [(buffer.name, buffer.nbytes) for buffer in program.buffers if buffer.first <= step <= buffer.last]
    reload_at = {index: position for index, position, _ in result.loads}
    for index, (candidate, action) in enumerate(zip(program.candidates, actions, strict=True)):
        begin, end = int(candidate.produced_at), int(candidate.last_forward_use)
        again = (len(result.memory), -1)
        if result.first[index] < arrays.backward_steps:
            last = forward_steps + result.last[index]
            if action == "keep":
                end = last
            elif action == "recompute":
                again = (forward_steps + result.first[index], last)
            else:
                release = result.release[index]
                end, again = forward_steps - 1 if release is None else release, (forward_steps + reload_at[index], last)
        if begin <= step <= end or again[0] <= step <= again[1]:
            held.append((candidate.name, candidate.nbytes))
    rest = int(result.memory[step]) - sum(nbytes for _, nbytes in held) if len(result.memory) else 0
    held.append((f"temporaries of {program.step_name(step)}", rest))
    return sorted((entry for entry in held if entry[1]), key=lambda entry: -entry[1])


def describe(held: Sequence[tuple[str, int]], *, most: int = 5) -> str:
    """ "logits 1.95 GiB, x0 24 MiB, 12 more 96 MiB"."""
    shown = [f"{name} {format_bytes(nbytes)}" for name, nbytes in held[:most]]
    if len(held) > most:
        shown.append(f"{len(held) - most} more {format_bytes(sum(nbytes for _, nbytes in held[most:]))}")
    return ", ".join(shown)
