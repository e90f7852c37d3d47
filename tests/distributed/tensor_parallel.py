"""Ways to train with collectives inside the graphs: tensor parallel, gathered parameters, experts. For several.trained."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from distributed.several import Compile, Steps, grads, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

WIDTH, HEADS, LENGTH, ROWS, WORDS, LAYERS, STEPS = 32, 4, 16, 2, 48, 2, 4


class Attention(nn.Module):
    """Causal attention; its heads may be split."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (part(x).view(rows, length, -1, WIDTH // HEADS).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(rows, length, -1))


class Gated(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A Llama block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = nn.RMSNorm(WIDTH), Attention(), nn.RMSNorm(WIDTH), Gated()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """An embedding, blocks, a norm and a head."""

    def __init__(self, block: Any = Block) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList(block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def batch(seed: int, rows: int = ROWS) -> Tensor:
    """Words."""
    return torch.randint(0, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    """Of predicting the same words."""
    return F.cross_entropy(model(words).flatten(0, 1), words.flatten())


def fitted(model: nn.Module, *, own_data: bool, losses_in_parallel: bool = False) -> Steps:
    """Steps of AdamW; own_data: each rank has other words."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
    for step in range(STEPS):
        words = batch(100 * step + (dist.get_rank() if own_data else 0))
        if losses_in_parallel:
            with loss_parallel():
                loss = loss_of(model, words)
                loss.backward()
        else:
            loss = loss_of(model, words)
            loss.backward()
        yield whole(loss).item(), grads([model])
        optimizer.step()
        optimizer.zero_grad()


def _compile(model: Any, compiled: Compile, blocks: bool) -> None:
    for module in model.layers if blocks else [model]:
        compiled(module)


def _tensor_parallel(compiled: Compile, *, blocks: bool, sequence: bool = False, losses: bool = False) -> Steps:
    model, mesh = Model(), init_device_mesh("cpu", (dist.get_world_size(),))
    plan: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    plan |= {"attention.o": RowwiseParallel(), "mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel()}
    plan |= {"mlp.down": RowwiseParallel()}
    if sequence:
        gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        plan |= {"norm1": SequenceParallel(), "attention": PrepareModuleInput(**gathered)}
        plan |= {"norm2": SequenceParallel(), "mlp": PrepareModuleInput(**gathered)}
        plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.o", "mlp.down")}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    if sequence:
        output = {"output_layouts": Shard(-1), "use_local_output": False} if losses else {"output_layouts": Replicate()}
        ends: dict[str, Any] = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), **output),
        }
        parallelize_module(model, mesh, ends)
    _compile(model, compiled, blocks)
    return fitted(model, own_data=False, losses_in_parallel=losses)


def tensor_parallel_blocks(compiled: Compile) -> Steps:
    """Columns and rows of the weights are split; blocks are compiled one by one."""
    return _tensor_parallel(compiled, blocks=True)


def tensor_parallel_whole(compiled: Compile) -> Steps:
    """The same, one graph."""
    return _tensor_parallel(compiled, blocks=False)


def sequence_parallel_whole(compiled: Compile) -> Steps:
    """Norms and residuals are split by tokens: all-gathers and reduce-scatters in the graph."""
    return _tensor_parallel(compiled, blocks=False, sequence=True)


def loss_parallel_whole(compiled: Compile) -> Steps:
    """The same, and the logits are split by words."""
    return _tensor_parallel(compiled, blocks=False, sequence=True, losses=True)


class Gathered(nn.Module):
    """A weight of which each rank has a shard, gathered where it is used."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        parts = (torch.randn(shape) * 0.2).chunk(dist.get_world_size())
        self.shard = nn.Parameter(parts[dist.get_rank()].clone())

    def forward(self) -> Tensor:
        return functional.all_gather_tensor_autograd(self.shard, 0, dist.group.WORLD)


class GatheredBlock(nn.Module):
    """A block of such weights; `how` it is checkpointed."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.norm, self.up, self.down = Gathered(WIDTH), Gathered(4 * WIDTH, WIDTH), Gathered(WIDTH, 4 * WIDTH)

    def inner(self, x: Tensor) -> Tensor:
        """The block without its checkpoint."""
        y = F.gelu(F.linear(F.layer_norm(x, (WIDTH,)) * self.norm(), self.up()))
        return x + F.linear(y, self.down())

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "gathers":
            contexts = partial(create_selective_checkpoint_contexts, _gather_again)
            return checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts)
        return checkpoint(self.inner, x, use_reentrant=False) if self.how == "all" else self.inner(x)


def _gather_again(_context: Any, target: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE if "c10d" in str(target) else CheckpointPolicy.PREFER_SAVE


def gathered_parameters(compiled: Compile) -> Steps:
    """As SimpleFSDP does: what was gathered is gathered again in backward, by tags."""
    return _gathered(compiled, "gathers")


def checkpointed_collectives(compiled: Compile) -> Steps:
    """Checkpoint regions with collectives inside."""
    return _gathered(compiled, "all")


def _gathered(compiled: Compile, how: str) -> Steps:
    model = Model(partial(GatheredBlock, how))
    compiled(model)
    return fitted(model, own_data=True)


class Experts(nn.Module):
    """Each rank has one expert: tokens are sent to it and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.up, self.down = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weight = torch.softmax(self.router(tokens), -1).amax(-1, keepdim=True)
        sent = functional.all_to_all_single_autograd(tokens * weight, None, None, dist.group.WORLD)
        back = functional.all_to_all_single_autograd(self.down(F.gelu(self.up(sent))), None, None, dist.group.WORLD)
        return x + back.reshape(x.shape)


def expert_parallel_whole(compiled: Compile) -> Steps:
    """Tokens go to experts by all-to-all, in one graph."""
    return _experts(compiled, blocks=False)


def expert_parallel_blocks(compiled: Compile) -> Steps:
    """The same, block by block."""
    return _experts(compiled, blocks=True)


def _experts(compiled: Compile, *, blocks: bool) -> Steps:
    model = Model(Experts)
    _compile(model, compiled, blocks)
    return fitted(model, own_data=True)
