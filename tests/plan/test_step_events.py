"""The schedule of a step's calls, run by a model of the runtime that knows only ops and events."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphoffload.planner.arrays import arrays_of
from graphoffload.planner.problem import Candidate, Program, Step
from graphoffload.planner.simulator import evaluate, simulate, timeline_of
from graphoffload.planner.step.events import CallSchedule, schedule_step
from graphoffload.planner.step.facts import CallFacts, Gap, StepFacts, Variant
from graphoffload.planner.step.joint import Joined, join
from graphoffload.planner.step.replay import Moments, replay_step
from tests.plan.instances import hardwares, programs, toy
from tests.plan.steps import alone, less_than_keep_all, steps, with_ops

COPIES = ("keep", "offload")


class Runtime:
    """Runs a schedule: which candidate is on the device at which step of the joint program."""

    def __init__(self, facts: StepFacts, chosen: Sequence[int], joined: Joined, calls: Sequence[CallSchedule]) -> None:
        self.facts, self.chosen, self.joined, self.calls = facts, chosen, joined, calls
        self.programs = [facts.variant(call, chosen[call]).program for call in range(len(chosen))]
        self.ops: dict[tuple[int, int], set[str]] = {}
        for call, fact in enumerate(facts.calls):
            self.ops.setdefault((fact.graph, chosen[call]), set()).update(calls[call].offloads)
        self.issued: list[tuple[int, str]] = []
        self.released: set[tuple[int, str]] = set()
        self.settled = 0
        self.away: set[tuple[int, str]] = set()
        self.back: dict[tuple[int, str], int] = {}
        self.absent: list[set[tuple[int, str]]] = []

    def forward_event(self, call: int, kind: str, name: str, issued_before: int) -> None:
        count = self.calls[call].settle[kind, name]
        assert self.settled <= count <= issued_before, "a count falls, or covers a copy that was not issued yet"
        self.settled = count
        if name in self.calls[call].offloads:
            self.issued += [(call, name)] if kind == "offload" else []
            self.released |= {(call, name)} if kind == "release" else set()
        self.away = {source for source in self.issued[: self.settled] if source in self.released}

    def run(self) -> list[set[tuple[int, str]]]:
        """Candidates that are not on the device during each step."""
        forward_steps = len(self.joined.program.forward)
        for step in range(forward_steps):
            self.starts(self.joined.forward_start, step, self.start_forward)
            self.absent.append(set(self.away))
            for call, program in enumerate(self.programs):
                local = step - self.joined.forward_start[call]
                if 0 <= local < len(program.forward):
                    self.end_of_step(call, program, local)
        self.away = set(self.issued)
        for step in range(len(self.joined.program.backward)):
            for call in reversed(range(len(self.programs))):
                local = step - self.joined.backward_start[call]
                if 0 <= local < len(self.programs[call].backward):
                    self.backward_events(call, self.programs[call], local)
            self.absent.append(set(self.away))
        assert sorted(self.back) == sorted(self.issued), "a copy never came back"
        return self.absent

    def starts(self, begins, step, then) -> None:
        for call, begin in enumerate(begins):
            if begin == step:
                then(call)

    def start_forward(self, call: int) -> None:
        self.forward_event(call, "start", "", len(self.issued))

    def end_of_step(self, call: int, program: Program, local: int) -> None:
        names = self.ops[self.facts.calls[call].graph, self.chosen[call]]
        before = len(self.issued)
        for kind, attribute in (("offload", "produced_at"), ("release", "last_forward_use")):
            for candidate in program.candidates:
                if candidate.name in names and getattr(candidate, attribute) == local:
                    self.forward_event(call, kind, candidate.name, before)

    def backward_events(self, call: int, program: Program, local: int) -> None:
        schedule = self.calls[call]
        if local == 0:
            self.start_copies(schedule.prefetch.get(("start", ""), ()))
        for candidate in program.candidates:
            if schedule.reload_at.get(candidate.name) == local:
                self.start_copies(schedule.prefetch.get(("reload", candidate.name), ()))
        for candidate in program.candidates:
            if candidate.name not in schedule.reload_at:
                continue
            use = candidate.backward_uses[0]
            if local == (program.reload_steps[use] if program.reload_steps else use):
                self.start_copies(schedule.prefetch.get(("wait", candidate.name), ()))
                assert (call, candidate.name) not in self.away, "waited for and never started"

    def start_copies(self, copies) -> None:
        for copy in copies:
            assert copy in self.away, "started twice, or never offloaded"
            self.away.remove(copy)
            self.back[copy] = 1


def scheduled(facts, chosen, actions, hardware, window=None, early=()):
    joined = join(facts, chosen)
    arrays = arrays_of(joined.program, hardware)
    planned = timeline_of(arrays, evaluate(arrays, actions, max_inflight_bytes=window))
    schedule = schedule_step(facts, chosen, joined, planned.schedule, early)
    return joined, planned, schedule, replay_step(arrays, actions, schedule.moments)


@settings(max_examples=300)
@given(steps(), hardwares(), st.sampled_from([None, 0, 20]), st.data())
def test_the_runtime_holds_what_the_timeline_says(facts, hardware, window, data):
    chosen = [data.draw(st.integers(0, len(facts.graphs[call.graph]) - 1)) for call in facts.calls]
    candidates = join(facts, chosen).program.candidates
    actions = [data.draw(st.sampled_from(candidate.actions)) for candidate in candidates]
    early = data.draw(st.sets(st.integers(0, len(actions))))
    joined, planned, schedule, found = scheduled(facts, chosen, actions, hardware, window, early)
    names = [
        {(call, facts.variant(call, chosen[call]).program.candidates[own].name): index}
        for index, (call, own) in enumerate(joined.of)
    ]
    index_of = {key: index for entry in names for key, index in entry.items()}
    copied = {item.candidate for item in planned.schedule}
    assert {index_of[call, name] for call, each in enumerate(schedule.calls) for name in each.offloads} == copied
    absent = Runtime(facts, chosen, joined, schedule.calls).run()
    everything = simulate(joined.program, ["keep"] * len(actions), hardware).memory
    could = with_ops(facts, joined, chosen, copied)
    for step, away in enumerate(absent):
        less = less_than_keep_all(joined.program, could, {index_of[key] for key in away}, step)
        assert found.memory[step] == everything[step] - less, joined.program.step_name(step)


@given(programs(free=True), hardwares(), st.data())
def test_a_replay_of_the_simulators_own_moments_is_the_simulation(program, hardware, data):
    program = alone(program)
    actions = [data.draw(st.sampled_from(candidate.actions)) for candidate in program.candidates]
    arrays = arrays_of(program, hardware)
    expected = evaluate(arrays, actions)
    copies = tuple(index for _, _, index in expected.d2h)
    reloads = tuple((position, index) for index, position, _ in expected.loads)
    found = replay_step(arrays, actions, Moments(copies, (), expected.release, reloads))
    assert (found.time_s, found.memory.tolist(), found.stalls) == (expected.time_s, expected.memory.tolist(), expected.stalls)


def two_blocks(uses: tuple[int, ...] = (1,)) -> StepFacts:
    """Two calls of one graph that saves x of 10 bytes; a link of 10 bytes a second; steps of a second."""
    forward = tuple(Step(f"f{i}", 1.0) for i in range(3))
    backward = tuple(Step(f"b{i}", 1.0) for i in range(3))
    program = Program(forward, backward, (), (Candidate("x", 10, 0, 1, uses),))  # type: ignore[arg-type]
    loss = Gap(1.0)
    return StepFacts(
        ((Variant("v", frozenset(), program),),), (CallFacts(0, 50, 50), CallFacts(0, 50, 50, before_backward=loss))
    )


def test_two_calls_by_hand():
    """x of call 0 is issued after f0 and done after f1: its own release settles it. Its reload is wanted at the start of its
    backward, which is where the op stands. Call 1 keeps x, and its events run all the same."""
    _, planned, schedule, found = scheduled(two_blocks(), (0, 0), ["offload", "keep"], toy(10.0))
    first, second = schedule.calls
    assert (first.offloads, second.offloads) == (("x",), ())
    assert first.settle == {("start", ""): 0, ("offload", "x"): 0, ("release", "x"): 1}
    assert second.settle == {("start", ""): 1, ("offload", "x"): 1, ("release", "x"): 1}
    assert schedule.reload_steps == {(0, 0): {"x": 0}}
    assert (first.prefetch, second.prefetch) == ({("reload", "x"): ((0, "x"),)}, {})
    assert found.time_s == planned.time_s == 13.0
    assert found.memory.tolist() == [60, 60, 50, 60, 60, 60, 60, 60, 60, 50, 60, 60, 50]


def test_a_reload_before_its_own_call_starts_in_the_call_that_runs_before():
    """x of call 0 is used in the first step of its backward: its copy starts at the wait in call 1's backward."""
    _, _, schedule, found = scheduled(two_blocks((0,)), (0, 0), ["offload", "offload"], toy(10.0))
    assert schedule.calls[1].prefetch == {("reload", "x"): ((1, "x"),), ("wait", "x"): ((0, "x"),)}
    assert dict(schedule.calls[0].prefetch) == {}
    assert found.memory[-6:].tolist() == [70, 60, 60, 60, 50, 50]


def test_a_release_in_the_loss_waits_for_backward():
    """A copy that is done during the loss is settled when backward starts: no op of ours runs in between."""
    facts = two_blocks()
    _, planned, schedule, found = scheduled(facts, (0, 0), ["keep", "offload"], toy(4.0))
    assert planned.memory[6] == 70
    assert set(schedule.calls[1].settle.values()) == {0}
    assert found.memory[6] == 70
    assert found.peak_bytes == 70


def test_a_copy_may_be_waited_for_at_the_last_event_before_the_loss():
    """The memory of the loss is free of a copy that compute waits for at the last op before it: 2.5 s less the one step."""
    facts = two_blocks()
    late = scheduled(facts, (0, 0), ["keep", "offload"], toy(4.0))[-1]
    copied = len(join(facts, (0, 0)).program.candidates) - 1
    _, _, schedule, found = scheduled(facts, (0, 0), ["keep", "offload"], toy(4.0), early={copied})
    assert schedule.calls[1].settle["release", "x"] == 1
    assert (late.memory[6], found.memory[6]) == (70, 60)
    assert found.time_s == pytest.approx(late.time_s + 1.5)


def test_schedules_refer_to_candidates_of_variants():
    """The union over a variant's calls has ops; another variant's calls have none of them."""
    facts = two_blocks()
    program = facts.graphs[0][0].program
    facts = StepFacts((facts.graphs[0] + (Variant("w", frozenset(), program),),), facts.calls)
    _, _, schedule, _ = scheduled(facts, (0, 1), ["offload", "keep"], toy(10.0))
    assert set(schedule.calls[1].settle) == {("start", "")}
    assert schedule.reload_steps[0, 1] == {}
    with pytest.raises(TypeError):
        schedule.calls[0].settle["start", ""] = 3  # type: ignore[index]
