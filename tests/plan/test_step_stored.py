"""The problem of a step as JSON: it comes back equal, and is planned alike; what is no such file is refused."""

from __future__ import annotations

import dataclasses
import json

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
    content = json.loads(to_json(StepProblem(llama(2), H200, MeetBudget(26 * GB))))
    del content["facts"]["host_s"]
    assert from_json(json.dumps(content)).facts.host_s == 0.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no problem of a step"),
        ("[]", "no problem of a step"),
        ('{"format": 99}', "format 99"),
        ('{"format": 1}', "goal"),
        ('{"format": 1, "goal": {"kind": "Fast"}, "facts": {}, "hardware": {}}', "no problem of a step"),
    ],
)
def test_what_is_no_problem(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        from_json(text)
