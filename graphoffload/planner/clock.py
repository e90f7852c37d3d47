"""The clock of a simulation: when compute runs, stands still and is slowed down, and for how long a channel is busy.

    clock.run(1.0)    compute for a second, longer beside a copy        clock.copy(2.0)    a copy behind those before it
    clock.wait(5.0)   stand still until the fifth second                clock.owed         stand still before compute runs again
"""

from __future__ import annotations

from dataclasses import dataclass, field

from graphoffload.planner.moments import Span

TIME_EPSILON_S = 1e-12


@dataclass(slots=True)
class Clock:
    """Compute time, how long the running channel is busy, and what is to be drawn.

    owed: what `stand` gets before compute runs again; what else is issued by then is issued before it.
    """

    factor: float
    now_s: float = 0.0
    busy_until_s: float = 0.0
    segment_start_s: float = 0.0
    stalls: list[tuple[int, int, float]] = field(default_factory=list)
    compute: list[tuple[float, float]] = field(default_factory=list)
    owed: list[tuple[float, int, int]] = field(default_factory=list)

    def run(self, work_s: float) -> None:
        """Advance by `work_s` of compute, slower while the channel is busy."""
        if self.owed and work_s > 0.0:
            self.pay()
        overlap_s = self.busy_until_s - self.now_s
        if overlap_s <= 0.0:
            self.now_s += work_s
        elif work_s * self.factor <= overlap_s:
            self.now_s += work_s * self.factor
        else:
            self.now_s = self.busy_until_s + work_s - overlap_s / self.factor

    def copy(self, duration_s: float) -> Span:
        """Queue a copy now; when it starts and ends."""
        start_s = self.busy_until_s if self.busy_until_s > self.now_s else self.now_s
        self.busy_until_s = start_s + duration_s
        return start_s, self.busy_until_s

    def wait(self, until_s: float, candidate: int, where: int) -> None:
        """Stall until a copy is done, if it is not."""
        if until_s > self.now_s + TIME_EPSILON_S:
            self.stalls.append((candidate, where, until_s - self.now_s))
            self.close()
            self.now_s = self.segment_start_s = until_s

    def stand(self, seconds: float, candidate: int, where: int) -> None:
        """Stall for the host, which is late by so much since it issues a copy."""
        self.wait(self.now_s + seconds, candidate, where)

    def pay(self) -> None:
        """Stall for all that is owed."""
        for owed in self.owed:
            self.stand(*owed)
        self.owed.clear()

    def close(self) -> None:
        """End a stretch of compute."""
        if self.now_s > self.segment_start_s:
            self.compute.append((self.segment_start_s, self.now_s))
        self.segment_start_s = self.now_s
