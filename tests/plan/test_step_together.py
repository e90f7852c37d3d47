"""One plan for several ranks: merged problems, decisions that travel as JSON, and what they come to elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphoffload.compiler import step_ranks
from graphoffload.compiler.rounds import Solve
from graphoffload.errors import BudgetError, PlanError
from graphoffload.facts.goals import Goal, KeepIfFits, MeetBudget, WithinSlowdown
from graphoffload.facts.recipe import EVERYTHING_KEPT, Recipe
from graphoffload.hardware.measurement import resolve_hardware
from graphoffload.planner.problem import Program
from graphoffload.planner.simulator import simulate
from graphoffload.planner.step.events import moments_of, schedule_step
from graphoffload.planner.step.facts import CallFacts, Gap, StepFacts, StepProblem
from graphoffload.planner.step.joint import join
from graphoffload.planner.step.solve import plan_step
from graphoffload.planner.step.stored import from_json
from graphoffload.planner.step.together import (
    Decision,
    RankFacts,
    decision_of,
    facts_of_rank,
    followed,
    merged,
    with_variants,
)
from tests.plan.instances import hardwares
from tests.plan.steps import MB, llama, steps

H200 = resolve_hardware("h200-sxm")
GB = 1000 * MB


def told(problem: StepProblem) -> RankFacts:
    """As it comes out of the store."""
    facts = facts_of_rank(problem, divided=True)
    assert RankFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts
    return facts


def slowed(facts: StepFacts, factor: float) -> StepFacts:
    """The same step on a rank whose kernels all take longer."""

    def slow(program: Program) -> Program:
        return replace(
            program,
            forward=tuple(replace(step, time_s=step.time_s * factor) for step in program.forward),
            backward=tuple(replace(step, time_s=step.time_s * factor) for step in program.backward),
            candidates=tuple(
                c if c.recompute is None else replace(c, recompute=replace(c.recompute, time_s=c.recompute.time_s * factor))
                for c in program.candidates
            ),
        )

    graphs = tuple(tuple(replace(v, program=slow(v.program)) for v in variants) for variants in facts.graphs)
    return replace(facts, graphs=graphs, bounds=tuple(map(slow, facts.bounds)))


def with_outside(facts: StepFacts, nbytes: int) -> StepFacts:
    """The same step with so much more memory outside."""

    def gap(gap: Gap) -> Gap:
        return replace(gap, outside_peak_bytes=gap.outside_peak_bytes + nbytes) if gap.outside_peak_bytes else gap

    calls = tuple(
        replace(
            call,
            forward_outside_bytes=call.forward_outside_bytes + nbytes,
            backward_outside_bytes=call.backward_outside_bytes + nbytes,
            before_forward=gap(call.before_forward),
            before_backward=gap(call.before_backward),
        )
        for call in facts.calls
    )
    return replace(facts, calls=calls, base_bytes=facts.base_bytes + nbytes)


def recipes(facts: StepFacts) -> list[list[Recipe]]:
    """Names are all that is asked of them here."""
    return [[Recipe(variant.name, recomputes=variant.recomputes) for variant in variants] for variants in facts.graphs]


@settings(max_examples=25)
@given(steps(most_calls=3), hardwares(), st.integers(20, 200))
def test_a_decision_is_what_was_solved(facts: StepFacts, hardware, budget: int) -> None:
    """On the rank that solved, and through JSON: the same schedule, the same moments, the same memory and time."""
    problem = StepProblem(facts, hardware, MeetBudget(budget), or_least=True)
    solution = plan_step(problem)
    decision = decision_of(problem, solution, recipes(facts))
    again = Decision.from_json(json.loads(json.dumps(decision.to_json())))
    found = followed(problem, again)
    assert (found.chosen, found.calls, found.actions) == (solution.chosen, solution.calls, solution.actions)
    assert found.reload_steps == solution.reload_steps
    assert found.timeline.memory == solution.timeline.memory
    assert found.timeline.time_s == pytest.approx(solution.timeline.time_s)
    assert found.timeline.peak_bytes == solution.timeline.peak_bytes
    assert found.solver == solution.solver


@settings(max_examples=60)
@given(steps(), hardwares(), st.data())
def test_moments_are_those_of_the_schedule(facts: StepFacts, hardware, data) -> None:
    """The inverse, for any actions."""
    chosen = [data.draw(st.integers(0, len(facts.graphs[call.graph]) - 1)) for call in facts.calls]
    joined = join(facts, chosen)
    actions = [
        c.fixed or ("offload" if c.can_offload and data.draw(st.booleans()) else "keep") for c in joined.program.candidates
    ]
    planned = simulate(joined.program, actions, hardware).schedule
    made = schedule_step(facts, chosen, joined, planned)
    assert moments_of(facts, chosen, joined, made.calls, made.reload_steps) == made.moments


@pytest.mark.parametrize("goal", [MeetBudget(40 * GB), KeepIfFits(40 * GB), WithinSlowdown(0.02)])
def test_one_rank_alone_is_its_own_merger(goal: Goal) -> None:
    problem = StepProblem(llama(4), H200, goal, reserve_bytes=GB, host_budget_bytes=50 * GB)
    assert merged(problem, [told(problem)]) == problem
    assert merged(problem, [told(problem)] * 3) == problem


def test_the_least_room_the_slowest_kernels_the_slowest_link() -> None:
    """Of three ranks: one has more memory and more outside than that, one is slow, one has a slow link and little host."""
    facts = llama(4)
    plain = StepProblem(facts, H200, MeetBudget(40 * GB), reserve_bytes=GB, host_budget_bytes=50 * GB)
    roomy = replace(plain, facts=with_outside(facts, 5 * GB), goal=MeetBudget(43 * GB))
    slow = replace(plain, facts=slowed(facts, 1.25), hardware=H200.scaled(link=0.5), host_budget_bytes=20 * GB)
    found = merged(plain, [told(each) for each in (plain, roomy, slow)])
    assert found.goal == MeetBudget(40 * GB)
    assert found.reserve_bytes == GB
    assert found.host_budget_bytes == 20 * GB
    assert found.hardware.d2h_bytes_per_s == H200.d2h_bytes_per_s / 2
    for at, call in enumerate(found.facts.calls):
        assert call.forward_outside_bytes == facts.calls[at].forward_outside_bytes + 2 * GB
    for mine, theirs in zip(found.facts.graphs, slow.facts.graphs, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert [s.time_s for s in one.program.backward] == pytest.approx([s.time_s for s in other.program.backward])
    from_the_slow = merged(slow, [told(each) for each in (plain, roomy, slow)])
    assert from_the_slow.goal == found.goal
    assert from_the_slow.facts.calls == found.facts.calls


def test_the_plan_of_the_merged_problem_holds_on_each_rank() -> None:
    """Where each alone would decide otherwise."""
    facts = llama(8)
    ranks = [
        StepProblem(facts, H200, MeetBudget(34 * GB)),
        StepProblem(with_outside(facts, 4 * GB), H200, MeetBudget(34 * GB)),
        StepProblem(slowed(facts, 1.1), H200.scaled(link=0.7), MeetBudget(34 * GB)),
    ]
    alone = {plan_step(problem).actions for problem in ranks}
    assert len(alone) > 1
    problem = merged(ranks[2], [told(each) for each in ranks])
    solution = plan_step(problem)
    decision = Decision.from_json(json.loads(json.dumps(decision_of(problem, solution, recipes(facts)).to_json())))
    for each in ranks:
        found = followed(each, decision)
        assert found.timeline.peak_bytes <= 34 * GB
        assert (found.chosen, found.actions, found.calls) == (solution.chosen, solution.actions, solution.calls)
        assert found.timeline.time_s <= solution.timeline.time_s * 1.0001


def test_gaps_of_any_rank() -> None:
    """The shortest, since a rank that waits for another measures the wait, and the highest peak; one without any has none."""
    facts = llama(2)
    plain = StepProblem(facts, H200, MeetBudget(40 * GB))
    own = facts.calls[0].before_backward
    for seconds in (0.5, own.time_s / 2):
        calls = (replace(facts.calls[0], before_backward=Gap(seconds, 20 * GB)), *facts.calls[1:])
        other = replace(plain, facts=replace(facts, calls=calls), goal=MeetBudget(45 * GB))
        found = merged(plain, [told(plain), told(other)]).facts.calls[0]
        assert found.before_backward == Gap(min(seconds, own.time_s), max(15 * GB, own.outside_peak_bytes))


def test_a_rank_that_waits_hides_no_copies() -> None:
    """In recorded runs one rank waits 14 ms for the other before each forward. Planned with that, copies would seem free; and
    both say the same, whichever of them solves."""
    facts = llama(8)
    waits = replace(facts, calls=tuple(replace(c, before_forward=Gap(0.014, 0)) for c in facts.calls))
    ranks = [StepProblem(each, H200, MeetBudget(26 * GB)) for each in (facts, waits)]
    alone = plan_step(ranks[0])
    for solver in ranks:
        problem = merged(solver, [told(each) for each in ranks])
        decision = decision_of(problem, plan_step(problem), recipes(facts))
        decision = Decision.from_json(json.loads(json.dumps(decision.to_json())))
        slowdowns = [followed(each, decision).slowdown for each in ranks]
        assert slowdowns == pytest.approx([alone.slowdown] * 2, abs=1e-9)
    assert plan_step(ranks[1]).slowdown < alone.slowdown - 0.05


def test_one_that_cannot_be_met_names_the_least_of_all() -> None:
    facts = llama(2)
    plain = StepProblem(facts, H200, MeetBudget(5 * GB))
    more = replace(plain, facts=with_outside(facts, 3 * GB))
    least = []
    for each in (plain, merged(plain, [told(plain), told(more)])):
        with pytest.raises(BudgetError) as info:
            plan_step(each)
        least.append(info.value.least_bytes)
    assert least[1] == pytest.approx(least[0] + 3 * GB, rel=0.01)


def test_a_decision_for_another_step_is_refused() -> None:
    facts = llama(4)
    problem = StepProblem(facts, H200, MeetBudget(26 * GB))
    decision = decision_of(problem, plan_step(problem), recipes(facts))
    with pytest.raises(PlanError, match="does not fit this step"):
        followed(replace(problem, facts=llama(2)), decision)
    program = facts.graphs[0][0].program
    renamed = replace(program, candidates=tuple(replace(c, name=f"other {c.name}") for c in program.candidates))
    other = replace(facts, graphs=(tuple(replace(v, program=renamed) for v in facts.graphs[0]),))
    with pytest.raises(PlanError, match="does not fit this step"):
        followed(replace(problem, facts=other), decision)
    with pytest.raises(PlanError, match="does not fit this step: it has 3 calls, and there are 4 here"):
        followed(problem, replace(decision, gaps_s=decision.gaps_s[1:]))
    with pytest.raises(PlanError, match="calls and graphs"):
        merged(problem, [told(problem), told(replace(problem, facts=llama(2)))])


@pytest.mark.parametrize("writable", [True, False])
def test_the_rank_that_solves_dumps_the_problem_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: bool) -> None:
    """And tells its decision all the same where the folder cannot be written: the other ranks wait for it."""
    facts = llama(4)
    problem = StepProblem(facts, H200, MeetBudget(26 * GB), host_budget_bytes=50 * GB)
    slow = replace(problem, facts=slowed(facts, 1.2))
    monkeypatch.setattr(step_ranks, "problem_of", lambda *_: problem)
    folder = tmp_path / "dumps"
    if not writable:
        folder.write_text("a file")
    config = SimpleNamespace(dump_dir=str(folder))
    graphs: Any = [
        SimpleNamespace(graph=SimpleNamespace(config=config), family=SimpleNamespace(recipes=each)) for each in recipes(facts)
    ]
    found = Solve({at: {"facts": told(each).to_json(), "host": "a"} for at, each in enumerate((problem, slow))}, ())
    proposal: Any = SimpleNamespace(facts=facts, asked=None)
    peers: Any = SimpleNamespace(rank=0)
    assert "decision" in step_ranks.solved(found, proposal, graphs, peers)
    paths = list(tmp_path.glob("dumps/step.*.together.problem.json"))
    assert len(paths) == writable
    for path in paths:
        assert from_json(path.read_text()) == merged(problem, [told(each) for each in (problem, slow)])


def test_other_variants() -> None:
    """What ran is known by name."""
    facts = llama(2)
    assert with_variants(facts, facts.graphs, facts.bounds) == facts
    last = replace(facts, calls=tuple(replace(call, ran=len(facts.graphs[0]) - 1) for call in facts.calls))
    fewer = with_variants(last, [facts.graphs[0][:1]], ())
    assert all(isinstance(call, CallFacts) and call.ran == 0 for call in fewer.calls)
    assert EVERYTHING_KEPT.name
