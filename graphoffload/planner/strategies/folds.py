"""Candidates folded into classes for the LP: equal ones of neighbouring layers share two variables instead of having two each.

A class stands for `count` candidates of equal size, cost and choices. Their positions differ. Each constraint takes the
position that makes it weakest. So folding can only lower the bound, never lift it above a real plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphoffload.planner.arrays import Arrays

_CHUNKS = 12


@dataclass(slots=True)
class Fold:
    """One class. `early_first` and `late_first`: between them lies the first backward use under any actions."""

    members: tuple[int, ...]
    nbytes: int
    d2h_s: float
    h2d_s: float
    recompute_s: float
    own_use: bool
    can_offload: bool
    can_recompute: bool
    can_keep: bool
    produced: tuple[int, ...]
    last_forward: tuple[int, ...]
    own_first: tuple[int, ...]
    own_last: tuple[int, ...]
    kept_until: tuple[int, ...]
    early_first: int
    late_first: int

    @property
    def count(self) -> int:
        """Candidates in it."""
        return len(self.members)


def first_use_range(arrays: Arrays) -> tuple[list[int], list[int]]:
    """Earliest and latest first backward use of each candidate over all actions; B and -1 when nothing can ever need it."""
    early, late = arrays.first_use.copy(), [u if u < arrays.backward_steps else -1 for u in arrays.first_use]
    own = [u < arrays.backward_steps for u in arrays.first_use]
    for index, reads in arrays.chains:
        if "recompute" not in arrays.program.candidates[index].actions or early[index] >= arrays.backward_steps:
            continue
        for read in reads:
            early[read] = min(early[read], early[index])
            if not own[read]:
                late[read] = max(late[read], late[index])
    return early, late


def fold(arrays: Arrays) -> list[Fold]:
    """Classes of candidates that any plan can need."""
    early, late = first_use_range(arrays)
    keyed: dict[tuple[object, ...], list[int]] = {}
    for index in arrays.production_order:
        candidate = arrays.program.candidates[index]
        if early[index] >= arrays.backward_steps:
            continue
        reads = len(candidate.recompute.reads) if candidate.recompute else -1
        label: object = candidate.group or index
        own = bool(candidate.backward_uses)
        keyed.setdefault((label, candidate.nbytes, arrays.recompute_s[index], candidate.actions, own, reads), []).append(index)
    classes = []
    for members in keyed.values():
        size = -(-len(members) // _CHUNKS)
        classes += [_fold(arrays, members[i : i + size], early, late) for i in range(0, len(members), size)]
    return classes


def _fold(arrays: Arrays, members: list[int], early: list[int], late: list[int]) -> Fold:
    candidates = [arrays.program.candidates[k] for k in members]
    actions = candidates[0].actions
    return Fold(
        members=tuple(members),
        nbytes=candidates[0].nbytes,
        d2h_s=arrays.d2h_s[members[0]],
        h2d_s=arrays.h2d_s[members[0]],
        recompute_s=float(arrays.recompute_s[members[0]]),
        own_use=bool(candidates[0].backward_uses),
        can_offload="offload" in actions,
        can_recompute="recompute" in actions,
        can_keep="keep" in actions,
        produced=tuple(c.produced_at for c in candidates),
        last_forward=tuple(c.last_forward_use for c in candidates),
        own_first=tuple(arrays.first_use[k] for k in members),
        own_last=tuple(arrays.last_use[k] for k in members),
        kept_until=tuple(arrays.kept_until[k] for k in members),
        early_first=min(early[k] for k in members),
        late_first=max(late[k] for k in members),
    )
