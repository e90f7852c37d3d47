"""What graphoffload did during a run of the bench: its plans, what it said of them, its counters, and how far it is from its
synchronous twin."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch

from graphoffload.bench.measure import Session
from graphoffload.log import log
from graphoffload.report.offload_report import running
from graphoffload.runtime import registry, stats, twin_copies

REPEATS = 3
"""Steps from which it is learnt how far gradients are from themselves."""


class _Noted(logging.Handler):
    """Notes what is said."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Note one line."""
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """All lines that graphoffload says inside, as they come: what was planned, planned again, and why."""
    handler, before = _Noted(), log.level
    log.addHandler(handler)
    log.setLevel(min(before, logging.INFO) or logging.INFO)
    try:
        yield handler.lines
    finally:
        log.setLevel(before)
        log.removeHandler(handler)


def forget_plans() -> None:
    """So that last_plans() shows the next variant's alone."""
    registry.forget()


def our_stats() -> dict[str, float]:
    """graphoffload's counters."""
    return {name: value for name, value in stats().items() if isinstance(value, (int, float))}


def our_plans() -> list[dict[str, Any]]:
    """What the variant's plans say, without their tables, and without those that a graph ran by before its step was planned."""
    return [
        {
            "graph": plan.graph,
            "variant": plan.variant,
            "summary": plan.summary,
            "notes": list(plan.notes),
            "offloaded_bytes": plan.offloaded_bytes,
            "recomputed_bytes": plan.recomputed_bytes,
            "saved_bytes": plan.saved.saved_bytes,
            "transfers": len(plan.transfers),
            "prediction": {name: getattr(plan.prediction, name) for name in plan.prediction.__dataclass_fields__},
            "predicted_slowdown": plan.prediction.predicted_slowdown,
            "lower_bound_slowdown": plan.prediction.lower_bound_slowdown,
        }
        for plan in running(registry.last_plans())
    ]


def twin_error(session: Session) -> tuple[float, float] | None:
    """How far a step is from the same graphs with synchronous copies, and how far those are from themselves.

    Only copies differ, so only races and layouts can; but attention's backward adds in any order, at times and not always.
    Gradients to compare with wait on the host: on the device they would be memory outside, for which a step is planned again.
    """
    try:
        session.step()  # another session may have left its gradients where this one's are
        found, errors = session.gradients("cpu"), []
        with twin_copies():
            for _ in range(REPEATS):
                session.step()
                errors.append(session.check(found, 0.0).error)
                found = session.gradients("cpu") if len(errors) == 1 else found
        return errors[0], max(errors[1:])
    except torch.cuda.OutOfMemoryError:
        return None
