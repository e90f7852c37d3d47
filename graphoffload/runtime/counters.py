"""Counters of what moved in this process."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the process started or since reset_stats().

    offloads, reloads: copies. d2h_bytes, h2d_bytes: bytes moved. stays, stayed_bytes: what a plan offloads, but a budget that
    several graphs share had room for. relaid: reloads whose run-time strides differed from the
    graph's, so that a second copy on the device put them right. dropped: offloaded tensors that no backward asked for.
    captured, captured_bytes: offloads that CUDA graphs were captured with; their replays are not counted, nor are their bytes.
    checked: digests compared. deferred: releases left to the next graph. prefetches: reloads started in the backward of the
    graph behind; prefetch_hits: those that a reload took. inflight_peak_bytes: most bytes offloaded and not yet released at
    one time. release_stall_us, wait_stall_us: what compute waited for copies to and from the host, as far as it was timed
    (runtime.trace_stalls).
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

    def offloaded(self, nbytes: int) -> None:
        """One tensor more on its way to the host."""
        self.offloads += 1
        self.d2h_bytes += nbytes
        self.inflight_bytes += nbytes
        if self.inflight_bytes > self.inflight_peak_bytes:
            self.inflight_peak_bytes = self.inflight_bytes

    def stayed(self, nbytes: int) -> None:
        """One tensor more that stays on the device."""
        self.stays += 1
        self.stayed_bytes += nbytes

    def as_dict(self) -> dict[str, int]:
        """All counters by name."""
        return asdict(self)


COUNTERS = Counters()


def reset_stats() -> None:
    """Set every counter to zero, but for what is in flight now: it is still to be released."""
    inflight_bytes = COUNTERS.inflight_bytes
    for name in Counters.__dataclass_fields__:
        setattr(COUNTERS, name, 0)
    COUNTERS.inflight_bytes = COUNTERS.inflight_peak_bytes = inflight_bytes
