"""Copies run while another stream waits for an event, whichever stream of torch that is.

Streams share the connections to a GPU (CUDA_DEVICE_MAX_CONNECTIONS, 8 by default). A stream that waits for an event holds what
comes behind it on its connection, also work of other streams. A pipeline's compute stream waits for another GPU most of the
time that it is idle.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphoffload.runtime.streams.copy_streams import DeviceStreams

CYCLES = 8_000_000  # some milliseconds
OTHERS = 32  # as many as torch has of a priority
TRIES = 3  # another process may have the GPU meanwhile; a connection that is shared holds every copy


@pytest.mark.parametrize("priority", [0, -1])
def test_copies_do_not_wait_for_streams_that_wait(priority: int) -> None:
    device = torch.device("cuda")
    ours = DeviceStreams(device)
    sides = {"d2h": ours.d2h, "h2d": ours.h2d}
    on_host, on_device = torch.empty(2**20, pin_memory=True), torch.empty(2**20, device=device)
    others = [torch.cuda.default_stream(), *(torch.cuda.Stream(priority=priority) for _ in range(OTHERS))]
    busy, held = torch.cuda.Stream(priority=priority), list[str]()
    on_device[:1].add_(0)  # the first launch of a kernel loads it, and waits for the device
    for number, other in enumerate(others):
        if other in (*sides.values(), busy):
            continue
        for name, side in sides.items():
            source, target = (on_device, on_host) if name == "d2h" else (on_host, on_device)
            if all(is_held(side, source[1:], target[1:], other, on_device, busy) for _ in range(TRIES)):
                held.append(f"{name} by stream {number}")
    torch.cuda.synchronize()
    print(f"priority {priority}: {len(held)} of {2 * len(others)}: {', '.join(held)}")
    assert not held, held


def is_held(
    side: torch.cuda.Stream, source: Tensor, target: Tensor, other: torch.cuda.Stream, work: Tensor, busy: torch.cuda.Stream
) -> bool:
    """Whether a copy on `side` is over only after what `other` waits for, with work of its own behind that."""
    torch.cuda.synchronize()
    over, copied = torch.cuda.Event(), torch.cuda.Event()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(CYCLES)
        over.record()
    other.wait_event(over)
    with torch.cuda.stream(other):
        work[:1].add_(0)
    with torch.cuda.stream(side):
        target.copy_(source, non_blocking=True)
        copied.record()
    while not copied.query():
        pass
    return over.query()
