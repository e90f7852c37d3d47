"""A graph that is planned alone, such as a whole model: what its first runs teach, and whether its plan still holds.

    forward         |  loss  |         backward       everything that is saved is alive, and beside it what the loss takes

    run 1           by a plan that has an estimate of it if all of the device is to be filled, and nothing of it under a budget
    run 2           watched: by how much memory rises at the turn, and what lives throughout that was not there in run 1
    run 3           by another plan, if the budget is broken, or the estimate keeps a good part of it for nothing
    any run         by another plan, if two of the latest runs began with so much more that the budget would be broken, or if
                    another process took what was planned with

What is freed between forward and backward is at the turn alone: the last step's outputs, or gradients where zero_grad() comes
behind the loss. So what lives throughout is seen where backwards begin.

The calls of a step of several graphs have all that in what was recorded of each (step_facts.py, step_again.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphoffload.compiler.device_limits import device_budget_now
from graphoffload.compiler.dispatch import Dispatched
from graphoffload.compiler.partitioner import summary_of
from graphoffload.compiler.step_again import differs, tolerated_bytes
from graphoffload.compiler.step_facts import Turn, turn_of
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


def learn_from(graph: Dispatched, runs: Sequence[StepRun], *, asked_anew: bool = False) -> None:
    """Learn from two recorded runs of one call what is allocated beside its activations; plan again if that matters.

    asked_anew: another goal was set since, for which it will be planned.
    """
    plan, last = graph.first.plan, runs[-1]
    if last.streams is None or last.twin or plan is None:
        return
    first, turn = turn_of(runs[0]), turn_of(last)
    if first is None or turn is None:
        return
    outside, static_bytes, taken_bytes = graph.outside, graph.graph.limits.static_bytes, turn.risen_bytes
    if not graph.is_for_any_size:  # else what the graph leaves is of other sizes than planned
        static_bytes += max(0, turn.before_backward_bytes - first.before_backward_bytes)
        taken_bytes = max(0, turn.peak_bytes - turn.left_bytes - static_bytes)
    outside.start_bytes, outside.static_bytes = turn.start_bytes, static_bytes
    outside.turn_bytes = -(-taken_bytes // _ROUNDED) * _ROUNDED
    if asked_anew:
        return
    config = config_of(graph)
    limits = graph.limits_now(config)
    if not _planned_if_it_matters(graph, config, limits, turn):
        _tell(graph, config, limits, turn.peak_bytes)
        graph.hold_to_plan(config)


def plan_if_outgrown(graph: Dispatched, allocated_bytes: int) -> None:
    """A run begins with so much allocated: plan again if two of the latest had more than was planned with, and it breaks the
    budget; or if what was more is gone."""
    plan, limits, outside = graph.first.plan, graph.limits, graph.outside
    budget = limits.device_budget_bytes
    if plan is None or budget is None or outside.static_bytes is None or config_of(graph).max_slowdown is not None:
        return
    outside.begins_with(allocated_bytes)
    lasting, freed, lost = outside.lasting_bytes, outside.freed_bytes, _lost_bytes(graph, budget)
    came = outside.static_bytes + lasting - limits.static_bytes  # since the plan was made
    peak_bytes = plan.prediction.predicted_peak_bytes + max(0, came)
    if differs(freed, budget):
        why = f"{format_bytes(freed)} less are allocated outside"
    elif outside.again >= _MOST_AGAIN or outside.is_least:
        return
    elif differs(came - limits.reserve_bytes, budget) and peak_bytes > budget:  # what was reserved for is there by now
        outside.again += 1
        why = f"{format_bytes(came - limits.reserve_bytes)} more are allocated outside"
    elif differs(lost, budget) and peak_bytes > budget - lost:
        outside.again += 1
        why = f"{format_bytes(lost)} less are free on the device"
    else:
        return
    outside.grown_bytes = lasting
    say(f"{graph.graph.name}: planned again: {why}")
    _plan(graph)


def _lost_bytes(graph: Dispatched, budget_bytes: int) -> int:
    """How much less the device has for this process than was planned with, as another one came. The driver is asked now and
    then."""
    graph.outside.looks += 1
    if graph.limits.explicit or graph.device.type != "cuda" or graph.outside.looks % _LOOK_EVERY:
        return 0
    return budget_bytes - device_budget_now(graph.device, graph.limits.reserve_bytes, of_a_step=bool(graph.limits.turn_bytes))


def _planned_if_it_matters(graph: Dispatched, config: OffloadConfig, limits: Limits, turn: Turn) -> bool:
    """Whether the graph is planned again: where its peak is above the budget, or an estimate leaves much of it unused."""
    plan, budget = graph.first.plan, limits.device_budget_bytes
    assert plan is not None
    if budget is None or config.max_slowdown is not None:
        return False
    given = budget if limits.explicit else None
    at_turn = turn.peak_bytes + limits.reserve_bytes - budget
    came = limits.static_bytes - graph.limits.static_bytes
    known = _amended(plan, limits.turn_bytes or 0, turn.peak_bytes).prediction.predicted_peak_bytes
    elsewhere = known + came + limits.reserve_bytes - budget
    unused = plan.turn_bytes - (limits.turn_bytes or 0)
    if at_turn > tolerated_bytes(given):
        _say_that_it_broke(graph, given, at_turn)
    elif came > 0 and elsewhere > tolerated_bytes(given):
        say(f"{graph.graph.name}: planned again: {format_bytes(came)} more are allocated outside")
    elif plan.changes_anything and differs(unused, budget):
        say(f"{graph.graph.name}: planned again: eager code between forward and backward takes {format_bytes(unused)} less")
    else:
        return False
    return _plan(graph)


def _say_that_it_broke(graph: Dispatched, given: int | None, excess: int) -> None:
    """What eager code takes breaks the budget; a warning if that was given."""
    name, taken = graph.graph.name, format_bytes(graph.outside.turn_bytes or 0)
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


def _plan(graph: Dispatched) -> bool:
    """Plan again, by the least plan there is if none meets the budget: training goes on. Whether there is another plan."""
    config, turn = config_of(graph), format_bytes(graph.outside.turn_bytes or 0)
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
                f"{error}{of_turn if graph.outside.turn_bytes else ''} Training goes on by the plan that takes least.",
                stacklevel=6,
            )
            if error.least_bytes is None:
                return False
            graph.plan_alone(config, least_bytes=error.least_bytes)
    except (BudgetError, ShapeGuardError, PlanError) as error:
        warn(StepNotPlannedWarning, f"{error} {graph.graph.name} runs on as it is.", stacklevel=5)
        return False
    return True


def _tell(graph: Dispatched, config: OffloadConfig, limits: Limits, peak_bytes: int) -> None:
    """What is predicted is true of the step from now on: the measured bytes are in place of the estimated ones.

    peak_bytes: what was allocated at the turn, which is all that can be said of a plan from a compile cache.
    """
    plan, turn_bytes = graph.first.plan, graph.outside.turn_bytes or 0
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
    predicted = predicted_of(plan.key)
    own, keep = plan.prediction.predicted_peak_bytes, plan.prediction.keep_peak_bytes
    if predicted is not None:
        more = turn_bytes - predicted.turn_bytes
        own, keep = _peak(predicted.timeline, more), _peak(predicted.keep_timeline, more)
    elif turn_bytes > plan.turn_bytes:
        own, keep = max(own, peak_bytes), max(keep, peak_bytes)
    prediction = replace(plan.prediction, predicted_peak_bytes=own, keep_peak_bytes=keep)
    return replace(plan, prediction=prediction, turn_bytes=turn_bytes)


def _peak(timeline: Timeline, more_bytes: int) -> int:
    """The peak if the last step of forward, which stands for the turn, takes so much more."""
    turn = timeline.forward_steps - 1
    others = max(timeline.memory[:turn] + timeline.memory[turn + 1 :], default=0)
    return max(others, timeline.memory[turn] + more_bytes)
