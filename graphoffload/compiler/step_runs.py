"""Runs of a step: when it is recorded, when it is planned, and when it is planned again.

    run 1, 2     recorded; each call runs what was compiled first
    run 3        this sequence of calls came twice: planned, and its variants compiled; one line says so
    later        planned again at the start of a run, if the memory outside, the budget or what was asked for is another one

Plans are kept by sequence: batches of other shapes are other graphs, with plans of their own. The sequence that comes is known
when it is over. Its first graph is known at once, and what followed the last sequence the time before: two tasks in turn that
share their first blocks each run by their plan.

A plan that is made again for what it was made for before costs no compile. Only what breaks the budget, or frees a good part
of it, is a reason.

Python's garbage holds device memory until it is collected, at any time: a model that was deleted is a cycle, with all its
parameters. It is collected before the run that facts are made of and before a plan that was asked for, or that plan would
leave room for it and refuse budgets that can be met. It counts where a step is planned again for what grew: garbage that
comes back in each step is memory that the step needs.
"""

from __future__ import annotations

import gc
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from graphoffload.compiler.device_limits import device_budget_now, map_by_pages_if_tight, resolve_limits
from graphoffload.compiler.dispatch import GRAPHS, Dispatched
from graphoffload.compiler.optimizer_state import unmade_state_bytes
from graphoffload.compiler.override import OVERRIDE
from graphoffload.compiler.step_again import GOAL_WAS_SET, Known, learn_shortage, why_again
from graphoffload.compiler.step_facts import drop_shared_inputs, facts_of, shifted
from graphoffload.compiler.step_plan import Asked, StepPlan, make_step_plan
from graphoffload.errors import BudgetError, BudgetExceededWarning, PlanError, StepNotPlannedWarning, warn
from graphoffload.facts.goals import UNMEASURABLE, Goal, KeepIfFits, MeetBudget, WithinSlowdown
from graphoffload.facts.limits import Limits
from graphoffload.log import log, say
from graphoffload.monitor.step_memory import shortage_of, watch
from graphoffload.options.config import OffloadConfig
from graphoffload.planner.step.facts import StepFacts
from graphoffload.runtime.step.calls import STEPS, StepRun
from graphoffload.torch_internals.dynamo import ShapeGuardError
from graphoffload.units import format_bytes

_RECORDED = 2  # runs of a sequence before it is planned: the first one compiles and warms up
_SEQUENCES = 64  # that are remembered, the latest
_WINDOW = 64  # runs; a warning, if more than half of them were not the sequence that was planned
_IRREGULAR = 8  # runs in a row that no plan can be made of, before a warning


class _Planner(threading.local):
    """What this thread's runs taught, by device and sequence, the latest last; the last sequence of each device; whether each
    of the latest runs went by a plan; irregular runs in a row."""

    def __init__(self) -> None:
        self.known: OrderedDict[tuple[torch.device, tuple[int, ...]], Known] = OrderedDict()
        self.went_as_planned: deque[bool] = deque(maxlen=_WINDOW)
        self.last: dict[torch.device, tuple[int, ...]] = {}
        self.irregular = 0
        self.warned = False


_PLANNER = _Planner()


def forget() -> None:
    """What this thread ran is not called again: its last runs go, and what they taught."""
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
    device, last = graph.device, STEPS.of(graph.device)
    watch()
    shortage = shortage_of(device)
    lacking = 0 if shortage is None else shortage.lacking_bytes
    if last is not None and not last.learnt:  # an error of planning below comes back here with the same run
        last.learnt = True
        last.finish()
        if lacking and last.plan is not None:
            for short in [known for known in _PLANNER.known.values() if known.plan is last.plan]:
                learn_shortage(short, lacking)
        elif lacking and [call.graph for call in last.calls] == [graph.number] and not graph.is_variant:
            _plan_alone_with_less(graph, lacking)
        elif last.turned:
            _learn(device, last)
    known = _expected(device, graph.number)
    if known is not None and known.fixed and known.version != OVERRIDE.version:
        known.version = OVERRIDE.version
        if known.alone:
            graph.plan_alone(_config(graph))
        else:
            known.fixed = False
    if known is not None and not known.fixed:
        if known.plan is None and known.facts is not None:
            _plan(known, device, GOAL_WAS_SET)
        elif known.plan is None and len(known.runs) >= _RECORDED:
            _plan(known, device, "")
        elif known.plan is not None and (why := why_again(known, device, last)):
            _plan(known, device, why)
    plan = None if known is None else known.plan
    recording = known is None or (known.plan is None and not known.fixed)
    watching = recording and known is not None and len(known.runs) == _RECORDED - 1
    if watching:
        _collect_garbage(device)
    hooked = last is None or not last.tells
    run = STEPS.start(
        device, lambda streams: StepRun(streams, recording=recording, watching=watching, plan=plan, hooked=hooked)
    )
    run.room_bytes = graph.free_room(run)
    if last is not None and not last.recording:
        last.calls.clear()  # run and calls are a cycle: their memory is used again at once, and not when garbage is collected
    return run


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
    if not run.is_nested or not _all_live(sequence):
        _count_irregular(run)
        return
    _PLANNER.irregular = 0
    before = _PLANNER.known.get((device, _PLANNER.last.get(device, ())))
    if before is not None:
        before.after = sequence
    _PLANNER.last[device] = sequence
    for key in [key for key in _PLANNER.known if not _all_live(key[1])]:
        del _PLANNER.known[key]  # its model is gone
    known = _PLANNER.known.get((device, sequence))
    if known is None:
        known = _PLANNER.known[device, sequence] = Known(sequence, version=min(GRAPHS[n].version for n in sequence))
    _PLANNER.known.move_to_end((device, sequence))
    if len(_PLANNER.known) > _SEQUENCES:
        _PLANNER.known.popitem(last=False)
    if known.plan is None and run.recording and not known.fixed:
        known.runs = [*known.runs[1 - _RECORDED :], run]
    if len(sequence) < 2 and not GRAPHS[sequence[0]].is_variant:
        known.fixed = known.alone = True
    if not known.fixed:
        _count_changing(run)


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
        stacklevel=5,
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
        stacklevel=5,
    )


def _plan_alone_with_less(graph: Dispatched, lacking_bytes: int) -> None:
    """A graph with a plan of its own had too little memory: its next run is planned with less, if there is such a plan."""
    try:
        graph.plan_alone(_config(graph), lacking_bytes)
    except (BudgetError, ShapeGuardError, PlanError) as error:
        warn(StepNotPlannedWarning, f"{error} After this allocation failed, {graph.graph.name} runs on as it is.", stacklevel=4)


def _graphs(sequence: Sequence[int]) -> list[Dispatched]:
    """The graphs of a sequence, each once, in the order of their first calls."""
    return [GRAPHS[number] for number in dict.fromkeys(sequence)]


def _config(graph: Dispatched) -> OffloadConfig:
    """What is asked for now: as it was compiled, or as it was changed since."""
    config = graph.graph.config
    return config.with_options(**OVERRIDE.options) if config.digest() in OVERRIDE.configs else config


def _asked(graph: Dispatched, known: Known) -> tuple[Asked, Limits]:
    config = _config(graph)
    limits = resolve_limits(config, graph.graph.inputs)
    counts = config.reserve == "auto" and graph.device.type == "cuda"
    reserve = unmade_state_bytes(graph.device) if counts else limits.reserve_bytes
    budget = limits.device_budget_bytes
    if not limits.explicit and graph.device.type == "cuda":
        budget = device_budget_now(graph.device, reserve, of_a_step=True)
    goal: Goal = KeepIfFits(budget)
    if config.max_slowdown is not None:
        goal = WithinSlowdown(max(config.max_slowdown, UNMEASURABLE), asked=config.max_slowdown)
    elif limits.explicit and budget is not None:
        goal = MeetBudget(budget)
    given = limits.device_budget_bytes if limits.explicit else None
    return Asked(goal, reserve, limits.host_budget_bytes, given, known.taken_bytes), limits


def _keep_all_bytes(facts: StepFacts, asked: Asked) -> int:
    """What the step would take with everything kept, at most."""
    saved = sum(sum(c.nbytes for c in facts.graphs[call.graph][0].program.candidates) for call in facts.calls)
    outside = max(
        max(c.forward_outside_bytes, c.backward_outside_bytes, c.before_backward.outside_peak_bytes) for c in facts.calls
    )
    return saved + outside + asked.reserve_bytes


def _streams(device: torch.device) -> Any:
    run = STEPS.of(device)
    return None if run is None else run.streams


def _found_facts(known: Known, graphs: list[Dispatched], limits: Limits) -> bool:
    """Make facts of what was recorded; False where a graph cannot be traced again."""
    try:
        drop_shared_inputs(known.runs[-1], graphs)
        known.facts = facts_of(known.runs, graphs, limits)
    except (ShapeGuardError, PlanError) as error:
        _give_up(known, error)
        return False
    known.start_bytes = known.runs[-1].marks[0].allocated_bytes
    known.runs = []
    return True


def _collect_garbage(device: torch.device) -> None:
    """Free what only Python's garbage holds, or it counts as memory outside, and an optimizer in it as one that will step."""
    streams = _streams(device)
    before = streams.allocated_bytes()[0] if streams is not None else 0
    gc.collect()
    freed = before - streams.allocated_bytes()[0] if streams is not None else 0
    if freed > 0:
        log.info("%s of device memory were garbage that Python had not collected; they are free now", format_bytes(freed))


def _give_up(known: Known, error: Exception) -> None:
    """A graph of the step cannot be compiled again: it goes on as it was compiled first."""
    known.plan, known.fixed, known.runs = None, True, []
    remedy = " Compile with dynamic=False." if isinstance(error, ShapeGuardError) else ""
    text = f"the step is not planned, and its graphs run as they were compiled first: {str(error).rstrip('.')}.{remedy}"
    warn(StepNotPlannedWarning, text, stacklevel=5)


def _plan(known: Known, device: torch.device, why: str) -> None:
    """Plan a step from what is known of it; `why` it is planned again."""
    graphs = _graphs(known.sequence)
    may_exceed = why not in ("", GOAL_WAS_SET)  # training goes on: what was met once is no error later
    if not may_exceed:
        _collect_garbage(device)
    asked, limits = _asked(graphs[0], known)
    if known.facts is None and not _found_facts(known, graphs, limits):
        return
    assert known.facts is not None
    streams = _streams(device)
    known.planned_bytes = streams.allocated_bytes()[0] if streams is not None else 0
    known.version, known.asked, known.followed = OVERRIDE.version, asked, 0
    known.freed = 0
    facts = shifted(known.facts, known.planned_bytes - known.start_bytes)
    before = known.plan
    wanted, budget = _keep_all_bytes(facts, asked), asked.goal.device_budget_bytes
    if before is None and map_by_pages_if_tight(device, wanted, budget, of_a_step=True):
        asked, limits = _asked(graphs[0], known)
        known.asked = asked
    try:
        known.plan = make_step_plan(known.sequence, graphs, facts, replace(asked, or_least=may_exceed))
    except BudgetError as error:
        known.plan, known.fixed = None, True
        if limits.explicit:
            raise
        warn(StepNotPlannedWarning, f"{error} The step runs on as it was compiled first, which holds least.", stacklevel=4)
        return
    except (ShapeGuardError, PlanError) as error:
        _give_up(known, error)
        return
    if streams is not None and (before is None or before.calls != known.plan.calls):
        streams.empty_cache()  # or blocks of a step that ran otherwise would be cut up, and a loss finds no large ones
    say(known.plan.summary + (f"; planned again: {why}" if why else ""))
    if may_exceed:
        _warn_of_excess(known.plan, asked, why)


def _warn_of_excess(plan: StepPlan, asked: Asked, why: str) -> None:
    """Name what is missing where a plan that is made again takes more than its budget."""
    budget = asked.goal.device_budget_bytes
    least_bytes = plan.solution.timeline.peak_bytes + asked.reserve_bytes + asked.taken_bytes
    if budget is None or isinstance(asked.goal, WithinSlowdown) or least_bytes <= budget:
        return
    missing = least_bytes - budget
    given = f"device_budget={format_bytes(asked.budget_bytes)}" if asked.budget_bytes is not None else "what the device has"
    remedy = "Free memory outside" if asked.budget_bytes is None else f"Give {format_bytes(asked.budget_bytes + missing)}"
    warn(
        BudgetExceededWarning,
        f"no plan of the training step meets {given} any more, since {why}. The step goes on by the plan that takes least, "
        f"which needs {format_bytes(least_bytes)}: {format_bytes(missing)} too much. {remedy}, or make the batch or sequence "
        "smaller.",
        stacklevel=4,
    )
