"""A few runs of one plan are looked at, for how fast the host issues what the device runs.

    a run begins: looks.at(run)   ... forwards and backwards begin and end ...   the next one begins: looks.fastest()

Runs that compile, leave their plan or are disturbed by something else are slower: the fastest counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from graphoffload.runtime.step.calls import StepRun
from graphoffload.runtime.step.pace import Issued, Pace

LOOKS = 3
"""Runs that are looked at."""
_TRIES = 8  # runs that are begun to look at until enough of them went by their plan


@dataclass(slots=True)
class Looks:
    """A few runs of one plan that are looked at."""

    _tries: int = 0
    _looked: Pace | None = None
    _found: list[Issued] = field(default_factory=list)

    def at(self, run: StepRun) -> None:
        """A run begins: look at it, if something is still to be known, and if it says anything of the host."""
        if self._looked is not None or self._tries == _TRIES:
            return
        if run.streams is None or run.twin or run.streams.capturing():  # no capture survives a question of what was reached
            return
        self._tries += 1
        run.pace = self._looked = Pace(run.streams)

    def fastest(self) -> Issued | None:
        """At the start of a run: the fastest of `LOOKS` runs, once; None before, and after."""
        if self._looked is None or not self._looked.is_reached:
            return None
        found, self._looked = self._looked.found(), None
        if found is None:
            return None
        self._found.append(found)
        if len(self._found) < LOOKS:
            return None
        self._tries = _TRIES
        return min(self._found)
