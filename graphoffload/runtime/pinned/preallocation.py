"""Host memory for a plan, taken while its graphs are still being compiled, so that no step waits for page-locking."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from graphoffload.facts.plan import Plan
from graphoffload.runtime.pinned.pool import POOL

_COMPILING = ContextVar("graphoffload_compiling", default=False)
_prepared: set[str] = set()


@contextlib.contextmanager
def preallocating(host_budget_bytes: int | None) -> Iterator[None]:
    """Plans that are registered inside are going to run, within this budget of the process (the largest of all counts)."""
    if host_budget_bytes is not None:
        POOL.budget_bytes = max(host_budget_bytes, POOL.budget_bytes or 0)
    token = _COMPILING.set(True)
    try:
        yield
    finally:
        _COMPILING.reset(token)


def going_to_run() -> bool:
    """Whether plans that are registered now are going to run: explain() only shows them."""
    return _COMPILING.get()


def prepare_plan(plan: Plan) -> None:
    """Take host memory for a plan's transfers in the background, once, if it is for a GPU and is going to run.

    Transfers of symbolic size are left out: their buffers are made when the first tensor of each size comes.
    """
    device = torch.device(plan.device)
    if device.type == "cuda" and going_to_run() and plan.key not in _prepared:
        _prepared.add(plan.key)
        index = torch.cuda.current_device() if device.index is None else device.index
        POOL.prepare([transfer.nbytes for transfer in plan.transfers if transfer.nbytes], pin=True, device=index)
