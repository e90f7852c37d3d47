"""The memory at the peak of a step by what it is: the same rows for keep-all and for the plan.

    at the peak        keep-all      plan
    parameters         1.50 GiB  1.50 GiB
    gradients          ...                     those that exist by then
    optimizer state
    activations                                and what a graph's operations use while they run
    outside                                    inputs, buffers, what eager code and autograd hold between the graphs
    all together

A plan of one graph sees its gradients as what the graph's backward makes, so they are in the row of the activations.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphoffload.units import format_bytes

_WIDTH = 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Bytes at the peak. gradients_bytes: None: in `activations_bytes`. optimizer_bytes: None: not known, and not counted.
    reserve_bytes: left free for what comes later."""

    parameters_bytes: int
    gradients_bytes: int | None
    optimizer_bytes: int | None
    activations_bytes: int
    outside_bytes: int
    reserve_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All rows."""
        known = (self.parameters_bytes, self.gradients_bytes or 0, self.optimizer_bytes or 0)
        return sum(known) + self.activations_bytes + self.outside_bytes + self.reserve_bytes


def ledger_lines(plan: Ledger, keep: Ledger) -> list[str]:
    """Both as text, side by side."""
    together = plan.gradients_bytes is None
    rows: list[tuple[str, int | None, int | None]] = [
        ("parameters", keep.parameters_bytes, plan.parameters_bytes),
        ("optimizer state", keep.optimizer_bytes, plan.optimizer_bytes),
        ("activations and gradients" if together else "activations", keep.activations_bytes, plan.activations_bytes),
        ("outside the graphs", keep.outside_bytes, plan.outside_bytes),
    ]
    if not together:
        rows.insert(1, ("gradients", keep.gradients_bytes, plan.gradients_bytes))
    if keep.reserve_bytes:
        rows.append(("reserve", keep.reserve_bytes, plan.reserve_bytes))
    rows.append(("all together", keep.total_bytes, plan.total_bytes))
    lines = [f"{'memory at the peak':<{_WIDTH}}{'keep-all':>12}{'plan':>12}"]
    for name, kept, planned in rows:
        lines.append(f"{name:<{_WIDTH}}{_cell(kept):>12}{_cell(planned):>12}")
    return lines


def fit_lines(plan_bytes: int, keep_bytes: int, budget_bytes: int | None) -> list[str]:
    """Says in words which of the two does not fit in a budget, and by how much; nothing where both do."""
    if budget_bytes is None:
        return []
    return [
        f"{name} does not fit: it needs {format_bytes(nbytes)}, {format_bytes(nbytes - budget_bytes)} more than the "
        f"{format_bytes(budget_bytes)} that there are{rest}"
        for name, nbytes, rest in (
            ("keep-all", keep_bytes, "" if plan_bytes > budget_bytes else f"; the plan fits with {format_bytes(plan_bytes)}"),
            ("the plan", plan_bytes, ": raise device_budget, or make the batch or sequence smaller"),
        )
        if nbytes > budget_bytes
    ]


def _cell(nbytes: int | None) -> str:
    return "not counted" if nbytes is None else format_bytes(nbytes)
