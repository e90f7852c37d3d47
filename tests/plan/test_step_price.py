"""A step whose host is late for each copy: fewer copies, at a price that the timeline has."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from graphoffload.planner.step.facts import StepProblem
from graphoffload.planner.step.flight import follow_flight, offloads_of
from graphoffload.planner.step.parts import without_slices
from graphoffload.planner.step.solve import StepSolution, plan_step
from graphoffload.planner.step.stored import from_json

RECORDED = Path(__file__).parent / "recorded_steps" / "convnext-blocks.json.gz"


def problem(price_s: float) -> StepProblem:
    """A ConvNeXt of 36 calls, as it was recorded on an H200."""
    found = from_json(gzip.decompress(RECORDED.read_bytes()).decode())
    hardware = replace(found.hardware, host_s_per_copy=price_s)
    return replace(found, facts=without_slices(found.facts), hardware=hardware)


def copies(solution: StepSolution) -> int:
    return sum(action == "offload" for call in solution.actions for action in call)


@pytest.fixture(scope="module")
def free() -> StepSolution:
    return plan_step(problem(0.0))


@pytest.mark.parametrize(("price_s", "most"), [(100e-6, 0.6), (340e-6, 0.2)])
def test_a_price_buys_fewer_copies_within_the_same_budget(free: StepSolution, price_s: float, most: float) -> None:
    asked = problem(price_s)
    found = plan_step(asked)
    assert asked.goal.device_budget_bytes is not None
    assert found.timeline.peak_bytes <= asked.goal.device_budget_bytes - asked.reserve_bytes
    assert copies(found) < most * copies(free)
    assert found.lower_bound_s is not None
    assert found.timeline.time_s <= 1.02 * found.lower_bound_s
    assert found.timeline.stall_s >= price_s * copies(found) * 0.999
    offloads = offloads_of(asked.facts, free)
    same = follow_flight(asked, free.chosen, free.calls, free.reload_steps, offloads, free.solver)
    assert same.timeline.time_s == pytest.approx(free.timeline.time_s + price_s * copies(free), rel=0.01)
    assert found.timeline.time_s < same.timeline.time_s


def test_keep_all_has_no_price(free: StepSolution) -> None:
    assert plan_step(problem(340e-6)).keep_timeline == free.keep_timeline
