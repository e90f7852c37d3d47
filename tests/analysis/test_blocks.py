"""Which modules of a graph are its blocks: those that torch.utils.checkpoint would be put around."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph

import graphoffload
from graphoffload.analysis.blocks import blocks_of
from graphoffload.compiler import checkpoint_regions
from graphoffload.errors import BudgetError

WIDTH = 8


class Block(nn.Module):
    """A residual block whose MLP is a Sequential, which numbers its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Parts(nn.Module):
    """A block of two numbered parts, each of several layers."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x).sin()
        return x


class Scale(nn.Module):
    """A layer of somebody's own, with no modules in it: several operations all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x.exp() @ self.weight).cos()


def joint_of(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Graph:
    found: list[Graph] = []
    in_blocks = checkpoint_regions.in_blocks

    def noting(analysis, *args, **kwargs):
        found.append(analysis.request.joint.graph)
        return in_blocks(analysis, *args, **kwargs)

    monkeypatch.setattr(checkpoint_regions, "in_blocks", noting)
    with pytest.raises(BudgetError):
        graphoffload.explain(module, hardware="h200-sxm", device_budget="1B", reserve=0)(torch.randn(4096, WIDTH))
    return found[0]


@pytest.mark.parametrize(
    ("module", "blocks"),
    [
        (Block(), 0),
        (Parts(Block(), Block(), Block()), 3),
        (Parts(Scale(), Scale()), 2),
        (Parts(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), 0),
        (Parts(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), Block(), nn.Linear(WIDTH, WIDTH)), 2),
    ],
    ids=["one block", "a list of blocks", "one's own layers", "a list of layers", "blocks and a layer"],
)
def test_numbered_layers_are_no_blocks(module: nn.Module, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    joint = joint_of(module, monkeypatch)
    assert len(set(blocks_of(joint).values())) == blocks
    whole = blocks_of(joint, whole=True)
    assert len(set(whole.values())) == max(1, blocks)
    if not blocks:
        assert any("addmm" in name for name in whole), "the products as well are part of the one block"
