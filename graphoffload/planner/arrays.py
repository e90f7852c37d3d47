"""A Program and its hardware as arrays, made once and reused by hundreds of evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from graphoffload.facts.plan import Action
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.planner.problem import Candidate, Program, Step

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Arrays:
    """What an evaluation reads. Times in seconds, sizes in bytes, one entry a step or candidate.

    Attributes:
        forward_sum_s: compute time before each forward position, F + 1 entries. backward_sum_s: the same of the backward.
        base_bytes: memory at each global step that no action changes: static, buffers, candidates to their last forward use.
        first_use, last_use: of each candidate's own backward uses; B and -1 when it has none.
        kept_until: the last backward step at which it is in memory if it is kept and no chain reads it; -1 when it has no uses.
        reload_steps: see Program.
        chains: candidates that can be recomputed, latest produced first, as (index, reads).
    """

    program: Program
    hardware: HardwareProfile
    forward_steps: int
    backward_steps: int
    forward_sum_s: list[float]
    forward_time_s: Floats
    backward_time_s: Floats
    backward_sum_s: list[float]
    compute_s: float
    base_bytes: Ints
    workspace_bytes: Ints
    nbytes: Ints
    produced_at: list[int]
    last_forward_use: list[int]
    first_use: list[int]
    last_use: list[int]
    kept_until: list[int]
    d2h_s: list[float]
    h2d_s: list[float]
    recompute_s: Floats
    temp_bytes: Ints
    chains: tuple[tuple[int, tuple[int, ...]], ...]
    production_order: tuple[int, ...]
    reload_steps: tuple[int, ...]

    @property
    def late_s(self) -> float:
        """For how long compute stands still at each end of a transfer."""
        return self.hardware.host_s_per_copy / 2


_recent: list[Arrays] = []


def arrays_of(program: Program, hardware: HardwareProfile) -> Arrays:
    """Arrays of this very instance; the last few are remembered by identity, since hashing 6000 steps is slow."""
    for known in _recent:
        if known.program is program and known.hardware == hardware:
            return known
    made = _build(program, hardware)
    _recent.insert(0, made)
    del _recent[4:]
    return made


def _build(program: Program, hardware: HardwareProfile) -> Arrays:
    candidates, forward_steps = program.candidates, len(program.forward)
    order = sorted(range(len(candidates)), key=lambda k: (candidates[k].produced_at, k))
    recomputes = [c.recompute for c in candidates]
    forward_s, backward_s = _times_s(program.forward), _times_s(program.backward)
    forward_sum_s = [0.0, *np.cumsum(forward_s).tolist()]
    return Arrays(
        program=program,
        hardware=hardware,
        forward_steps=forward_steps,
        backward_steps=len(program.backward),
        forward_sum_s=forward_sum_s,
        forward_time_s=forward_s,
        backward_time_s=backward_s,
        backward_sum_s=[0.0, *np.cumsum(backward_s).tolist()],
        compute_s=forward_sum_s[-1] + sum(backward_s.tolist()),
        base_bytes=_base_bytes(program),
        workspace_bytes=np.concatenate([_workspace_bytes(program.forward), _workspace_bytes(program.backward)]),
        nbytes=np.array([c.nbytes for c in candidates], dtype=np.int64),
        produced_at=[c.produced_at for c in candidates],
        last_forward_use=[c.last_forward_use for c in candidates],
        first_use=[c.backward_uses[0] if c.backward_uses else len(program.backward) for c in candidates],
        last_use=[c.backward_uses[-1] if c.backward_uses else -1 for c in candidates],
        kept_until=[_kept_until(c) for c in candidates],
        d2h_s=[hardware.copy_time_s(c.nbytes, "d2h") for c in candidates],
        h2d_s=[hardware.copy_time_s(c.nbytes, "h2d") for c in candidates],
        recompute_s=np.array([r.time_s if r else 0.0 for r in recomputes], dtype=np.float64),
        temp_bytes=np.array([r.temp_bytes if r else 0 for r in recomputes], dtype=np.int64),
        chains=tuple((k, recompute.reads) for k in reversed(order) if (recompute := recomputes[k]) is not None),
        production_order=tuple(order),
        reload_steps=program.reload_steps or tuple(range(len(program.backward) + 1)),
    )


def _times_s(steps: Sequence[Step]) -> Floats:
    return np.fromiter(map(attrgetter("time_s"), steps), np.float64, len(steps))


def _workspace_bytes(steps: Sequence[Step]) -> Ints:
    return np.fromiter(map(attrgetter("workspace_bytes"), steps), np.int64, len(steps))


def _kept_until(candidate: Candidate) -> int:
    if candidate.overwritten_at is not None:
        return candidate.overwritten_at - 1
    return candidate.backward_uses[-1] if candidate.backward_uses else -1


def needs(arrays: Arrays, actions: Sequence[Action]) -> tuple[list[int], list[int]]:
    """The first backward step that needs each candidate, chains that read it included, and the last with it in memory.

    B and -1: never. A kept candidate that a kernel writes over is not counted while that kernel runs, since its result is.
    """
    first, never = arrays.first_use.copy(), arrays.backward_steps
    ends = zip(actions, arrays.kept_until, arrays.last_use, strict=True)
    last = [kept if action == "keep" else used for action, kept, used in ends]
    for index, reads in arrays.chains:
        if actions[index] == "recompute" and (need := first[index]) < never:
            for read in reads:
                first[read] = min(first[read], need)
                last[read] = max(last[read], arrays.last_use[read], need)
    return first, last


def _base_bytes(program: Program) -> Ints:
    change = np.zeros(len(program.forward) + len(program.backward) + 1, dtype=np.int64)
    for buffer in program.buffers:
        change[buffer.first] += buffer.nbytes
        change[buffer.last + 1] -= buffer.nbytes
    for candidate in program.candidates:
        change[candidate.produced_at] += candidate.nbytes
        change[candidate.last_forward_use + 1] -= candidate.nbytes
    curve: Ints = np.cumsum(change)[:-1] + program.static_bytes
    return curve
