"""The soak of planned steps with streams and real memory: 20 changes of the goal, five shapes, evaluations and exceptions.

Losses are equal to the bit to those of synchronous copies, and device memory, host memory and what the runtime keeps books of
are flat after the first quarter. SOAK_STEPS shortens or lengthens it.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from gpu.races import RANDOM, Disturbance, disturbances
from lazy import forget_steps
from soaking import EVENTS, PLENTY, Course, Log, Model, Run, assert_flat, build, run

import graphoffload
from graphoffload.compiler import step_again
from graphoffload.runtime import twin_copies
from graphoffload.runtime.offloaded_tensors import OffloadedTensor
from graphoffload.runtime.pinned import pool, window

STEPS = int(os.environ.get("SOAK_STEPS", "2000"))
ROWS = (1024, 1280, 1536, 1792, 2048)
ROUNDS = 4
EVERY = max(1, min(10, STEPS // ROUNDS // len(EVENTS)))  # in the first round each event happens: two at once hold the most
COURSE = Course(
    STEPS, ROWS, (0.02, 0.3, 0.7), ROUNDS, every=EVERY, looks=max(1, STEPS // 80), blocks=6, width=512, device="cuda"
)
SHORT = Course(24, ROWS[-1:], shares=(0.05,), rounds=1, every=10, blocks=6, width=512, device="cuda")
SLOW_COPIES = Disturbance("slow copies", before_ms=5.0)
RESIDENT_BYTES = 128 * 2**20  # of the process: what torch and Python keep


@pytest.fixture(autouse=True)
def nothing_before() -> Iterator[None]:
    """Steps and goals of one test are not those of the next."""
    torch._dynamo.reset()
    forget_steps()
    gc.collect()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield
    forget_steps()


def compiled(course: Course) -> Model:
    options = {"device_budget": PLENTY, "reserve": 0, "inner": "aot_eager", "hardware": "h200-sxm", "min_tensor_bytes": 1}
    return build(course, backend="graphoffload", options=options)


def timed(model: Model, course: Course, what: str, *, books: bool) -> Log:
    graphoffload.reset_stats()
    start = time.perf_counter()
    log = run(model, course, books=books)
    torch.cuda.synchronize()
    stats = {name: count for name, count in graphoffload.stats().items() if count}
    print(f"{what}: {course.steps} steps in {time.perf_counter() - start:.0f} s; {dict(log.happened)}; {stats}")
    print(f"budgets refused at the start of a step: {log.refused}; beside another: {log.refused_beside}")
    return log


@pytest.mark.slow
@pytest.mark.usefixtures("deterministic")
def test_a_long_run() -> None:
    model = compiled(COURSE)
    log = timed(model, COURSE, "copies beside compute", books=True)
    stats = graphoffload.stats()
    assert log.happened["goal"] == 20
    assert min(log.happened[event] for event in EVENTS) >= COURSE.steps // COURSE.every // len(EVENTS)
    assert stats["deferred"] > COURSE.steps
    assert stats["prefetch_hits"] > COURSE.steps
    with twin_copies(), mock.patch.object(step_again, "tolerated_bytes", return_value=PLENTY):  # clones exceed any budget
        twin = timed(model, COURSE, "synchronous clones", books=False)
    assert twin.losses == log.losses
    assert_flat(log, COURSE, slack_bytes=RESIDENT_BYTES)
    assert log.refused == [], "budgets between the least and keep-all were not met"


@pytest.mark.usefixtures("deterministic")
def test_a_copy_that_is_not_waited_for_shows() -> None:
    """Copies are slow and new memory starts as NaN: a source that goes before its copy is seen in the losses."""
    model = compiled(SHORT)
    expected = run(model, SHORT, books=False).losses
    with twin_copies(), mock.patch.object(step_again, "tolerated_bytes", return_value=PLENTY):
        assert run(model, SHORT, books=False).losses == expected
    original = OffloadedTensor.settle

    def careless(entry: OffloadedTensor, *, waited: bool = False) -> torch.Tensor | None:
        return original(entry, waited=True)

    with mock.patch.object(OffloadedTensor, "settle", careless), disturbances(SLOW_COPIES):
        found = run(model, SHORT, books=False).losses
        torch.cuda.synchronize()
    assert found != expected


@pytest.mark.usefixtures("deterministic")
def test_host_memory_that_goes_back_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Page-locking is undone beside copies that are late: losses are those of synchronous copies, and the memory is the
    system's again."""
    for module in (window, pool):
        monkeypatch.setattr(module, "TURNS", 2)
    monkeypatch.setattr(window, "TURNS_IF_SHORT", 2)
    monkeypatch.setattr(window, "_PATIENCE", 0)
    model = compiled(SHORT)
    before = graphoffload.host_memory().returned_bytes
    with disturbances(RANDOM, seed=0):
        log = run(model, SHORT, books=False)
        torch.cuda.synchronize()
    assert graphoffload.host_memory().returned_bytes > before
    with twin_copies(), mock.patch.object(step_again, "tolerated_bytes", return_value=PLENTY):
        assert run(model, SHORT, books=False).losses == log.losses


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_page_locked_memory_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a budget that needs none of it, and after a reset: the process is smaller by that much."""
    monkeypatch.setattr(window, "_PATIENCE", 0)
    this = Run(compiled(SHORT), SHORT, planned=True)
    this.measure()
    for reset in (False, True):
        this.set_goal(0.05)
        for seed in range(4):
            this.step(ROWS[-1], seed)
        held, before = graphoffload.host_memory().pinned_bytes, resident_bytes()
        assert held > 2**25
        if reset:
            torch._dynamo.reset()
        else:
            graphoffload.set_budget(PLENTY)
            for seed in range(2 * window.TURNS + 1):
                this.step(ROWS[-1], seed)
        assert graphoffload.host_memory().pinned_bytes == 0
        assert before - resident_bytes() > 0.7 * held
