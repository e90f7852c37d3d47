"""What a run really did: its plans and its copies. A test of gradients that looks at nothing else would pass a no-op."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from graphoffload.facts.plan import Plan
from graphoffload.runtime import registry, stats


@dataclass(slots=True)
class Observed:
    """Filled when `observe` ends: plans compiled (or found in a cache) meanwhile, and what each counter of stats() grew by."""

    plans: tuple[Plan, ...] = ()
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def planned_bytes(self) -> int:
        """Bytes that all the plans offload in one forward."""
        return sum(plan.offloaded_bytes for plan in self.plans)

    @property
    def copied_bytes(self) -> int:
        """Bytes that went to the host."""
        return self.counters["d2h_bytes"]


@contextlib.contextmanager
def observe() -> Iterator[Observed]:
    """Plans and copies of the code inside; forgets the plans of earlier compiles."""
    seen, before = Observed(), stats()
    registry.forget()
    yield seen
    seen.plans = registry.last_plans()
    seen.counters = {name: value - before[name] for name, value in stats().items() if isinstance(value, int)}
