"""Copies run while another stream waits for an event, whichever stream of torch that is.

Streams share the connections to a GPU (CUDA_DEVICE_MAX_CONNECTIONS, 8 by default). A stream that waits for an event holds what
comes behind it on its connection, also work of other streams. A pipeline's compute stream waits for another GPU most of the
time that it is idle.
"""

from __future__ import annotations

import pytest
import torch

from graphoffload.runtime.streams.copy_streams import DeviceStreams

CYCLES = 8_000_000  # some milliseconds
OTHERS = 32  # as many as torch has of a priority


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
            torch.cuda.synchronize()
            over, copied = torch.cuda.Event(), torch.cuda.Event()
            with torch.cuda.stream(busy):
                torch.cuda._sleep(CYCLES)
                over.record()
            other.wait_event(over)
            with torch.cuda.stream(other):
                on_device[:1].add_(0)
            with torch.cuda.stream(side):
                source, target = (on_device, on_host) if name == "d2h" else (on_host, on_device)
                target[1:].copy_(source[1:], non_blocking=True)
                copied.record()
            while not copied.query():
                pass
            if over.query():
                held.append(f"{name} by stream {number}")
    torch.cuda.synchronize()
    print(f"priority {priority}: {len(held)} of {2 * len(others)}: {', '.join(held)}")
    assert not held, held
