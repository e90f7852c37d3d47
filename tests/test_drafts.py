"""Plans that recompute are drafts until torch has partitioned again: what misses its goal then is planned for less."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import graphoffload
from graphoffload import pipeline
from graphoffload.decide import Limits
from graphoffload.errors import BudgetError
from graphoffload.hardware import PROFILES


class Net(nn.Module):
    """Wide pointwise results between products: worth recomputing."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(64, 512, bias=False) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(512, 64, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(nn.functional.gelu(up(x)))
        return x


def explained(**options: Any) -> graphoffload.OffloadReport:
    """The plan of a batch of 256."""
    given = {"hardware": PROFILES["h200-sxm"], "min_tensor_bytes": 0, "reserve": 0, "host_budget": 0, **options}
    return graphoffload.explain(Net(), **given)(torch.randn(256, 64))


def watch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int | None, float | None, float]]:
    """Budget, slowdown and excess of every draft."""
    seen: list[tuple[int | None, float | None, float]] = []
    draft = pipeline._draft

    def noting(work: Any, program: Any, limits: Limits, config: Any) -> Any:
        made = draft(work, program, limits, config)
        seen.append((limits.device_budget_bytes, config.max_slowdown, made.excess))
        return made

    monkeypatch.setattr(pipeline, "_draft", noting)
    return seen


def middle() -> int:
    """A budget that needs recomputation or offloading, and can be met."""
    keep = explained(policy="keep")
    return int(0.75 * keep.keep_peak_bytes)


def test_a_budget_is_kept_on_the_graph_that_runs() -> None:
    budget = middle()
    report = explained(device_budget=budget)
    assert report.recomputed_bytes > 0
    assert report.predicted_peak_bytes <= budget


def test_a_draft_above_the_budget_is_made_again_for_as_much_less(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, seen, excess = middle(), watch(monkeypatch), pipeline._excess

    def once_too_much(request: Any, decided: Any, timeline: Any) -> float:
        return 1000.0 if not seen else excess(request, decided, timeline)

    monkeypatch.setattr(pipeline, "_excess", once_too_much)
    report = explained(device_budget=budget)
    assert [limit for limit, _, _ in seen] == [budget, budget - 1001]
    assert report.predicted_peak_bytes <= budget


def test_a_draft_that_is_too_slow_is_made_again_for_a_smaller_slowdown(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, excess = watch(monkeypatch), pipeline._excess
    monkeypatch.setattr(pipeline, "_excess", lambda r, d, t: 0.01 * d.keep_timeline.time_s if not seen else excess(r, d, t))
    explained(max_slowdown=0.05)
    assert [slowdown for _, slowdown, _ in seen] == [0.05, pytest.approx(0.039)]


def test_no_slowdown_is_what_nobody_can_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    assert explained(max_slowdown=0.0).predicted_slowdown <= 0.005
    assert {slowdown for _, slowdown, _ in seen} == {0.005}


def test_what_no_draft_meets_is_an_error_with_the_least_found(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = middle()
    monkeypatch.setattr(pipeline, "_excess", lambda *_: 1000.0)
    with pytest.raises(
        BudgetError, match=rf"no plan was found that meets it\. The least feasible one .*\({budget + 1000} bytes\)"
    ):
        explained(device_budget=budget)


class Logits(nn.Module):
    """Returns far more than it saves, as a language model without its loss does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))
        self.head = nn.Linear(64, 1024, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(x))
        return self.head(x)


def test_what_the_model_returns_stays_unless_only_without_it_a_budget_can_be_met() -> None:
    """Until backward is over for a caller who may hold it; a budget that is met only otherwise is met, with a note."""
    given = {"hardware": PROFILES["h200-sxm"], "min_tensor_bytes": 0, "reserve": 0}
    x, returned = torch.randn(1024, 64), 1024 * 1024 * 4

    def report(**options: Any) -> graphoffload.OffloadReport:
        return graphoffload.explain(Logits(), **given, **options)(x)

    parameters = sum(p.nbytes for p in Logits().parameters())
    least = parameters + x.nbytes + 2 * returned  # the logits and their gradient; gradients of parameters come later
    roomy = report(device_budget=int(report(policy="keep").keep_peak_bytes * 0.98))
    assert not any("returns" in note for note in roomy.plans[0].notes)
    tight = report(device_budget=least + 4 * x.nbytes)
    assert any("only if nothing holds what the model returns (4.00 MiB)" in note for note in tight.plans[0].notes)
    assert least <= tight.predicted_peak_bytes <= least + 4 * x.nbytes
    with pytest.raises(BudgetError):
        report(device_budget=least - returned)
