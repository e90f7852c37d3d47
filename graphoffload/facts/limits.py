"""What the process may use, resolved to bytes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from graphoffload.patience import Patience
from graphoffload.units import coarse_size


@dataclass(frozen=True, slots=True)
class Limits:
    """What the process may use, resolved to bytes.

    explicit: the user gave a budget or a slowdown. device_budget_bytes: None where there is nothing to fit (a CPU).
    static_bytes: what lives on the device outside the saved activations. reserve_bytes: to be left free. shared: the budget is
    for several graphs, of which this one is not the first, and the runtime lets stay what fits of what they offload together.
    downstream: the graph reads what other trained graphs compute. host_locked: the host budget is what this user may lock.
    patience: how long planning may take; None: as long as it does.
    """

    explicit: bool = False
    device_budget_bytes: int | None = None
    static_bytes: int = 0
    reserve_bytes: int = 0
    host_budget_bytes: int | None = None
    shared: bool = False
    downstream: bool = False
    host_locked: bool = False
    patience: Patience | None = field(default=None, compare=False, repr=False)

    def quantised(self) -> Limits:
        """For cache keys: what "auto" measures in steps of 1 GiB, so that two runs on the same machine agree."""
        return replace(
            self,
            device_budget_bytes=coarse_size(self.device_budget_bytes),
            static_bytes=coarse_size(self.static_bytes) or 0,
            host_budget_bytes=coarse_size(self.host_budget_bytes),
        )
