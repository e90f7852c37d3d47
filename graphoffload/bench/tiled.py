"""MLPs computed in slices of the sequence, as ALST does for long sequences (Arctic Long Sequence Training, arXiv:2506.13996).

    x (tokens) ──split──▶ slice 0 ─ mlp ─▶ ┐
                          slice 1 ─ mlp ─▶ ├─cat──▶ y (tokens)
                          slice 2 ─ mlp ─▶ ┘

What an MLP holds while it runs is several times as wide as its input, and is needed for one slice at a time: each slice is
checkpointed, so backward makes it again, slice by slice, also inside of a layer that is checkpointed itself. A token's output
depends on no other token, so only the order in which gradients of the weights are added differs from the plain MLP.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

TOKENS = 8192
"""A slice, where nothing else is said."""


class TiledMLP(nn.Module):
    """An MLP of (batch, tokens, width), `tokens` at a time."""

    def __init__(self, mlp: nn.Module, tokens: int) -> None:
        super().__init__()
        self.mlp, self.tokens = mlp, tokens

    def forward(self, x: Tensor) -> Tensor:
        """The same as the plain MLP's."""
        if x.shape[1] <= self.tokens:
            whole: Tensor = self.mlp(x)
            return whole
        parts: list[Any] = [checkpoint(self.mlp, part, use_reentrant=False) for part in x.split(self.tokens, dim=1)]
        return torch.cat(parts, dim=1)


def tile_mlps(layers: list[nn.Module], tokens: int) -> int:
    """Have the MLP of each layer run in slices, in place; how many there were."""
    found = [layer for layer in layers if isinstance(getattr(layer, "mlp", None), nn.Module)]
    for layer in found:
        mlp: Any = layer.mlp
        layer.mlp = TiledMLP(mlp, tokens)
    return len(found)
