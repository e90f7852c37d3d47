"""A graph that is planned alone, such as a whole model: what its first runs teach, and whether its plan still holds.

    forward         |  loss  |         backward       everything that is saved is alive, and beside it what the loss takes

    run 1           by a plan that has an estimate of it if all of the device is to be filled, and nothing of it under a budget
    run 2           watched: by how much memory rises above what forward leaves
    run 3           by another plan, if the budget is broken there, or the estimate keeps a good part of it for nothing
    any run         by another plan, if so much more is allocated when it begins that the budget would be broken, or if another
                    process took what was planned with

The calls of a step of several graphs have all that in what was recorded of each (step_facts.py, step_again.py).
"""

from __future__ import annotations

from dataclasses import replace

from graphoffload.compiler.device_limits import device_budget_now
from graphoffload.compiler.dispatch import Dispatched
from graphoffload.compiler.partitioner import summary_of
from graphoffload.compiler.step_again import differs, tolerated_bytes
from graphoffload.compiler.step_facts import turn_of
from graphoffload.compiler.step_planning import config_of
from graphoffload.errors import BudgetError, BudgetExceededWarning, PlanError, StepNotPlannedWarning, warn
from graphoffload.facts.limits import Limits
from graphoffload.facts.plan import Plan
from graphoffload.log import log, say
from graphoffload.options.config import OffloadConfig
from graphoffload.planner.simulator import Timeline
from graphoffload.report.predictions import predicted_of
from graphoffload.runtime import registry
from graphoffload.runtime.step.calls import StepRun
from graphoffload.torch_internals.dynamo import ShapeGuardError
from graphoffload.units import format_bytes

_ROUNDED = 4 * 2**20
"""Upwards, so that two runs of a program have the same plan."""
_LOOK_EVERY = 8
"""Runs between two looks at what the device has free."""
_MOST_AGAIN = 3
"""What grows more often grows without end. Each plan of a whole model costs a compile."""


def learn_turn(graph: Dispatched, run: StepRun) -> None:
    """Learn from a run of one call what eager code takes at its turn, and plan the graph again if that matters."""
    if run.streams is None or run.twin or graph.first.plan is None:
        return
    turn = turn_of(run)
    graph.turn_bytes = -(-turn.taken_bytes // _ROUNDED) * _ROUNDED
    config = config_of(graph)
    limits = graph.limits_now(config)
    if not _plan_if_it_matters(graph, config, limits, turn.peak_bytes + limits.reserve_bytes):
        _tell(graph, config, limits, turn.peak_bytes)


def plan_if_outgrown(graph: Dispatched, allocated_bytes: int) -> None:
    """A run begins with so much allocated: plan again if that is more than was planned with, and breaks the budget."""
    plan, limits = graph.first.plan, graph.limits
    budget, more = limits.device_budget_bytes, allocated_bytes - limits.static_bytes
    if plan is None or budget is None or graph.outgrown >= _MOST_AGAIN:
        return
    needed = plan.prediction.predicted_peak_bytes + more
    made = more - limits.reserve_bytes  # what was reserved for is there by now
    lost = _lost_bytes(graph, budget)
    outgrown = differs(made, budget) and needed > budget
    squeezed = differs(lost, budget) and max(needed, plan.prediction.predicted_peak_bytes) > budget - lost
    if not (outgrown or squeezed) or config_of(graph).max_slowdown is not None:
        return
    graph.outgrown += 1
    why = f"{format_bytes(made)} more are allocated outside"
    say(f"{graph.graph.name}: planned again: {why if outgrown else f'{format_bytes(lost)} less are free on the device'}")
    _plan(graph)


def _lost_bytes(graph: Dispatched, budget_bytes: int) -> int:
    """How much less the device has for this process than was planned with, as another one came. The driver is asked now and
    then."""
    graph.looks += 1
    if graph.limits.explicit or graph.device.type != "cuda" or graph.looks % _LOOK_EVERY:
        return 0
    return budget_bytes - device_budget_now(graph.device, graph.limits.reserve_bytes, of_a_step=bool(graph.limits.turn_bytes))


def _plan_if_it_matters(graph: Dispatched, config: OffloadConfig, limits: Limits, peak_bytes: int) -> bool:
    """Whether the graph is planned again: where its turn has a peak above the budget, or leaves much of it unused."""
    plan, budget = graph.first.plan, limits.device_budget_bytes
    assert plan is not None
    if budget is None or config.max_slowdown is not None:
        return False
    given = budget if limits.explicit else None
    excess, unused = peak_bytes - budget, plan.turn_bytes - (graph.turn_bytes or 0)
    if excess > tolerated_bytes(given):
        _say_that_it_broke(graph, given, excess)
    elif plan.changes_anything and differs(unused, budget):
        say(f"{graph.graph.name}: planned again: eager code between forward and backward takes {format_bytes(unused)} less")
    else:
        return False
    _plan(graph)
    return True


def _say_that_it_broke(graph: Dispatched, given: int | None, excess: int) -> None:
    """What eager code takes breaks the budget; a warning if that was given."""
    name, taken = graph.graph.name, format_bytes(graph.turn_bytes or 0)
    if given is None:
        say(f"{name}: planned again: eager code between forward and backward takes {taken}")
    else:
        warn(
            BudgetExceededWarning,
            f"device_budget={format_bytes(given)} was exceeded by {format_bytes(excess)} in the first steps: between the "
            f"forward and the backward of {name}, eager code such as a loss takes {taken}. It is planned again with that. "
            "Nothing has to be done; if the loss is compiled with the model, it is in the plan from the first step on.",
            stacklevel=7,
        )


def _plan(graph: Dispatched) -> None:
    """Plan again; by the least plan there is if none meets the budget, since training goes on."""
    config, turn = config_of(graph), format_bytes(graph.turn_bytes or 0)
    try:
        try:
            graph.plan_alone(config)
        except BudgetError as error:
            of_turn = (
                f" {turn} of it are for eager code between forward and backward, such as a loss: compile that with the model, "
                "or compute it in chunks."
            )
            warn(
                BudgetExceededWarning,
                f"{error}{of_turn if graph.turn_bytes else ''} Training goes on by the plan that takes least.",
                stacklevel=6,
            )
            if error.least_bytes:
                graph.plan_alone(config, budget_bytes=error.least_bytes)
    except (BudgetError, ShapeGuardError, PlanError) as error:
        warn(StepNotPlannedWarning, f"{error} {graph.graph.name} runs on as it is.", stacklevel=5)


def _tell(graph: Dispatched, config: OffloadConfig, limits: Limits, peak_bytes: int) -> None:
    """What is predicted is true of the step from now on: the measured bytes are in place of the estimated ones.

    peak_bytes: what was allocated at the turn, which is all that can be said of a plan from a compile cache.
    """
    plan, turn_bytes = graph.first.plan, graph.turn_bytes or 0
    assert plan is not None
    if plan.turn_bytes == turn_bytes:
        return
    plan = _amended(plan, turn_bytes, peak_bytes)
    plan = replace(plan, summary=summary_of(plan, config, limits))
    log.info("%s: %s", plan.graph, plan.summary)
    registry.amend(plan)
    graph.first = replace(graph.first, plan=plan)


def _amended(plan: Plan, turn_bytes: int, peak_bytes: int) -> Plan:
    """A plan whose peaks have what eager code takes."""
    predicted, more = predicted_of(plan.key), turn_bytes - plan.turn_bytes
    own, keep = plan.prediction.predicted_peak_bytes, plan.prediction.keep_peak_bytes
    if predicted is not None:
        own, keep = _peak(predicted.timeline, more), _peak(predicted.keep_timeline, more)
    elif more > 0:
        own, keep = max(own, peak_bytes), max(keep, peak_bytes)
    prediction = replace(plan.prediction, predicted_peak_bytes=own, keep_peak_bytes=keep)
    return replace(plan, prediction=prediction, turn_bytes=turn_bytes)


def _peak(timeline: Timeline, more_bytes: int) -> int:
    """The peak if the last step of forward, which stands for the turn, takes so much more."""
    turn = timeline.forward_steps - 1
    others = max(timeline.memory[:turn] + timeline.memory[turn + 1 :], default=0)
    return max(others, timeline.memory[turn] + more_bytes)
