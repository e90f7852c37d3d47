"""The Program of a whole training step: join() against one call, against numbers by hand, and against a model of memory."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphoffload.errors import PlanError
from graphoffload.planner.problem import Buffer, Candidate, Program, Step
from graphoffload.planner.simulator import simulate
from graphoffload.planner.step.facts import CallFacts, Dropped, Gap, StepFacts, Variant
from graphoffload.planner.step.joint import Joined, join
from tests.plan.instances import hardwares, programs, toy
from tests.plan.steps import alone, llama, steps


def actions_of(draw: st.DataObject, program: Program) -> list:
    return [draw.draw(st.sampled_from(candidate.actions)) for candidate in program.candidates]


@given(programs(), hardwares(), st.data())
def test_one_call_is_its_program(program, hardware, data):
    program = alone(program)
    facts = StepFacts(((Variant("only", frozenset(), program),),), (CallFacts(0, 11, 11),))
    joined = join(facts, (0,))
    actions = actions_of(data, program)
    expected = simulate(replace(program, static_bytes=11), actions, hardware)
    found = simulate(joined.program, actions, hardware)
    assert (found.time_s, found.peak_bytes, found.memory) == (expected.time_s, expected.peak_bytes, expected.memory)
    assert found.schedule == expected.schedule
    assert joined.of == tuple((0, index) for index in range(len(program.candidates)))


def two_variants() -> tuple[Variant, Variant]:
    """Two steps each way. The first saves x; the second makes it again and saves its input instead."""
    forward = (Step("make", 1.0, 1), Step("use", 1.0))
    kept = Program(
        forward, (Step("grad", 2.0), Step("last", 1.0, 2)), (), (Candidate("x", 10, 0, 1, (0,)),), reload_steps=(0, 0)
    )  # type: ignore[arg-type]
    again = Program(
        forward, (Step("again", 1.0), Step("grad", 2.0), Step("last", 1.0, 2)), (Buffer("x", 10, 0, 1), Buffer("x", 10, 2, 3))
    )
    return Variant("kept", frozenset(), kept), Variant("again", frozenset({"x"}), again, saved_input_bytes=4)


def test_two_calls_by_hand():
    """Call 0 computes x again, call 1 keeps it; a gap before call 1, one of the loss, and one between the backwards."""
    calls = (
        CallFacts(0, 100, 105, before_backward=Gap(0.0, 120)),
        CallFacts(0, 104, 110, before_forward=Gap(0.25, 0), before_backward=Gap(0.5, 130)),
    )
    joined = join(StepFacts((two_variants(),), calls, base_bytes=90), (1, 0))
    program = joined.program
    assert [step.name for step in program.forward] == [
        "call 0: make", "call 0: use", "before forward of call 1", "call 1: make", "call 1: use",
        "between forward and backward",
    ]  # fmt: skip
    assert [step.name for step in program.backward] == [
        "call 1: grad", "call 1: last", "before backward of call 0", "call 0: again", "call 0: grad", "call 0: last",
    ]  # fmt: skip
    assert (joined.forward_start, joined.backward_start, joined.of) == ((0, 3), (3, 0), ((1, 0),))
    assert program.reload_steps == (0, 0, 2, 3, 4, 5)
    assert [(c.name, c.produced_at, c.last_forward_use, c.backward_uses) for c in program.candidates] == [
        ("call 1: x", 3, 4, (0,))
    ]
    timeline = simulate(program, ["keep"], toy(1.0))
    assert timeline.memory == (
        104 + 10 + 1, 104 + 10, 108, 108 + 10 + 1, 108 + 10, 134 + 10, 114 + 10, 114 + 2, 124, 109 + 10, 109 + 10, 109 + 2,
    )  # fmt: skip
    assert timeline.time_s == 2 + 0.25 + 2 + 0.5 + 3 + 4


def test_fewer_saved_inputs_leave_after_the_forward_that_reads_them():
    calls = (CallFacts(0, 100, 104, ran=1), CallFacts(0, 104, 108, ran=1))
    memory = simulate(join(StepFacts((two_variants(),), calls), (0, 0)).program, ["keep", "keep"], toy(1.0)).memory
    assert memory == (111, 110, 100 + 10 + 11, 100 + 10 + 10, 100 + 20, 100 + 10 + 2, 100 + 10, 100 + 2)


def test_what_others_hold_is_kept_or_outside():
    """Call 1's x is somebody else's as well: it cannot be offloaded, and a variant that does not save it frees nothing."""
    calls = (CallFacts(0, 100, 104), CallFacts(0, 104, 108, held=("x",), held_bytes=10))
    facts = StepFacts((two_variants(),), calls)
    first, second = join(facts, (0, 0)).program.candidates
    assert (first.actions, second.actions) == (("keep", "offload"), ("keep",))
    assert first.group != second.group
    alone = replace(facts, calls=(calls[0], replace(calls[1], held=(), held_bytes=0)))
    free, held = (simulate(join(each, (0, 1)).program, ["keep"], toy(1.0)) for each in (alone, facts))
    more = tuple(one - other for one, other in zip(held.memory, free.memory, strict=True))
    assert more == (0, 0, 10, 10, 10, 10, 10, 0, 0)


@pytest.mark.parametrize("in_gap", [False, True])
def test_an_output_that_only_its_call_holds(in_gap: bool):
    """What the first of two calls returns, 7 bytes: its caller lets go of it before the backwards, or before the last of them.
    A variant that saves it keeps it from then on, in memory that was not seen when another variant was measured."""
    kept, again = two_variants()
    family, gap = (replace(kept, saved_outputs=(5, 7)), again), Gap(1.0, 150)

    def memory(moment: int, chosen: tuple[int, int]) -> tuple[int, ...]:
        first = CallFacts(0, 100, 104, 1, before_backward=gap, dropped=(Dropped(7, moment, in_gap),))
        second = CallFacts(0, 100, 104, 1, before_forward=gap, before_backward=gap)
        found = []
        for each in (first, replace(first, dropped=())):
            joined = join(StepFacts((family,), (each, second)), chosen)
            found.append(simulate(joined.program, ["keep"] * len(joined.of), toy(1.0)).memory)
        return tuple(one - other for one, other in zip(*found, strict=True))

    # forward: two steps, a gap, two steps, and the gap of the loss; backward: two steps, a gap, two steps
    assert memory(1, (0, 0)) == (0, 0, 7 * in_gap, 7, 7, 7, 7, 7, 7, 7, 7)
    assert memory(2, (0, 0)) == (0, 0, 0, 0, 0, 7 * in_gap, 7, 7, 7, 7, 7)
    assert memory(3, (0, 0)) == (0, 0, 0, 0, 0, 0, 0, 0, 7 * in_gap, 7, 7)
    assert not any(memory(2, (1, 0))), "the variant of call 0 does not save it"


def expected_memory(facts: StepFacts, chosen: list[int], joined: Joined) -> tuple[list[int], list[int]]:
    """What is outside and inside at each step when everything is kept, counted one item at a time."""
    program = joined.program
    names = [step.name for step in (*program.forward, *program.backward)]
    forward_steps, count = len(program.forward), len(facts.calls)
    outside, inside = [0] * len(names), [0] * len(names)
    changes = [
        facts.variant(call, chosen[call]).saved_input_bytes - facts.variant(call, facts.calls[call].ran).saved_input_bytes
        for call in range(count)
    ]
    for at, name in enumerate(names):
        if not name.startswith("call "):
            continue
        call, back = int(name[5 : name.index(":")]), at >= forward_steps
        fact, variant = facts.calls[call], facts.variant(call, chosen[call]).program
        level = (fact.backward_outside_bytes if back else fact.forward_outside_bytes) + sum(changes[:call])
        outside[at] = max(facts.base_bytes, level + (changes[call] if back else max(0, changes[call])))
        begin = joined.backward_start[call] + forward_steps - len(variant.forward) if back else joined.forward_start[call]
        local = at - begin
        inside[at] += (*variant.forward, *variant.backward)[local].workspace_bytes
        inside[at] += sum(b.nbytes for b in variant.buffers if b.first <= local <= b.last)
    for call in range(count):
        for candidate in facts.variant(call, chosen[call]).program.candidates:
            start = joined.forward_start[call] + candidate.produced_at
            end = joined.forward_start[call] + candidate.last_forward_use
            if candidate.backward_uses:
                over = candidate.overwritten_at
                last = candidate.backward_uses[-1] if over is None else over - 1
                end = forward_steps + joined.backward_start[call] + last
            for at in range(start, end + 1):
                inside[at] += candidate.nbytes
    return outside, inside


@settings(max_examples=200)
@given(steps(), st.data())
def test_memory_is_what_is_outside_and_what_is_saved(facts, data):
    chosen = [data.draw(st.integers(0, len(facts.graphs[call.graph]) - 1)) for call in facts.calls]
    joined = join(facts, chosen)
    program = joined.program
    outside, inside = expected_memory(facts, chosen, joined)
    memory = simulate(program, ["keep"] * len(program.candidates), toy(1.0)).memory
    for at, step in enumerate((*program.forward, *program.backward)):
        if step.name.startswith("call "):
            assert memory[at] == outside[at] + inside[at], step.name
        else:  # a gap: at least as much as around it
            around = [outside[k] for k in (at - 1, at + 1) if 0 <= k < len(outside)]
            assert memory[at] - inside[at] >= max(around)
    assert len({candidate.name for candidate in program.candidates}) == len(program.candidates)
    for index, (call, own) in enumerate(joined.of):
        candidate = facts.variant(call, chosen[call]).program.candidates[own]
        assert program.candidates[index].name == f"call {call}: {candidate.name}"


def test_equal_candidates_of_equal_calls_fold():
    program = join(llama(8), [0] * 8).program
    groups = {candidate.group for candidate in program.candidates}
    assert len(groups) == len(program.candidates) // 8


def test_what_is_no_step_is_refused():
    variants = two_variants()
    with pytest.raises(PlanError, match="variant 2 of 2 is chosen"):
        join(StepFacts((variants,), (CallFacts(0, 1, 1),)), (2,))
    with pytest.raises(PlanError, match="graph 1 of 1"):
        StepFacts((variants,), (CallFacts(1, 1, 1),))
    with pytest.raises(PlanError, match="begins in the forward and ends in the backward"):
        Variant("wrong", frozenset(), replace(variants[0].program, buffers=(Buffer("all", 1, 0, 3),)))
    with pytest.raises(PlanError, match="3 static and 0 reserved bytes"):
        Variant("wrong", frozenset(), replace(variants[0].program, static_bytes=3))


def test_joining_is_fast():
    facts = llama(80, count=150)
    begin = time.process_time()
    joined = join(facts, [0] * 40 + [1] * 40)
    assert time.process_time() - begin < 1.0
    assert len(joined.program.forward) == 80 * 150 + 1
    assert np.all(np.diff(joined.forward_start) > 0)
    assert np.all(np.diff(joined.backward_start) < 0)
