"""The referee against hand-computed timelines, and what must hold for every instance."""

from __future__ import annotations

import pytest

from graphoffload.errors import PlanError
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.planner.problem import Buffer, Candidate, Program, Recompute, Step
from graphoffload.planner.simulator import Scheduled, Stall, simulate


def link(bytes_per_s: float = 1.0, *, slowdown: float = 0.0, host_s_per_copy: float = 0.0) -> HardwareProfile:
    """A link of so many bytes a second without latency, so that times can be read off."""
    return HardwareProfile(
        name="toy",
        source="datasheet",
        memory_bytes=1000,
        d2h_bytes_per_s=bytes_per_s,
        h2d_bytes_per_s=bytes_per_s,
        copy_latency_s=0.0,
        compute_slowdown_while_copying=slowdown,
        host_s_per_copy=host_s_per_copy,
    )


def steps(prefix: str, count: int, time_s: float = 1.0) -> tuple[Step, ...]:
    return tuple(Step(f"{prefix}{i}", time_s) for i in range(count))


def chain(layers: int = 4, nbytes: int = 1) -> Program:
    """Each forward step makes one tensor that its mirror in backward needs."""
    last = layers - 1
    candidates = tuple(
        Candidate(f"x{i}", nbytes, i, min(i + 1, last), (last - i,), recompute=Recompute(0.5)) for i in range(layers)
    )
    return Program(steps("f", layers), steps("b", layers), candidates=candidates, static_bytes=10)


def test_keep_all_is_the_sum_of_the_steps_and_frees_after_the_last_use() -> None:
    timeline = simulate(chain(), ["keep"] * 4, link())
    assert timeline.time_s == timeline.keep_time_s == 8.0
    assert timeline.memory == (11, 12, 13, 14, 14, 13, 12, 11)
    assert (timeline.peak_bytes, timeline.peak_step, timeline.stalls, timeline.schedule) == (14, 3, (), ())


def test_offload_hides_and_frees_between_release_and_reload() -> None:
    """x0: copied during f1, released after f1; its reload of 1 s ends as b3 starts, so it is issued before b2."""
    timeline = simulate(chain(), ["offload", "keep", "keep", "keep"], link())
    assert timeline.schedule == (Scheduled(0, offload_at=0, release_at=1, reload_at=2, wait_at=3),)
    assert timeline.time_s == 8.0
    assert timeline.memory == (11, 12, 12, 13, 13, 12, 12, 11)
    assert timeline.host_bytes == 1
    assert [(i.start_s, i.end_s, i.candidate) for i in timeline.lanes.d2h] == [(1.0, 2.0, 0)]
    assert [(i.start_s, i.end_s, i.candidate) for i in timeline.lanes.h2d] == [(6.0, 7.0, 0)]


def test_a_host_that_is_late_stops_compute_at_both_ends_of_a_copy() -> None:
    """0.5 s before x0's copy starts, at 1.5 s, and 0.5 s after it is back."""
    timeline = simulate(chain(), ["offload", "keep", "keep", "keep"], link(host_s_per_copy=1.0))
    assert timeline.time_s == 9.0
    assert timeline.stalls == (Stall("x0", "f0", 0.5), Stall("x0", "b3", 0.5))
    assert [(i.start_s, i.end_s) for i in timeline.lanes.d2h] == [(1.5, 2.5)]
    assert timeline.ends_s == (1.0, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 9.0)
    assert simulate(chain(), ["keep"] * 4, link(host_s_per_copy=1.0)).time_s == 8.0


def test_copies_that_do_not_fit_the_forward_are_waited_for_at_its_end() -> None:
    """Two copies of 3 s after 1 s and 2 s of a 4 s forward: done at 4 s and 7 s; the second is a stall of 3 s."""
    timeline = simulate(chain(nbytes=3), ["offload", "offload", "keep", "keep"], link())
    assert timeline.stalls[0] == Stall("x1", "f3", 3.0)
    assert [s.release_at for s in timeline.schedule if s.candidate == 0] == [3]
    assert [s.release_at for s in timeline.schedule if s.candidate == 1] == [None]
    assert timeline.lanes.forward_end_s == 7.0


def test_backward_that_begins_with_many_reloads_names_who_it_waits_for() -> None:
    """x3 is used by b0: nothing hides its reload of 2 s; x2's follows it and is 1 s late for b1."""
    timeline = simulate(chain(nbytes=2), ["keep", "keep", "offload", "offload"], link())
    waits = [stall for stall in timeline.stalls if stall.where.startswith("b")]
    assert waits == [Stall("x3", "b0", 2.0), Stall("x2", "b1", 1.0)]


def test_a_recompute_chain_pulls_the_reload_of_what_it_reads_to_its_own_first_use() -> None:
    """x1 is made again from x0 before b0: x0, needed on its own by b3 only, must be back for b0."""
    base = chain()
    x1 = Candidate("x1", 1, 1, 1, (0,), recompute=Recompute(0.25, reads=(0,), temp_bytes=5))
    program = Program(base.forward, base.backward, candidates=(base.candidates[0], x1), static_bytes=10)
    timeline = simulate(program, ["offload", "recompute"], link())
    assert timeline.schedule == (Scheduled(0, 0, 1, 0, 0),)
    assert timeline.stalls == (Stall("x0", "b0", 1.0),)
    assert timeline.time_s == 8.0 + 0.25 + 1.0
    assert timeline.memory == (11, 12, 10, 10, 17, 11, 11, 11)
    assert timeline.recompute_s == 0.25


def test_recomputed_inputs_of_a_chain_come_first_and_are_paid_once() -> None:
    candidates = (
        Candidate("a", 1, 0, 0, (3,), recompute=Recompute(1.0)),
        Candidate("b", 1, 1, 1, (), recompute=Recompute(2.0, reads=(0,))),
        Candidate("c", 1, 2, 2, (1,), recompute=Recompute(4.0, reads=(1,))),
        Candidate("d", 1, 3, 3, (2,), recompute=Recompute(8.0, reads=(1,))),
    )
    program = Program(steps("f", 4), steps("b", 4), candidates=candidates)
    assert simulate(program, ["recompute"] * 4, link()).time_s == 8.0 + 15.0
    unread = simulate(program, ["keep", "recompute", "keep", "keep"], link())
    assert (unread.time_s, unread.recompute_s) == (8.0, 0.0), "nothing reads b, so it is not made"
    assert simulate(program, ["keep", "keep", "recompute", "keep"], link()).memory[4] == 3, "b is held for c"


def test_a_window_makes_compute_wait_for_the_oldest_copy() -> None:
    program = chain(nbytes=2)
    free = simulate(program, ["offload"] * 3 + ["keep"], link())
    assert free.inflight_peak_bytes == 4
    window = simulate(program, ["offload"] * 3 + ["keep"], link(), max_inflight_bytes=2)
    assert window.inflight_peak_bytes == 2
    assert window.stalls[:2] == (Stall("x0", "f1", 1.0), Stall("x1", "f2", 1.0))
    assert max(window.memory[:4]) < max(free.memory[:4])
    alone = simulate(program, ["offload", "keep", "keep", "keep"], link(), max_inflight_bytes=1)
    assert alone.stalls == (), "one copy larger than the window goes alone"


def test_compute_slows_down_while_a_copy_runs_and_only_then() -> None:
    """Copy of 1 s each way under compute at half speed: 0.5 s of work is done in it, so each costs 0.5 s."""
    timeline = simulate(chain(), ["offload", "keep", "keep", "keep"], link(slowdown=1.0))
    assert timeline.time_s == pytest.approx(9.0)
    assert timeline.stalls == ()


def test_reloads_can_be_placed_earlier_for_memory() -> None:
    actions = ["offload", "keep", "keep", "keep"]
    assert simulate(chain(), actions, link()).schedule[0].reload_at == 2
    assert simulate(chain(), actions, link(), reload_by={0: 1}).schedule[0].reload_at == 1


def test_buffers_and_workspace_are_part_of_the_curve() -> None:
    forward = (Step("f0", 1.0, workspace_bytes=100), *steps("g", 1))
    program = Program(forward, steps("b", 1), buffers=(Buffer("logits", 7, 1, 2),), static_bytes=1, reserve_bytes=1000)
    assert simulate(program, [], link()).memory == (101, 8, 8), "the reserve is no allocation"


def test_refuses_what_a_candidate_cannot_do() -> None:
    program = Program(steps("f", 1), steps("b", 1), candidates=(Candidate("x", 1, 0, 0, (0,), can_offload=False),))
    with pytest.raises(PlanError, match="'x' cannot offload; it allows keep"):
        simulate(program, ["offload"], link())
    with pytest.raises(PlanError, match="'x' cannot recompute"):
        simulate(program, ["recompute"], link())
    with pytest.raises(PlanError, match="0 actions for 1 candidates"):
        simulate(program, [], link())


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (Candidate("x", 1, 1, 0, (0,)), "produced at 1"),
        (Candidate("x", 1, 0, 0, (1, 0)), "unsorted"),
        (Candidate("x", 1, 0, 0, (5,)), "outside 2"),
        (Candidate("x", 1, 0, 0, (0,), recompute=Recompute(1.0, (0,))), "not produced before"),
        (Candidate("x", 1, 0, 0, (0,), fixed="recompute"), "fixed to 'recompute'"),
    ],
)
def test_an_instance_that_cannot_be_meant_is_refused(bad: Candidate, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Program(steps("f", 2), steps("b", 2), candidates=(bad,))


def test_a_late_channel_takes_memory_one_reload_after_the_other() -> None:
    """Copies of 3 s for steps of 1 s: each reload is issued when the one before it is done, not all at backward's start."""
    timeline = simulate(chain(layers=4, nbytes=3), ["offload"] * 4, link())
    assert [(s.candidate, s.reload_at) for s in timeline.schedule] == [(3, 0), (2, 0), (1, 1), (0, 2)]
    assert timeline.memory[4:] == (16, 16, 16, 13)
    assert [(i.start_s - timeline.lanes.forward_end_s) for i in timeline.lanes.h2d] == [0.0, 3.0, 6.0, 9.0]


def test_a_kept_candidate_ends_where_a_kernel_writes_over_it():
    """A reloaded one does not, nor one that a chain reads."""
    x = Candidate("x", 4, 0, 0, (1,), overwritten_at=1)
    y = Candidate("y", 1, 1, 1, (1,), recompute=Recompute(0.0, reads=(0,)))
    program = Program(steps("f", 2), steps("b", 2), candidates=(x, y))

    def last(*actions):
        return simulate(program, list(actions), link()).memory[3]

    assert (last("keep", "keep"), last("offload", "keep"), last("keep", "recompute")) == (1, 5, 5)
    with pytest.raises(PlanError, match="overwritten at 0"):
        Program(steps("f", 2), steps("b", 2), candidates=(Candidate("x", 4, 0, 0, (1,), overwritten_at=0),))
