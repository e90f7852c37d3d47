"""The hint beside a plan that keeps all: what a little time would buy, found at once or not at all."""

from __future__ import annotations

import time

from hypothesis import given, settings

from graphoffload.hardware.measurement import resolve_hardware
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.planner.hint import saved_within
from graphoffload.planner.problem import Candidate, Program, Recompute, Step
from graphoffload.planner.simulator import simulate
from graphoffload.planner.solver import WithinSlowdown, solve
from tests.plan.instances import hardwares, programs

H200 = resolve_hardware("h200-sxm")
PATIENT_S = 60.0


def layers(count: int) -> Program:
    """A norm that is made again in no time and a product whose copies overlap with compute, a layer each."""
    forward = tuple(Step(f"f{i}", time_s=2e-3) for i in range(2 * count))
    backward = tuple(Step(f"b{i}", time_s=4e-3) for i in range(2 * count))
    last = 2 * count - 1
    saved = tuple(
        Candidate(f"x{i}", 64 << 20, i, i, (last - i,), recompute=Recompute(1e-6) if i % 2 else None) for i in range(2 * count)
    )
    return Program(forward, backward, candidates=saved, static_bytes=1 << 30)


def test_says_what_a_plan_for_that_slowdown_saves() -> None:
    program = layers(8)
    saved = saved_within(program, H200, 0.01, patience_s=PATIENT_S)
    keep = simulate(program, program.keep_actions(), H200).peak_bytes
    planned = solve(program, H200, WithinSlowdown(0.01)).timeline.peak_bytes
    assert saved is not None
    assert 0.7 * (keep - planned) <= saved <= keep - planned
    assert saved > 8 * (64 << 20) * 0.9, "the norms alone are worth that"


def test_where_nothing_can_move_nothing_is_saved() -> None:
    program = Program((Step("f", 1.0),), (Step("b", 1.0),), candidates=(Candidate("x", 1, 0, 0, (0,), can_offload=False),))
    assert saved_within(program, H200, 0.01, patience_s=PATIENT_S) == 0


def test_an_impatient_one_says_nothing_and_is_quick() -> None:
    program = layers(200)
    simulate(program, program.keep_actions(), H200)
    start = time.perf_counter()
    assert saved_within(program, H200, 0.01, patience_s=0.0) is None
    assert time.perf_counter() - start < 0.5


def test_the_hosts_memory_bounds_it() -> None:
    program = layers(8)
    bounded = saved_within(program, H200, 0.01, host_budget_bytes=0, patience_s=PATIENT_S)
    free = saved_within(program, H200, 0.01, patience_s=PATIENT_S)
    assert bounded is not None
    assert free is not None
    assert bounded < free


@given(programs(), hardwares())
@settings(max_examples=40)
def test_never_promises_what_the_planner_cannot_keep(program: Program, hardware: HardwareProfile) -> None:
    saved = saved_within(program, hardware, 0.05, patience_s=PATIENT_S)
    keep = simulate(program, program.keep_actions(), hardware).peak_bytes
    assert saved is not None
    assert 0 <= saved <= keep - solve(program, hardware, WithinSlowdown(0.05)).timeline.peak_bytes
