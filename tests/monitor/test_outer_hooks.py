"""Checkpointing and offloading around the compiled call defeat a plan, and are named; hooks that only look are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from graphoffload.errors import NotOffloadedWarning, StepNotPlannedWarning

OPTIONS = {"policy": "offload", "inner": "aot_eager", "min_tensor_bytes": 1}
Call = Callable[[nn.Module, Tensor], Tensor]


class Tanh(nn.Module):
    """A product, and what follows it."""

    def __init__(self) -> None:
        """Of width 8."""
        super().__init__()
        self.weight = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Of a batch."""
        return torch.tanh(self.weight(x)) * x


class Linears(nn.Module):
    """More parameters than DDP's first buckets hold."""

    def __init__(self) -> None:
        """Of width 640: 1.6 MB a layer."""
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(640, 640) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Of a batch."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class OffloadActivations(saved_tensors_hooks):
    """As trainers call theirs; their pack function is a function inside of __init__ as well."""

    def __init__(self) -> None:
        """With hooks that copy."""

        def pack_tensor(value: Tensor) -> Tensor:
            return value.clone()

        super().__init__(pack_tensor, lambda value: value)


def inside(context: Any) -> Call:
    def call(module: nn.Module, x: Tensor) -> Tensor:
        with context:
            result: Tensor = module(x)
        return result

    return call


def checkpointed(reentrant: bool) -> Call:
    return lambda module, x: checkpoint(module, x, use_reentrant=reentrant)


def told(call: Call) -> tuple[list[str], Tensor]:
    """Warnings of ours while a compiled module is trained, and its gradient."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Tanh()
    module.compile(backend="graphoffload", options=OPTIONS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            module.zero_grad()
            call(module, torch.ones(4, 8, requires_grad=True)).sum().backward()
    assert module.weight.weight.grad is not None
    return [str(w.message) for w in caught if w.category is NotOffloadedWarning], module.weight.weight.grad


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (checkpointed(False), ("torch.utils.checkpoint", "gradient_checkpointing=False")),
        (checkpointed(True), ("torch.utils.checkpoint", "gradient_checkpointing=False")),
        (inside(save_on_cpu()), ("torch.autograd.graph.save_on_cpu", "activation_offloading=False")),
        (inside(OffloadActivations()), (f"{__name__}.OffloadActivations", "activation_offloading=False")),
    ],
    ids=["checkpoint", "reentrant", "save_on_cpu", "trainer"],
)
def test_named_once(call: Call, parts: tuple[str, ...]) -> None:
    """With what to switch off; gradients are right all the same."""
    (text,), gradient = told(call)
    for part in parts:
        assert part in text
    _, alone = told(lambda module, x: module(x))
    assert torch.equal(gradient, alone)


def first_in_a_hook(module: nn.Module, x: Tensor) -> Tensor:
    """A loss of its own, in a hook of backward."""

    def hook(grad: Tensor) -> Tensor:
        with torch.enable_grad():
            module(x.detach()).sum().backward()
        return grad

    y = torch.tanh(x)
    y.register_hook(hook)
    return y


def test_what_is_compiled_in_a_hook_is_not_named() -> None:
    """Backward alone is no checkpoint."""
    assert told(first_in_a_hook)[0] == []


def test_what_only_looks_is_not_named() -> None:
    """Neither hooks that count what is saved, nor nothing at all, nor checkpointing inside of what is compiled."""
    assert told(inside(saved_tensors_hooks(lambda value: value, lambda value: value)))[0] == []
    assert told(lambda module, x: module(x))[0] == []

    torch._dynamo.reset()
    module = Tanh()
    outer = torch.compile(lambda x: checkpoint(module, x, use_reentrant=False), backend="graphoffload", options=OPTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotOffloadedWarning)
        outer(torch.ones(4, 8, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("split", [True, False])
def test_what_ddp_splits_is_named(split: bool, tmp_path: Path) -> None:
    """Parts of a compiled model are planned alone; with optimize_ddp off it is whole, and nothing is said."""
    torch._dynamo.reset()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(Linears(), bucket_cap_mb=2)
        options = {"device_budget": "1GiB", "hardware": "h200-sxm", "inner": "aot_eager"}
        compiled = torch.compile(wrapped, backend="graphoffload", options=options)
        with torch._dynamo.config.patch(optimize_ddp=split), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compiled(torch.randn(4, 640)).sum().backward()
    finally:
        dist.destroy_process_group()
    told = [str(w.message) for w in caught if w.category is StepNotPlannedWarning]
    assert [("optimize_ddp = False" in text) for text in told] == ([True] if split else [])
