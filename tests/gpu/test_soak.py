"""The soak with streams and real memory: at least 1 GB offloaded a step, five buckets. SOAK_STEPS shortens or lengthens it."""

from __future__ import annotations

import os
import time

import pytest
import torch

import graphoffload
from graphoffload.bench.soak import Course, build, run
from graphoffload.runtime import twin_copies

STEPS = int(os.environ.get("SOAK_STEPS", "2000"))
BUCKETS = (4096, 5120, 6144, 7168, 8192)


@pytest.mark.slow
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("inner", ["inductor"])
def test_soak(inner: str) -> None:
    """Device and host memory flat after warm-up, losses equal to the bit to the synchronous twin's."""
    course = Course(STEPS, BUCKETS, width=1024, layers=2, every=100 if STEPS >= 1000 else 10, dtype=torch.bfloat16)
    module = build(course, "cuda", inner)
    before, start = graphoffload.stats()["d2h_bytes"], time.perf_counter()
    log = run(module, course, "cuda")
    per_step = (graphoffload.stats()["d2h_bytes"] - before) / course.steps
    print(f"{course.steps} steps, {per_step / 1e9:.2f} GB offloaded a step, {time.perf_counter() - start:.0f} s")
    print(
        f"host {log.held[-1] / 1e9:.3f} GB in {log.allocations[-1]} pieces, device {log.device[-1] / 1e9:.3f} GB between steps"
    )
    warm = course.steps // 4
    for what in ("held", "allocations", "device", "reserved"):
        values = getattr(log, what)
        print(what, values[warm], values[course.steps // 2], values[-1])
    assert per_step >= 1e9
    assert len(log.failed) == course.steps // course.every
    assert set(log.held[warm:]) == {log.held[warm]}
    assert set(log.allocations[warm:]) == {log.allocations[warm]}
    assert set(log.device[warm:]) == {log.device[warm]}
    assert max(log.reserved[warm:]) <= 1.02 * log.reserved[warm]
    with twin_copies():
        twin = run(module, course, "cuda")
    assert twin.losses == log.losses
