"""Counters of the copies and bytes of this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Counters:
    """Totals since the process started or since reset_stats().

    offloads, reloads: copies. d2h_bytes, h2d_bytes: bytes copied. stays, stayed_bytes: tensors that a plan offloads and the
    runtime kept on the device, since a budget that several graphs share had room for them, or since they were the last graph's
    and backward reads those at once, or since the host had no room. relaid: reloads whose run-time strides differed from the
    graph's, so that a second copy on the device was needed. dropped: offloaded tensors that no backward read. captured,
    captured_bytes: offloads that CUDA graphs were captured with; their replays and the bytes of these are not counted.
    checked: digests compared. deferred: releases left to the next graph. prefetches: reloads started during the backward of
    another graph; prefetch_hits: those that a reload used. inflight_peak_bytes: most bytes offloaded and not yet released at
    one time. release_stall_us, wait_stall_us: time that compute waited for copies to the host and back, as far as it was
    measured (runtime.trace_stalls); stall_ms_by_tensor: both together, largest first.
    """

    offloads: int = 0
    releases: int = 0
    reloads: int = 0
    waits: int = 0
    d2h_bytes: int = 0
    h2d_bytes: int = 0
    stays: int = 0
    stayed_bytes: int = 0
    relaid: int = 0
    relaid_bytes: int = 0
    dropped: int = 0
    checked: int = 0
    captured: int = 0
    captured_bytes: int = 0
    deferred: int = 0
    prefetches: int = 0
    prefetch_hits: int = 0
    inflight_bytes: int = 0
    inflight_peak_bytes: int = 0
    release_stall_us: int = 0
    wait_stall_us: int = 0
    stall_ms_by_tensor: dict[str, float] = field(default_factory=dict)

    def offloaded(self, nbytes: int) -> None:
        """Count a tensor whose copy to the host has started."""
        self.offloads += 1
        self.d2h_bytes += nbytes
        self.inflight_bytes += nbytes
        if self.inflight_bytes > self.inflight_peak_bytes:
            self.inflight_peak_bytes = self.inflight_bytes

    def released(self, nbytes: int) -> None:
        """Count a source that was released."""
        self.releases += 1
        self.inflight_bytes -= nbytes

    def stayed(self, nbytes: int) -> None:
        """Count a tensor that stays on the device."""
        self.stays += 1
        self.stayed_bytes += nbytes

    def stalled(self, release_ms: float, wait_ms: float, by_tensor_ms: Mapping[str, float]) -> None:
        """Count a measured wait of compute."""
        self.release_stall_us += round(release_ms * 1e3)
        self.wait_stall_us += round(wait_ms * 1e3)
        for name, stall_ms in by_tensor_ms.items():
            self.stall_ms_by_tensor[name] = self.stall_ms_by_tensor.get(name, 0.0) + stall_ms

    def as_dict(self) -> dict[str, Any]:
        """All counters by name: integers alone, until stalls were timed."""
        found = asdict(self)
        waited = sorted(found.pop("stall_ms_by_tensor").items(), key=lambda item: -item[1])
        return {**found, "stall_ms_by_tensor": dict(waited)} if waited else found


COUNTERS = Counters()


def reset_stats() -> None:
    """Set every counter to zero, except for bytes in copies right now."""
    inflight = COUNTERS.inflight_bytes
    fresh = Counters(inflight_bytes=inflight, inflight_peak_bytes=inflight)
    for name in Counters.__dataclass_fields__:
        setattr(COUNTERS, name, getattr(fresh, name))
