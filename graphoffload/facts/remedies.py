"""Remedies: warnings about activations that were to be offloaded or recomputed and are kept, with advice for each cause.

A cause is the text of a refusal (refusals.py), as the table of a plan shows it: "shares memory with an output of the model".
"""

from __future__ import annotations

from collections.abc import Iterable

from graphoffload.facts.refusals import Refusal, refusal_of
from graphoffload.facts.saved_tensors import SavedTensor
from graphoffload.units import format_bytes

_REASONS_SHOWN = 3
_HOST_MEMORY: dict[str, str] = {
    "given": "Raise host_budget (or GRAPHOFFLOAD_HOST_BUDGET), or offload less.",
    "auto": "That is host_budget=\"auto\", this process's share of the host's (or container's) memory: give host_budget (or "
    "GRAPHOFFLOAD_HOST_BUDGET) where more is free, run on a host with more, or offload less.",
    "memlock": 'That is host_budget="auto", as much as RLIMIT_MEMLOCK lets this user lock: raise that (ulimit -l), or offload '
    "less; a larger host_budget (or GRAPHOFFLOAD_HOST_BUDGET) alone gives memory that copies slowly.",
}


def remedy(cause: str) -> str:
    """The change that lets an activation be offloaded that is kept for this cause; "" if there is none."""
    refusal = refusal_of(cause)
    return refusal.remedy if refusal is not None else ""


AS_ONE_GRAPH = "compile the whole model as one graph, whose plan knows what all parts keep"


def lower_budget(budget_bytes: int, excess_bytes: int) -> str:
    """Advice for a peak that is `excess_bytes` above the planned one."""
    if excess_bytes < budget_bytes:
        return f"lower device_budget by {format_bytes(excess_bytes)}"
    return (
        f"make the batch or the sequence smaller: {format_bytes(excess_bytes)} is more than any lower device_budget "
        "makes up for"
    )


def share_of_budget(budget_bytes: int, fixed_bytes: int, count: int) -> str:
    """Advice for `count` graphs that keep too much together: a budget for each, if there is one."""
    room_bytes = (budget_bytes - fixed_bytes) // count
    if room_bytes <= 0:
        return (
            f"or make the batch or the sequence smaller: {format_bytes(fixed_bytes)} leave no share of the budget "
            "for what each keeps."
        )
    return f'or plan each for its share: device_budget="{format_bytes(fixed_bytes + room_bytes)}".'


def disobeyed(tensor: SavedTensor, tag: str, cause: str) -> str:
    """The warning for a binding tag that cannot be obeyed: the tensor, its bytes, the cause and the remedy."""
    change = remedy(cause)
    if tensor.tag == "must_recompute":
        change = f"tag it {'MUST_CPU_OFFLOAD or MUST_SAVE' if tensor.eligible else 'MUST_SAVE'} instead"
        if remedy(cause):
            change = f"{remedy(cause)}, {change}"
    what = f"{change}, or remove the tag" if change else "remove the tag: nothing changes that"
    return (
        f"{tensor.name} ({format_bytes(tensor.nbytes)}) of module {tensor.module or 'unknown'!r} is tagged {tag} but is kept: "
        f"{cause}. {what[0].upper()}{what[1:]}."
    )


def nothing_offloaded(kept: Iterable[tuple[str, int]], count: int) -> str:
    """The warning for policy="offload" that offloads nothing: the causes with their remedies, the one of most bytes first.

    Args:
        kept: cause and bytes of each activation that is kept.
        count: the number of all activations.
    """
    causes: dict[Refusal | str, list[tuple[int, str]]] = {}
    for cause, nbytes in kept:
        causes.setdefault(refusal_of(cause) or cause, []).append((nbytes, cause))
    ordered = sorted(causes.values(), key=lambda found: -sum(nbytes for nbytes, _ in found))
    total = sum(nbytes for found in ordered for nbytes, _ in found)
    number = sum(map(len, ordered))
    texts = []
    for found in ordered[:_REASONS_SHOWN]:
        nbytes, (largest, cause) = sum(nbytes for nbytes, _ in found), max(found)
        shown = f"{cause}" if len(found) == 1 else f"the largest, of {format_bytes(largest)}: {cause}"
        change = remedy(cause)
        texts.append(f"{len(found)} ({format_bytes(nbytes)}), {shown}{f'; {change}' if change else ''}.")
    more = f" {len(ordered) - _REASONS_SHOWN} more causes are in the plan." if len(ordered) > _REASONS_SHOWN else ""
    return (
        f'policy="offload" offloads nothing: {number} of {count} saved activations ({format_bytes(total)}) are kept. '
        f"{' '.join(texts)}{more}"
    )


def host_full(refused_bytes: int, used_bytes: int, budget_bytes: int, limit: str) -> str:
    """The warning for offloads that do not fit in the host budget; `limit` names its origin: "given", "auto" or "memlock"."""
    return (
        f"{format_bytes(refused_bytes)} of saved activations were to be offloaded but are kept: "
        f"host_budget={format_bytes(budget_bytes)} holds {format_bytes(used_bytes)} of them. {_HOST_MEMORY[limit]}"
    )
