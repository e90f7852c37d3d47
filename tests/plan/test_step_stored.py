"""The problem of a step as JSON: it comes back equal, and is planned alike; what is no such file is refused."""

from __future__ import annotations

import dataclasses
import json

import numpy
import pytest
from hypothesis import given, settings

from graphoffload.errors import ConfigError
from graphoffload.facts.goals import Goal, KeepIfFits, MeetBudget, WithinSlowdown
from graphoffload.hardware.measurement import resolve_hardware
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.planner.step.facts import Beside, StepFacts, StepProblem
from graphoffload.planner.step.solve import plan_step
from graphoffload.planner.step.stored import from_json, to_json
from tests.plan.instances import hardwares
from tests.plan.steps import MB, llama, steps

H200 = resolve_hardware("h200-sxm")
GB = 1000 * MB


@settings(max_examples=60)
@given(steps(), hardwares())
def test_it_comes_back(facts: StepFacts, hardware: HardwareProfile) -> None:
    beside = (Beside(1, tuple(call.forward_outside_bytes for call in facts.calls)),)
    flying = dataclasses.replace(facts, in_flight=2, beside_forward=beside, host_s=0.25)
    for each in (facts, flying):
        problem = StepProblem(each, hardware, MeetBudget(7), reserve_bytes=3, host_budget_bytes=5, or_least=True)
        assert from_json(to_json(problem)) == problem


@pytest.mark.parametrize("goal", [MeetBudget(26 * GB), KeepIfFits(None), KeepIfFits(26 * GB), WithinSlowdown(0.02)])
def test_it_is_planned_alike(goal: Goal) -> None:
    problem = StepProblem(llama(4), H200, goal)
    again = from_json(to_json(problem))
    assert again.goal == goal
    assert plan_step(again) == plan_step(problem)


def test_a_field_that_is_not_there_has_its_default() -> None:
    content = json.loads(to_json(StepProblem(llama(2), H200, MeetBudget(26 * GB), or_least=True, taken_bytes=5)))
    del content["facts"]["host_s"], content["or_least"], content["taken_bytes"]
    found = from_json(json.dumps(content))
    assert (found.facts.host_s, found.or_least, found.taken_bytes) == (0.0, False, 0)


def test_numbers_of_numpy_in_a_profile() -> None:
    hardware = dataclasses.replace(H200, d2h_bytes_per_s=numpy.float32(5e10), memory_bytes=numpy.int64(7))
    found = from_json(to_json(StepProblem(llama(2), hardware, MeetBudget(26 * GB)))).hardware
    assert (found.d2h_bytes_per_s, found.memory_bytes) == (float(numpy.float32(5e10)), 7)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no problem of a step"),
        ("[]", "no problem of a step"),
        ('{"format": 99}', "^the problem of a step has format 99; this version reads 1"),
        ('{"format": 1}', "goal"),
        ('{"format": 1, "goal": {"kind": "Fast"}, "facts": {}, "hardware": {}}', "no problem of a step"),
    ],
)
def test_what_is_no_problem(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        from_json(text)
