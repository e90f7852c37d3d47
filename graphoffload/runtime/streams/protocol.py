"""What the runtime asks of a device's side streams, and of the events of their copies.

`DeviceStreams` (copy_streams.py) is what a CUDA device has. A benchmark on a CPU has streams that copy at once
(bench/op_cost.py), and the tests have streams that copy as late as they may (testing/lazy_streams.py). mypy holds all of them
to these signatures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch

from graphoffload.runtime.streams.copy_times import CopyTimes

Block: TypeAlias = tuple[int, int, int]
"""Addresses of destination and source, and bytes."""


class Named(Protocol):
    """The tensor of a copy, for messages and hooks."""

    @property
    def name(self) -> str:
        """The tensor and its module."""


class CopyEvent(Protocol):
    """Reached when a copy, and all before it on its stream, were made."""

    def wait(self, stream: Any) -> None:
        """Order all later work of `stream` after the copy."""

    def synchronize(self) -> None:
        """Return when it is reached."""

    def query(self) -> bool:
        """Whether it was reached."""


class Moment(Protocol):
    """A moment of the compute stream."""

    def query(self) -> bool:
        """Whether it was reached."""

    def synchronize(self) -> None:
        """Return when it is reached."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from here to `end`."""


class CopyStreams(Protocol):
    """A D2H and an H2D stream beside the stream that computes. index: of the device. times: of its copies; None: not timed."""

    index: int
    times: CopyTimes | None

    def compute(self) -> Any:
        """The stream that the caller computes on."""

    def timed_event(self) -> Moment:
        """This moment of the compute stream."""

    def hold_compute(self) -> None:
        """Keep compute busy for a moment: what the host issues meanwhile runs without a break, as on a faster host."""

    def recycle(self, event: CopyEvent | None) -> None:
        """Give an event back."""

    def copy(
        self, direction: str, entry: Named, after: tuple[Any, ...], run: Callable[[], None], block: Block | None = None
    ) -> CopyEvent:
        """Copy after compute's work so far and the events `after`; `run` copies what `block` says, if that is given."""

    def compute_waits(self, event: Any) -> None:
        """Order all later work of the compute stream after `event`."""

    def compute_waits_for(self, op: str, entry: Named, event: Any, compute: Any = None) -> None:
        """compute_waits for the op `release` or `wait`; `compute`: None for the current stream."""

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured: no wait may leave it, and nothing may be deferred."""

    def empty_cache(self) -> None:
        """Let the allocator give back the memory that it caches."""

    def allocated_bytes(self) -> tuple[int, int]:
        """Bytes allocated on the device now, and their peak so far."""

    def retries(self) -> int:
        """How often the allocator gave back what it caches to serve an allocation."""

    def headroom_bytes(self) -> int:
        """Bytes that can be allocated without a new peak."""


class CaptureStreams(CopyStreams, Protocol):
    """The same for copies inside captures of CUDA graphs."""

    device: torch.device

    def copy(
        self,
        direction: str,
        entry: Named,
        after: tuple[Any, ...],
        run: Callable[[], None],
        block: Block | None = None,
        *,
        first: Callable[[], None] | None = None,
    ) -> CopyEvent:
        """As CopyStreams.copy; `first` runs before the copy, on its stream."""

    def read(self, number: torch.Tensor) -> int:
        """An int64 of shape (1,) on the device, read while the compute stream is being captured."""
