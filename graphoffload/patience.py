"""How long planning may take, and a line now and then on how far it is.

A net and no tool: solvers and trials are counted, so that plans do not depend on a machine's speed. Only where planning takes
minutes does the clock end it, with the best plan so far; that is said in the plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from graphoffload.log import say

PATIENCE_S = 300.0
FIRST_LINE_S = 8.0


class Patience:
    """The clock of one graph's planning.

    Args:
        name: of the graph. seconds: what planning may take. first_line_s: when the user hears of it first; then at twice that.
    """

    def __init__(
        self,
        name: str = "graph",
        seconds: float = PATIENCE_S,
        *,
        first_line_s: float = FIRST_LINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.seconds, self.doing = name, seconds, "the first trial"
        self._clock, self._begin_s, self._next_line_s = clock, clock(), first_line_s
        self.ended = False

    def over(self) -> bool:
        """Whether planning has to end now. Asked between any two simulations, so it is cheap; says a line when one is due."""
        spent_s = self._clock() - self._begin_s
        if spent_s >= self._next_line_s:
            self._next_line_s = 2.0 * spent_s
            say(f"{self.name}: planning, {spent_s:.0f} s so far: {self.doing}")
        self.ended = self.ended or spent_s > self.seconds
        return self.ended

    def note(self) -> str:
        """What a plan says whose planning the clock ended."""
        return f"planning was ended after {self.seconds:.0f} s: this is the best plan so far"
