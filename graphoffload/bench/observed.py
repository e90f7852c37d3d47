"""What graphoffload did during a run of the bench: its plans, what it said of them, its counters, and how far it is from its
synchronous twin."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch

from graphoffload.bench.measure import Session
from graphoffload.log import log, say, show
from graphoffload.report.offload_report import running
from graphoffload.runtime import registry, stats, twin_copies

_LONGEST = 1000
REPEATS = 3
"""Steps from which it is learnt how far gradients are from themselves."""


class _Noted(logging.Handler):
    """Notes what is said, a line each, and shows it where nobody else would."""

    def __init__(self, *, shows: bool) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        self.shows = shows

    def emit(self, record: logging.LogRecord) -> None:
        """Note one line."""
        line = (record.getMessage().splitlines() or [""])[0][:_LONGEST]
        self.lines.append(line)
        if self.shows and record.funcName == say.__name__:  # others are for those who set up logging
            show(line)


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """All lines that graphoffload says inside, as they come: what was planned, planned again, and why. Who sees them otherwise
    sees them as before."""
    level, propagates, silenced = log.level, log.propagate, log.level > logging.INFO
    handler = _Noted(shows=not silenced and not log.hasHandlers())
    log.addHandler(handler)
    log.propagate = propagates and not silenced
    log.setLevel(min(level, logging.INFO) or logging.INFO)
    try:
        yield handler.lines
    finally:
        log.setLevel(level)
        log.propagate = propagates
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
