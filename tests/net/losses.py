"""Losses: several tokens ahead, in chunks under checkpointing, and with gradients that are computed in forward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from net.small import VOCABULARY, WIDTH, Block, Trunk, linear, next_token_loss, tokens
from net.table import Built, architecture


class Ahead(nn.Module):
    """A trunk, a block for each token ahead that reads the one before it, and one unembedding for all."""

    def __init__(self, ahead: int = 3) -> None:
        super().__init__()
        self.trunk, self.head = Trunk(layers=1), linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block(WIDTH, 4, linear) for _ in range(ahead - 1))

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x = self.trunk(input_ids)
        loss = next_token_loss(self.head(x), input_ids)
        for number, block in enumerate(self.blocks, 2):
            x = block(x)
            loss = loss + 0.3 * next_token_loss(self.head(x), input_ids, number)
        return {"loss": loss}


@architecture("multi-token", "loss, several tokens ahead by heads that share an unembedding")
def multi_token() -> Built:
    return Ahead(), tokens()


class Independent(nn.Module):
    """A trunk and heads that each read it."""

    def __init__(self, heads: int = 3) -> None:
        super().__init__()
        self.trunk, self.out = Trunk(layers=1), linear(WIDTH, VOCABULARY)
        self.heads = nn.ModuleList(nn.Sequential(nn.RMSNorm(WIDTH), linear(WIDTH, WIDTH), nn.SiLU()) for _ in range(heads))

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x = self.trunk(input_ids)
        losses = [next_token_loss(self.out(x + head(x)), input_ids, n) for n, head in enumerate(self.heads, 1)]
        return {"loss": torch.stack(losses).mean()}


@architecture("multi-token-parallel", "loss, several tokens ahead by heads side by side")
def multi_token_parallel() -> Built:
    return Independent(), tokens()


class Chunked(nn.Module):
    """Logits of a chunk of tokens at a time."""

    def __init__(self, chunks: int = 4, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.trunk, self.head = Trunk(layers=1), linear(WIDTH, VOCABULARY)
        self.chunks, self.checkpointed = chunks, checkpointed

    def chunk(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).float(), labels, reduction="sum")

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x, labels = self.trunk(input_ids)[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten()
        total = x.new_zeros(())
        for part, target in zip(x.chunk(self.chunks), labels.chunk(self.chunks), strict=True):
            total = total + (
                checkpoint(self.chunk, part, target, use_reentrant=False) if self.checkpointed else self.chunk(part, target)
            )
        return {"loss": total / labels.numel()}


@architecture("loss-chunked", "loss, in chunks of the sequence")
def chunked() -> Built:
    return Chunked(), tokens()


@architecture("loss-checkpointed", "loss, in chunks of the sequence, each under checkpointing")
def chunked_checkpointed() -> Built:
    return Chunked(checkpointed=True), tokens()


class FusedLoss(torch.autograd.Function):
    """Unembedding and cross entropy in chunks; forward computes the gradients, so that no logits are kept (as Liger does)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, chunks: int) -> Tensor:
        dx, dweight, total = torch.empty_like(x), torch.zeros_like(weight), x.new_zeros(())
        size = -(-x.shape[0] // chunks)
        for start in range(0, x.shape[0], size):
            part, target = x[start : start + size], labels[start : start + size]
            logs = (part @ weight.t()).float().log_softmax(-1)
            total += -logs.gather(1, target[:, None]).sum().to(total.dtype)
            wrong = (logs.exp() - F.one_hot(target, weight.shape[0])).to(x.dtype) / x.shape[0]
            dx[start : start + size] = wrong @ weight
            dweight += wrong.t() @ part
        ctx.save_for_backward(dx, dweight)
        return total / x.shape[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dx, dweight = ctx.saved_tensors
        return grads[0] * dx, grads[0] * dweight, None, None


class Fused(nn.Module):
    """A decoder with the fused loss."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = Trunk(layers=1), linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x, labels = self.trunk(input_ids)[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten()
        return {"loss": FusedLoss.apply(x, self.head.weight, labels, 4)}


@architecture("loss-fused", "loss, fused with the unembedding, gradients computed in forward")
def fused() -> Built:
    return Fused(), tokens()
