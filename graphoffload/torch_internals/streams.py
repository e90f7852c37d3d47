"""The current device and stream, the allocator's counters, and checks on the device. Seen in torch 2.11 to 2.15.

The ops call these for each copy, so the names here are torch's own functions, not wrappers. A build of torch without CUDA has
not all of them: what is missing is None there, and nothing asks for it without a CUDA device.
"""

from __future__ import annotations

from typing import Any

import torch

current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
"""Index of the current CUDA device. torch.cuda.current_device does the same after a check for lazy initialisation, which costs
as much as the rest of a copy's bookkeeping. Without it: use that."""

current_stream: Any = getattr(torch._C, "_cuda_getCurrentStream", None)
"""(id, device index, device type) of a device's current stream. Without it: torch.cuda.current_stream, which makes an object
each time."""

memory_stats: Any = getattr(torch._C, "_cuda_memoryStats", None)
"""The allocator's counters as nested dicts. Without it: torch.cuda.memory_stats, which flattens and sorts all of them."""

empty_strided: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
"""Allocate on the current CUDA device as Inductor's code does, in half of the host's time. Without it: torch.empty_strided."""

assert_async = torch._assert_async
"""Check a number on the device without a synchronisation, also in a replayed CUDA graph. Without it: a replay that reads
another step's host copy is not stopped."""

busy_wait: Any = torch.cuda._sleep
"""Keep the current stream busy for a number of cycles. Without it: the time between two kernels, and between two calls of a
step, is measured together with the host's."""


def empty_host_cache() -> None:
    """Give page-locked memory that nobody uses back to the system. Without it: a benchmark's runs add up on the host."""
    torch._C._host_emptyCache()
