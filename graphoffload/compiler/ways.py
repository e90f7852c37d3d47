"""Ways to need less memory that cost time, or that only the user can ensure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from graphoffload.analysis.saved_values import returned_bytes
from graphoffload.compiler.request import GraphAnalysis
from graphoffload.units import format_bytes


def other_ways(analysis: GraphAnalysis) -> Iterator[GraphAnalysis]:
    """Unfused large operations, which cost time; a caller who does not hold the model's outputs, as only the user can ensure;
    both."""
    returned = returned_bytes(analysis.pair)
    note = f"meets the budget only if nothing holds what the model returns ({format_bytes(returned)}) once backward begins"
    not_held = replace(analysis, outputs_stay=False, notes=[*analysis.notes, note])
    if analysis.fuses:
        yield unfused(analysis, "to meet the budget")
    if returned >= _least(analysis):
        yield not_held
        if analysis.fuses:
            yield unfused(not_held, "to meet the budget")


def unfused(analysis: GraphAnalysis, why: str) -> GraphAnalysis:
    """`analysis` with large operations as kernels of their own; `why` ends the note that says so."""
    least = _least(analysis)
    note = f"operations that write {format_bytes(least)} or more each are not fused with each other, {why}"
    return replace(analysis, unfused_bytes=least, notes=[*analysis.notes, note])


def _least(analysis: GraphAnalysis) -> int:
    return max(1, int(analysis.request.config.min_tensor_bytes))
