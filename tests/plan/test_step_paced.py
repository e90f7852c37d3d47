"""Code between calls that copies to the device: compute waits there for reloads that have started, and plans avoid it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphoffload.facts.goals import MeetBudget
from graphoffload.facts.plan import Action
from graphoffload.planner.arrays import Arrays, arrays_of
from graphoffload.planner.problem import Candidate, Program, Step
from graphoffload.planner.simulator import Timeline, evaluate, timeline_of
from graphoffload.planner.step.events import drains
from graphoffload.planner.step.facts import CallFacts, Gap, StepFacts, StepProblem, Variant
from graphoffload.planner.step.flight import offloads_of
from graphoffload.planner.step.joint import join
from graphoffload.planner.step.paced import paced_reloads
from graphoffload.planner.step.replay import replay_step
from graphoffload.planner.step.solve import StepSolution, follow_step, plan_step
from tests.plan.instances import hardwares, toy
from tests.plan.recordings import hardware_of
from tests.plan.steps import recorded_llama, steps
from tests.plan.test_step_events import scheduled


def three_blocks() -> StepFacts:
    """Calls of one graph that saves x of 20 bytes for its first backward step; three steps of a second each way."""
    forward = tuple(Step(f"f{i}", 1.0) for i in range(3))
    backward = tuple(Step(f"b{i}", 1.0) for i in range(3))
    program = Program(forward, backward, (), (Candidate("x", 20, 0, 1, (0,)),))  # type: ignore[arg-type]
    return StepFacts(((Variant("v", frozenset(), program),),), (CallFacts(0, 50, 50),) * 3)


def follow(facts: StepFacts, problem: StepProblem, found: StepSolution) -> StepSolution:
    return follow_step(problem, found.chosen, found.calls, found.reload_steps, offloads_of(facts, found), "given")


def test_a_reload_that_has_started_is_waited_for_where_a_call_ends():
    """x of call 0 takes 4 s and is wanted at step 6. It starts at step 1, and call 2 ends at step 3: compute waits 2 s."""
    facts = replace(three_blocks(), copies_between=True)
    actions: list[Action] = ["offload", "keep", "keep"]
    joined, _, schedule, _ = scheduled(facts, (0, 0, 0), actions, toy(5.0))
    assert schedule.moments.drains == (3, 6, 9)
    arrays = arrays_of(joined.program, toy(5.0))
    early = replace(schedule.moments, reloads=((1, schedule.moments.reloads[0][1]),))
    found, plain = (replay_step(arrays, actions, moments) for moments in (early, replace(early, drains=())))
    assert [(where - 9, seconds) for _, where, seconds in found.stalls] == [(3, 2.0)]
    assert (found.time_s, plain.time_s, plain.stalls) == (20.0, 18.0, [])
    assert found.memory.tolist() == plain.memory.tolist()


@given(steps(), hardwares(), st.data())
def test_waits_are_at_ends_of_calls_and_change_no_memory(facts, hardware, data):
    chosen = [0] * len(facts.calls)
    candidates = join(facts, chosen).program.candidates
    actions = [data.draw(st.sampled_from([a for a in c.actions if a != "recompute"])) for c in candidates]
    plain = scheduled(facts, chosen, actions, hardware)[-1]
    joined, _, schedule, found = scheduled(replace(facts, copies_between=True), chosen, actions, hardware)
    ends = set(schedule.moments.drains)
    assert len(ends) <= len(facts.calls)
    assert max(ends, default=0) <= len(joined.program.backward)
    assert found.memory.tolist() == plain.memory.tolist()
    assert found.time_s >= plain.time_s - 1e-9


@given(steps(), hardwares(), st.data())
def test_paced_reloads_are_free_and_no_later(facts, hardware, data):
    chosen = [0] * len(facts.calls)
    joined = join(facts, chosen)
    arrays = arrays_of(joined.program, hardware)
    actions = [data.draw(st.sampled_from([a for a in c.actions if a != "recompute"])) for c in joined.program.candidates]
    late = timeline_of(arrays, evaluate(arrays, actions))
    limit_bytes = late.peak_bytes + data.draw(st.integers(0, 60))
    if not late.schedule:
        return
    ends = drains(replace(facts, copies_between=True), chosen, joined)

    def again(reload_by):
        return timeline_of(arrays, evaluate(arrays, actions, reload_by=reload_by))

    for found in paced_reloads(joined, late, again, arrays, ends, limit_bytes=limit_bytes):
        assert found.peak_bytes <= limit_bytes
        assert found.time_s <= late.time_s * 1.0005
        places = {item.candidate: item.reload_at for item in late.schedule}
        assert all(item.reload_at <= places[item.candidate] for item in found.schedule)


@pytest.mark.parametrize("gap_s", [0.0, 3.0])
def test_paced_reloads_are_done_before_their_call_ends(gap_s: float) -> None:
    """Those of calls 0 and 1 take 2 s each, and a backward 3 s: one starts with call 2's, the other with call 1's. Time between
    calls is none for copies, since it begins with one."""
    plain = three_blocks()
    gaps = replace(plain, calls=tuple(replace(call, before_backward=Gap(gap_s)) for call in plain.calls), copies_between=True)
    joined = join(gaps, (0, 0, 0))
    arrays = arrays_of(joined.program, toy(10.0))
    late = timeline_of(arrays, evaluate(arrays, ["offload", "offload", "keep"]))
    ends = drains(gaps, (0, 0, 0), joined)
    again = functools.partial(_again, arrays, ["offload", "offload", "keep"])
    (found, *_) = paced_reloads(joined, late, again, arrays, ends, limit_bytes=10**6)
    places = {item.candidate: item.reload_at for item in found.schedule}
    assert places == {1: joined.backward_start[2], 0: joined.backward_start[1]}


def _again(arrays: Arrays, actions: list[Action], reload_by: Mapping[int, int]) -> Timeline:
    return timeline_of(arrays, evaluate(arrays, actions, reload_by=reload_by))


@pytest.mark.parametrize("share", [0.6, 0.4])
def test_a_plan_avoids_what_it_would_wait_for(share):
    """24 blocks of a Llama: the plan that knows nothing of the waits has many milliseconds of them, the other next to none."""
    plain, hardware = recorded_llama(24), hardware_of("llama-block")
    copying = replace(plain, copies_between=True)
    budget = int(plan_step(StepProblem(plain, hardware, MeetBudget(10**15))).timeline.peak_bytes * share)
    problem = StepProblem(copying, hardware, MeetBudget(budget))
    blind, found = plan_step(replace(problem, facts=plain)), plan_step(problem)
    assert follow(plain, problem, blind).timeline.time_s > blind.timeline.time_s + 5e-3
    assert found.timeline.time_s <= blind.timeline.time_s + 0.5e-3
    assert found.timeline.peak_bytes <= budget
    assert follow(copying, problem, found).timeline.time_s == pytest.approx(found.timeline.time_s)
