"""What a report says of a step of several graphs: its calls, its predicted cost, and one picture of all of it.

calls    8 x graph0: light x 5, third x 3         which variant of its graph each call runs
picture  lanes over all graphs, and one curve of memory in two layers: outside the graphs, and all
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from graphoffload.facts.plan import Action, Prediction
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.planner.arrays import arrays_of
from graphoffload.planner.memory_layers import layers_of
from graphoffload.planner.simulator import Timeline
from graphoffload.planner.step.facts import StepFacts
from graphoffload.planner.step.joint import OUTSIDE, Joined, join
from graphoffload.planner.step.solve import StepSolution
from graphoffload.report.step_picture import (
    Lane,
    StepPicture,
    again_text,
    compute_lane,
    memory_parts,
    memory_points,
    milliseconds,
    stalls_of,
)
from graphoffload.report.table import percent
from graphoffload.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport(Prediction):
    """The facts of a planned step. Its peaks include everything outside the graphs; eager code between them takes no time.

    Attributes:
        calls: (graph, variant) in the order of the forwards.
        summary: the step's line, as training prints it.
        offloaded_bytes, recomputed_bytes, kept_bytes: of all calls together.
        budget_bytes: what the peak and the reserve were to stay within; None where nothing was to be met.
        picture: the predicted step.
    """

    calls: tuple[tuple[str, str], ...] = ()
    summary: str = ""
    offloaded_bytes: int = 0
    recomputed_bytes: int = 0
    kept_bytes: int = 0
    budget_bytes: int | None = None
    picture: StepPicture = StepPicture()  # noqa: RUF009 (frozen)

    def lines(self) -> list[str]:
        """The step as text: calls folded, and what they do together."""
        amounts = (
            f"{word} {format_bytes(nbytes)}"
            for word, nbytes in (
                ("keep", self.kept_bytes), ("recompute", self.recomputed_bytes), ("offload", self.offloaded_bytes)
            )
        )  # fmt: skip
        return [
            f"one step runs {folded_calls(self.calls)}",
            f"together they {', '.join(amounts)}",
            self.summary,
        ]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StepReport:
        """Inverse of dataclasses.asdict, also after JSON made lists of the tuples."""
        picture = {key: _tuples(value) for key, value in data["picture"].items()}
        calls = tuple((graph, variant) for graph, variant in data["calls"])
        return cls(**{**data, "calls": calls, "picture": StepPicture(**picture)})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value


def folded_calls(calls: Sequence[tuple[str, str]]) -> str:
    """Such as "8 x graph0: light x 5, third x 3; graph1: keep"."""
    texts = []
    for graph in dict.fromkeys(graph for graph, _ in calls):
        variants = Counter(variant for name, variant in calls if name == graph)
        count = sum(variants.values())
        each = ", ".join(f"{variant} x {n}" if count > 1 else variant for variant, n in variants.items())
        texts.append(f"{count} x {graph}: {each}" if count > 1 else f"{graph}: {each}")
    return "; ".join(texts)


def report_of_step(
    solution: StepSolution,
    facts: StepFacts,
    names: Sequence[str],
    summary: str,
    reserve_bytes: int,
    budget_bytes: int | None,
    hardware: HardwareProfile,
) -> StepReport:
    """The report of a solved step.

    Args:
        names: the graph of each call. budget_bytes: as it was resolved. hardware: where the times come from.
    """
    variants = [facts.variant(call, chosen) for call, chosen in enumerate(solution.chosen)]
    calls = tuple((name, variant.name) for name, variant in zip(names, variants, strict=True))
    sums: Counter[Action] = Counter()
    again: dict[str, str] = {}
    for call, fact in enumerate(facts.calls):
        for candidate, action in zip(variants[call].program.candidates, solution.actions[call], strict=True):
            sums[action] += candidate.nbytes
        everything = facts.bounds[fact.graph].candidates if facts.bounds else ()
        for c in everything:
            if c.name in variants[call].recomputes:
                sums["recompute"] += c.nbytes
                again[f"call {call}: {c.name}"] = f"call {call}: {c.name}, {format_bytes(c.nbytes)}"
    limit_bytes = None if budget_bytes is None else budget_bytes - reserve_bytes
    return StepReport(
        **asdict(solution.prediction(reserve_bytes)),
        calls=calls,
        summary=summary,
        offloaded_bytes=sums["offload"],
        recomputed_bytes=sums["recompute"],
        kept_bytes=sums["keep"],
        budget_bytes=budget_bytes,
        picture=_picture(solution, calls, summary, limit_bytes, hardware, again),
    )


def outside_of(facts: StepFacts, chosen: Sequence[int], step: int) -> tuple[int, int, bool]:
    """Bytes outside the graphs at a step of the joint program; the call that runs then or last began; whether backward runs."""
    joined = join(facts, chosen)
    half = len(joined.program.forward)
    backward = step >= half
    if backward:
        starts = sorted((start, call) for call, start in enumerate(joined.backward_start))
        call = starts[max(0, bisect_right(starts, (step - half, len(starts))) - 1)][1]
    else:
        call = max(0, bisect_right(joined.forward_start, step) - 1)
    return outside_at(joined)[step], call, backward


def outside_at(joined: Joined) -> list[int]:
    """Bytes outside the graphs at each step of the joint program."""
    program = joined.program
    levels = [program.static_bytes] * (len(program.forward) + len(program.backward))
    for buffer in program.buffers:
        if buffer.name.startswith(OUTSIDE):
            for step in range(buffer.first, buffer.last + 1):
                levels[step] += buffer.nbytes
    return levels


def _picture(
    solution: StepSolution,
    calls: Sequence[tuple[str, str]],
    summary: str,
    limit_bytes: int | None,
    hardware: HardwareProfile,
    again: Mapping[str, str],
) -> StepPicture:
    timeline, joined = solution.timeline, solution.joined
    candidates = joined.program.candidates
    labels = {index: f"{c.name}, {format_bytes(c.nbytes)}" for index, c in enumerate(candidates)}
    actions = [solution.actions[call][candidate] for call, candidate in joined.of]
    layers = layers_of(arrays_of(joined.program, hardware), actions, timeline, outside_at(joined))
    lanes = [*_call_lanes(joined, timeline, calls), *compute_lane(timeline, layers.again, again)]
    for name, copies in (("D2H", timeline.lanes.d2h), ("H2D", timeline.lanes.h2d)):
        lanes += [(name, i.start_s, i.end_s, labels.get(-1 if i.candidate is None else i.candidate, "")) for i in copies]
    recomputes = f"; recomputation{text}" if (text := again_text(layers)) else ""
    stalls = f"compute stalls (red) for {milliseconds(timeline.stall_s)}" if timeline.stalls else "no stalls"
    keep_s, bound_s = solution.keep_timeline.time_s, solution.lower_bound_s
    least = "" if bound_s is None or not keep_s else f", bound {percent(bound_s / keep_s - 1.0)}"
    change = f" ({percent(timeline.time_s / keep_s - 1.0)}{least})" if keep_s else ""
    return StepPicture(
        title=f"one step of {folded_calls(calls)}, as predicted for {hardware.name}",
        lanes=tuple(lanes),
        stalls=tuple(stalls_of(timeline, {c.name: labels[index] for index, c in enumerate(candidates)})),
        memory_keep=tuple(memory_points(solution.keep_timeline)),
        memory_plan=tuple(memory_points(timeline)),
        budget_bytes=limit_bytes,
        forward_end_s=timeline.lanes.forward_end_s,
        facts=(f"keep-all {milliseconds(keep_s)}, plan {milliseconds(timeline.time_s)}{change}; {stalls}{recomputes}", summary),
        **memory_parts(timeline, layers),
    )


def _call_lanes(joined: Joined, timeline: Timeline, calls: Sequence[tuple[str, str]]) -> Iterator[Lane]:
    """The calls over time, by number, graph and variant; what comes before the next one's start is a call's."""
    moments_s = (0.0, *timeline.ends_s)
    half, count = len(joined.program.forward), len(calls)
    backward = sorted((half + start, call) for call, start in enumerate(joined.backward_start))
    for starts, last in (
        ([(start, call) for call, start in enumerate(joined.forward_start)], half),
        (backward, len(timeline.ends_s)),
    ):
        for place, (start, call) in enumerate(starts):
            end = starts[place + 1][0] if place + 1 < count else last
            graph, variant = calls[call]
            if moments_s[end] > moments_s[start]:
                yield "layer", moments_s[start], moments_s[end], f"{graph} {variant}.{call}"
