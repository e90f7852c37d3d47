"""explain() and the decorator as a user calls them: what they refuse, and what they leave behind."""

from __future__ import annotations

import pytest
import torch

import graphoffload
from graphoffload.saved import Plan


def look(rows: int, module: torch.nn.Module) -> Plan:
    """explain()'s plan for so many rows."""
    (plan,) = graphoffload.explain(module, policy="offload", inner="aot_eager", min_tensor_bytes=0)(torch.empty(rows, 8)).plans
    return plan


@pytest.mark.parametrize("apart", [True, False], ids=["isolated", "forgotten"])
def test_explain_leaves_nothing_to_a_later_compile(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for Dynamo's count, which gives up at eight and runs the model in eager, nor sizes to compare with."""
    if not apart:  # torch before 2.13
        plain = torch.compile
        monkeypatch.setattr(
            torch, "compile", lambda model, *, backend, dynamic=None: plain(model, backend=backend, dynamic=dynamic)
        )
    torch._dynamo.reset()
    module = Tanhs()
    sizes = [look(rows, module).saved.tensors[0].shape for rows in (16, 32, 64, 64, 64, 64, 64, 64, 64, 64)]
    assert sizes[:4] == [(16, 8), (32, 8), (64, 8), (64, 8)]
    graphoffload.offload(module, policy="offload", inner="aot_eager", min_tensor_bytes=0)
    before = graphoffload.stats()["offloads"]
    module(torch.randn(24, 8)).sum().backward()
    assert graphoffload.stats()["offloads"] > before
    assert graphoffload.last_plans()[-1].saved.tensors[0].shape == (24, 8)


class Tanhs(torch.nn.Module):
    """Two layers with something to save between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x).tanh())
        return out
