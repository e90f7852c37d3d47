"""The one line of a step that was planned."""

from __future__ import annotations

from collections.abc import Mapping

from graphoffload.planner.step.facts import StepFacts
from graphoffload.planner.step.solve import StepSolution
from graphoffload.units import format_bytes

_SLOWER = 1.1  # than the GPU: predicted times are good to a few percent


def line_of_step(
    solution: StepSolution, graphs: Mapping[str, int], reserve_bytes: int, budget_bytes: int | None, device_bytes: int | None
) -> str:
    """Such as "step of 8 x graph0: offloads 7.1 GiB, recomputes in 6 of 8 calls, predicted peak 8.0 of 8.6 GiB, ...".

    Args:
        graphs: how often each graph is called, by name. budget_bytes: given by the user; device_bytes: of the whole device.
    """
    timeline, keep = solution.timeline, solution.keep_timeline
    copied = sum(
        candidate.nbytes
        for candidate, action in zip(solution.joined.program.candidates, _flat(solution), strict=True)
        if action == "offload"
    )
    again = sum(1 for chosen in solution.chosen if chosen)
    parts = []
    if copied:
        parts.append(f"offloads {format_bytes(copied)}")
    if again:
        parts.append(f"recomputes in {again} of {len(solution.chosen)} calls")
    parts = parts or ["kept all"]
    of = budget_bytes if budget_bytes is not None else device_bytes
    peak = format_bytes(timeline.peak_bytes + reserve_bytes)
    parts.append(f"predicted peak {peak}" + (f" of {format_bytes(of)}" if of is not None else ""))
    slowdown = timeline.time_s / keep.time_s - 1.0 if keep.time_s else 0.0
    bound = ""
    if solution.lower_bound_s is not None and keep.time_s:
        bound = f" (bound {solution.lower_bound_s / keep.time_s - 1.0:+.1%})"
    if again or copied:
        parts.append(f"slowdown {slowdown:+.1%}{bound}".replace("%", " %"))
    if reserve_bytes:
        parts.append(f"{format_bytes(reserve_bytes)} of the peak are reserved for optimizer state")
    if solution.in_flight > 1:
        parts.append(f"{solution.in_flight} microbatches in flight")
    called = " and ".join(f"{count} x {name}" if count > 1 else name for name, count in graphs.items())
    return f"step of {called}: {', '.join(parts)}"


def slow_host(facts: StepFacts) -> str:
    """A note that the host issues the step's kernels more slowly than the GPU runs them; "" where it does not."""
    if facts.host_s <= _SLOWER * facts.ran_s or not facts.ran_s:
        return ""
    return (
        f"the host is the limit: it took {1e3 * facts.host_s:.1f} ms to issue what the GPU runs in {1e3 * facts.ran_s:.1f} ms, "
        "so steps are slower than predicted; larger batches help"
    )


def _flat(solution: StepSolution) -> list[str]:
    return [solution.actions[call][index] for call, index in solution.joined.of]
