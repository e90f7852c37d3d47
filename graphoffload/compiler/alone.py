"""A graph that is planned alone, such as a whole model: what its first runs teach, and whether its plan still holds.

    forward         |  loss  |         backward       everything that is saved is alive, and beside it what the loss takes

    run 1           by a plan that has an estimate of it if all of the device is to be filled, and nothing of it under a budget
    run 2           watched: by how much memory rises at the turn, and what lives throughout that was not there in run 1; and
                    what backward takes beyond its plan, as outputs do that the caller holds
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
from graphoffload.compiler.garbage import collected
from graphoffload.compiler.partitioner import summary_of
from graphoffload.compiler.step_again import MOST_EXCESS_BYTES, differs
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
_EXCESS_SHARE, _LEAST_EXCESS_BYTES = 0.0025, 4 * 2**20  # of a budget that was given
_MOST_AGAIN = 3
"""What grows more often grows without end. Each plan of a whole model costs a compile."""


def learn_from(graph: Dispatched, runs: Sequence[StepRun], *, asked_anew: bool = False) -> None:
    """Learn from two recorded runs of one call what is allocated beside its activations; plan again if that matters.

    asked_anew: another goal was set since, for which it will be planned.
    """
    own, last = graph.own, runs[-1]
    if last.streams is None or last.twin or graph.first.plan is None or own.outside.static_bytes is not None:
        return
    first, turn = turn_of(runs[0]), turn_of(last)
    if first is None or turn is None:
        return
    config = config_of(graph)
    limits, reserve = own.graph.limits, own.reserve_now(config)
    came, taken = max(0, limits.reserve_bytes - reserve), turn.risen_bytes  # state that was reserved for is there by now
    if not own.is_for_any_size:  # else what the graph leaves is of other sizes than planned
        came = max(came, turn.before_backward_bytes - first.before_backward_bytes)
        taken = max(0, turn.peak_bytes - turn.left_bytes - (limits.static_bytes - limits.uncut_bytes) - came)
    outside = own.outside
    outside.start_bytes, outside.static_bytes, outside.reserve_bytes = turn.start_bytes, limits.static_bytes + came, reserve
    outside.turn_bytes = _rounded(taken)
    if asked_anew:
        return
    limits = own.limits_now(config)
    if beyond := _beyond_bytes(graph, limits, turn, came):
        outside.static_bytes += beyond
        limits = own.limits_now(config)
    if not _planned_if_it_matters(graph, config, limits, turn, beyond):
        _tell(graph, config, limits, turn)
        own.hold(config, graph.first)


def tolerated_bytes(given_bytes: int | None) -> int:
    """By how much a run may exceed its budget: another plan costs a compile of the model, and none has the workspaces that
    libraries take inside their calls. None: no budget was given."""
    if given_bytes is None:
        return MOST_EXCESS_BYTES
    return min(MOST_EXCESS_BYTES, max(_LEAST_EXCESS_BYTES, int(_EXCESS_SHARE * given_bytes)))


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ROUNDED) * _ROUNDED


def _beyond_bytes(graph: Dispatched, limits: Limits, turn: Turn, came: int) -> int:
    """What backward took beyond its plan, where that breaks the budget: outputs that the caller holds after backward has read
    them, or what libraries allocate inside their calls. came: what lives throughout that was not there when it was planned."""
    plan, budget = graph.first.plan, limits.device_budget_bytes
    if plan is None or budget is None or graph.own.is_for_any_size:
        return 0
    excess = turn.backward_peak_bytes + limits.reserve_bytes - budget
    beyond = turn.backward_peak_bytes - came - _backward_bytes(plan)
    if beyond <= 0 or excess <= tolerated_bytes(limits.given_bytes):
        return 0
    return _rounded(beyond + limits.uncut_bytes)


def _backward_bytes(plan: Plan) -> int:
    """The most that a backward is predicted to take; of a plan from a cache, which has no timeline, that a step is."""
    predicted = predicted_of(plan.key)
    if predicted is None:
        return plan.prediction.predicted_peak_bytes
    return max(predicted.timeline.memory[predicted.timeline.forward_steps :], default=0)


def plan_if_outgrown(graph: Dispatched, allocated_bytes: int) -> None:
    """A run begins with so much allocated: plan again if two of the latest had more than was planned with, and it breaks the
    budget; or if what was more is gone."""
    plan, limits, outside = graph.first.plan, graph.own.limits, graph.own.outside
    budget, config = limits.device_budget_bytes, config_of(graph)
    if plan is None or budget is None or outside.static_bytes is None or config.max_slowdown is not None:
        return
    outside.begins_with(allocated_bytes)
    freed, lost = outside.freed_bytes, _lost_bytes(graph, budget)
    if differs(freed, budget):
        outside.given_up = False
        say(f"{graph.graph.name}: planned again: {format_bytes(freed)} less are allocated outside")
        _plan(graph)
        return
    came = outside.static_bytes + outside.lasting_bytes - limits.static_bytes  # since the plan was made
    excess = plan.prediction.predicted_peak_bytes + max(0, came) - budget
    more, tolerated = came - limits.reserve_bytes, tolerated_bytes(limits.given_bytes)
    outgrown = differs(more, budget) and excess > tolerated  # what was reserved for is there by now
    squeezed = differs(lost, budget) and excess + lost > tolerated
    if not (outgrown or squeezed):
        outside.given_up = False
    elif not (outside.given_up or outside.is_least):
        why = f"{format_bytes(more)} more are allocated outside"
        _plan_again(graph, why if outgrown else f"{format_bytes(lost)} less are free on the device")


def _plan_again(graph: Dispatched, why: str) -> None:
    """Plan with what came, unless it has come too often."""
    own, config = graph.own, config_of(graph)
    if own.outside.again >= _MOST_AGAIN and not own.has(config):
        own.outside.given_up = True
        warn(
            BudgetExceededWarning,
            f"{graph.graph.name} was compiled {_MOST_AGAIN} times for what is allocated outside, and is not any more: {why}, "
            "and its plan exceeds the budget with that. Look for what grows from step to step, or leave room for it in "
            "device_budget. graphoffload.set_budget() has it planned again.",
        )
        return
    before = own.compiles
    say(f"{graph.graph.name}: planned again: {why}")
    _plan(graph)
    own.outside.again += own.compiles > before


def _lost_bytes(graph: Dispatched, budget_bytes: int) -> int:
    """How much less the device has for this process than was planned with, as another one came. The driver is asked now and
    then."""
    limits, outside = graph.own.limits, graph.own.outside
    outside.looks += 1
    if limits.explicit or graph.device.type != "cuda" or outside.looks % _LOOK_EVERY:
        return 0
    return budget_bytes - device_budget_now(graph.device, limits.reserve_bytes, of_a_step=bool(limits.turn_bytes))


def _planned_if_it_matters(graph: Dispatched, config: OffloadConfig, limits: Limits, turn: Turn, beyond: int) -> bool:
    """Whether the graph is planned again: where its peak is above the budget, or an estimate leaves much of it unused."""
    plan, before, budget = graph.first.plan, graph.own.limits, limits.device_budget_bytes
    assert plan is not None
    if budget is None or config.max_slowdown is not None:
        return False
    given = limits.given_bytes
    at_turn = turn.peak_bytes + limits.reserve_bytes - budget
    came = limits.static_bytes - before.static_bytes
    known = _amended(plan, limits.turn_bytes or 0, 0).prediction.predicted_peak_bytes
    elsewhere = known + came + limits.reserve_bytes - budget
    unused = plan.turn_bytes - (limits.turn_bytes or 0) - ((before.device_budget_bytes or budget) - budget)
    if at_turn > tolerated_bytes(given):
        _say_that_the_turn_broke_it(graph, given, at_turn)
    elif beyond > 0 and elsewhere > tolerated_bytes(given):
        _say_that_backward_broke_it(graph, given, turn.backward_peak_bytes + limits.reserve_bytes - budget, beyond)
    elif came > 0 and elsewhere > tolerated_bytes(given):
        say(f"{graph.graph.name}: planned again: {format_bytes(came)} more are allocated outside")
    elif plan.changes_anything and differs(unused, budget):
        say(f"{graph.graph.name}: planned again: eager code between forward and backward takes {format_bytes(unused)} less")
    else:
        return False
    return _plan(graph)


def _say_that_the_turn_broke_it(graph: Dispatched, given: int | None, excess: int) -> None:
    name, taken = graph.graph.name, format_bytes(graph.own.outside.turn_bytes or 0)
    what = f"eager code between forward and backward takes {taken}"
    why = f"between the forward and the backward of {name}, eager code such as a loss takes {taken}"
    advice = "if the loss is compiled with the model, it is in the plan from the first step on"
    _say_that_it_broke(name, given, excess, what, why, advice)


def _say_that_backward_broke_it(graph: Dispatched, given: int | None, excess: int, beyond: int) -> None:
    name, more = graph.graph.name, f"{format_bytes(beyond)} more than was planned"
    why = f"the backward of {name} took {more}, as it does where outputs such as logits are held until it ends"
    advice = "`model(x).loss.backward()` holds none, `out = model(x)` and then `out.loss.backward()` does"
    _say_that_it_broke(name, given, excess, f"its backward takes {more}", why, advice)


def _say_that_it_broke(name: str, given: int | None, excess: int, what: str, why: str, advice: str) -> None:
    """The first plan breaks the budget; a warning if that was given. what: for a line; why, advice: for a warning."""
    if given is None:
        say(f"{name}: planned again: {what}")
    else:
        warn(
            BudgetExceededWarning,
            f"device_budget={format_bytes(given)} was exceeded by {format_bytes(excess)} in the first steps: {why}. It is "
            f"planned again with that. Nothing has to be done; {advice}.",
        )


def _plan(graph: Dispatched) -> bool:
    """Plan again, by the least plan there is if none meets the budget: training goes on. Whether there is another plan."""
    with collected(graph.device):
        return _plan_or_least(graph)


def _plan_or_least(graph: Dispatched) -> bool:
    config, turn = config_of(graph), format_bytes(graph.own.outside.turn_bytes or 0)
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
                f"{error}{of_turn if graph.own.outside.turn_bytes else ''} Training goes on by the plan that takes least.",
            )
            if error.least_bytes is None:
                return False
            graph.plan_alone(config, least_bytes=error.least_bytes)
    except (BudgetError, ShapeGuardError, PlanError) as error:
        warn(StepNotPlannedWarning, f"{error} {graph.graph.name} runs on as it is.")
        return False
    return True


def _tell(graph: Dispatched, config: OffloadConfig, limits: Limits, turn: Turn) -> None:
    """What is predicted is true of the step from now on: the measured bytes are in place of the estimated ones."""
    plan, turn_bytes = graph.first.plan, limits.turn_bytes or 0
    assert plan is not None
    if plan.turn_bytes == turn_bytes:
        return
    came = max(0, limits.static_bytes - graph.own.limits.static_bytes)  # what it was reserved for is in the reserve
    plan = _amended(plan, turn_bytes, turn.peak_bytes - came)
    plan = replace(plan, summary=summary_of(plan, config, limits))
    log.info("%s: %s", plan.graph, plan.summary)
    registry.amend(plan)
    graph.first = replace(graph.first, plan=plan)


def _amended(plan: Plan, turn_bytes: int, peak_bytes: int) -> Plan:
    """A plan whose peaks have what eager code takes. peak_bytes: at the turn, all that is known of a plan from a cache."""
    predicted = predicted_of(plan.key)
    own, keep = plan.prediction.predicted_peak_bytes, plan.prediction.keep_peak_bytes
    if predicted is not None:
        more = turn_bytes - predicted.turn_bytes
        own, keep = _peak(predicted.timeline, more), _peak(predicted.keep_timeline, more)
    else:
        own, keep = max(own, peak_bytes), max(keep, peak_bytes)
    prediction = replace(plan.prediction, predicted_peak_bytes=own, keep_peak_bytes=keep)
    return replace(plan, prediction=prediction, turn_bytes=turn_bytes)


def _peak(timeline: Timeline, more_bytes: int) -> int:
    """The peak if the last step of forward, which stands for the turn, takes so much more."""
    turn = timeline.forward_steps - 1
    others = max(timeline.memory[:turn] + timeline.memory[turn + 1 :], default=0)
    return max(others, timeline.memory[turn] + more_bytes)
