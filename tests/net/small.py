"""A decoder of our own whose linears, attention and loss are chosen: what precisions and kinds of training are tried on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from net.table import ids

VOCABULARY, WIDTH, HEADS = 128, 32, 4
Linear = Callable[[int, int], nn.Module]


def linear(inputs: int, outputs: int) -> nn.Module:
    """A linear without a bias."""
    return nn.Linear(inputs, outputs, bias=False)


class Block(nn.Module):
    """Norm, attention, norm, SwiGLU. `attend` takes q, k, v of (batch, heads, tokens, head) and what the model is given."""

    def __init__(self, width: int, heads: int, make: Linear, attend: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend or causal
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = make(width, 3 * width), make(width, width)
        self.gate, self.up, self.down = make(width, 2 * width), make(width, 2 * width), make(2 * width, width)

    def forward(self, x: Tensor, **where: Any) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v, **where).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention to the tokens before."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Trunk(nn.Module):
    """Token ids to hidden states."""

    def __init__(
        self, *, layers: int = 2, width: int = WIDTH, heads: int = HEADS, make: Linear = linear, attend: Any = None
    ) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, width), nn.RMSNorm(width)
        self.layers = nn.ModuleList(Block(width, heads, make, attend) for _ in range(layers))

    def forward(self, input_ids: Tensor, **where: Any) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, **where)
        out: Tensor = self.norm(x)
        return out


class Decoder(nn.Module):
    """Trunk, unembedding, and the mean cross entropy of the next token."""

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.trunk = Trunk(**fields)
        self.head = nn.Linear(fields.get("width", WIDTH), VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, **where: Any) -> dict[str, Tensor]:
        return {"loss": next_token_loss(self.head(self.trunk(input_ids, **where)), input_ids)}


def next_token_loss(logits: Tensor, input_ids: Tensor, ahead: int = 1) -> Tensor:
    """Mean cross entropy of the token `ahead`, in float32."""
    return F.cross_entropy(logits[:, :-ahead].flatten(0, 1).float(), input_ids[:, ahead:].flatten())


def tokens(batch: int = 2, length: int = 16) -> dict[str, Tensor]:
    """A batch of token ids."""
    return {"input_ids": ids(batch, length, high=VOCABULARY)}
