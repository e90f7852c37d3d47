"""What the process may use, resolved to bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graphoffload.units import coarse_size


@dataclass(frozen=True, slots=True)
class Limits:
    """What the process may use, resolved to bytes.

    explicit: the user gave a budget or a slowdown. device_budget_bytes: None where there is nothing to fit (a CPU).
    static_bytes: what lives on the device outside the saved activations. reserve_bytes: to be left free. shared: the budget is
    for several graphs, of which this one is not the first, and the runtime lets stay what fits of what they offload together.
    downstream: the graph reads what other trained graphs compute. host_auto: the host budget is a share of what was
    available when it was resolved. host_locked: it is what this user may lock.
    """

    explicit: bool = False
    device_budget_bytes: int | None = None
    static_bytes: int = 0
    reserve_bytes: int = 0
    host_budget_bytes: int | None = None
    shared: bool = False
    downstream: bool = False
    host_auto: bool = False
    host_locked: bool = False

    @property
    def room_bytes(self) -> int | None:
        """What is left of the budget for saved activations and temporaries; None where nothing has to fit."""
        if self.device_budget_bytes is None:
            return None
        return max(0, self.device_budget_bytes - self.static_bytes - self.reserve_bytes)

    def quantised(self) -> Limits:
        """For cache keys: what "auto" measures in steps of 1 GiB, so that two runs on the same machine agree.

        What the host has available differs by GiBs from run to run, and few plans depend on it. It is left out where it was
        measured, and `Plan.suits_host` says whether a stored plan may be used with what there is now.
        """
        host_bytes = None if self.host_auto else coarse_size(self.host_budget_bytes)
        return replace(
            self,
            device_budget_bytes=coarse_size(self.device_budget_bytes),
            static_bytes=coarse_size(self.static_bytes) or 0,
            host_budget_bytes=host_bytes,
            host_locked=self.host_locked and not self.host_auto,
        )
