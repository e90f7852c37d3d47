"""Runs of a step: when it is recorded, when it is planned, and when it is planned again.

    run 1, 2     recorded; each call runs what was compiled first
    run 3        this sequence of calls came twice: planned, and its variants compiled; one line says so
    later        planned again at the start of a run, if the memory outside, the budget or what was asked for is another one

Plans are kept by sequence: batches of other shapes are other graphs, with plans of their own. The sequence that comes is known
when it is over. Its first graph is known at once, and what followed the last sequence the time before: two tasks in turn that
share their first blocks each run by their plan.

A plan that is made again for what it was made for before costs no compile. Only what breaks the budget, or frees a good part
of it, is a reason.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphoffload.compiler.device_limits import device_budget_now, resolve_limits
from graphoffload.compiler.dispatch import GRAPHS, Dispatched
from graphoffload.compiler.optimizer_state import unmade_state_bytes
from graphoffload.compiler.override import OVERRIDE
from graphoffload.compiler.step_facts import drop_shared_inputs, facts_of, shifted
from graphoffload.compiler.step_plan import Asked, StepPlan, make_step_plan
from graphoffload.errors import BudgetError, BudgetExceededWarning, PlanError, StepNotPlannedWarning, warn
from graphoffload.facts.goals import UNMEASURABLE, Goal, KeepIfFits, MeetBudget, WithinSlowdown
from graphoffload.facts.limits import Limits
from graphoffload.log import say
from graphoffload.monitor.step_memory import Shortage, shortage_of, watch
from graphoffload.options.config import OffloadConfig
from graphoffload.planner.step.facts import StepFacts
from graphoffload.runtime.step.calls import STEPS, StepRun
from graphoffload.torch_internals import allocator
from graphoffload.torch_internals.dynamo import ShapeGuardError
from graphoffload.units import format_bytes

_RECORDED = 2  # runs of a sequence before it is planned: the first one compiles and warms up
_SAME_SHARE, _SAME_BYTES = 0.01, 256 * 2**20  # of the budget: by which memory outside may differ from what was planned with
_FREED_SHARE = 0.05  # of the budget: what must have come free for a plan with less to be given up
_ROOMY = 0.9  # of the memory: what needs no more has no trouble with memory in pieces
_FREED_RUNS = 8  # in a row: between the microbatches of one step, gradients come and go
_WARM = 2  # runs of a plan that compile its backwards
_EXCESS_BYTES = 64 * 2**20
_RETRIED = 3  # runs in a row: the first ones after a plan find the memory of other steps
_SEQUENCES = 64  # that are remembered, the latest
_WINDOW = 64  # runs; a warning, if more than half of them were not the sequence that was planned
_IRREGULAR = 8  # runs in a row that no plan can be made of, before a warning


@dataclass(slots=True)
class _Known:
    """What is known of one sequence.

    sequence: its graphs. after: the sequence that followed it last time. runs: recorded, until they are `facts`. plan: once
    there is one. asked: what the plan is for.
    fixed: nothing is planned until something else is asked for. alone: it is one call of a graph that has a plan of its own.
    version: of the override that it was made under. taken_bytes: less memory than there seems to be, as an error taught.
    start_bytes: allocated at the start of the runs that the facts are of; planned_bytes: when it was planned.
    retries: how often the allocator had to give memory back to serve an allocation; retried: runs in a row that it had to.
    peak_bytes: torch's, at the last start of a run; followed: runs under the present plan.
    freed: runs in a row with much less outside than it was planned with.
    """

    sequence: tuple[int, ...]
    after: tuple[int, ...] = ()
    runs: list[StepRun] = field(default_factory=list)
    facts: StepFacts | None = None
    plan: StepPlan | None = None
    asked: Asked | None = None
    fixed: bool = False
    alone: bool = False
    version: int = 0
    taken_bytes: int = 0
    start_bytes: int = 0
    planned_bytes: int = 0
    retries: int = 0
    retried: int = 0
    peak_bytes: int = 0
    followed: int = 0
    freed: int = 0


class _Planner(threading.local):
    """What this thread's runs taught, by device and sequence, the latest last; the last sequence of each device; whether each
    of the latest runs went by a plan; irregular runs in a row."""

    def __init__(self) -> None:
        self.known: OrderedDict[tuple[torch.device, tuple[int, ...]], _Known] = OrderedDict()
        self.went_as_planned: deque[bool] = deque(maxlen=_WINDOW)
        self.last: dict[torch.device, tuple[int, ...]] = {}
        self.irregular = 0
        self.warned = False


_PLANNER = _Planner()


def next_run(graph: Dispatched) -> StepRun:
    """The run that begins with a call of `graph`; its step is planned first, if it is known by now, or again.

    Raises:
        BudgetError: no plan of the step meets the budget that was given.
    """
    device, last = graph.device, STEPS.of(graph.device)
    watch()
    shortage = shortage_of(device)
    if last is not None and not last.learnt:  # an error of planning below comes back here with the same run
        last.learnt = True
        last.finish()
        if shortage is not None and last.plan is not None:
            _learn_shortage(device, last, shortage)
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
            _plan(known, device, "another goal was set")
        elif known.plan is None and len(known.runs) >= _RECORDED:
            _plan(known, device, "")
        elif known.plan is not None and (why := _why_again(known, device)):
            _plan(known, device, why)
    plan = None if known is None else known.plan
    recording = known is None or (known.plan is None and not known.fixed)
    watching = recording and known is not None and len(known.runs) == _RECORDED - 1
    run = STEPS.start(device, lambda streams: StepRun(streams, recording=recording, watching=watching, plan=plan))
    run.room_bytes = graph.free_room(run)
    return run


def _expected(device: torch.device, number: int) -> _Known | None:
    """The sequence that is expected to begin with this graph: what followed the last one the time before, the last one again,
    or the latest."""
    last = _PLANNER.last.get(device, ())
    known = _PLANNER.known.get((device, last))
    latest = (sequence for where, sequence in reversed(_PLANNER.known) if where == device)
    for sequence in (() if known is None else known.after, last, *latest):
        found = _PLANNER.known.get((device, sequence))
        if found is not None and sequence[0] == number and all(graph in GRAPHS for graph in sequence):
            return found
    return None


def _learn(device: torch.device, run: StepRun) -> None:
    """Keep a recorded run whose backwards came in order."""
    sequence = run.sequence
    if not run.is_nested or any(number not in GRAPHS for number in sequence):
        _count_irregular(run)
        return
    _PLANNER.irregular = 0
    before = _PLANNER.known.get((device, _PLANNER.last.get(device, ())))
    if before is not None:
        before.after = sequence
    _PLANNER.last[device] = sequence
    for key in [key for key in _PLANNER.known if any(number not in GRAPHS for number in key[1])]:
        del _PLANNER.known[key]  # its model is gone
    known = _PLANNER.known.setdefault((device, sequence), _Known(sequence, version=min(GRAPHS[n].version for n in sequence)))
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


def _learn_shortage(device: torch.device, run: StepRun, shortage: Shortage) -> None:
    """A planned run had too little memory: the next one is planned with less."""
    known = next((k for k in _PLANNER.known.values() if k.plan is run.plan), None)
    if known is not None:
        known.taken_bytes += shortage.lacking_bytes
        known.version = -1


def _graphs(sequence: Sequence[int]) -> list[Dispatched]:
    """The graphs of a sequence, each once, in the order of their first calls."""
    return [GRAPHS[number] for number in dict.fromkeys(sequence)]


def _config(graph: Dispatched) -> OffloadConfig:
    """What is asked for now: as it was compiled, or as it was changed since."""
    config = graph.graph.config
    return config.with_options(**OVERRIDE.options) if config.digest() in OVERRIDE.configs else config


def _asked(graph: Dispatched, known: _Known) -> tuple[Asked, Limits]:
    config = _config(graph)
    limits = resolve_limits(config, graph.graph.inputs)
    counts = config.reserve == "auto" and graph.device.type == "cuda"
    reserve = unmade_state_bytes(graph.device) if counts else limits.reserve_bytes
    budget = limits.device_budget_bytes
    if not limits.explicit and graph.device.type == "cuda":
        budget = device_budget_now(graph.device, reserve, of_a_step=True)
    if budget is not None:
        budget -= known.taken_bytes
    goal: Goal = KeepIfFits(budget)
    if config.max_slowdown is not None:
        goal = WithinSlowdown(max(config.max_slowdown, UNMEASURABLE), asked=config.max_slowdown)
    elif limits.explicit and budget is not None:
        goal = MeetBudget(budget)
    return Asked(goal, reserve, limits.host_budget_bytes, limits.device_budget_bytes if limits.explicit else None), limits


def _why_again(known: _Known, device: torch.device) -> str:
    """What changed since a step was planned, in words; "" if it is as it was."""
    plan, asked, streams = known.plan, known.asked, _streams(device)
    assert plan is not None
    assert asked is not None
    if known.version != OVERRIDE.version:
        return "less memory after an error" if known.version < 0 else "another goal was set"
    if streams is None:
        return ""
    (allocated, peak_bytes), retries = streams.allocated_bytes(), streams.retries()
    more = allocated - known.planned_bytes
    grown, known.peak_bytes, known.followed = peak_bytes > known.peak_bytes, peak_bytes, known.followed + 1
    known.retried = known.retried + 1 if retries > known.retries else 0
    if asked.budget_bytes is None and known.retried >= _RETRIED:
        known.retries, known.retried = retries, 0
        known.taken_bytes += int(_SAME_SHARE * (asked.goal.device_budget_bytes or 0))
        return "the allocator had to give back what it caches in the middle of a step"
    known.retries = retries
    if asked.goal.device_budget_bytes is None:
        return ""
    excess = peak_bytes - asked.goal.device_budget_bytes
    if grown and known.followed > _WARM and excess > _EXCESS_BYTES:  # else it was another step's, or of compiling
        known.taken_bytes += excess
        return _exceeded(asked, plan, excess)
    budget = asked.goal.device_budget_bytes
    if asked.budget_bytes is None and device.type == "cuda":
        budget = min(budget, device_budget_now(device, of_a_step=True) - known.taken_bytes)
    same = max(_SAME_BYTES, int(_SAME_SHARE * budget))
    peak = plan.solution.timeline.peak_bytes + more
    if more > same and peak > budget:
        return f"{format_bytes(more)} more are allocated outside"
    if peak > budget + same:
        return f"{format_bytes(peak - budget)} less are free on the device"
    known.freed = known.freed + 1 if -more > max(same, _FREED_SHARE * budget) else 0
    if known.freed >= _FREED_RUNS and plan.solution.slowdown > UNMEASURABLE:
        return f"{format_bytes(-more)} less are allocated outside"
    return ""


def _exceeded(asked: Asked, plan: StepPlan, excess_bytes: int) -> str:
    """Why a step above its budget is planned again; with a warning where the budget was given."""
    if asked.budget_bytes is not None:
        predicted = format_bytes(plan.solution.timeline.peak_bytes)
        warn(
            BudgetExceededWarning,
            f"device_budget={format_bytes(asked.budget_bytes)} was exceeded by {format_bytes(excess_bytes)} in the last step, "
            f"whose peak was predicted to be {predicted}. The step is planned again with that much less. Nothing has to be "
            "done unless this comes again; then give a budget that is smaller by it.",
            stacklevel=6,
        )
    return f"the last step took {format_bytes(excess_bytes)} more than its budget"


def _is_tight(facts: StepFacts, asked: Asked, device: torch.device) -> bool:
    """Whether the step is planned for nearly all of a GPU's memory, and would not fit without a plan."""
    budget = asked.goal.device_budget_bytes
    if device.type != "cuda" or budget is None or budget < _ROOMY * device_budget_now(device, of_a_step=True):
        return False
    saved = sum(sum(c.nbytes for c in facts.graphs[call.graph][0].program.candidates) for call in facts.calls)
    outside = max(
        max(c.forward_outside_bytes, c.backward_outside_bytes, c.before_backward.outside_peak_bytes) for c in facts.calls
    )
    return saved + outside + asked.reserve_bytes > budget * _ROOMY


def _streams(device: torch.device) -> Any:
    run = STEPS.of(device)
    return None if run is None else run.streams


def _found_facts(known: _Known, graphs: list[Dispatched], limits: Limits) -> bool:
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


def _give_up(known: _Known, error: Exception) -> None:
    """A graph of the step cannot be compiled again: it goes on as it was compiled first."""
    known.plan, known.fixed, known.runs = None, True, []
    remedy = " Compile with dynamic=False." if isinstance(error, ShapeGuardError) else ""
    text = f"the step is not planned, and its graphs run as they were compiled first: {str(error).rstrip('.')}.{remedy}"
    warn(StepNotPlannedWarning, text, stacklevel=5)


def _plan(known: _Known, device: torch.device, why: str) -> None:
    """Plan a step from what is known of it; `why` it is planned again."""
    graphs = _graphs(known.sequence)
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
    if before is None and _is_tight(facts, asked, device) and allocator.map_by_pages():
        streams.empty_cache()
        say("device memory is mapped page by page from now on (expandable_segments): in pieces it would not do for this step")
        asked, limits = _asked(graphs[0], known)
        known.asked = asked
    try:
        known.plan = make_step_plan(known.sequence, graphs, facts, asked)
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
