"""What a step was planned with, and what each of its calls does, as text: a dump's `problem.txt`, and the command `replay`.

     call graph  ran           outside GiB       gap ms    its peak GiB  does          offloads
        0     0  smallest      9.25  12.10   0.00  0.18       -   12.16  light        146.1 MiB

Of two figures the first is of the forward, and the second of the backward. *Outside* is what is allocated when the call
begins, without what compiled graphs saved. *Gap* is the eager work before it; its peak is the most memory outside meanwhile.
"""

from __future__ import annotations

from graphoffload.facts.goals import Goal, KeepIfFits
from graphoffload.planner.step.facts import CallFacts, StepProblem, Variant
from graphoffload.planner.step.solve import StepSolution
from graphoffload.units import format_bytes, unit_of


def problem_table(problem: StepProblem, solution: StepSolution | None = None) -> str:
    """The facts of a step; with a solution, what each call does."""
    return "\n".join([*_asked_lines(problem), "", *_graph_lines(problem), "", *_call_lines(problem, solution), ""])


def _asked_lines(problem: StepProblem) -> list[str]:
    hardware, facts = problem.hardware, problem.facts
    host = "no limit" if problem.host_budget_bytes is None else format_bytes(problem.host_budget_bytes)
    gaps = sum(call.before_forward.time_s + call.before_backward.time_s for call in facts.calls)
    flight = f", {facts.in_flight} microbatches in flight" if facts.in_flight > 1 else ""
    late_s = hardware.host_s_per_copy
    price = f", compute waits {late_s * 1e6:.0f} us for the host of each copied tensor" if late_s else ""
    rates = " and ".join(f"{hardware.copy_rate_bytes_per_s(way) / 1e9:.1f} GB/s" for way in ("d2h", "h2d"))
    return [
        f"goal: {_goal_text(problem.goal)}; reserve: {format_bytes(problem.reserve_bytes)}; host memory: {host}",
        f"device: {hardware.name}, {rates} to the host and back{price}",
        f"step: {len(facts.calls)} calls, {len(facts.graphs)} different graphs{flight}",
        f"as recorded: kernels {facts.ran_s * 1e3:.1f} ms, gaps {gaps * 1e3:.1f} ms, host {facts.host_s * 1e3:.1f} ms",
    ]


def _goal_text(goal: Goal) -> str:
    return "keep everything" if isinstance(goal, KeepIfFits) and goal.device_budget_bytes is None else str(goal)


def _graph_lines(problem: StepProblem) -> list[str]:
    lines = [f"{'graph':>5}  {'variant':22} {'forward ms':>10} {'backward ms':>11} {'saves':>11} {'of inputs':>11}"]
    for number, variants in enumerate(problem.facts.graphs):
        lines += [f"{number:5}  {variant.name:22} {_variant_cells(variant)}" for variant in variants]
    return lines


def _variant_cells(variant: Variant) -> str:
    halves = variant.program.forward, variant.program.backward
    forward, backward = (sum(step.time_s for step in steps) * 1e3 for steps in halves)
    saves = format_bytes(sum(candidate.nbytes for candidate in variant.program.candidates))
    return f"{forward:10.3f} {backward:11.3f} {saves:>11} {format_bytes(variant.saved_input_bytes):>11}"


def _call_lines(problem: StepProblem, solution: StepSolution | None) -> list[str]:
    facts = problem.facts
    unit, size = unit_of(max((_most_bytes(call) for call in facts.calls), default=0))
    planned = f"  {'does':22} {'offloads':>11}" if solution is not None else ""
    lines = [f"{'call':>5} {'graph':>5}  {'ran':22} {f'outside {unit}':>15} {'gap ms':>15} {f'its peak {unit}':>15}{planned}"]
    for at, call in enumerate(facts.calls):
        does = ""
        if solution is not None:
            chosen = facts.variant(at, solution.chosen[at])
            pairs = zip(chosen.program.candidates, solution.actions[at], strict=True)
            gone = sum(candidate.nbytes for candidate, action in pairs if action == "offload")
            does = f"  {chosen.name:22} {format_bytes(gone):>11}"
        lines.append(f"{at:5} {call.graph:5}  {facts.variant(at, call.ran).name:22} {_call_cells(call, size)}{does}")
    return lines


def _most_bytes(call: CallFacts) -> int:
    gaps = call.before_forward, call.before_backward
    return max(call.forward_outside_bytes, call.backward_outside_bytes, *(gap.outside_peak_bytes for gap in gaps))


def _call_cells(call: CallFacts, size: int) -> str:
    before = call.before_forward, call.before_backward
    outside = [f"{nbytes / size:7.2f}" for nbytes in (call.forward_outside_bytes, call.backward_outside_bytes)]
    gaps = [f"{gap.time_s * 1e3:7.2f}" for gap in before]
    peaks = [f"{gap.outside_peak_bytes / size:7.2f}" if gap.outside_peak_bytes else f"{'-':>7}" for gap in before]
    return " ".join(" ".join(pair) for pair in (outside, gaps, peaks))
