"""Steps with little or no host memory: what has no room there stays on the device until a plan says what is computed again."""

from __future__ import annotations

import contextlib
import re
import warnings
from typing import Any

import pytest
import torch
from lazy import LazyStreams, lazy_steps
from torch import Tensor

import graphoffload
from graphoffload.errors import BudgetError, NotOffloadedWarning, StepNotPlannedWarning
from graphoffload.runtime.pinned.pool import POOL
from tests.runtime.stepping import (
    COUNT,
    OPTIONS,
    Whole,
    Wide,
    assert_equal,
    batch,
    budget_at,
    compiled,
    fresh,
    kept,
    lazy,
    plan_now,
    step,
)

__all__ = ["lazy"]


@pytest.mark.parametrize("host_budget", [0, 4096])
def test_the_first_runs_need_no_host_memory(
    lazy: LazyStreams, monkeypatch: pytest.MonkeyPatch, host_budget: int
) -> None:
    model = fresh()
    (expected,) = kept(model, [batch()])
    monkeypatch.setattr(POOL, "budget_bytes", host_budget)  # it is the largest that anybody gave in this process
    compiled(model, budget_at(0.0), host_budget=host_budget)
    for _ in range(2):
        assert_equal(step(model, batch()), expected)
    with pytest.raises(BudgetError) as refused:  # nothing but recomputation is left, which has a least peak of its own
        step(model, batch())
    assert refused.value.least_bytes is not None
    graphoffload.set_budget(refused.value.least_bytes)
    assert_equal(step(model, batch()), expected)
    assert plan_now() is not None
    assert_equal(step(model, batch()), expected)
    assert POOL.budget_bytes == host_budget


def test_without_host_memory_nothing_is_offered_to_it_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first runs' variant has no ops: each of them would find no room."""
    model = fresh()
    (expected,) = kept(model, [batch()])
    monkeypatch.setattr(POOL, "budget_bytes", 0)
    compiled(model, budget_at(0.5), host_budget=0)
    for _ in range(4):
        assert_equal(step(model, batch()), expected)
    plan = plan_now()
    assert plan is not None
    assert plan.solution.timeline.host_bytes == 0
    assert_equal(step(model, batch()), expected)


UP = {"*.up": "offload"}


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize(
    ("given", "host_budget"),
    [({"policy": "offload"}, "24KiB"), ({"policy": UP}, "24KiB"), ({"max_slowdown": 10.0}, "16KiB"), ({"policy": UP}, "0B")],
)
def test_what_finds_no_room_on_the_host_stays_on_the_device(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], host_budget: str, *, on_gpu: bool
) -> None:
    """Each graph is compiled for all of host_budget, and they share it."""
    blocks = [Wide(64) for _ in range(COUNT)]
    model = fresh(*blocks)
    (expected,) = kept(model, [batch()])
    monkeypatch.setattr(POOL, "budget_bytes", None)
    monkeypatch.setattr(POOL, "_peak_bytes", 0)  # since the process began
    graphoffload.reset_stats()
    with lazy_steps() if on_gpu else contextlib.nullcontext(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(model, "auto", host_budget=host_budget, **given)
        for _ in range(5):
            assert_equal(step(model, batch()), expected)
    stats, most = graphoffload.stats(), graphoffload.OffloadConfig(host_budget=host_budget).host_budget
    assert isinstance(most, int)
    assert stats["host_peak_bytes"] <= most
    if given.get("policy") is not UP:  # which leaves the step unplanned, with room on the device for everything
        assert stats["d2h_bytes"] > 0
    said = [str(item.message) for item in caught if item.category in (NotOffloadedWarning, StepNotPlannedWarning)]
    if "policy" in given:
        assert said, "what was asked is not done"
    for text in said:
        assert re.search(r"host_budget[= ]\S+ (KiB|B)", text)


@pytest.mark.parametrize("share", [0.75, 0.4, 0.0])
def test_a_planned_step_runs_on_where_others_use_up_the_host(
    lazy: LazyStreams, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Its schedule counts copies, and some of them are not made: what waits for them waits for later ones."""
    model = fresh()
    (expected,) = kept(model, [batch()])
    monkeypatch.setattr(POOL, "budget_bytes", None)
    compiled(model, budget_at(0.4))
    for _ in range(5):
        assert_equal(step(model, batch()), expected)
    plan = plan_now()
    assert plan is not None
    needed = plan.solution.timeline.host_bytes
    assert needed > 0
    monkeypatch.setattr(POOL, "budget_bytes", int(share * needed))
    graphoffload.release_host_memory()  # what is idle would be used again
    graphoffload.reset_stats()
    with pytest.warns(NotOffloadedWarning, match="Until then it stays on the device"):
        assert_equal(step(model, batch()), expected)
    for _ in range(2):
        assert_equal(step(model, batch()), expected)
    stats = graphoffload.stats()
    assert stats["stays"] > 0
    assert (stats["d2h_bytes"] > 0) == (share > 0)


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("given", [{"policy": "offload"}, {"max_slowdown": 10.0}])
def test_a_larger_batch_keeps_what_the_host_has_no_room_for(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], *, on_gpu: bool
) -> None:
    """A plan is for the sizes that it was made for, and the code runs for others as well."""
    monkeypatch.setattr(POOL, "budget_bytes", None)
    monkeypatch.setattr(POOL, "_peak_bytes", 0)  # since the process began
    torch.manual_seed(0)
    model = Whole()
    batches = [torch.randn(rows, 24, 32) for rows in (2, 3, 3, 5)]

    def gradients(x: Tensor) -> list[Tensor]:
        model.zero_grad()
        model(x).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    model.compile(backend="aot_eager")
    expected = [gradients(x) for x in batches]
    torch._dynamo.reset()
    del model._compiled_call_impl
    with lazy_steps() if on_gpu else contextlib.nullcontext():
        model.compile(backend=graphoffload.OffloadBackend(**OPTIONS, host_budget="80KiB", **given))
        for x, wanted in zip(batches[:3], expected, strict=False):
            assert_equal(gradients(x), wanted)
        with pytest.warns(NotOffloadedWarning, match=r"host_budget=80.0 KiB is spent: .* Until then it stays on the device"):
            assert_equal(gradients(batches[3]), expected[3])
    assert graphoffload.stats()["host_peak_bytes"] <= 80 * 2**10


def test_a_slowdown_with_more_to_offload_than_the_host_has_is_refused(
    lazy: LazyStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(POOL, "budget_bytes", None)
    model = fresh(*(Wide(64) for _ in range(COUNT)))
    (expected,) = kept(model, [batch()])
    compiled(model, "auto", host_budget="8KiB", max_slowdown=10.0, policy=UP)
    for _ in range(2):
        assert_equal(step(model, batch()), expected)
    with pytest.raises(BudgetError, match=r"host_budget 8\.00 KiB: what is fixed to offload needs \d+"):
        step(model, batch())
