"""The store through which the processes of a group find each other, and who this one is. Seen in 2.11 to 2.15.

The store is a table of bytes that torchrun or rank 0 serves. Reading it needs nobody else to do anything at that moment, so
unlike a collective it cannot wait for a rank that does something else.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
import weakref
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


def has_stage() -> bool:
    """Whether this process has a stage of a pipeline (torch.distributed.pipelining), so that other stages may wait for it."""
    base = getattr(sys.modules.get("torch.distributed.pipelining.stage"), "_PipelineStageBase", None)
    return base is not None and any(issubclass(type(found), base) for found in gc.get_objects())


class WithPrefix:
    """A store, where each key begins with `prefix`. It is not kept alive.

    The group alone owns its store. The store is the server at the group's address in one of the processes, and one that
    lived longer would answer the next group there with the addresses of the last one, which then cannot connect.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self._store, self._prefix = weakref.ref(store), prefix

    def _now(self) -> Any:
        store = self._store()
        if store is None:
            raise RuntimeError("its process group was destroyed")
        return torch.distributed.PrefixStore(self._prefix, store)

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._now().set(key, value)

    def get(self, key: str) -> bytes:
        """Its value; waits for a key that is not there."""
        value: bytes = self._now().get(key)
        return value

    def check(self, keys: list[str]) -> bool:
        """Whether all of these keys are there."""
        return bool(self._now().check(keys))

    def add(self, key: str, amount: int) -> int:
        """Add to a number that begins with 0; the sum."""
        return int(self._now().add(key, amount))
