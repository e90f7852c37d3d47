"""What runs in a training step: the ops, their streams, the host memory, and the handles that connect them.

ops.py                  the four ops                            captured.py   the four ops inside a CUDA graph
offloaded_tensors.py    the states of an offloaded tensor       handles.py    handle -> the tensor it stands for
registry.py             plans by key                            layouts.py    how a tensor is laid out in memory
counters.py             bytes and calls so far                  checksum.py   digests on the device
hooks.py                switches for tests
streams/                side streams and events of a device, and the protocol of both; a copy and its events as one call; stalls
pinned/                 page-locked slabs, buffers of exact size cut from them, memory taken in advance and given back
step/                   across graphs: copies that outlive their graph, tensors that stay under a shared budget
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from graphoffload.runtime import captured
from graphoffload.runtime.counters import COUNTERS, reset_stats
from graphoffload.runtime.handles import ENTRIES
from graphoffload.runtime.hooks import copy_hook, release_hook, twin_copies
from graphoffload.runtime.pinned.pool import POOL
from graphoffload.runtime.pinned.slabs import HostMemory
from graphoffload.runtime.streams.stalls import Stalls, trace_stalls

__all__ = [
    "HostMemory", "Stalls", "copy_hook", "host_memory", "release_hook", "release_host_memory", "reset_stats", "stats",
    "trace_stalls", "twin_copies",
]  # fmt: skip


def stats() -> dict[str, Any]:
    """Totals of this process since it started or since reset_stats(), by the names of runtime.counters.Counters.

    Values are integers. Once runtime.trace_stalls has timed something, `stall_ms_by_tensor` has the milliseconds that compute
    waited. Since the process started: `host_peak_bytes` is the most host bytes in use at one time, and `host_returned_bytes` is
    the idle host memory that went back to the operating system.
    """
    held = POOL.snapshot()
    return {**COUNTERS.as_dict(), "host_peak_bytes": held.peak_bytes, "host_returned_bytes": held.returned_bytes}


def host_memory() -> HostMemory:
    """Host memory held for offloaded activations, after handles without an owner were cleared."""
    ENTRIES.sweep()
    captured.collect()
    by_tensor: Counter[str] = Counter()
    for entry in (*ENTRIES.living(), *captured.living()):
        host = entry.host
        if host is not None and host.buffer is not None:
            by_tensor[entry.name] += host.buffer.nbytes
    return replace(POOL.snapshot(), by_tensor=dict(by_tensor.most_common()))


def release_host_memory() -> int:
    """Give idle host memory back to the operating system; returns the bytes. Memory in use is not touched."""
    ENTRIES.sweep()
    captured.collect()
    return POOL.release_idle()
