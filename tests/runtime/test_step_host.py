"""A host that does not keep up with a planned step: seen, and planned again with fewer copies where that is faster."""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lazy import LazyStreams, afresh, clean_slate, lazy_steps, once

import graphoffload
from graphoffload.compiler import looks, step_plan, step_planning
from graphoffload.compiler.looks import LOOKS
from graphoffload.compiler.step_again import Known, learn_shortage
from graphoffload.compiler.step_host import HostSeen
from graphoffload.compiler.step_link import LinkSeen
from graphoffload.compiler.step_plan import Asked
from graphoffload.compiler.step_runs import _PLANNER
from graphoffload.errors import BudgetError
from graphoffload.facts.goals import KeepIfFits
from graphoffload.planner.step.facts import StepProblem
from graphoffload.runtime import twin_copies
from graphoffload.runtime.step.calls import STEPS as STEPS_OF
from graphoffload.runtime.step.calls import StepRun
from graphoffload.runtime.step.pace import Issued, Pace
from graphoffload.torch_internals.dynamo import ShapeGuardError
from tests.runtime.stepping import (
    Model,
    Moment,
    assert_equal,
    batch,
    budget_at,
    compiled,
    fresh,
    kept,
    lazy,
    lines_of_plans_again,
    plan_now,
    slow_link,
    step,
    trained,
)

__all__ = ["afresh", "clean_slate", "lazy", "once"]

RATE = 1e9
STEPS = 24
SLOW = Issued(step_s=10.0, host_s=10.0, idle=1.0)
"""No planned step of these models takes as long."""


class Streams(LazyStreams):
    """Whose moments a test gives."""

    def __init__(self, *moments: Moment) -> None:
        super().__init__()
        self.moments = iter(moments)

    def timed_event(self) -> Moment:  # type: ignore[override]
        return next(self.moments)


def seen(*moments: Moment, kinds: tuple[tuple[str, int], ...]) -> Pace:
    pace = Pace(Streams(*moments))
    for kind, call in kinds:
        pace.mark(kind, call)
    return pace


RUN = (("forward", 0), ("forward end", 0), ("backward", 0), ("backward end", 0))


def test_a_device_that_is_behind_its_host_is_not_idle() -> None:
    late = [Moment(float(at), reached=False) for at in (1, 2, 3)]
    pace = seen(*late, Moment(5.0), kinds=RUN)
    found = pace.found()
    assert found is not None
    assert found.step_s == pytest.approx(4e-3)
    assert found.idle == 0.0
    pace = seen(Moment(1.0), late[1], Moment(3.0), Moment(5.0), kinds=RUN)
    found = pace.found()
    assert found is not None
    assert found.idle == pytest.approx(2 / 3)
    assert found.host_s > 0.0


def test_a_run_that_did_not_end_has_no_pace() -> None:
    last = Moment(3.0, reached=False)
    pace = seen(Moment(1.0), Moment(2.0), last, kinds=RUN[:3])
    assert not pace.is_reached
    last.reached = True
    assert pace.is_reached
    assert pace.found() is None
    assert Pace(Streams()).found() is None


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Issued]:
    """What looks find, one after the other; the last one again and again."""
    seen = [SLOW]
    looks = itertools.count()
    monkeypatch.setattr(Pace, "found", lambda _: seen[min(next(looks), len(seen) - 1)])
    return seen


def train(capfd: pytest.CaptureFixture[str], share: float = 0.5, steps: int = STEPS) -> tuple[Model, list[str]]:
    return trained(capfd, steps, share, RATE)


def copied_bytes() -> int:
    plan = plan_now()
    assert plan is not None
    return plan.solution.timeline.host_bytes


def test_a_slow_host_gets_a_plan_with_fewer_copies(
    lazy: LazyStreams, found: list[Issued], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    solve, problems = step_plan.plan_flight, list[StepProblem]()
    time_s, copies = list[float](), list[int]()

    def noted(problem: StepProblem, *rest: Any) -> Any:
        problems.append(problem)
        found = solve(problem, *rest)
        time_s.append(found.timeline.time_s)
        copies.append(sum(action == "offload" for call in found.actions for action in call))
        return found

    monkeypatch.setattr(step_plan, "plan_flight", noted)
    found += [SLOW] * LOOKS + [SLOW._replace(step_s=9.0)]
    _, lines = train(capfd)
    prices = [problem.hardware.host_s_per_copy for problem in problems]
    assert [price_s > 0.0 for price_s in prices] == [False, True], "what was asked is not solved again"
    assert prices[1] == pytest.approx((SLOW.step_s - time_s[0]) / copies[0], rel=1e-6)
    assert len(lines) == 1
    assert "planned again: the host took 10000.0 ms to issue a step that was predicted to take" in lines[0]
    assert not copied_bytes()


def test_what_is_no_faster_is_taken_back(lazy: LazyStreams, found: list[Issued], capfd: pytest.CaptureFixture[str]) -> None:
    """Once, and for good."""
    _, lines = train(capfd)
    assert [line.split("planned again: ")[1].split(" took")[0] for line in lines] == ["the host", "with fewer copies it"]
    assert copied_bytes()


@pytest.mark.parametrize("idle", [0.0, 0.2])
def test_a_busy_device_is_no_reason(
    idle: float, lazy: LazyStreams, found: list[Issued], capfd: pytest.CaptureFixture[str]
) -> None:
    found[0] = SLOW._replace(idle=idle)
    assert train(capfd)[1] == []


def test_a_step_as_fast_as_predicted_is_no_reason(
    lazy: LazyStreams, found: list[Issued], capfd: pytest.CaptureFixture[str]
) -> None:
    found[0] = SLOW._replace(step_s=0.0)
    assert train(capfd)[1] == []


def test_one_disturbed_run_is_no_reason(lazy: LazyStreams, found: list[Issued], capfd: pytest.CaptureFixture[str]) -> None:
    """The fastest counts."""
    found.append(SLOW._replace(step_s=0.0))
    found.append(SLOW)
    assert train(capfd)[1] == []


def test_the_budget_comes_first(lazy: LazyStreams, found: list[Issued], capfd: pytest.CaptureFixture[str]) -> None:
    """A plan with fewer copies than any that meets it is none."""
    _, lines = train(capfd, share=0.0)
    assert [line.split("planned again: ")[1].split(" took")[0] for line in lines] == ["the host", "with fewer copies it"]
    assert all(" offloads " in line for line in lines)
    plan = plan_now()
    assert plan is not None
    assert plan.solution.timeline.peak_bytes <= budget_at(0.0)
    assert copied_bytes()


def test_less_memory_brings_copies_back(lazy: LazyStreams, found: list[Issued], capfd: pytest.CaptureFixture[str]) -> None:
    """A plan for a price copies where nothing else fits."""
    found += [SLOW] * LOOKS + [SLOW._replace(step_s=9.0)]
    model, _ = train(capfd)
    assert not copied_bytes()
    (expected,) = kept(fresh(), [batch()])
    graphoffload.set_budget(budget_at(0.0))
    assert_equal(step(model, batch()), expected)
    assert copied_bytes()


def test_another_goal_is_looked_at_afresh(lazy: LazyStreams, found: list[Issued], capfd: pytest.CaptureFixture[str]) -> None:
    model, lines = train(capfd)
    assert len(lines) == 2
    graphoffload.set_budget(budget_at(0.6))
    for _ in range(STEPS):
        step(model, batch())
    again = lines_of_plans_again(capfd)
    assert ["another goal was set" in line for line in again] == [True, False, False]


_SEEN = st.builds(
    Issued, st.sampled_from([1e-6, 1e-3, 1.0, 10.0]), st.just(1.0), st.sampled_from([0.0, 1.0]), st.just(0.0), st.just(0.0)
)


@given(st.lists(_SEEN, min_size=1, max_size=6), st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.8]), min_size=1, max_size=3))
@settings(max_examples=8)
def test_whatever_is_seen_of_the_host_gradients_are_right(seen: list[Issued], shares: list[float]) -> None:
    """Prices come and go, other budgets in between; no plan exceeds its budget."""
    looks = itertools.cycle(seen)
    with pytest.MonkeyPatch.context() as patch, lazy_steps():
        patch.setattr(Pace, "found", lambda _: next(looks))
        (expected,) = kept(fresh(), [batch()])
        compiled(model := fresh(), budget_at(shares[0]), hardware=slow_link(RATE))
        for number, share in enumerate(shares):
            if number:
                graphoffload.set_budget(budget_at(share))
            for _ in range(12):
                assert_equal(step(model, batch()), expected)
            plan = plan_now()
            assert plan is not None
            assert plan.solution.timeline.peak_bytes <= budget_at(share)


def test_a_slowdown_is_left_alone(lazy: LazyStreams, found: list[Issued], capfd: pytest.CaptureFixture[str]) -> None:
    """Without copies it would free less than was asked for."""
    model = fresh()
    compiled(model, "auto", max_slowdown=0.5, hardware=slow_link(RATE))
    for _ in range(STEPS):
        step(model, batch())
    assert "planned again" not in capfd.readouterr().err
    assert copied_bytes()


@pytest.mark.parametrize("how", ["twin", "captured"])
def test_what_says_nothing_of_the_host_is_not_looked_at(
    how: str, lazy: LazyStreams, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps whose copies are clones, which take compute's time; a capture, which asking an event ends."""
    looked: list[Pace] = []

    def look(streams: Any) -> Pace:
        looked.append(Pace(streams))
        return looked[-1]

    monkeypatch.setattr(looks, "Pace", look)
    model = fresh()
    compiled(model, budget_at(0.5), hardware=slow_link(RATE))
    for _ in range(4):
        step(model, batch())
    (run,) = STEPS_OF.runs.values()
    known = next(iter(_PLANNER.known.values()))
    assert known.plan is not None
    if how == "captured":
        lazy.captures = True
        known.host.look(known.plan, run)
    else:
        with twin_copies():
            for _ in range(STEPS):
                step(model, batch())
    assert looked == []
    lazy.captures = False
    known.host.look(known.plan, run)
    assert len(looked) == 1


def test_a_plan_that_is_no_faster_any_more_is_none(
    lazy: LazyStreams, found: list[Issued], capfd: pytest.CaptureFixture[str]
) -> None:
    """As where less memory leaves only plans that compute much again, before the first one was seen to be faster."""
    found += [SLOW] * LOOKS + [SLOW._replace(step_s=9.0)]
    model, _ = train(capfd)
    assert not copied_bytes()
    known = next(iter(_PLANNER.known.values()))
    known.host.free_s = 0.0
    learn_shortage(known, 1)
    step(model, batch())
    assert known.host.price_s, "one at the price was faster: the other one would be slower as well"
    assert not copied_bytes()
    known.host._compared = False
    learn_shortage(known, 1)
    step(model, batch())
    assert copied_bytes()
    assert not known.host.price_s


def test_what_cannot_be_compiled_with_fewer_copies_keeps_them(
    lazy: LazyStreams, found: list[Issued], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step goes on by a plan."""
    make = step_planning.make_step_plan

    def fails(sequence: Any, graphs: Any, facts: Any, asked: Any, **how: Any) -> Any:
        if facts.host_s_per_copy:
            raise ShapeGuardError("other sizes")
        return make(sequence, graphs, facts, asked, **how)

    monkeypatch.setattr(step_planning, "make_step_plan", fails)
    train(capfd)
    assert copied_bytes()


def test_other_ranks_and_other_microbatches_take_the_price_away(lazy: LazyStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    known, priced = Known((0,)), HostSeen(price_s=0.1, free_s=1.0)
    known.host = replace(priced)
    known.fly(2)
    assert known.host == HostSeen()
    known.host = replace(priced)
    known.host.begin_plan()
    assert known.host == priced
    known.begin_goal()
    assert known.host == HostSeen()
    known.host = replace(priced)

    def refuses(*_: Any, **how: Any) -> None:
        assert how["decision"] is not None
        raise BudgetError("no plan")

    monkeypatch.setattr(step_planning, "_graphs", lambda _: [])
    monkeypatch.setattr(step_planning, "make_step_plan", refuses)
    told: Any = SimpleNamespace(asked=Asked(KeepIfFits(1)), facts=None, may_exceed=False, explicit=True)
    with pytest.raises(BudgetError):
        step_planning._make(known, torch.device("cpu"), told, SimpleNamespace())  # type: ignore[arg-type]
    assert known.host == HostSeen()


def test_slices_are_no_way_to_do_without_copies(lazy: LazyStreams) -> None:
    """They round gradients otherwise."""
    compiled(model := fresh(), budget_at(0.5), hardware=slow_link(RATE))
    for _ in range(4):
        step(model, batch())
    known = next(iter(_PLANNER.known.values()))
    assert known.facts is not None
    assert known.asked is not None
    sliced = tuple((*variants, replace(variants[-1], slices=4)) for variants in known.facts.graphs)
    facts, asked = step_planning._at_price(replace(known.facts, graphs=sliced), known.asked, 0.25)
    assert facts == replace(known.facts, host_s_per_copy=0.25)
    assert asked == replace(known.asked, or_least=False)


def test_a_plans_copies_are_judged_by_the_variants_that_it_chose_from(
    lazy: LazyStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at a price has none in slices, and numbers that count without them."""
    problems: list[StepProblem] = []

    def judged(_: Any, plan: Any, last: Any, problem: Any) -> str:
        problems.append(problem())
        return ""

    monkeypatch.setattr(LinkSeen, "why_slower", judged)
    compiled(model := fresh(), budget_at(0.5), hardware=slow_link(RATE))
    for _ in range(8):
        step(model, batch())
    known, plan = next(iter(_PLANNER.known.values())), plan_now()
    assert known.facts is not None
    assert plan is not None
    sliced = tuple((replace(variants[-1], slices=4), *variants) for variants in known.facts.graphs)
    known.facts = replace(known.facts, graphs=sliced)
    step(model, batch())
    assert problems[-1].facts == plan.facts


def test_a_capture_is_not_asked(lazy: LazyStreams) -> None:
    pace = seen(Moment(1.0), kinds=RUN[:1])
    streams = pace._streams
    assert isinstance(streams, Streams)
    assert pace.is_reached
    streams.captures = True
    assert not pace.is_reached
    for kind, call in RUN[1:]:
        pace.mark(kind, call)
    assert pace.found() is None


def test_a_second_backward_is_no_part_of_a_run() -> None:
    pace = seen(*(Moment(float(at)) for at in range(4)), kinds=(*RUN, ("backward", 0), ("backward end", 0)))
    found = pace.found()
    assert found is not None
    assert found.step_s == pytest.approx(3e-3)


def test_a_run_that_left_its_plan_is_none_and_is_not_held(lazy: LazyStreams) -> None:
    streams = Streams(*(Moment(float(at)) for at in range(4)))
    run = StepRun(streams, recording=False)
    run.pace = pace = Pace(streams)
    pace.mark(*RUN[0])
    run.leave_plan()
    for kind, call in RUN[1:]:
        if run.pace is not None:
            run.pace.mark(kind, call)
    assert pace.found() is None
    assert not [held for held in gc.get_referents(pace) if isinstance(held, StepRun)]
