"""The plan of a step: made between two steps from what was recorded of the last ones, and given to each call by its index.

    run 1, 2   recorded, each call runs what was compiled first
    run 3      the sequence of calls came twice: planned, variants compiled, one line; from now on each call follows its schedule

Plans are kept by sequence of graphs, so batches of other shapes, which are other graphs, have plans of their own.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch

from graphoffload.compiler.compile_variant import Compiled
from graphoffload.compiler.device_limits import resolve_limits
from graphoffload.compiler.dispatch import GRAPHS, Dispatched
from graphoffload.compiler.optimizer_state import unmade_state_bytes
from graphoffload.errors import BudgetError, StepNotPlannedWarning, warn
from graphoffload.facts.goals import Goal, KeepIfFits, MeetBudget, WithinSlowdown, UNMEASURABLE
from graphoffload.facts.limits import Limits
from graphoffload.facts.plan import Prediction
from graphoffload.facts.recipe import Recipe
from graphoffload.hardware.measurement import resolve_hardware
from graphoffload.log import log, say
from graphoffload.patience import Patience
from graphoffload.planner.step.facts import CallFacts, Gap, StepFacts
from graphoffload.planner.step.solve import StepSolution, plan_step
from graphoffload.report.step_line import step_line
from graphoffload.runtime import registry
from graphoffload.runtime.pinned.pool import POOL
from graphoffload.runtime.step.calls import STEPS, Mark, Schedule, StepCall, StepRun
from graphoffload.torch_internals.dynamo import ShapeGuardError

_RECORDED = 2  # runs of a sequence before it is planned: the first one compiles and warms up


@dataclass(slots=True)
class StepPlan:
    """What each call of a step runs, by its index."""

    sequence: tuple[int, ...]
    calls: tuple[tuple[Compiled, Schedule, int], ...]
    solution: StepSolution

    def call(self, call: StepCall) -> tuple[Compiled, Schedule, int] | None:
        """The variant and the schedule of a call; None if another graph was expected."""
        if call.index < len(self.sequence) and self.sequence[call.index] == call.graph:
            return self.calls[call.index]
        return None


@dataclass(slots=True)
class _Known:
    """What is known of one sequence: its recorded runs, and its plan once it has one. fixed: it is not planned."""

    runs: list[StepRun] = field(default_factory=list)
    plan: StepPlan | None = None
    fixed: bool = False


class _Planner(threading.local):
    """What this thread's runs taught, by device."""

    def __init__(self) -> None:
        self.known: dict[tuple[torch.device, tuple[int, ...]], _Known] = {}
        self.last: dict[torch.device, tuple[int, ...]] = {}


_PLANNER = _Planner()


def next_run(graph: Dispatched) -> StepRun:
    """The run that begins with a call of `graph`; its step is planned first, if it is known by now.

    Raises:
        BudgetError: no plan of the step meets the budget that was given.
    """
    device, last = graph.device, STEPS.of(graph.device)
    if last is not None:
        last.finish()
        if last.turned:
            _learn(device, last)
    known = _expected(device, graph.number)
    if known is not None and known.plan is None and not known.fixed and len(known.runs) >= _RECORDED:
        _plan(known)
    plan = None if known is None else known.plan
    recording = known is None or (known.plan is None and not known.fixed)
    watching = recording and known is not None and len(known.runs) == _RECORDED - 1
    run = STEPS.start(device, lambda streams: StepRun(streams, recording=recording, watching=watching, plan=plan))
    run.room_bytes = graph.free_room(run)
    return run


def _expected(device: torch.device, number: int) -> _Known | None:
    """The latest sequence that begins with this graph."""
    sequence = _PLANNER.last.get(device)
    if sequence and sequence[0] == number:
        return _PLANNER.known.get((device, sequence))
    for (where, sequence), known in reversed(_PLANNER.known.items()):
        if where == device and sequence and sequence[0] == number:
            return known
    return None


def _learn(device: torch.device, run: StepRun) -> None:
    """Keep a recorded run whose backwards came in order."""
    sequence = run.sequence
    if not run.is_nested or any(number not in GRAPHS for number in sequence):
        return
    _PLANNER.last[device] = sequence
    known = _PLANNER.known.setdefault((device, sequence), _Known())
    if known.plan is None and run.recording and not known.fixed:
        known.runs = [*known.runs[1 - _RECORDED :], run]
    if len(sequence) < 2 and not _is_variant(GRAPHS[sequence[0]]):
        known.fixed = True


def clean_cache(device: torch.device) -> None:
    """Let torch's allocator give back what it caches: blocks of a step that ran otherwise would be cut up for smaller tensors,
    and the large ones of a loss would find no memory in one piece."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _is_variant(graph: Dispatched) -> bool:
    """Whether the graph was first compiled as one of several."""
    return graph.first.plan is not None and bool(graph.first.plan.variant)


def _plan(known: _Known) -> None:
    run = known.runs[-1]
    begun = time.perf_counter()
    graphs = {number: GRAPHS[number] for number in run.sequence}
    first = graphs[run.sequence[0]].graph
    order = list(graphs)
    config = first.config
    limits = resolve_limits(config, first.inputs)
    reserve = unmade_state_bytes() if config.reserve == "auto" else limits.reserve_bytes
    goal = _goal(config.max_slowdown, limits)
    first_device = graphs[order[0]].device
    facts = facts_of(known.runs, [graphs[number] for number in order], limits)
    hardware = resolve_hardware(config.hardware, str(graphs[order[0]].device))
    try:
        solution = plan_step(
            facts, hardware, goal, reserve_bytes=reserve, host_budget_bytes=limits.host_budget_bytes, patience=Patience("step")
        )
    except BudgetError as error:
        known.fixed = True
        if limits.explicit:
            raise
        warn(StepNotPlannedWarning, f"{error} The step runs on as it was compiled first, which holds least.", stacklevel=4)
        return
    planned_s = time.perf_counter() - begun
    try:
        calls = _compiled(solution, facts, [graphs[number] for number in order])
    except ShapeGuardError as error:
        known.fixed = True
        warn(StepNotPlannedWarning, f"the step is not planned: {error}. Compile with dynamic=False.", stacklevel=4)
        return
    known.plan = StepPlan(run.sequence, calls, solution)
    known.runs = []
    clean_cache(first_device)
    names = Counter(graphs[number].graph.name for number in run.sequence)
    whole = hardware.memory_bytes if hardware.source != "cpu" else None
    summary = step_line(solution, names, reserve, limits.device_budget_bytes if limits.explicit else None, whole)
    _tell(known.plan, solution, reserve, summary)
    say(summary)
    log.info("the step was planned in %.1f s, and planned and compiled in %.1f s", planned_s, time.perf_counter() - begun)


def _goal(max_slowdown: float | None, limits: Limits) -> Goal:
    if max_slowdown is not None:
        return WithinSlowdown(max(max_slowdown, UNMEASURABLE), asked=max_slowdown)
    if limits.explicit and limits.device_budget_bytes is not None:
        return MeetBudget(limits.device_budget_bytes)
    return KeepIfFits(limits.device_budget_bytes)


def _compiled(
    solution: StepSolution, facts: StepFacts, graphs: Sequence[Dispatched]
) -> tuple[tuple[Compiled, Schedule, int], ...]:
    """The variant and the schedule of each call: what the solution names, by the ids of what was compiled."""
    offloads: dict[tuple[int, int], set[str]] = {}
    for fact, variant, schedule in zip(facts.calls, solution.chosen, solution.calls, strict=True):
        offloads.setdefault((fact.graph, variant), set()).update(schedule.offloads)
    _prepare_host(solution, graphs)
    compiled = {}
    for (graph, variant), names in offloads.items():
        recipe = graphs[graph].family.recipes[variant]
        steps = solution.reload_steps.get((graph, variant), {})
        chosen = Recipe(
            recipe.name, recipe.recomputes, frozenset(names), tuple(sorted((n, s) for n, s in steps.items() if n in names))
        )
        compiled[graph, variant] = graphs[graph].variant(chosen)
    ids = [_ids(compiled[fact.graph, variant]) for fact, variant in zip(facts.calls, solution.chosen, strict=True)]
    calls = []
    for at, (fact, variant, made) in enumerate(zip(facts.calls, solution.chosen, solution.calls, strict=True)):
        own = ids[at]
        schedule = Schedule(
            goes=frozenset(own[name] for name in made.offloads),
            settle={(kind, own.get(name, -1)): count for (kind, name), count in made.settle.items()},
            prefetch={
                (kind, own.get(name, -1)): tuple((call, ids[call][other]) for call, other in items)
                for (kind, name), items in made.prefetch.items()
            },
        )
        calls.append((compiled[fact.graph, variant], schedule, variant))
    return tuple(calls)


def _prepare_host(solution: StepSolution, graphs: Sequence[Dispatched]) -> None:
    """Take host memory for all copies of the step, in the background, while its variants compile."""
    device = graphs[0].device
    if device.type == "cuda":
        candidates = solution.joined.program.candidates
        actions = (solution.actions[call][index] for call, index in solution.joined.of)
        sizes = [c.nbytes for c, action in zip(candidates, actions, strict=True) if action == "offload"]
        POOL.prepare(sizes, pin=True, device=torch.cuda.current_device() if device.index is None else device.index)


def _ids(compiled: Compiled) -> dict[str, int]:
    assert compiled.plan is not None
    return {transfer.tensor: transfer.id for transfer in compiled.plan.transfers}


def _tell(plan: StepPlan, solution: StepSolution, reserve_bytes: int, summary: str) -> None:
    """The prediction of the step in the plans of its variants: a report of one of them speaks of the step."""
    timeline, keep = solution.timeline, solution.keep_timeline
    prediction = Prediction(
        keep_peak_bytes=keep.peak_bytes,
        predicted_peak_bytes=timeline.peak_bytes,
        keep_time_s=keep.time_s,
        predicted_time_s=timeline.time_s,
        lower_bound_time_s=None if solution.lower_bound_s is None else min(solution.lower_bound_s, timeline.time_s),
        host_bytes=timeline.host_bytes,
        stall_s=timeline.stall_s,
        lower_bound_peak_bytes=solution.lower_bound_peak_bytes,
        reserve_bytes=reserve_bytes,
    )
    for compiled in dict.fromkeys(call[0] for call in plan.calls):
        assert compiled.plan is not None
        registry.amend(replace(compiled.plan, prediction=prediction, summary=summary, part=False))


def facts_of(runs: Sequence[StepRun], graphs: Sequence[Dispatched], limits: Limits) -> StepFacts:
    """What the recorded runs say of the step: bytes outside and gaps of the last one, and the peaks of gaps of any of them."""
    last = runs[-1]
    position = {graph.number: at for at, graph in enumerate(graphs)}
    records = [_Record(run) for run in runs]
    calls = []
    count = len(last.calls)
    for call in last.calls:
        index = call.index
        forward, backward = records[-1].at("forward", index), records[-1].at("backward", index)
        before = ("forward end", index - 1) if index else None
        after = ("backward end", index + 1) if index + 1 < count else ("forward end", index)
        calls.append(
            CallFacts(
                graph=position[call.graph],
                forward_outside_bytes=_outside(forward, limits),
                backward_outside_bytes=_outside(backward, limits),
                ran=_ran(graphs[position[call.graph]], call),
                before_forward=_gap(records, before, ("forward", index), limits),
                before_backward=_gap(records, after, ("backward", index), limits),
            )
        )
    base = min((min(c.forward_outside_bytes, c.backward_outside_bytes) for c in calls), default=0)
    families = [graph.family for graph in graphs]
    return StepFacts(
        graphs=tuple(family.variants for family in families),
        calls=tuple(calls),
        base_bytes=base,
        bounds=tuple(family.bound for family in families),
    )


def _ran(graph: Dispatched, call: StepCall) -> int:
    """The variant that ran when a call was recorded."""
    plan = graph.first.plan
    names = [recipe.name for recipe in graph.family.recipes]
    if plan is None or not plan.variant:
        return 0
    return names.index(plan.variant) if plan.variant in names else len(names) - 1


class _Record:
    """The marks of a run by what they mark, and what the allocator did."""

    def __init__(self, run: StepRun) -> None:
        self._marks: dict[tuple[str, int], Mark] = {}
        self.changes = run.changes
        for mark in run.marks:
            self._marks.setdefault((mark.kind, mark.call), mark)

    def at(self, kind: str, call: int) -> Mark:
        """The mark of a moment."""
        return self._marks[kind, call]

    def above_bytes(self, start: tuple[str, int], end: tuple[str, int]) -> int:
        """By how much memory outside rises between two moments above the larger of both: what the allocator did says so where
        that was recorded, else the peak, where it was higher than any before."""
        first, last = self.at(*start), self.at(*end)
        level = max(first.allocated_bytes, last.allocated_bytes)
        if self.changes:
            low = bisect_left(self.changes, first.time_us, key=lambda change: change.time_us)
            high = bisect_right(self.changes, last.time_us, key=lambda change: change.time_us)
            between = accumulate((change.nbytes for change in self.changes[low:high]), initial=0)
            return max(0, first.allocated_bytes + max(between) - level)
        return last.peak_bytes - level if last.peak_bytes > first.peak_bytes else 0


def _outside(mark: Mark, limits: Limits) -> int:
    return limits.static_bytes if mark.event is None else max(0, mark.allocated_bytes - mark.ours_bytes)


def _gap(records: Sequence[_Record], start: tuple[str, int] | None, end: tuple[str, int], limits: Limits) -> Gap:
    """The eager work between two moments."""
    if start is None:
        return Gap()
    first, last = records[-1].at(*start), records[-1].at(*end)
    if first.event is None or last.event is None:
        return Gap()
    last.event.synchronize()
    level = max(_outside(first, limits), _outside(last, limits))
    above = max(record.above_bytes(start, end) for record in records)
    return Gap(time_s=max(0.0, first.event.elapsed_time(last.event) / 1e3), outside_peak_bytes=level + above)
