"""Reloads ahead of time: as far as memory allows, in order, and at no predicted cost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphoffload.facts.plan import Action
from graphoffload.hardware.profile import PROFILES, HardwareProfile
from graphoffload.planner.prefetch import Again, prefetch_reloads, release_later, with_slack
from graphoffload.planner.problem import Candidate, Program, Step
from graphoffload.planner.simulator import Timeline, simulate

LINK = HardwareProfile(
    name="a byte a second", source="datasheet", memory_bytes=10**6, d2h_bytes_per_s=1.0, h2d_bytes_per_s=1.0,
    copy_latency_s=0.0, compute_slowdown_while_copying=0.0,
)  # fmt: skip
LAYERS = 50


def chain(layers: int = LAYERS, nbytes: int = 1) -> Program:
    """Layers of ten seconds, forward and backward, each with a tensor that takes a second to copy."""
    return Program(
        tuple(Step(f"f{i}", 10.0) for i in range(layers)),
        tuple(Step(f"b{i}", 1.0) for i in range(10 * layers)),
        candidates=tuple(Candidate(f"x{i}", nbytes, i, i, (10 * (layers - 1 - i) + 9,)) for i in range(layers)),
    )


def offload_most(program: Program) -> list[Action]:
    return ["offload" if number < len(program.candidates) - 1 else "keep" for number in range(len(program.candidates))]


def again(program: Program, actions: Sequence[Action], hardware: HardwareProfile = LINK) -> Again:
    return lambda reload_by: simulate(program, actions, hardware, reload_by=reload_by)


def both(limit_bytes: int | None = None) -> tuple[Timeline, Timeline]:
    program = chain()
    actions = offload_most(program)
    late = simulate(program, actions, LINK)
    limit = late.peak_bytes if limit_bytes is None else limit_bytes
    return late, prefetch_reloads(program, late, again(program, actions), limit_bytes=limit)


def reloads(timeline: Timeline) -> dict[int, int]:
    return {item.candidate: item.reload_at for item in timeline.schedule}


def test_two_percent_ahead_where_memory_allows() -> None:
    """Keep-all takes 1000 s, so a reload comes up to 20 s earlier."""
    late, ahead = both(limit_bytes=10**6)
    assert ahead.time_s == late.time_s
    moved = [reloads(late)[k] - reloads(ahead)[k] for k in range(LAYERS - 4)]
    assert set(moved) == {20}


def test_not_a_byte_above_the_limit() -> None:
    """Two of the largest are left free, for what a compiler displaces; then only what a finished layer frees can be used."""
    moved = {}
    for slack in range(4):
        late, ahead = both(limit_bytes=2 + slack)
        assert (late.peak_bytes, ahead.peak_bytes) == (2, max(2, slack))
        moved[slack] = {reloads(late)[k] - reloads(ahead)[k] for k in reloads(late)}
    assert moved[0] == {0}
    assert max(moved[1]) < max(moved[2]) == 18
    assert max(moved[3]) == 20


@pytest.mark.parametrize("late", [True, False])
def test_both(late: bool) -> None:
    program = chain()
    actions = offload_most(program)
    just_in_time = simulate(program, actions, LINK)
    found = with_slack(program, just_in_time, again(program, actions), limit_bytes=10**6, late=late)
    ahead = prefetch_reloads(program, just_in_time, again(program, actions), limit_bytes=10**6)
    assert found == (release_later(program, ahead, limit_bytes=10**6) if late else ahead)
    assert (releases(found) != releases(just_in_time)) == late


def test_nothing_to_reload_is_left_alone() -> None:
    program = chain(3)
    late = simulate(program, ["keep"] * 3, LINK)
    assert prefetch_reloads(program, late, again(program, ["keep"] * 3), limit_bytes=0) is late


def test_what_would_cost_time_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated before it is taken."""
    monkeypatch.setattr("graphoffload.planner.prefetch._FREE", 0.5)
    late, ahead = both(limit_bytes=10**6)
    assert ahead is late


def releases(timeline: Timeline) -> dict[int, int | None]:
    return {item.candidate: item.release_at for item in timeline.schedule}


def slow_forward() -> tuple[Program, Timeline]:
    """Steps of a second, a tensor each ten of them, copied in one."""
    steps = tuple(Step(f"f{i}", 1.0) for i in range(500))
    candidates = tuple(Candidate(f"x{i}", 1, 10 * i, 10 * i, (49 - i,)) for i in range(50))
    program = Program(steps, tuple(Step(f"b{i}", 10.0) for i in range(50)), candidates=candidates)
    return program, simulate(program, offload_most(program), LINK)


def test_releases_come_two_percent_later_where_memory_allows() -> None:
    """Keep-all takes 1000 s, so compute waits for a copy up to 20 s behind the end that was predicted for it."""
    program, early = slow_forward()
    later = release_later(program, early, limit_bytes=10**6)
    assert later.time_s == early.time_s
    waits = {(b or 0) - (a or 0) for a, b in zip(releases(early).values(), releases(later).values(), strict=True)}
    assert max(waits) == 20
    assert all(b is None or b < 500 for b in releases(later).values())
    assert sum(later.memory) == sum(early.memory) + sum(
        (b or 0) - (a or 0) for a, b in zip(releases(early).values(), releases(later).values(), strict=True)
    )


@pytest.mark.parametrize("slack", range(5))
def test_releases_take_no_byte_above_the_limit(slack: int) -> None:
    """With the room that is left for what a compiler displaces."""
    program, early = slow_forward()
    later = release_later(program, early, limit_bytes=early.peak_bytes + slack)
    assert later.peak_bytes == max(later.memory) <= max(early.peak_bytes, early.peak_bytes + slack - 2)
    assert later.memory[later.peak_step] == later.peak_bytes
    moved = any(b != a for a, b in zip(releases(early).values(), releases(later).values(), strict=True))
    assert moved == (slack > 0)


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=12), st.integers(0, 40))
def test_limits_and_order_hold_for_any_sizes(sizes: list[tuple[int, bool]], slack: int) -> None:
    layers = len(sizes)
    plain = chain(layers)
    program = Program(
        plain.forward,
        plain.backward,
        candidates=tuple(Candidate(c.name, size, c.produced_at, c.last_forward_use, c.backward_uses)
              for c, (size, _) in zip(plain.candidates, sizes, strict=True)),
    )  # fmt: skip
    actions: list[Action] = ["offload" if goes else "keep" for _, goes in sizes]
    for hardware in (LINK, PROFILES["h200-sxm"]):
        late = simulate(program, actions, hardware)
        ahead = prefetch_reloads(program, late, again(program, actions, hardware), limit_bytes=late.peak_bytes + slack)
        assert ahead.peak_bytes <= late.peak_bytes + slack
        assert ahead.time_s <= late.time_s * 1.001
        assert all(reloads(ahead)[k] <= reloads(late)[k] for k in reloads(late))
        order = sorted(ahead.schedule, key=lambda item: item.wait_at)
        assert [item.reload_at for item in order] == sorted(item.reload_at for item in order)
