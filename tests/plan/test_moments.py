"""When each step ends: by hand, and against the timeline of any plan."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphoffload.hardware.profile import HardwareProfile
from graphoffload.planner.moments import wall_times_s
from graphoffload.planner.problem import Program
from graphoffload.planner.simulator import simulate
from tests.plan.instances import hardwares, programs


def test_compute_alone_is_wall_time() -> None:
    assert wall_times_s([1.0, 1.0, 3.0], [(0.0, 3.0)], [], 1.0) == (1.0, 1.0, 3.0)


def test_a_step_that_ends_before_a_stall_ends_where_the_stall_starts() -> None:
    assert wall_times_s([1.0, 2.0], [(0.0, 1.0), (4.0, 5.0)], [(0.5, 4.0)], 1.0) == (1.0, 5.0)


def test_beside_a_copy_compute_takes_longer() -> None:
    """Copies from 1 s to 3 s halve the speed: 1 s of work is done in them, by 3 s there are 2 s."""
    assert wall_times_s([1.0, 1.5, 2.0, 3.0], [(0.0, 4.0)], [(1.0, 2.0), (2.0, 3.0)], 2.0) == (1.0, 2.0, 3.0, 4.0)


def test_nothing_takes_no_time() -> None:
    assert wall_times_s([0.0, 0.0], [], [], 1.0) == (0.0, 0.0)


@given(programs(), hardwares(), st.data())
@settings(max_examples=100)
def test_steps_end_in_order_with_their_timeline(program: Program, hardware: HardwareProfile, data: st.DataObject) -> None:
    actions = [data.draw(st.sampled_from(candidate.actions)) for candidate in program.candidates]
    timeline = simulate(program, actions, hardware, max_inflight_bytes=data.draw(st.sampled_from([None, 0, 10])))
    ends_s = timeline.ends_s
    assert len(ends_s) == len(timeline.memory)
    assert all(one <= two + 1e-9 for one, two in pairwise(ends_s))
    assert ends_s[-1] == pytest.approx(timeline.lanes.compute[-1].end_s if timeline.lanes.compute else 0.0, abs=1e-9)
    steps = (*program.forward, *program.backward)
    for step, (start_s, end_s) in zip(steps, pairwise((0.0, *ends_s)), strict=True):
        assert end_s - start_s >= step.time_s - 1e-7, "a step takes at least its own time"
    forward = ends_s[: len(program.forward)]
    assert forward[-1] <= timeline.lanes.forward_end_s + 1e-9
