"""Several microbatches in flight: how runs show it.

    a pipeline's stage, 1F1B    |f0|f1|b0|f2|b1|f3|b2|b3|
    first seen as               |<-- a run -->|<-- another -->      its first backward is that of call k - 1, not of the last
    from then on                |f0|   |f1|   ...                   a run for each microbatch, of k calls

A forward that runs twice before its backward may be chance, so it counts when it comes twice in a row.
"""

from __future__ import annotations

from graphoffload.runtime.step.calls import StepRun

OVERLAPS = 2
"""Runs in a row that have to show several microbatches."""


def microbatch_of(run: StepRun) -> int:
    """How many calls each of several microbatches in a run has; 0: it is one, or its backwards say nothing."""
    count = len(run.calls)
    if run.flies or not run.ended:
        return 0
    size = run.ended[0] + 1
    graphs = [call.graph for call in run.calls]
    whole = size < count and count % size == 0 and run.ended[:size] == list(range(size - 1, -1, -1))
    return size if whole and graphs == graphs[:size] * (count // size) else 0


def seen_in_flight(run: StepRun) -> int:
    """Microbatches that were in flight when a recorded run began, itself included."""
    return 1 + (run.marks[0].beside if run.marks else 0)
