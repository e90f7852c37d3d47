"""Observes the plans and copies of a run. A test that only compares gradients would also pass if nothing were offloaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from graphoffload.facts.plan import Plan
from graphoffload.runtime import registry, stats


@dataclass(slots=True)
class Observed:
    """Plans that were compiled or found in a cache inside `observe`, and the growth of each counter of stats().

    The fields are filled when `observe` ends.
    """

    plans: tuple[Plan, ...] = ()
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def planned_bytes(self) -> int:
        """Bytes that all plans together offload in one forward."""
        return sum(plan.offloaded_bytes for plan in self.plans)

    @property
    def copied_bytes(self) -> int:
        """Bytes that were copied to the host."""
        return self.counters["d2h_bytes"]


@contextlib.contextmanager
def observe() -> Iterator[Observed]:
    """Observe the plans and copies of the code inside. Plans of earlier compiles are dropped."""
    seen, before = Observed(), stats()
    registry.forget()
    yield seen
    seen.plans = registry.last_plans()
    seen.counters = {name: value - before[name] for name, value in stats().items() if isinstance(value, int)}
