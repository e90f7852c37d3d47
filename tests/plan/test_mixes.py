"""The count of a mix is found by few bounds."""

from __future__ import annotations

import math

import pytest

from graphoffload.planner.step.facts import StepFacts
from graphoffload.planner.step.mixes import Mix, MixSearch
from tests.plan.steps import llama

CALLS = 80


@pytest.fixture(scope="module")
def facts() -> StepFacts:
    return llama(CALLS)


@pytest.mark.parametrize("best", [0, 1, 7, 33, 34, 55, 79, 80])
@pytest.mark.parametrize("feasible_from", [0, 30])
def test_the_count_with_the_least_value_is_found_by_twelve_values(facts: StepFacts, best: int, feasible_from: int) -> None:
    """Values fall to the best count and rise after it; below `feasible_from` calls that recompute more no plan exists."""
    asked: list[int] = []

    def value(chosen: tuple[int, ...]) -> float:
        count = chosen.count(1)
        asked.append(count)
        return abs(count - best) + 1.0 if count >= feasible_from else math.inf

    search = MixSearch(facts, value, most=1000)
    found = search._count((Mix(0, 1, 0),), 0, Mix(0, 1, CALLS))
    assert found.count == max(best, feasible_from)
    assert len(asked) == len(set(asked)) <= 12
