"""How memory outside rises from run to run until the optimizer steps.

    step 4     starts of its runs: 10, 12, 12.5, 13 GiB      gradients appear, and a stage's outputs pile up
    step 5     its first run starts at 10 GiB                planned for 13 GiB

A plan for what is allocated at the start of one run would be made again at each of those that follow. Several runs in a step:
gradient accumulation, and the last stage of a pipeline, whose microbatches each end before the next begins. In the first step
nothing is known of this.
"""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

_MOST = 1024  # runs in a step that are remembered


class _Optimizers:
    """Those of this process. steps: how many they have made, all together."""

    steps = 0


OPTIMIZERS = _Optimizers()


def _after_step(*_: Any) -> None:
    OPTIMIZERS.steps += 1


register_optimizer_step_post_hook(_after_step)


class Rise:
    """What was allocated when the runs of one sequence began, in the step that runs and in the one before."""

    def __init__(self) -> None:
        self._step = -1
        self._starts: list[int] = []
        self._before: list[int] = []

    def begin(self, allocated_bytes: int, step: int) -> None:
        """A run began with so much allocated, after so many steps of the optimizers."""
        if step != self._step:
            self._before, self._starts, self._step = self._starts, [], step
        if len(self._starts) < _MOST:
            self._starts.append(allocated_bytes)

    @property
    def ahead_bytes(self) -> int:
        """How much more there will be at the start of a later run of this step than at the start of the latest one, if it goes
        on as the step before did."""
        rest = self._before[max(0, len(self._starts) - 1) :]
        return max(rest) - rest[0] if rest else 0
