"""Batches of another size: torch makes the size symbolic, and a budget holds as before."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import graphoffload
from graphoffload.runtime import registry
from graphoffload.testing import compiled, keep_all
from graphoffload.testing.layers import ResidualMlps

WIDTH, MIB = 64, 2**20
BATCHES = (512, 512, 500, 512, 300, 700)


def train(backend: Any) -> list[list[torch.Tensor | None]]:
    """Gradients of a step for each batch."""
    torch.manual_seed(0)
    model = compiled(ResidualMlps(4, WIDTH), backend)
    found = []
    for rows in BATCHES:
        model.zero_grad()
        torch.manual_seed(rows)
        model(torch.randn(rows, WIDTH)).square().mean().backward()
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    return found


def planned(**options: Any) -> list[Any]:
    """Plans of the graphs that all batches compile; gradients are keep-all's, and no size is guarded on."""
    registry.forget()
    config = {"inner": "aot_eager", "hardware": "h200-sxm", "min_tensor_bytes": 0, **options}
    ours, plain = map(CompileCounterWithBackend, (cast("Any", graphoffload.OffloadBackend(**config)), keep_all("aot_eager")))
    found = train(ours)
    for got, expected in zip(found, train(plain), strict=True):
        torch.testing.assert_close(got, expected, rtol=0.0, atol=0.0)
    assert ours.frame_count == plain.frame_count == 2
    return list(graphoffload.last_plans())


def test_a_budget_holds_for_batches_of_other_sizes() -> None:
    """The second graph's activations count as they were when it was compiled, the note says so, and the table their sizes."""
    report = graphoffload.explain(ResidualMlps(4, WIDTH), policy="keep", hardware="h200-sxm")(torch.randn(BATCHES[0], WIDTH))
    budget = int(0.8 * report.keep_peak_bytes)
    first, second = planned(device_budget=budget)
    assert all(tensor.nbytes is None for tensor in second.saved.tensors if second.action(tensor.name) != "keep")
    for plan in (first, second):
        assert plan.prediction.predicted_peak_bytes <= budget < plan.prediction.keep_peak_bytes
        assert plan.offloaded_bytes + plan.recomputed_bytes > MIB
    assert second.prediction.keep_peak_bytes == pytest.approx(500 / 512 * first.prediction.keep_peak_bytes, rel=0.1)
    assert any("change their size: planned for the sizes of this call" in note for note in second.notes)
    assert not any("change their size" in note for note in first.notes)
    assert "~" in str(graphoffload.OffloadReport(plans=(second,)))
    assert "symbolic" not in second.summary


def test_a_slowdown_saves_memory_for_batches_of_other_sizes() -> None:
    """As much as it saves for the first batch, to the size of the batch."""
    first, second = planned(max_slowdown=0.5)
    saved = [plan.prediction.keep_peak_bytes - plan.prediction.predicted_peak_bytes for plan in (first, second)]
    assert saved[1] == pytest.approx(500 / 512 * saved[0], rel=0.1)


def test_a_fraction_is_one_of_all_bytes() -> None:
    """Of symbolic sizes too."""
    for plan in planned(policy="offload", offload_fraction=0.5):
        assert 0.3 * plan.saved.eligible_bytes < plan.offloaded_bytes <= 0.5 * plan.saved.eligible_bytes


class Branching(ResidualMlps):
    """The same computation for few rows and for many: Dynamo's guards differ, and its graphs for any size do not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if x.shape[0] > MANY:
            return y.sin()
        return y.sin()


MANY = 400


def test_one_graph_for_any_size_has_a_plan_for_each_size_it_was_compiled_at() -> None:
    """The second plan is not the first one's as well: what was planned at many rows fits there."""
    registry.forget()
    torch.manual_seed(0)
    report = graphoffload.explain(Branching(4, WIDTH), policy="keep", hardware="h200-sxm")(torch.randn(500, WIDTH))
    config = {"inner": "aot_eager", "hardware": "h200-sxm", "min_tensor_bytes": 0}
    backend: Any = graphoffload.OffloadBackend(**config, device_budget=int(0.9 * report.keep_peak_bytes))
    torch._dynamo.reset()
    model, plain = Branching(4, WIDTH), Branching(4, WIDTH)
    plain.load_state_dict(model.state_dict())
    run = torch.compile(model, backend=backend)
    for rows in (10, 500, 300, 500):
        x = torch.randn(rows, WIDTH)
        for module, call in ((model, run), (plain, plain)):
            module.zero_grad()
            call(x).square().mean().backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=0.0, atol=0.0)
    plans = graphoffload.last_plans()
    assert [plan.changes_anything for plan in plans] == [False, True, False]
