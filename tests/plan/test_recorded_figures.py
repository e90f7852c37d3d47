"""Plans of recorded models are no worse than the figures that were recorded with them, and no better than their bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graphoffload.planner.goals import MeetBudget, WithinSlowdown
from graphoffload.planner.simulator import simulate
from graphoffload.planner.solver import solve
from tests.plan import recordings

FIGURES: dict[str, list[dict[str, Any]]] = json.loads(Path(__file__).with_name("figures.json").read_text())
TOLERANCE = 0.1
"""Points: percent of slowdown for a budget, percent of keep-all's peak for a slowdown."""
LONG = ("bert",)
"""As long as a third of the others together, and as they are."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in FIGURES])
def test_a_plan_is_no_worse_than_its_recorded_figure(name: str) -> None:
    """One budget, one slowdown, and one budget over a slow link."""
    program, measured_on = recordings.load(name), recordings.hardware_of(name)
    for figure in FIGURES[name]:
        hardware = measured_on.scaled(link=figure["link"])
        if "budget_bytes" in figure:
            found = solve(program, hardware, MeetBudget(figure["budget_bytes"]))
            assert found.timeline.peak_bytes + program.reserve_bytes <= figure["budget_bytes"]
            assert found.lower_bound_s is not None
            assert found.lower_bound_s <= found.timeline.time_s
            points = 100 * found.timeline.slowdown
        else:
            found = solve(program, hardware, WithinSlowdown(figure["max_slowdown"]))
            assert found.timeline.slowdown <= figure["max_slowdown"] + 1e-6
            points = 100 * found.timeline.peak_bytes / simulate(program, program.keep_actions(), hardware).peak_bytes
        assert points <= figure["points"] + TOLERANCE, figure


def test_every_recording_has_figures() -> None:
    assert sorted(FIGURES) == recordings.names()
