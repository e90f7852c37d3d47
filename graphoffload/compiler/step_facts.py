"""What recorded runs say of a step, as the planner's facts.

    run     forward 0 | forward end 0 | ... | backward N | backward end N | ...       marks: allocated, ours, when
    facts   outside = allocated - ours, at the start of each forward and backward; time and peak of each gap between two calls

Memory outside is measured, so nobody needs to know what it is: parameters, gradients, optimizer state, inputs, logits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from graphoffload.compiler.dispatch import Dispatched
from graphoffload.facts.limits import Limits
from graphoffload.planner.step.facts import Beside, CallFacts, Dropped, Gap, StepFacts
from graphoffload.runtime.step.call import StepCall
from graphoffload.runtime.step.calls import StepRun
from graphoffload.runtime.step.schedule import Mark
from graphoffload.torch_internals import allocator, fsdp


def facts_of(runs: Sequence[StepRun], graphs: Sequence[Dispatched], limits: Limits) -> StepFacts:
    """What the recorded runs say of the step: bytes outside of the last one, the shortest gaps of any, and their highest peaks,
    of those whose allocations were recorded if there are some.

    A gap between two calls is no shorter than its work. It is longer where the host or another rank is late, as when something
    compiles or memory is page-locked, which happens once.

    A call's inputs that other graphs computed are outside where they were measured. They are activations of the call from the
    end of its forward to its backward, so they come off what is outside there, unless they were on the host; and those of other
    microbatches in flight. Those that somebody else holds as well, such as a list of hidden states, can only stay.
    """
    last = runs[-1]
    position = {graph.number: at for at, graph in enumerate(graphs)}
    records = [_Record(run) for run in runs]
    calls = []
    count = len(last.calls)
    ran = [_ran(graphs[position[call.graph]], call) for call in last.calls]
    stay = [_held_bytes(runs, call.index) for call in last.calls]
    inputs = [
        graphs[position[call.graph]].family.input_bytes[variant] - _gone_bytes(last, call, stay[call.index])
        for call, variant in zip(last.calls, ran, strict=True)
    ]
    held = list(accumulate(inputs, initial=0))
    for call in last.calls:
        index, graph = call.index, graphs[position[call.graph]]
        forward, backward = records[-1].at("forward", index), records[-1].at("backward", index)
        before = _gap_start("forward", index, count) if index else None
        after = None if last.flies and index + 1 == count else _gap_start("backward", index, count)
        here, there = held[index] + forward.beside * held[-1], held[index + 1] + backward.beside * held[-1]
        calls.append(
            CallFacts(
                graph=position[call.graph],
                forward_outside_bytes=max(0, _outside(forward, limits) - here),
                backward_outside_bytes=max(0, _outside(backward, limits) - there),
                ran=ran[index],
                before_forward=_less(_gap(records, before, ("forward", index), limits), here),
                before_backward=_less(_gap(records, after, ("backward", index), limits), there),
                held=_named(graph, stay[index]),
                held_bytes=sum(stay[index].values()),
                dropped=_dropped(records[-1], call, limits),
            )
        )
    base = min((min(c.forward_outside_bytes, c.backward_outside_bytes) for c in calls), default=0)
    families = [graph.family for graph in graphs]
    return StepFacts(
        graphs=tuple(family.variants for family in families),
        calls=tuple(calls),
        base_bytes=base,
        bounds=tuple(family.bound for family in families),
        beside_forward=_beside(records, "forward", limits, held),
        beside_backward=_beside(records, "backward", limits, held),
        host_s=min(record.host_s() for record in records),
        copies_between=fsdp.copies_between_calls(),
    )


def _gap_start(kind: str, index: int, count: int) -> tuple[str, int]:
    """Where the gap before the forward or backward of one of so many calls begins."""
    if kind == "forward":
        return "forward end", index - 1
    return ("backward end", index + 1) if index + 1 < count else ("forward end", index)


def _dropped(record: _Record, call: StepCall, limits: Limits) -> tuple[Dropped, ...]:
    """Outputs of a call that nobody held any more at a moment before its backward ended."""
    count, found = len(record.calls), []
    for nbytes, (kind, index) in call.let_go:
        start, moment = _gap_start(kind, index, count), index if kind == "forward" else 2 * count - 1 - index
        before = _gap([record], start, (kind, index), limits)
        found.append(Dropped(nbytes, moment, in_gap=before.outside_peak_bytes > _outside(record.at(*start), limits)))
    return tuple(found)


def _beside(records: Sequence[_Record], kind: str, limits: Limits, held: Sequence[int]) -> tuple[Beside, ...]:
    """What was outside when the forwards, or the backwards, of each microbatch began. held: inputs of the calls before each."""
    found = []
    for record in records:
        marks = [record.at(kind, call) for call in record.calls]
        own = held[:-1] if kind == "forward" else held[1:]
        outside = (_outside(m, limits) - m.beside * held[-1] - less for m, less in zip(marks, own, strict=True))
        found.append(Beside(max(mark.beside for mark in marks), tuple(max(0, nbytes) for nbytes in outside)))
    return tuple(dict.fromkeys(found)) if any(one.others for one in found) else ()


def _less(gap: Gap, nbytes: int) -> Gap:
    return replace(gap, outside_peak_bytes=max(0, gap.outside_peak_bytes - nbytes)) if gap.outside_peak_bytes else gap


def _gone_bytes(run: StepRun, call: StepCall, held: Mapping[int, int]) -> int:
    """Bytes of a call's own inputs that were on the host alone until its backward."""
    return sum(nbytes for id, nbytes in _own(run, call.gone).items() if id not in held)


def _held_bytes(runs: Sequence[StepRun], index: int) -> dict[int, int]:
    """Bytes of a call's own inputs, by id, that others held until its backward in each run. In one alone it may be garbage."""
    first, *others = (run.calls[index].held for run in runs)
    return {id: nbytes for id, nbytes in _own(runs[0], first).items() if all(id in held for held in others)}


def _own(run: StepRun, inputs: Mapping[int, tuple[Any, int]]) -> dict[int, int]:
    """Bytes, by id, of those inputs of a call, by (memory, bytes), that no other call of its run has."""
    times = _times(run)
    return {id: nbytes for id, (address, nbytes) in inputs.items() if times[address] == 1}


def _named(graph: Dispatched, held: Mapping[int, int]) -> tuple[str, ...]:
    """Inputs of a call by their names in its graph."""
    plan = graph.first.plan
    return tuple(t.tensor for t in plan.transfers if t.id in held) if plan is not None else ()


def _times(run: StepRun) -> Counter[Any]:
    """How many calls have each input, by what its memory is known by."""
    return Counter(address for call in run.calls for address in set(call.inputs))


def drop_shared_inputs(run: StepRun, graphs: Sequence[Dispatched]) -> None:
    """Inputs that several calls of a run have are no activations of any of them: offloading one for one call frees nothing."""
    times = _times(run)
    for graph in graphs:
        calls = [call for call in run.calls if call.graph == graph.number]
        shared = {
            graph.graph.activations[at]
            for call in calls
            for at, address in enumerate(call.inputs)
            if at < len(graph.graph.activations) and (times[address] > 1 or call.inputs.count(address) > 1)
        }
        graph.share_inputs(shared)


def _ran(graph: Dispatched, call: StepCall) -> int:
    """The variant that ran when a call was recorded."""
    plan = graph.first.plan
    names = [recipe.name for recipe in graph.family.recipes]
    if plan is None or not plan.variant:
        return 0
    if plan.variant in names:
        return names.index(plan.variant)
    alike = [at for at, recipe in enumerate(graph.family.recipes) if not recipe.blocks and not recipe.slices]
    return max(alike, key=lambda at: len(graph.family.recipes[at].recomputes or ()))


class _Record:
    """The marks of a run by what they mark, and what the allocator did."""

    def __init__(self, run: StepRun) -> None:
        self._marks: dict[tuple[str, int], Mark] = {}
        self.changes = run.changes
        self.calls = range(len(run.calls))
        for mark in run.marks:
            self._marks.setdefault((mark.kind, mark.call), mark)

    def has(self, kind: str, call: int) -> bool:
        """Whether a moment came."""
        return (kind, call) in self._marks

    def at(self, kind: str, call: int) -> Mark:
        """The mark of a moment."""
        return self._marks[kind, call]

    def peak_bytes(self, start: tuple[str, int], end: tuple[str, int]) -> int:
        """The most that is allocated from one moment to another."""
        level = max(self.at(*start).allocated_bytes, self.at(*end).allocated_bytes)
        return level + self.above_bytes(start, end)

    def above_bytes(self, start: tuple[str, int], end: tuple[str, int]) -> int:
        """By how much memory outside rises between two moments above the larger of both: what the allocator did says so where
        that was recorded, else the peak, where it was higher than any before."""
        first, last = self.at(*start), self.at(*end)
        level = max(first.allocated_bytes, last.allocated_bytes)
        if self.changes:
            low = bisect_left(self.changes, first.time_us, key=lambda change: change.time_us)
            high = bisect_right(self.changes, last.time_us, key=lambda change: change.time_us)
            now_bytes = first.allocated_bytes - first.soon_bytes
            return max(0, now_bytes + allocator.most(self.changes[low:high]) - level)
        return last.peak_bytes - level if last.peak_bytes > first.peak_bytes else 0

    def seconds(self, start: tuple[str, int], end: tuple[str, int]) -> float:
        """What the compute stream took from one moment to the other, idle or not."""
        first, last = self.at(*start).event, self.at(*end).event
        last.synchronize()
        return max(0.0, float(first.elapsed_time(last)) / 1e3)

    def host_s(self) -> float:
        """What the host took to issue the forwards and backwards; 0.0 where it computes them itself."""
        return sum(
            (end.time_us - begin.time_us) / 1e6
            for kind in ("forward", "backward")
            for call in self.calls
            if (begin := self.at(kind, call)).event is not None and (end := self._marks.get((f"{kind} end", call))) is not None
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """Where a run of one call turns to its backward.

    start_bytes: allocated when the run began. left_bytes: what forward leaves: its activations on the device, and its outputs.
    peak_bytes: of the device, until backward begins. risen_bytes: by how much memory rises to it, where that was recorded.
    before_backward_bytes: allocated beside the activations where backward begins. backward_peak_bytes: of the device while it
    runs; 0 if it did not end.
    """

    start_bytes: int
    left_bytes: int
    peak_bytes: int
    risen_bytes: int
    before_backward_bytes: int
    backward_peak_bytes: int


def turn_of(run: StepRun) -> Turn | None:
    """The turn of a recorded run of one call; None for one that did not come to its backward."""
    record, start, end, done = _Record(run), ("forward end", 0), ("backward", 0), ("backward end", 0)
    if not all(record.has(*moment) for moment in (("forward", 0), start, end)):
        return None
    left, right = record.at(*start), record.at(*end)
    peak = record.peak_bytes(start, end)
    return Turn(
        start_bytes=record.at("forward", 0).allocated_bytes,
        left_bytes=left.ours_bytes + sum(run.calls[0].output_bytes.values()),
        peak_bytes=peak,
        risen_bytes=peak - left.allocated_bytes,
        before_backward_bytes=right.allocated_bytes - right.ours_bytes,
        backward_peak_bytes=record.peak_bytes(end, done) if record.has(*done) else 0,
    )


def _outside(mark: Mark, limits: Limits) -> int:
    return limits.static_bytes if mark.event is None else max(0, mark.allocated_bytes - mark.ours_bytes)


def _gap(records: Sequence[_Record], start: tuple[str, int] | None, end: tuple[str, int], limits: Limits) -> Gap:
    """The eager work between two moments."""
    if start is None:
        return Gap()
    first, last = records[-1].at(*start), records[-1].at(*end)
    if first.event is None or last.event is None:
        return Gap()
    level = max(_outside(first, limits), _outside(last, limits))
    watched = [record for record in records if record.changes]  # a first run compiles in its gaps, and times kernels
    above = max(record.above_bytes(start, end) for record in watched or records)
    return Gap(time_s=min(record.seconds(start, end) for record in records), outside_peak_bytes=level + above)
