"""Python's garbage holds device memory until it is collected, at any time.

    before a plan     a model that was deleted is a cycle, with all its parameters
    after planning    an error that was caught is one, with the frames of its traceback, and with those that called them

Frames of a user's loop hold what is on the device: a block's input and result are locals of `Module.__call__`. A step that
began with planning would have them until its end, and so would more steps after it: 157 MiB of a ConvNeXt's first block.
Whoever turns collection off, as some trainers do, would have them for good.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch

from graphoffload.log import log
from graphoffload.runtime.step.calls import STEPS
from graphoffload.runtime.streams.protocol import CopyStreams
from graphoffload.units import format_bytes


def streams_on(device: torch.device) -> CopyStreams | None:
    """The side streams of the latest run on a device; None before the first one, and where copies are synchronous."""
    run = STEPS.of(device)
    return None if run is None else run.streams


def collect_garbage(device: torch.device) -> None:
    """Free what only Python's garbage holds, or it counts as memory outside, and an optimizer in it as one that will step."""
    streams = streams_on(device)
    before = streams.allocated_bytes()[0] if streams is not None else 0
    gc.collect()
    freed = before - streams.allocated_bytes()[0] if streams is not None else 0
    if freed > 0:
        log.info("%s of device memory were garbage that Python had not collected; they are free now", format_bytes(freed))


@contextlib.contextmanager
def collected(device: torch.device) -> Iterator[None]:
    """Planning, and the handlers of its errors, under the frames of a user's step: what that leaves holds nothing of theirs. An
    error that leaves this block is still alive. A CPU's memory is not counted."""
    try:
        yield
    finally:
        if streams_on(device) is not None:
            gc.collect()
