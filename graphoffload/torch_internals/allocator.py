"""torch's CUDA allocator: what it did, allocation by allocation; when it fails; and how it gets memory from the driver.

What it did is the only way to learn the peak of a part of a step without resetting the peak that users read.

Seen in torch 2.11 to 2.15.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

_MOST = 2_000_000  # entries; a step of an 80-block model makes some 50,000


def observe_failures(observer: Callable[[int, int, int, int], None]) -> None:
    """Call `observer(device, bytes asked for, allocated, free)` before torch raises an out-of-memory error.

    Without it: an error in eager code says nothing of the plan, and the next step is planned as before.
    """
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None:
        attach(observer)


class Change(NamedTuple):
    """One allocation (bytes above 0) or one free, as the allocator counts allocated bytes.

    time_us: when it was, in microseconds of the wall clock. address: of the block. frames: of Python, innermost first, with
    "filename", "line" and "name" each; of allocations, where they were asked for.
    """

    time_us: int
    nbytes: int
    address: int = 0
    frames: Sequence[Mapping[str, Any]] = ()


def allowed_share(device: torch.device) -> float:
    """Which part of a GPU's memory this process may allocate: `torch.cuda.set_per_process_memory_fraction` limits it.

    Without it: plans are made for memory that the allocator refuses.
    """
    share = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    if share is None or not torch.cuda.is_initialized():
        return 1.0
    return float(share(torch.cuda.current_device() if device.index is None else device.index))


def maps_by_pages() -> bool:
    """Whether the user asked for expandable segments, or `map_by_pages` did."""
    return bool(_asked) or "expandable_segments:true" in _settings().lower().replace(" ", "")


def map_by_pages() -> bool:
    """From now on, map device memory page by page; False where the user has said how, or torch cannot.

    Freed blocks of different sizes then join, whatever they were cut from. Without it: tensors that are kept for backward cut
    up what larger ones have left, and a loss finds no block in one piece where enough is free in all.
    """
    given = _settings()
    if _asked or "expandable_segments" in given or torch.cuda.memory.get_allocator_backend() != "native":
        return False
    setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # the other one warns where there is this
    try:
        (setter or torch.cuda.memory._set_allocator_settings)(",".join(filter(None, (given, "expandable_segments:True"))))
    except (RuntimeError, AttributeError):
        return False
    _asked.append(True)
    return True


_asked: list[bool] = []


def _settings() -> str:
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") or os.environ.get("PYTORCH_ALLOC_CONF", "")


def start(*, frames: bool = False) -> bool:
    """Begin to record; False where somebody records already, or torch cannot. frames: who allocates, as well."""
    enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    if enabled is None or not torch.cuda.is_available() or enabled():
        return False
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.memory._record_memory_history(
            enabled="all", context="alloc" if frames else None, stacks="python", max_entries=_MOST
        )
    except (RuntimeError, TypeError):
        return False
    _recording.append(True)
    return True


_recording: list[bool] = []


def join() -> bool:
    """Take part in a recording that `start` began, if there is one: it goes on until all have stopped."""
    if _recording:
        _recording.append(True)
    return bool(_recording)


def stop(index: int) -> list[Change]:
    """End recording; what was recorded of a device, oldest first."""
    try:
        traces = torch._C._cuda_memorySnapshot(None)["device_traces"]
    finally:
        if _recording:
            _recording.pop()
        if not _recording:
            torch.cuda.memory._record_memory_history(enabled=None)
    entries = traces[index] if index < len(traces) else []
    signs = {"alloc": 1, "free_requested": -1}
    return [
        Change(e["time_us"], signs[e["action"]] * e["size"], e["addr"], e.get("frames", ()))
        for e in entries
        if e["action"] in signs
    ]


def most(changes: Iterable[Change]) -> int:
    """The most bytes that were allocated at a time, above those at the start."""
    return max(itertools.accumulate((change.nbytes for change in changes), initial=0))
