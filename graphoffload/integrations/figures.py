"""Figures of a training step for a trainer's logger: peak, stalls, and what the plan predicted.

    measured = StepFigures()
    measured.begin(); train_step(); logger.log(measured.end())        # one step in ten, say: waits are timed meanwhile
"""

from __future__ import annotations

import contextlib

import torch

from graphoffload.report.offload_report import OffloadReport
from graphoffload.runtime import stats, trace_stalls
from graphoffload.runtime.registry import last_plans
from graphoffload.runtime.streams.stalls import Stalls

PREFIX = "graphoffload/"


class StepFigures:
    """Figures of single steps, each between begin() and end()."""

    def __init__(self) -> None:
        self._timed = contextlib.ExitStack()
        self._stalls: Stalls | None = None
        self._copied = (0, 0)

    @property
    def is_open(self) -> bool:
        """Whether a step was begun and not ended."""
        return self._stalls is not None

    def begin(self) -> None:
        """Before a step. Its waits for copies are timed, which costs some microseconds each; a step that never ended is
        dropped."""
        self.drop()
        self._stalls = self._timed.enter_context(trace_stalls())
        self._copied = _copied()

    def drop(self) -> None:
        """End the timing without figures."""
        self._timed.close()
        self._stalls = None

    def end(self) -> dict[str, float]:
        """After the step: its figures by name, empty if none was begun.

        peak_bytes: most device memory since training began, as torch counts it (on a GPU). predicted_peak_bytes,
        predicted_slowdown: of the plans, 0.02 for 2 %. stall_ms: compute waited for copies. offloaded_bytes, reloaded_bytes:
        copied in this step. Waits for the step on the device, as its events must have happened.
        """
        if self._stalls is None:
            return {}
        stalls, before = self._stalls, self._copied
        self.drop()
        report, after = OffloadReport(plans=last_plans()), _copied()
        found = {
            "predicted_peak_bytes": report.predicted_peak_bytes,
            "predicted_slowdown": report.predicted_slowdown,
            "stall_ms": stalls.release_ms + stalls.wait_ms,
            "offloaded_bytes": after[0] - before[0],
            "reloaded_bytes": after[1] - before[1],
        }
        if torch.cuda.is_available():
            found = {"peak_bytes": torch.cuda.max_memory_allocated(), **found}
        return {PREFIX + name: float(value) for name, value in found.items()}


def _copied() -> tuple[int, int]:
    counts = stats()
    return counts["d2h_bytes"], counts["h2d_bytes"]
