"""Tensors that come back before backward asks for them: started here, and taken by the reload that asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphoffload.runtime.counters import COUNTERS
from graphoffload.runtime.layouts import empty
from graphoffload.runtime.offloaded_tensors import LOCK, ON_HOST, PREFETCHED, OffloadedTensor
from graphoffload.torch_internals.storages import expired

Copy = Callable[[torch.Tensor, OffloadedTensor], Any]


def reload_early(entry: OffloadedTensor, copy: Copy, ahead: list[OffloadedTensor]) -> bool:
    """Start an entry's copy back before backward asks for it, and list it among those `ahead`; False if that cannot be."""
    asked, layout, host = entry.run.asked.get(entry.id), entry.layout, entry.host
    idle = entry.state is ON_HOST and host is not None and host.buffer is not None and host.written is not None
    if asked is None or not idle or not entry.weak or expired(entry.weak):
        return False
    size, stride, dtype = asked
    if dtype != layout.dtype or not layout.returns_as_it_lies(size, stride):
        return False
    try:
        y = empty(size, stride, dtype, layout.device)
    except torch.OutOfMemoryError:
        return False
    entry.prefetch(y, copy)
    ahead.append(entry)
    COUNTERS.prefetches += 1
    return True


def take_early(
    entry: OffloadedTensor,
    ahead: list[OffloadedTensor],
    drop: Callable[[OffloadedTensor], None],
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """Take what came back early off the list of those `ahead`; `drop` it if backward asks for another form or stream."""
    streams = entry.streams
    with LOCK:
        y = entry.target
        if entry.state is not PREFETCHED or y is None:
            return None
        fits = tuple(y.shape) == tuple(size) and y.stride() == tuple(stride) and y.dtype == dtype
        if not fits or streams is None or streams.compute() is not entry.stream or streams.capturing():
            drop(entry)
            return None
        if entry in ahead:
            ahead.remove(entry)
        entry.take_prefetched()
    COUNTERS.prefetch_hits += 1
    return y
