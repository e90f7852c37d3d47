"""What the memory and the compute of a timeline are made of, for whoever draws it: nothing is decided or scored here.

    memory   outside | kept | in flight | the rest        one stack; together they are the timeline's memory, step by step
    compute  backward |again| backward |again|            operations of the forward that backward runs again

    kept        a saved activation from its producer to its last backward use
    in flight   an offloaded one from its producer to its release, and from its reload to the wait before its first use

The rest is gradients, workspaces, and tensors that no backward needs. The lives are those of the simulator: `needs` says when
backward first and last reads a candidate, and the timeline's schedule has the releases and reloads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from graphoffload.facts.plan import Action
from graphoffload.planner.arrays import Arrays, Ints, needs
from graphoffload.planner.problem import Program
from graphoffload.planner.simulator import Timeline


@dataclass(frozen=True, slots=True)
class Again:
    """A stretch of backward that runs operations of the forward again, by the names of their steps."""

    start_s: float
    end_s: float
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLayers:
    """The parts of a timeline's memory, one entry a step, in bytes; `again`: its recomputation, in order."""

    outside: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    in_flight: tuple[int, ...] = ()
    again: tuple[Again, ...] = ()


def layers_of(
    arrays: Arrays, actions: Sequence[Action], timeline: Timeline, outside: Sequence[int] | None = None
) -> MemoryLayers:
    """The layers of a timeline.

    Args:
        arrays: of the program that was simulated. actions: one a candidate, as they were simulated.
        outside: bytes outside the graphs at each step; None: the program's static bytes.
    """
    program, forward, steps = arrays.program, arrays.forward_steps, len(timeline.memory)
    first, last = needs(arrays, actions)
    scheduled = {item.candidate: item for item in timeline.schedule}
    kept, moving = np.zeros(steps + 1, dtype=np.int64), np.zeros(steps + 1, dtype=np.int64)
    for index, (candidate, action) in enumerate(zip(program.candidates, actions, strict=True)):
        made, read = candidate.produced_at, candidate.last_forward_use
        if first[index] >= arrays.backward_steps:
            continue
        end = forward + last[index]
        if item := scheduled.get(index):
            released = forward - 1 if item.release_at is None else item.release_at
            _add(moving, candidate.nbytes, made, max(read, released))
            _add(moving, candidate.nbytes, forward + item.reload_at, forward + first[index] - 1)
            _add(kept, candidate.nbytes, forward + first[index], end)
        elif action == "recompute":
            _add(kept, candidate.nbytes, forward + first[index], end)
        else:
            _add(kept, candidate.nbytes, made, end)
    return MemoryLayers(
        outside=tuple([program.static_bytes] * steps if outside is None else outside),
        kept=tuple(np.cumsum(kept)[:-1].tolist()),
        in_flight=tuple(np.cumsum(moving)[:-1].tolist()),
        again=tuple(again_of(program, timeline)),
    )


def again_of(program: Program, timeline: Timeline) -> Iterator[Again]:
    """Stretches of backward steps that are named as forward steps: a recomputed operation keeps its name. Steps that take no
    time neither begin nor end a stretch."""
    known = {step.name for step in program.forward}
    starts_s = (0.0, *timeline.ends_s)
    begin = end = 0.0
    names: list[str] = []
    for index, step in enumerate(program.backward, start=len(program.forward)):
        repeated = step.name in known
        if step.time_s <= 0.0:
            if repeated and names:
                names.append(step.name)
        elif repeated:
            begin = begin if names else starts_s[index]
            end = starts_s[index + 1]
            names.append(step.name)
        elif names:
            yield Again(begin, end, tuple(names))
            names = []
    if names:
        yield Again(begin, end, tuple(names))


def _add(change: Ints, nbytes: int, first: int, last: int) -> None:
    """Count bytes from one step to another, both inclusive; nothing if the last comes before the first."""
    if last >= first:
        change[first] += nbytes
        change[last + 1] -= nbytes
