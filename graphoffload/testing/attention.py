"""Cases around attention: transposed q/k/v, grouped heads, dropout, fused projections."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphoffload.testing.case import Case, activations, of

HIDDEN, HEADS, LENGTH = 32, 4, 12


class Attention(nn.Module):
    """Self-attention as it is written in models; `kv_heads` < HEADS groups the queries."""

    def __init__(self, *, kv_heads: int = HEADS, dropout: float = 0.0, manual: bool = False) -> None:
        super().__init__()
        self.kv_heads, self.dropout, self.manual = kv_heads, dropout, manual
        self.head = HIDDEN // HEADS
        self.q = nn.Linear(HIDDEN, HIDDEN)
        self.k = nn.Linear(HIDDEN, kv_heads * self.head)
        self.v = nn.Linear(HIDDEN, kv_heads * self.head)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, HEADS, self.head).transpose(1, 2)
        k = self.k(x).view(batch, length, self.kv_heads, self.head).transpose(1, 2)
        v = self.v(x).view(batch, length, self.kv_heads, self.head).transpose(1, 2)
        if self.manual:
            scores = (q @ k.transpose(-2, -1)) / self.head**0.5
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            y = F.dropout(scores.masked_fill(~mask, float("-inf")).softmax(-1), self.dropout, self.training) @ v
        else:
            y = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, dropout_p=self.dropout, enable_gqa=self.kv_heads != HEADS
            )
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, HIDDEN))
        return x + mixed


class FusedQKV(nn.Module):
    """One projection split into three: q, k and v are views of one storage."""

    def __init__(self, *, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        if self.packed:
            q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q, k, v = (t.view(batch, length, HEADS, -1).transpose(1, 2) for t in self.qkv(x).split(HIDDEN, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v)
        mixed: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return mixed


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attn = Attention(dropout=dropout)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + F.dropout(self.mlp(self.mlp_norm(x)), self.dropout, self.training)


class Blocks(nn.Module):
    """`count` identical blocks."""

    def __init__(self, count: int = 3, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dropout=dropout) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class DropoutChain(nn.Module):
    """Linear, dropout, activation, twice: the masks are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(torch.tanh(self.first(x)), 0.3, self.training)
        return F.dropout(F.silu(self.second(x)), 0.2, self.training)


_SEQUENCE = activations(2, LENGTH, HIDDEN)

ATTENTION = (
    Case(name="attention", build=of(Attention), inputs=_SEQUENCE, why="transposed q, k, v are saved"),
    Case(name="attention_math", build=of(partial(Attention, manual=True)), inputs=_SEQUENCE, why="scores, a bool mask"),
    Case(name="gqa", build=of(partial(Attention, kv_heads=2)), inputs=_SEQUENCE, why="fewer key heads than query heads"),
    Case(name="sdpa_dropout", build=of(partial(Attention, dropout=0.2)), inputs=_SEQUENCE, random=True, why="random in sdpa"),
    Case(name="dropout", build=of(DropoutChain), inputs=_SEQUENCE, random=True, why="saved random bool masks"),
    Case(name="block_dropout", build=of(partial(Block, dropout=0.1)), inputs=_SEQUENCE, random=True, why="several draws"),
    Case(name="fused_qkv_split", build=of(partial(FusedQKV, packed=False)), inputs=_SEQUENCE, why="three views, one storage"),
    Case(name="fused_qkv_unbind", build=of(partial(FusedQKV, packed=True)), inputs=_SEQUENCE, why="permuted, with offsets"),
    Case(name="three_blocks", build=of(Blocks), inputs=_SEQUENCE, why="identical blocks"),
    Case(name="attention_bf16", build=of(Attention), inputs=_SEQUENCE, dtype=torch.bfloat16, why="low precision throughout"),
    Case(name="block_autocast", build=of(Block), inputs=_SEQUENCE, autocast=torch.bfloat16, why="casts saved beside originals"),
)
