"""Host memory for a plan, allocated while its graphs are still being compiled, so that no step waits for page-locking."""

from __future__ import annotations

import torch

from graphoffload.facts.plan import Plan
from graphoffload.runtime.pinned.pool import POOL

_prepared: set[str] = set()


def allow(host_budget_bytes: int | None) -> None:
    """Let the pool hold as much page-locked memory as this; the largest budget of the process counts."""
    if host_budget_bytes is not None:
        POOL.budget_bytes = max(host_budget_bytes, POOL.budget_bytes or 0)


def prepare_plan(plan: Plan) -> None:
    """Take host memory for the transfers of a plan that is going to run on a GPU, in the background, once.

    Transfers of symbolic size are left out: their buffers are made when the first tensor of each size comes.
    """
    device = torch.device(plan.device)
    if device.type == "cuda" and plan.key not in _prepared:
        _prepared.add(plan.key)
        index = torch.cuda.current_device() if device.index is None else device.index
        POOL.prepare([transfer.nbytes for transfer in plan.transfers if transfer.nbytes], pin=True, device=index)
