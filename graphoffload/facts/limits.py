"""The memory that the process may use, resolved to bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graphoffload.units import coarse_size


@dataclass(frozen=True, slots=True)
class Limits:
    """The memory that the process may use, resolved to bytes.

    Attributes:
        explicit: the user gave a budget or a slowdown.
        device_budget_bytes: None if there is nothing to fit (a CPU).
        static_bytes: device memory outside the saved activations, such as parameters.
        uncut_bytes: of static_bytes, left for ends of blocks that torch's allocator does not cut off.
        reserve_bytes: device memory to leave free.
        shared: several graphs share the budget, and this graph is not the first. The runtime keeps those of their offloaded
            tensors on the device that fit together.
        downstream: the graph reads results of other trained graphs.
        turn_bytes: device memory that eager code takes between forward and backward, such as a loss, above what forward leaves.
            None: not known yet, and measured once it runs.
        host_auto: the host budget is a share of the host memory that was available when it was resolved.
        host_locked: the host budget is the memory that this user may lock.
    """

    explicit: bool = False
    device_budget_bytes: int | None = None
    static_bytes: int = 0
    reserve_bytes: int = 0
    host_budget_bytes: int | None = None
    shared: bool = False
    downstream: bool = False
    turn_bytes: int | None = 0
    uncut_bytes: int = 0
    host_auto: bool = False
    host_locked: bool = False

    @property
    def room_bytes(self) -> int | None:
        """What is left of the budget for saved activations and temporaries; None where nothing has to fit."""
        if self.device_budget_bytes is None:
            return None
        return max(0, self.device_budget_bytes - self.static_bytes - self.reserve_bytes)

    @property
    def given_bytes(self) -> int | None:
        """The budget that a plan is held to; None where the user gave no number, or nothing has to fit."""
        return self.device_budget_bytes if self.explicit else None

    def quantised(self) -> Limits:
        """The limits for cache keys, with measured bytes in steps of 1 GiB, so that two runs on the same machine agree.

        The host's available memory differs by GiBs between runs, and few plans depend on it. A measured host budget is
        therefore left out. `Plan.suits_host` decides whether a stored plan may be used with the memory that is available now.
        """
        host_bytes = None if self.host_auto else coarse_size(self.host_budget_bytes)
        return replace(
            self,
            device_budget_bytes=coarse_size(self.device_budget_bytes),
            static_bytes=coarse_size(self.static_bytes) or 0,
            uncut_bytes=0,
            host_budget_bytes=host_bytes,
            host_locked=self.host_locked and not self.host_auto,
        )
