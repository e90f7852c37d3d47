"""A soak on the CPU: short by default, as long as SOAK_STEPS says. Returned buffers are poisoned, so a late reader gets NaN."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import graphoffload
from graphoffload.bench.soak import Course, Log, build, run
from graphoffload.runtime import twin_copies
from graphoffload.runtime.pinned.pool import POOL

STEPS = int(os.environ.get("SOAK_STEPS", "60"))


@pytest.fixture
def poisoned() -> Iterator[None]:
    POOL.poison = True
    yield
    POOL.poison = False


def check(log: Log, course: Course) -> None:
    """Every failure came, and nothing is taken any more once every bucket was seen in every role."""
    assert log.failed == [("forward", "backward")[i % 2] for i in range(course.steps // course.every)]
    assert len(log.losses) == course.steps * course.accumulate - len(log.failed) + course.steps // course.every
    assert all(loss == loss and abs(loss) < 1e3 for loss in log.losses)
    warm = course.steps // 3
    assert max(log.held) > 0
    assert max(log.held[warm:]) == log.held[warm], "host bytes are held that were not at warm-up"  # less: some went back
    assert set(log.allocations[warm:]) == {log.allocations[warm]}, "host memory was taken after warm-up"
    assert set(log.device[warm:]) == {log.device[warm]}, "device bytes leak"


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_soak(inner: str) -> None:
    """Three buckets, four microbatches a step, an evaluation and a failure every ten steps."""
    course = Course(STEPS)
    module = build(course, "cpu", inner)
    graphoffload.release_host_memory()
    log = run(module, course, "cpu")
    check(log, course)
    assert log.resident[-1] - log.resident[course.steps // 3] < 64 * 2**20
    with twin_copies():
        assert run(module, course, "cpu").losses == log.losses, "not equal to the bit to the synchronous twin"
    assert log.losses[-1] < log.losses[0]


def test_a_soak_notices_a_wrong_byte() -> None:
    """One element of one reload, once: every loss behind it differs."""
    from graphoffload.testing.faults import reloads

    course = Course(4)
    module = build(course, "cpu", "aot_eager")
    log = run(module, course, "cpu")
    seen = 0

    def change(y: torch.Tensor) -> None:
        nonlocal seen
        seen += 1
        if seen == 20 and y.is_floating_point():
            y.view(-1)[0] += 1

    with reloads(change):
        assert run(module, course, "cpu").losses != log.losses


def test_a_dropped_forward_is_not_in_the_way_of_another_shape() -> None:
    """Its buffers go back before the next forward starts, so that nothing is cut from what is left between them."""
    course = Course(1)
    module = build(course, "cpu", "aot_eager")
    batches = [tuple(torch.ones(tokens, course.width) for _ in range(2)) for tokens in course.buckets]
    for _ in range(2):
        for batch in batches:
            module(*batch).backward()
    before = graphoffload.host_memory()
    assert before.allocations > 0
    for first in batches:
        for second in batches:
            module(*first)
            module(*second).backward()
    after = graphoffload.host_memory()
    assert (after.held_bytes, after.allocations) == (before.held_bytes, before.allocations)
