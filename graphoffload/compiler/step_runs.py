"""Runs of a step: when it is recorded, when it is planned, and when it is planned again.

    run 1, 2     recorded; each call runs what was compiled first
    run 3        this sequence of calls came twice: planned, and its variants compiled; one line says so
    later        planned again at the start of a run, if the memory outside, the budget or what was asked for is another one

Plans are kept by sequence: batches of other shapes are other graphs, with plans of their own. The sequence that comes is known
when it is over. Its first graph is known at once, and what followed the last sequence the time before: two tasks in turn that
share their first blocks each run by their plan.

Among several ranks of one program a plan comes a few runs later: no rank waits for another one inside a step (rounds.py).
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence

import torch

from graphoffload.compiler.alone import learn_from, plan_if_outgrown
from graphoffload.compiler.dispatch import GRAPHS, Dispatched
from graphoffload.compiler.garbage import collect_garbage, collected
from graphoffload.compiler.override import OVERRIDE
from graphoffload.compiler.step_again import WARM, Known, learn_shortage
from graphoffload.compiler.step_flight import OVERLAPS, microbatch_of
from graphoffload.compiler.step_link import stop_timing
from graphoffload.compiler.step_plan import StepPlan
from graphoffload.compiler.step_planning import RECORDED, config_of, plan_if_due, say_what_was_refused
from graphoffload.compiler.step_ranks import plans_none
from graphoffload.compiler.step_rise import OPTIMIZERS
from graphoffload.errors import BudgetError, PlanError, StepNotPlannedWarning, warn
from graphoffload.log import say
from graphoffload.monitor.step_memory import shortage_of, watch
from graphoffload.runtime.handles import ENTRIES
from graphoffload.runtime.offloaded_tensors import LOCK
from graphoffload.runtime.step.calls import STEPS, StepRun
from graphoffload.torch_internals.dynamo import ShapeGuardError
from graphoffload.torch_internals.processes import default_group

_SEQUENCES = 64  # that are remembered, the latest
_WINDOW = 64  # runs; a warning, if more than half of them were not the sequence that was planned
_WATCHED = 3  # runs of a graph that is planned alone
_IRREGULAR = 8  # runs in a row that no plan can be made of, before a warning


class _Planner(threading.local):
    """What this thread's runs taught, by device and sequence, the latest last; the last sequence of each device; whether each
    of the latest runs went by a plan; irregular runs in a row; whether the last run's backwards came by functions that tell;
    how often optimizers had stepped when the last run began."""

    def __init__(self) -> None:
        self.known: OrderedDict[tuple[torch.device, tuple[int, ...]], Known] = OrderedDict()
        self.went_as_planned: deque[bool] = deque(maxlen=_WINDOW)
        self.last: dict[torch.device, tuple[int, ...]] = {}
        self.irregular = 0
        self.warned = self.tells = False
        self.steps = 0


_PLANNER = _Planner()


def forget() -> None:
    """What this thread ran is not called again: its last runs go, and what they taught."""
    for run in STEPS.runs.values():
        stop_timing(run)
    STEPS.forget()
    _PLANNER.known.clear()
    _PLANNER.last.clear()
    _PLANNER.went_as_planned.clear()
    _PLANNER.irregular = 0


def next_run(graph: Dispatched) -> StepRun:
    """The run that begins with a call of `graph`; its step is planned first, if it is known by now, or again.

    Raises:
        BudgetError: no plan of the step meets the budget that was given.
    """
    device, latest = graph.device, STEPS.of(graph.device)
    watch()
    shortage = shortage_of(device)
    lacking = 0 if shortage is None else shortage.lacking_bytes
    done = STEPS.done(device, graph.number)
    if latest is not None and not latest.is_done:
        latest.rest()
    stop_timing(latest)
    short = next((run for run in reversed(done) if run.aborted), done[-1] if done else None)
    for run in done:
        _end(device, graph, run, lacking if run is short else 0)
    _close_dropped(done)
    last = done[-1] if done else latest if latest is not None and latest.is_done else None
    known = _expected(device, graph.number)
    if known is not None and known.ran is not None:
        last, known.ran = known.ran, None
    if known is not None and (known.fixed or known.alone) and known.version != OVERRIDE.version:
        known.version = OVERRIDE.version
        if known.alone:
            graph.own.outside.again = 0
            with collected(device):
                graph.plan_alone(config_of(graph))
        else:
            known.fixed = False
            known.begin_goal()
    if known is not None:
        say_what_was_refused(known)
        _look_at_alone(graph, known, latest)
    step = () if known is None else known.sequence
    flying = sum(run.step == step for run in STEPS.alive.get(device, ()))
    may = known is None or (known.takes_off(flying) and not known.fixed)
    if known is not None and may and not known.flies and latest is not None and latest.streams is not None:
        known.rise.begin(latest.streams.allocated_bytes()[0], OPTIMIZERS.steps)
    _PLANNER.steps = OPTIMIZERS.steps
    if known is not None and may and not flying:
        plan_if_due(known, device, last)
        if known.flies and known.plan is None and latest is not None and latest.streams is not None:
            known.flight_bytes = latest.streams.allocated_bytes()[0]
    plan = None if known is None else known.plan
    recording = known is None or (may and known.plan is None and not known.fixed and known.proposal is None)
    _PLANNER.tells = _PLANNER.tells if last is None else last.tells
    run = _begun(device, known, recording, plan)
    run.room = graph.room(run)
    if known is not None:
        _look_at_host(graph, known, run)
    with LOCK:  # a late backward of another thread may look at them
        for old in done:
            if not old.recording:
                old.calls.clear()  # run and calls are a cycle: their memory is used again at once, not when it is collected
    return run


def _begun(device: torch.device, known: Known | None, recording: bool, plan: StepPlan | None) -> StepRun:
    """A run, which is recorded or has a plan. The device is held in the one whose allocations are recorded: many programs have
    runs that nothing is ever planned from. Not among ranks, where that would hide what is waited for."""
    flies = known is not None and known.flies
    watching = recording and known is not None and _watches(known)
    if watching:
        collect_garbage(device)
    return STEPS.start(
        device,
        lambda streams: StepRun(
            streams,
            recording=recording,
            watching=watching,
            holding=watching and default_group() is None,
            plan=plan,
            hooked=not _PLANNER.tells,
            step=() if known is None else known.sequence,
            flies=flies,
        ),
    )


def _look_at_host(graph: Dispatched, known: Known, run: StepRun) -> None:
    """A run begins: whether the host keeps up with its plan is seen in a few of them."""
    if known.plan is not None and known.followed >= WARM and known.host_counts:
        known.host.look(known.plan, run)
    elif known.alone and known.fixed:
        known.alone_host.look(graph.first.plan, run)


def _look_at_alone(graph: Dispatched, known: Known, latest: StepRun | None) -> None:
    """A run begins, perhaps of a graph that is planned alone."""
    if not known.alone:
        return
    if known.watched > _WATCHED:
        known.fixed, known.runs = True, []
    if latest is None or latest.streams is None or latest.twin:
        return
    if note := known.alone_host.note(graph.first.plan):
        say(f"{graph.graph.name}: {note}")
    plan_if_outgrown(graph, latest.streams.allocated_bytes()[0])


def _watches(known: Known) -> bool:
    """Whether the allocations of the run that begins are recorded: it is the last one before something is learnt. Of a graph
    that is planned alone only a few: forwards that are dropped teach nothing."""
    if len(known.runs) != RECORDED - 1 or known.flies:
        return False
    known.watched += 1
    return not known.alone or known.watched <= _WATCHED


def _end(device: torch.device, graph: Dispatched, run: StepRun, lacking_bytes: int) -> None:
    """A run is over: learn from it. lacking_bytes: of an allocation that failed in it; the next run begins with `graph`."""
    run.learnt = True
    run.finish()
    if lacking_bytes and run.plan is not None:
        for short in [known for known in _PLANNER.known.values() if known.plan is run.plan]:
            learn_shortage(short, lacking_bytes)
    elif lacking_bytes and [call.graph for call in run.calls] == [graph.number] and not graph.is_variant:
        _plan_alone_with_less(graph, lacking_bytes)
    elif run.turned:
        _learn(device, run)


def _close_dropped(done: Sequence[StepRun]) -> None:
    """What stayed of forwards that were given up goes: it would count as memory outside, and be there beside the next run."""
    dropped = [run for run in done if len(run.ended) < len(run.calls)]
    if dropped and not any(run.streams is not None and run.streams.capturing() for run in dropped):  # no wait may leave it
        ENTRIES.sweep()


def _expected(device: torch.device, number: int) -> Known | None:
    """The sequence that is expected to begin with this graph: what followed the last one the time before, the last one again,
    or the latest."""
    last = _PLANNER.last.get(device, ())
    known = _PLANNER.known.get((device, last))
    latest = (sequence for where, sequence in reversed(_PLANNER.known) if where == device)
    for sequence in (() if known is None else known.after, last, *latest):
        found = _PLANNER.known.get((device, sequence))
        if found is not None and sequence[0] == number and _all_live(sequence):
            return found
    return None


def _all_live(sequence: Sequence[int]) -> bool:
    """Whether Dynamo's code still calls each graph of a sequence."""
    return all(number in GRAPHS for number in set(sequence))


def _learn(device: torch.device, run: StepRun) -> None:
    """Keep a recorded run whose backwards came in order."""
    sequence = run.sequence
    size = microbatch_of(run)
    if not (size or run.is_nested) or not _all_live(sequence):
        _count_irregular(run)
        return
    if size:
        _learn_flight(device, run, sequence[:size])
        return
    _PLANNER.irregular = 0
    before = _PLANNER.known.get((device, _PLANNER.last.get(device, ())))
    if before is not None:
        before.after = sequence
    _PLANNER.last[device] = sequence
    for key in [key for key in _PLANNER.known if not _all_live(key[1])]:
        del _PLANNER.known[key]  # its model is gone
    is_new = (device, sequence) not in _PLANNER.known
    known = _known(device, sequence)
    if is_new and run.marks:
        known.rise.begin(run.marks[0].allocated_bytes, _PLANNER.steps)
    if not known.flies:
        known.overlaps = 0
    if known.plan is None and run.recording and not known.fixed:
        known.runs = [*known.runs[1 - RECORDED * known.in_flight :], run]
    known.ran = run
    if run.inside and not known.inside:
        known.inside = True
        known.fixed, known.alone = known.fixed and not known.alone, False
    if len(sequence) < 2 and not GRAPHS[sequence[0]].is_variant and not known.alone and not known.inside:
        known.alone = True
        plans_none()
    if known.alone and not known.fixed and (len(known.runs) >= RECORDED or run.streams is None):
        known.fixed, runs, known.runs = True, known.runs, []
        learn_from(GRAPHS[sequence[0]], runs, asked_anew=known.version != OVERRIDE.version)
    if not known.fixed and not known.alone and known.proposal is None:
        _count_changing(run)


def _known(device: torch.device, sequence: tuple[int, ...]) -> Known:
    """What is known of a sequence, which is the latest from now on."""
    known = _PLANNER.known.get((device, sequence))
    if known is None:
        known = _PLANNER.known[device, sequence] = Known(sequence, version=min(GRAPHS[n].version for n in sequence))
    _PLANNER.known.move_to_end((device, sequence))
    if len(_PLANNER.known) > _SEQUENCES:
        _PLANNER.known.popitem(last=False)
    return known


def _learn_flight(device: torch.device, run: StepRun, sequence: tuple[int, ...]) -> None:
    """Several microbatches were in flight at a time. Seen twice in a row, it is how training goes."""
    _PLANNER.last[device] = sequence
    known = _known(device, sequence)
    known.overlaps += 1
    if known.overlaps < OVERLAPS:
        return
    if len(sequence) > 1:
        known.fly(max(known.in_flight, len(run.calls) // len(sequence)), tuple(run.calls))
    else:
        _warn_of_flight(GRAPHS[sequence[0]], len(run.calls))


def _warn_of_flight(graph: Dispatched, count: int) -> None:
    """Say once that the budget of a graph that is the whole model is for one microbatch."""
    if _PLANNER.warned:
        return
    _PLANNER.warned = True
    warn(
        StepNotPlannedWarning,
        f"{count} microbatches of {graph.graph.name} are in flight at a time, and it runs by a plan for one: what the others "
        "keep for their backwards is not in its predicted peak. Compile block by block, so that all microbatches are planned "
        "together; or give a budget that leaves room for what the others keep.",
    )


def _count_changing(run: StepRun) -> None:
    """Warn once if most steps call other graphs than those that were expected."""
    window = _PLANNER.went_as_planned
    window.append(run.plan is not None and run.plan.sequence == run.sequence)
    missed = window.count(False)
    if len(window) < _WINDOW or missed <= _WINDOW // 2 or _PLANNER.warned:
        return
    _PLANNER.warned = True
    warn(
        StepNotPlannedWarning,
        f"{missed} of the last {_WINDOW} steps called compiled graphs in another order, or more or fewer of them, than the "
        "steps before: no plan is made for what does not come again, and their graphs run as they were compiled first. Have "
        "each step call the same graphs, pad batches to a few shapes, or compile the whole model.",
    )


def _count_irregular(run: StepRun) -> None:
    _PLANNER.irregular += 1
    if _PLANNER.irregular < _IRREGULAR or _PLANNER.warned or len(run.calls) < 2:
        return
    _PLANNER.warned = True
    warn(
        StepNotPlannedWarning,
        f"the last {_IRREGULAR} forwards of compiled graphs were not followed by their backwards in reverse order (the last "
        f"one had {len(run.calls)} calls, and {len(run.ended)} backwards came): no step can be planned, and each graph runs as "
        "it was compiled first. Checkpoint inside what is compiled, not around it; or compile the whole model.",
    )


def _plan_alone_with_less(graph: Dispatched, lacking_bytes: int) -> None:
    """A graph with a plan of its own had too little memory: its next run is planned with less, if there is such a plan."""
    with collected(graph.device):
        try:
            graph.plan_alone(config_of(graph), lacking_bytes)
        except (BudgetError, ShapeGuardError, PlanError) as error:
            warn(StepNotPlannedWarning, f"{error} After this allocation failed, {graph.graph.name} runs on as it is.")
