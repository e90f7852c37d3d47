"""What torch's CUDA allocator did, allocation by allocation, for a short time: the only way to learn the peak of a part of a
step without resetting the peak that users read. Seen in torch 2.11 to 2.15.

Without it: the peak of an eager loss is known only where it is higher than everything before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

_MOST = 2_000_000  # entries; a step of an 80-block model makes some 50,000


def observe_failures(observer: Callable[[int, int, int, int], None]) -> None:
    """Call `observer(device, bytes asked for, allocated, free)` before torch raises an out-of-memory error. Without it: an error
    in eager code says nothing of the plan, and the next step is planned as before."""
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None:
        attach(observer)


class Change(NamedTuple):
    """One allocation (bytes above 0) or one free, and when it was, in microseconds of the wall clock."""

    time_us: int
    nbytes: int


def start() -> bool:
    """Begin; False where somebody else records already, or torch cannot."""
    enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    if enabled is None or not torch.cuda.is_available() or enabled():
        return False
    try:
        torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=_MOST)
    except (RuntimeError, TypeError):
        return False
    return True


def stop(index: int) -> list[Change]:
    """End, and what was recorded of a device, oldest first."""
    try:
        traces = torch._C._cuda_memorySnapshot(None)["device_traces"]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    entries = traces[index] if index < len(traces) else []
    signs = {"alloc": 1, "free_requested": -1}
    return [Change(e["time_us"], signs[e["action"]] * e["size"]) for e in entries if e["action"] in signs]
