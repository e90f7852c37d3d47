"""Storages: their identity, weak references to them, and how many own one. Seen in torch 2.11 to 2.15.

The ops call these for each tensor that they move, so the names here are torch's own functions, not wrappers.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

identity: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""The address of a storage's C++ object, equal for all Python objects of one storage. Without it: no handle finds its tensor,
and two views of one storage cannot be told from two storages."""

weak_ref: Callable[[torch.UntypedStorage], int] = torch.UntypedStorage._weak_ref  # type: ignore[assignment]
"""A weak reference that keeps a storage's identity from being used twice. Without it: a new tensor at an old handle's address
would stand for the old handle's host copy."""

expired: Callable[[int], bool] = torch.UntypedStorage._expired  # type: ignore[assignment]
"""Whether nobody owns the storage of a weak reference any more. Without it: host buffers are never given back."""

free_weak_ref: Callable[[int], None] = torch.UntypedStorage._free_weak_ref
"""Give a weak reference back. Without it: each offload leaks a storage's C++ object."""

owners: Callable[[int], int] = torch._C._storage_Use_Count
"""How many own the storage with this identity. Without it: memory that stayed on the device is copied, not handed back."""


def lasting(storage: torch.UntypedStorage) -> Any:
    """What a storage is known by, also when it is gone: no other one is equal to it. Without it: an address that is used again
    is taken for the same memory."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(storage)


def is_gone(known: Any) -> bool:
    """Whether nobody owns the storage any more that is known by this (`lasting`). Without it: outputs that only autograd holds
    are not counted."""
    return bool(known.expired())
