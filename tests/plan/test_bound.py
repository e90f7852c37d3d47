"""The LP bound against plans: sharp cases by hand, and every plan against the bound for exactly what it uses."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphoffload.facts.plan import Action
from graphoffload.hardware.profile import PROFILES, HardwareProfile
from graphoffload.planner.arrays import arrays_of
from graphoffload.planner.problem import Candidate, Program, Recompute, Step
from graphoffload.planner.simulator import simulate
from graphoffload.planner.strategies.folds import fold
from tests.plan.bounds import lower_bound_peak_bytes, lower_bound_s
from tests.plan.instances import hardwares, programs, stack, toy


def fix(program: Program, actions: list[Action]) -> Program:
    """The same instance with only this plan left."""
    fixed = tuple(dataclasses.replace(c, fixed=a) for c, a in zip(program.candidates, actions, strict=True))
    return dataclasses.replace(program, candidates=fixed)


def check(program: Program, actions: list[Action], hardware: HardwareProfile, window: int | None = None) -> tuple[float, float]:
    """With its own peak as budget and its own time as limit neither bound may exclude a plan. Both as shares of its figures."""
    timeline = simulate(program, actions, hardware, max_inflight_bytes=window)
    bound_s = lower_bound_s(program, hardware, device_budget_bytes=timeline.peak_bytes, host_budget_bytes=timeline.host_bytes)
    assert bound_s <= timeline.time_s * (1 + 1e-9)
    slowdown = max(0.0, timeline.slowdown) if timeline.keep_time_s else 1e6
    peak = lower_bound_peak_bytes(
        program, hardware, max_slowdown=slowdown * (1 + 1e-9) + 1e-9, host_budget_bytes=timeline.host_bytes
    )
    assert peak <= timeline.peak_bytes
    return bound_s / timeline.time_s if timeline.time_s else 1.0, peak / timeline.peak_bytes


def steps(*times: float) -> tuple[Step, ...]:
    return tuple(Step(f"s{i}", time_s) for i, time_s in enumerate(times))


def test_recomputation_that_runs_while_a_reload_is_on_its_way_is_not_added_to_it() -> None:
    """3 s of recompute before b0 hide the 3 s reload for b1: backward takes 3 + 1 + 1, not 3 + 3 + 1."""
    candidates = (Candidate("b", 3, 0, 0, (1,)), Candidate("a", 1, 1, 1, (0,), recompute=Recompute(3.0)))
    program = fix(Program(steps(1.0, 4.0), steps(1.0, 1.0), (), candidates, static_bytes=1), ["offload", "recompute"])
    assert simulate(program, ["offload", "recompute"], toy()).time_s == 10.0
    assert check(program, ["offload", "recompute"], toy())[0] == pytest.approx(1.0, rel=1e-4)


def test_an_instance_that_takes_no_time() -> None:
    """Keep-all's time is the unit of times, and may be nothing."""
    candidates = (Candidate("a", 2, 0, 0, (0,), recompute=Recompute(2.0)),)
    program = fix(Program(steps(0.0), steps(0.0), (), candidates, static_bytes=1), ["recompute"])
    assert check(program, ["recompute"], toy())[0] == pytest.approx(1.0, rel=1e-4)


def test_a_copy_that_is_done_in_time_costs_no_wait() -> None:
    """x is copied while f1 runs and gone before f2, the peak: a budget of that peak costs nothing."""
    forward = (Step("f0", 1.0), Step("f1", 1.0), Step("f2", 1.0, workspace_bytes=9))
    program = fix(Program(forward, steps(4.0, 1.0), (), (Candidate("x", 2, 0, 0, (1,)),), static_bytes=1), ["offload"])
    assert simulate(program, ["offload"], toy(2.0)).peak_bytes == 10
    assert check(program, ["offload"], toy(2.0))[0] == pytest.approx(1.0, rel=1e-4)


def test_what_cannot_have_been_copied_yet_is_waited_for() -> None:
    """The same, with a copy of 2 s: f2 fits only if it starts a second later, by a window or not."""
    forward = (Step("f0", 1.0), Step("f1", 1.0), Step("f2", 1.0, workspace_bytes=9))
    program = fix(Program(forward, steps(4.0, 1.0), (), (Candidate("x", 2, 0, 0, (1,)),), static_bytes=1), ["offload"])
    assert lower_bound_s(program, toy(1.0), device_budget_bytes=10) == pytest.approx(8.0 + 1.0, rel=1e-4)


@given(programs(free=True), hardwares(), st.data())
@settings(max_examples=150)
def test_no_plan_is_excluded_by_the_bound_for_what_it_uses(
    program: Program, hardware: HardwareProfile, data: st.DataObject
) -> None:
    actions = [data.draw(st.sampled_from(candidate.actions)) for candidate in program.candidates]
    window = data.draw(st.sampled_from([None, 0, 10]))
    check(fix(program, actions), actions, hardware, window)


@given(st.integers(1, 20), st.sampled_from([1.0, 0.2, 0.02]), st.data())
@settings(max_examples=25)
def test_folding_never_lifts_the_bound_above_a_plan(layers: int, link: float, data: st.DataObject) -> None:
    """Mixed plans of a folded stack: per group a first layer, and what happens from it on and before it."""
    program, hardware = stack(layers), PROFILES["h200-sxm"].scaled(link=link)
    rule: dict[str, tuple[int, Action, Action]] = {}
    choice: st.SearchStrategy[Action] = st.sampled_from(("keep", "offload", "recompute"))
    actions: list[Action] = []
    for index, candidate in enumerate(program.candidates):
        if candidate.group not in rule:
            rule[candidate.group] = (data.draw(st.integers(0, layers)), data.draw(choice), data.draw(choice))
        turn, before, after = rule[candidate.group]
        wanted = before if index // 5 < turn else after
        actions.append(wanted if wanted in candidate.actions else "keep")
    check(program, actions, hardware)


def test_equal_layers_are_folded() -> None:
    arrays = arrays_of(stack(80), PROFILES["h200-sxm"])
    classes = fold(arrays)
    assert len(classes) < len(arrays.program.candidates) / 4
    members = sorted(k for c in classes for k in c.members)
    assert members == list(range(len(arrays.program.candidates) - 1)), "all but the last residual, which nothing reads"
