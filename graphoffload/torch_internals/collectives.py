"""Collectives in a graph: which operators are some, and how torch's partitioner must treat them.

Functional collectives return at once with memory that is written to until it is waited for:

    y = all_gather_into_tensor(x, ...)         y must not be read, nor x freed or written to
    z = wait_tensor(y)                         z is y, to the byte, and may be read

Seen in torch 2.11 to 2.15.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from torch._functorch import config

from graphoffload.torch_internals.operators import OpOverload, schema_of

__all__ = ["RULES_OF_MIN_CUT", "group_size", "is_collective", "is_wait", "returns_at_once"]

_AT_ONCE = ("_c10d_functional", "c10d_functional", "_c10d_functional_autograd")
_NAMESPACES = (*_AT_ONCE, "c10d", "_dtensor", "symm_mem")

RULES_OF_MIN_CUT: dict[str, Any] = {
    name: False
    for name in ("unsafe_allow_optimization_of_collectives", "_sync_decision_cross_ranks")
    if hasattr(config, name)
}
"""Settings of torch's partitioner while it cuts: it recomputes no collective of its own accord, and asks no other rank what to
save, since ranks may cut a graph different numbers of times. Without it: a step may hang where a user has set them."""


def is_collective(target: Any) -> bool:
    """Whether an operator takes part in a collective, its wait included; a DTensor's redistribution by all-to-all is one.

    Without it: a collective could be run again, on one rank alone.
    """
    return isinstance(target, OpOverload) and target.namespace in _NAMESPACES


def is_wait(target: Any) -> bool:
    """Whether an operator waits for a collective and returns its memory, which its schema and its fake result do not say.

    Without it: what a collective gave counts as two tensors, and its price is paid twice.
    """
    return is_collective(target) and schema_of(target).name.endswith("::wait_tensor")


def returns_at_once(target: Any) -> bool:
    """Whether an operator's results are written to until they are waited for. Without it: they could be copied too early."""
    return isinstance(target, OpOverload) and target.namespace in _AT_ONCE and not is_wait(target)


def group_size(group: Any) -> int | None:
    """The number of ranks of a group that a collective has as an argument, a name or the group itself; None: there is no such
    group here. Without it: an all-reduce of two ranks costs twice its time."""
    with contextlib.suppress(Exception):  # what torch raises for a name without a group differs by release
        if isinstance(group, str):
            group = importlib.import_module("torch.distributed.distributed_c10d")._resolve_process_group(group)
        size = group.size()
        return size if isinstance(size, int) else None
    return None
