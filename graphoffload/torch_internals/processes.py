"""The store through which the processes of a group find each other, and who this one is. Seen in 2.11 to 2.15.

The store is a table of bytes that torchrun or rank 0 serves. Reading it needs nobody else to do anything at that moment, so
unlike a collective it cannot wait for a rank that does something else.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch


def default_group() -> tuple[Any, int, int] | None:
    """(store, rank, number of ranks) of torch.distributed's default group; None for one process, or where there is no group.

    The store is None where the group has none, as under MPI.
    """
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() < 2:
        return None
    store = None
    with contextlib.suppress(Exception):  # a group of another library's making
        store = importlib.import_module("torch.distributed.distributed_c10d")._get_default_store()
    return store, distributed.get_rank(), distributed.get_world_size()


def with_prefix(store: Any, prefix: str) -> Any:
    """The same store, where each key begins with `prefix`."""
    return torch.distributed.PrefixStore(prefix, store)
