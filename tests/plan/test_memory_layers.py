"""Layers of a timeline: each byte of the simulated memory is in one of them, and recomputation is where the forward's names
are in backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphoffload
from graphoffload.facts.goals import MeetBudget
from graphoffload.hardware.profile import PROFILES
from graphoffload.planner.arrays import arrays_of
from graphoffload.planner.memory_layers import Again, MemoryLayers, layers_of
from graphoffload.planner.problem import Buffer, Candidate, Program, Step, StepIndex
from graphoffload.planner.simulator import simulate
from graphoffload.planner.step.facts import StepProblem
from graphoffload.planner.step.solve import plan_step
from graphoffload.report import predictions
from graphoffload.report.step_report import outside_at
from tests.plan.steps import llama

HARDWARE = PROFILES["h200-sxm"]
MIB = 2**20


def steps(names: str, time_s: float = 1e-3, workspace: int = 0) -> tuple[Step, ...]:
    return tuple(Step(name, 0.0 if name.endswith("'") else time_s, workspace) for name in names.split())


def saved(name: str, made: int, uses: tuple[int, ...], nbytes: int = 64 * MIB) -> Candidate:
    at, backward = StepIndex(made), tuple(StepIndex(use) for use in uses)
    return Candidate(name, nbytes, at, at, backward)


def test_the_layers_of_a_small_step_by_hand() -> None:
    """Two saved activations, one of them copied; the rest is a buffer of backward."""
    program = Program(
        forward=steps("f0 f1 f2 f3 f4 f5"), backward=steps("b0 b1 b2 b3 b4 b5"),
        buffers=(Buffer("gradient", 5 * MIB, 9, 11),), candidates=(saved("f0", 0, (5,)), saved("f1", 1, (3, 4))),
        static_bytes=7 * MIB,
    )  # fmt: skip
    timeline = simulate(program, ["offload", "keep"], HARDWARE)
    (item,) = timeline.schedule
    found = layers_of(arrays_of(program, HARDWARE), ["offload", "keep"], timeline)
    assert found.outside == (7 * MIB,) * 12
    there = [step <= (item.release_at or 0) or 6 + item.reload_at <= step < 6 + item.wait_at for step in range(12)]
    assert found.in_flight == tuple(64 * MIB * moving for moving in there)
    assert 1 < sum(there) < 11, "it is away for a while"
    assert found.kept == tuple(64 * MIB * ((1 <= step <= 6 + 4) + (step == 11)) for step in range(12))
    rest = [m - o - k - f for m, o, k, f in zip(timeline.memory, found.outside, found.kept, found.in_flight, strict=True)]
    assert rest == [5 * MIB * (step >= 9) for step in range(12)]


def test_what_backward_runs_again_is_what_the_forward_ran() -> None:
    program = Program(forward=steps("mm view' relu mm_1"), backward=steps("b0 relu view' add' mm_1 b1 view' mm b2"))
    timeline = simulate(program, [], HARDWARE)
    again = layers_of(arrays_of(program, HARDWARE), [], timeline).again
    ms = pytest.approx
    assert again == (
        Again(ms(5e-3 - 1e-3), ms(6e-3), ("relu", "view'", "mm_1")),
        Again(ms(7e-3), ms(8e-3), ("mm",)),
    )


@pytest.mark.parametrize("share", [0.65, 0.75, 0.9])
def test_the_layers_of_a_planned_step_are_within_its_memory(share: float) -> None:
    facts = llama(6)
    keep = plan_step(StepProblem(facts, HARDWARE, MeetBudget(2**60))).keep_timeline.peak_bytes
    solution = plan_step(StepProblem(facts, HARDWARE, MeetBudget(int(keep * share))))
    actions = [solution.actions[call][candidate] for call, candidate in solution.joined.of]
    program, timeline = solution.joined.program, solution.timeline
    found = layers_of(arrays_of(program, HARDWARE), actions, timeline, outside_at(solution.joined))
    check(found, timeline.memory)
    assert any(found.in_flight) == bool(timeline.schedule)


@pytest.mark.parametrize("policy", ["keep", "recompute", "offload", "auto"])
def test_the_layers_of_a_compiled_graph_are_within_its_memory(policy: str) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Softmax(-1), nn.Linear(64, 64), nn.Tanh())
    options = {"policy": policy, "min_tensor_bytes": 0, "hardware": HARDWARE.name}
    (plan,) = graphoffload.explain(model, options)(torch.randn(256, 64, requires_grad=True)).plans
    predicted = predictions.predicted_of(plan.key)
    assert predicted is not None
    check(predicted.layers, predicted.timeline.memory)
    if policy == "recompute":
        assert plan.recomputed_bytes
        again = predicted.layers.again[0]
        assert predicted.timeline.lanes.forward_end_s <= again.start_s < again.end_s <= predicted.timeline.time_s


def check(layers: MemoryLayers, memory: tuple[int, ...]) -> None:
    parts = (layers.outside, layers.kept, layers.in_flight)
    assert {len(part) for part in parts} == {len(memory)}
    assert all(nbytes >= 0 for part in parts for nbytes in part)
    for step, total in enumerate(memory):
        assert sum(part[step] for part in parts) <= total, step
