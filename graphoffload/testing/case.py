"""One case of the zoo: a module, its inputs and a loss, as data for any device and dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from graphoffload.torch_internals import pytrees

Device = torch.device | str
Build = Callable[[Device, torch.dtype], nn.Module]
Inputs = Callable[[Device, torch.dtype, int], tuple[Any, ...]]


def weighted_loss(output: Any) -> Tensor:
    """A scalar that depends on every element of every differentiable tensor in `output`, each with another weight.

    A plain mean of squares would be constant after a normalization, and its gradients would be rounding errors.
    """
    total: Tensor | None = None
    for leaf in pytrees.tree_leaves(output):
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            continue
        real = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
        flat = real.reshape(-1).to(torch.promote_types(real.dtype, torch.float32))
        weight = torch.cos(torch.arange(flat.numel(), device=flat.device, dtype=flat.dtype))
        term = (flat * weight + 0.5 * flat * flat).sum() / max(flat.numel(), 1)
        total = term if total is None else total + term
    if total is None:
        raise ValueError("the output of this case holds no tensor that requires grad")
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A module whose saved activations are hard to handle for one particular reason.

    Attributes:
        name: key in ZOO.
        build: (device, dtype) -> module; parameters are drawn from torch's global generator.
        inputs: (device, dtype, seed) -> arguments of forward. For a case with `dynamic`, the batch depends on the seed.
        loss: output -> scalar.
        dtype: the dtype that the case is meant to run in.
        why: the reason why it is hard.
        offloads: whether policy="offload" must offload something.
        graph_breaks: whether it compiles to several graphs.
        dynamic: whether it is compiled with dynamic=True and run with several seeds.
        random: whether forward draws random numbers.
        autocast: forward runs under torch.autocast to this dtype.
        checkpointed: whether it contains a torch.utils.checkpoint region.
        reference: the run whose gradients are right; "eager" if torch's own partitioner gets them wrong.
    """

    name: str
    build: Build
    inputs: Inputs
    loss: Callable[[Any], Tensor] = weighted_loss
    dtype: torch.dtype = torch.float32
    why: str = ""
    offloads: bool = True
    graph_breaks: bool = False
    dynamic: bool = False
    random: bool = False
    autocast: torch.dtype | None = None
    checkpointed: bool = False
    reference: Literal["keep_all", "eager"] = "keep_all"

    def fresh(self, device: Device, dtype: torch.dtype | None = None, *, seed: int = 0) -> nn.Module:
        """The module with parameters drawn from `seed`: two calls give equal modules that share nothing."""
        torch.manual_seed(seed)
        return self.build(device, dtype or self.dtype)

    def example(self, device: Device, dtype: torch.dtype | None = None, *, seed: int = 0) -> tuple[Any, ...]:
        """Arguments of forward."""
        return self.inputs(device, dtype or self.dtype, seed)


def draw(*shape: int, device: Device, dtype: torch.dtype, seed: int, requires_grad: bool = False, scale: float = 1.0) -> Tensor:
    """Normal numbers that do not depend on the device, since they are drawn on the CPU in float64."""
    generator = torch.Generator().manual_seed(1000 + seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    return values.to(dtype).to(device).requires_grad_(requires_grad)


def draw_ints(*shape: int, high: int, device: Device, seed: int) -> Tensor:
    """Integers below `high` that do not depend on the device."""
    generator = torch.Generator().manual_seed(2000 + seed)
    return torch.randint(0, high, shape, generator=generator).to(device)


def activations(*shape: int, grad: bool = True) -> Inputs:
    """Inputs of one tensor of this shape."""

    def make(device: Device, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
        return (draw(*shape, device=device, dtype=dtype, seed=seed, requires_grad=grad),)

    return make


def batches(*shape: int) -> Inputs:
    """Inputs of one tensor whose leading size depends on the seed: 3, 5, 7, 4, 6, …"""

    def make(device: Device, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
        return (draw((3, 5, 7, 4, 6)[seed % 5], *shape, device=device, dtype=dtype, seed=seed, requires_grad=True),)

    return make


def of(module: Callable[[], nn.Module]) -> Build:
    """Build from a module class (or partial) that takes no arguments."""

    def build(device: Device, dtype: torch.dtype) -> nn.Module:
        return module().to(device=device, dtype=dtype)

    return build


def by_name(cases: Iterable[Case]) -> dict[str, Case]:
    """Cases by name. Names must be unique."""
    found: dict[str, Case] = {}
    for case in cases:
        assert case.name not in found, case.name
        found[case.name] = case
    return found
