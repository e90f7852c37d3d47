"""Schedules of torch.distributed.pipelining: several microbatches are in flight. For several.trained."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed.several import Compile, Steps, grads
from distributed.tensor_parallel import WIDTH, WORDS, Block, batch
from torch import Tensor, nn
from torch._functorch import config
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

MICROBATCHES, BLOCKS, STEPS = 4, 2, 10


class Stage(nn.Module):
    """Some blocks of a model, with its embedding or its head at the ends."""

    def __init__(self, number: int, count: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH) if number == 0 else None
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WORDS) if number == count - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


def _loss(found: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(found.flatten(0, 1), words.flatten())


def _trained(compiled: Compile, schedule: Any, *, stages: int = 1, blocks: bool = True) -> Steps:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count = ranks * stages
    numbers = [rank + turn * ranks for turn in range(stages)]
    modules = []
    for number in numbers:
        torch.manual_seed(number)
        modules.append(stage := Stage(number, count))
        for module in stage.layers if blocks else [stage]:
            compiled(module)
    parts = [PipelineStage(module, n, count, torch.device("cpu")) for module, n in zip(modules, numbers, strict=True)]
    run = schedule(parts[0] if stages == 1 else parts, MICROBATCHES, loss_fn=_loss)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, 1e-3, foreach=False)
    for step in range(STEPS):
        words = batch(step, 2 * MICROBATCHES)
        losses: list[Tensor] = []
        last = {"target": words, "losses": losses} if count - 1 in numbers else {}
        run.step(*([words] if 0 in numbers else []), **last)
        yield sum(loss.item() for loss in losses), grads(modules)
        optimizer.step()
        optimizer.zero_grad()


def gpipe_blocks(compiled: Compile) -> Steps:
    """All forwards, then all backwards in the same order."""
    return _trained(compiled, ScheduleGPipe)


def one_forward_one_backward_blocks(compiled: Compile) -> Steps:
    """1F1B, compiled block by block."""
    return _trained(compiled, Schedule1F1B)


def one_forward_one_backward_stages(compiled: Compile) -> Steps:
    """1F1B, a graph for each stage."""
    return _trained(compiled, Schedule1F1B, blocks=False)


def interleaved_blocks(compiled: Compile) -> Steps:
    """Two stages on each rank."""
    return _trained(compiled, ScheduleInterleaved1F1B, stages=2)


def zero_bubble_blocks(compiled: Compile) -> Steps:
    """Gradients of inputs first, of weights later: each backward runs twice, and reads what was saved twice."""
    with config.patch(donated_buffer=False):
        yield from _trained(compiled, ScheduleInterleavedZeroBubble, stages=2)
