"""Cases around relations between values: views, aliases, mutation, control flow, checkpoint regions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from graphoffload.testing.case import Case, Device, activations, batches, draw, of
from graphoffload.testing.layers import Mlp
from graphoffload.torch_internals import dynamo

WIDTH = 16


class ByFunction(nn.Module):
    """Two linears around any function of tensors."""

    def __init__(self, middle: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), middle

    def forward(self, x: Tensor) -> Any:
        out = self.middle(self.first(x))
        return self.second(out) if isinstance(out, Tensor) and out.shape[-1] == WIDTH else out


def transposes(y: Tensor) -> Tensor:
    """Products of transposed tensors."""
    return torch.tanh(y.transpose(0, 1) @ y.transpose(0, 1).transpose(1, 2) @ y.transpose(0, 1)).transpose(0, 1)


def small_slice(y: Tensor) -> Tensor:
    """Backward needs only a slice of a large storage."""
    big = torch.cat([y] * 8, dim=1) + 1.0
    part = big[:, 3:5]
    return part * part.sin() + big.sum() * 0.01


def expanded(y: Tensor) -> Tensor:
    """A broadcast tensor with stride 0 is saved, as a view and by an operation that keeps the stride."""
    wide = torch.tanh(y.mean(1, keepdim=True)).expand_as(y)
    return wide * y + torch.bmm(wide, y.transpose(1, 2)) @ wide


def zero_size(y: Tensor) -> Tensor:
    """Some of the saved tensors have no elements."""
    nothing = torch.tanh(y[:, :0])
    return torch.cat([nothing * nothing.exp(), torch.sin(y) * y], dim=1)


def saved_twice(y: Tensor) -> Tensor:
    """One tensor saved by several operations, as itself and as views."""
    z = torch.exp(-y * y)
    return torch.sin(z) * z + z.transpose(1, 2).contiguous().transpose(1, 2) * torch.cos(z) + (z @ z.transpose(1, 2)) @ z


def double_use(y: Tensor) -> Tensor:
    """Used early and late, so that backward reads it at both ends."""
    gate = torch.sigmoid(y)
    z = y * gate
    for _ in range(4):
        z = torch.tanh(z + 0.3) * gate
    return z + gate


def in_place(y: Tensor) -> Tensor:
    """In-place operations, on a tensor and through a view of it."""
    z = y.clone()
    z[:, 1:].mul_(2.0)
    z = torch.sigmoid(z)
    w = (z * y).add_(1.0).relu_()
    v = w * 1.5
    v[:, 0] = y[:, 1].cos()
    return torch.tanh(v) + w


def nested(y: Tensor) -> dict[str, Any]:
    """A dict of tuples of tensors, with a value that is no tensor."""
    z = torch.tanh(y)
    return {"pair": (z * y, z.sum(-1)), "deep": [{"max": z.max(dim=1).values}], "number": 3, "none": None}


def saved_output(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The saved tensor is an output, and so is a view of it."""
    z = torch.tanh(y)
    return z, z.transpose(0, 1), torch.sigmoid(z) * y


def detached_output(y: Tensor) -> tuple[Tensor, Tensor]:
    """A saved tensor is also returned detached, so the caller may write to it."""
    z = torch.exp(-y * y)
    return z * torch.cos(z), z.detach()


class GraphBreak(nn.Module):
    """Data-dependent Python control flow: three graphs, saved tensors on both sides of the breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Mlp(), Mlp(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if y.sum().item() > -1e9:
            y = self.second(y) * 2.0
        dynamo.graph_break()
        for _ in range(2):
            y = self.third(torch.sin(y))
        out: Tensor = y
        return out


class Clamp(torch.autograd.Function):
    """Custom backward with a saved input, a saved output and a saved mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float) -> Tensor:
        inside = x.abs() < limit
        out = torch.where(inside, x * x, limit * x.sign())
        ctx.save_for_backward(x, out, inside)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        x, out, inside = ctx.saved_tensors
        return torch.where(inside, grads[0] * 2.0 * x + 0.1 * out, torch.zeros_like(x)), None


def custom_function(y: Tensor) -> Tensor:
    """torch.autograd.Function twice."""
    apply: Callable[[Tensor, float], Tensor] = Clamp.apply
    return apply(torch.sin(apply(y, 1.5)) * y, 0.7)


class ReturnsInput(nn.Module):
    """Returns its input together with a result, and the input is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, self.mlp(x) * y, y.transpose(0, 1)


class MutatesInput(nn.Module):
    """Writes into an argument that backward does not need, and returns a product with the new value."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        count.add_(1.0)
        out: Tensor = self.mlp(x) * count
        return out


class Checkpointed(nn.Module):
    """A plain checkpoint region between two layers."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.before, self.inside, self.after, self.use_reentrant = Mlp(), Mlp(), Mlp(), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.inside, self.before(x), use_reentrant=self.use_reentrant)
        out: Tensor = self.after(y)
        return out


def save_products(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """The usual selective policy: products are saved, the rest is recomputed."""
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


def tag_everything(tag: CheckpointPolicy) -> Callable[..., CheckpointPolicy]:
    """A selective policy that gives every operation the same tag."""

    def policy(_ctx: Any, _op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return tag

    return policy


class Selective(nn.Module):
    """Selective checkpointing of the middle by `policy`."""

    def __init__(self, policy: Callable[..., CheckpointPolicy] = save_products) -> None:
        super().__init__()
        self.before, self.inside, self.after, self.policy = Mlp(), Mlp(), Mlp(), policy

    def forward(self, x: Tensor) -> Tensor:
        context = partial(create_selective_checkpoint_contexts, self.policy)
        y = checkpoint(self.inside, self.before(x), use_reentrant=False, context_fn=context)
        out: Tensor = self.after(y)
        return out


class Alone(nn.Module):
    """A module without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(torch.sin(x) @ x.transpose(1, 2), dim=-1) @ x


def _pair(device: Device, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
    return (
        draw(4, 6, WIDTH, device=device, dtype=dtype, seed=seed, requires_grad=True),
        draw(4, 6, WIDTH, device=device, dtype=dtype, seed=seed + 50, requires_grad=True),
    )


def _counted(device: Device, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
    return (
        draw(4, 6, WIDTH, device=device, dtype=dtype, seed=seed, requires_grad=True),
        draw(4, 6, WIDTH, device=device, dtype=dtype, seed=seed + 50),
    )


_ROWS = activations(4, 6, WIDTH)


def _function(middle: Callable[[Tensor], Any], **notes: Any) -> Case:
    return Case(name=middle.__name__, build=of(partial(ByFunction, middle)), inputs=_ROWS, why=middle.__doc__ or "", **notes)


STRUCTURE = (
    *map(_function, (transposes, small_slice, expanded, zero_size, saved_twice, double_use, in_place)),
    *map(_function, (nested, saved_output, detached_output, custom_function)),
    Case(name="graph_break", build=of(GraphBreak), inputs=_ROWS, graph_breaks=True, why="several graphs, control flow"),
    Case(name="returns_input", build=of(ReturnsInput), inputs=_pair, why="outputs that alias inputs"),
    Case(name="mutates_input", build=of(MutatesInput), inputs=_counted, why="an argument written in place"),
    Case(name="no_parameters", build=of(Alone), inputs=_ROWS, why="only the input needs a gradient"),
    Case(
        name="checkpoint", build=of(partial(Checkpointed, use_reentrant=False)), inputs=_ROWS, checkpointed=True,
        why="a region to recompute",
    ),
    Case(
        name="checkpoint_reentrant", build=of(partial(Checkpointed, use_reentrant=True)), inputs=_ROWS, checkpointed=True,
        why="the older kind of region",
    ),
    Case(name="selective", build=of(Selective), inputs=_ROWS, checkpointed=True, why="tags on single operations"),
    Case(
        name="dynamic_views", build=of(partial(ByFunction, transposes)), inputs=batches(6, WIDTH), dynamic=True,
        why="symbolic sizes, transposed",
    ),
)  # fmt: skip
