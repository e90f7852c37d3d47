"""Steps with little or no host memory: what has no room there stays on the device until a plan says what is computed again."""

from __future__ import annotations

import pytest
from lazy import LazyStreams

import graphoffload
from graphoffload.errors import BudgetError
from graphoffload.runtime.pinned.pool import POOL
from tests.runtime.stepping import assert_equal, batch, budget_at, compiled, fresh, kept, lazy, plan_now, step

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
    """Copies are synchronous there, and nothing that has an op may stay: the first runs' variant must have no ops."""
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
