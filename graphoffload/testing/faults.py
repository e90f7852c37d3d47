"""Break an operation on purpose, to show that a test detects it. A test that passes inside one of these tests nothing.

with reloads(lambda y: y.zero_()): ...            # backward gets zeros
with host_copies(lambda y: y.add_(1)): ...        # the host copy holds other values
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from graphoffload.runtime import ops
from graphoffload.torch_internals.operators import implemented
from graphoffload.torch_internals.patching import replaced


class Fails(torch.autograd.Function):
    """Raises a KeyError in backward, as an interrupted step does; forward is a copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise KeyError("interrupted")


@contextlib.contextmanager
def reloads(change: Callable[[Tensor], Any]) -> Iterator[None]:
    """Apply `change` in place to every reloaded tensor before its reader, in twin mode too."""
    original = ops.wait

    def wait(y: Tensor, handle: Tensor, plan: str, id: int) -> None:
        original(y, handle, plan, id)
        change(y)

    with _implementation("wait", wait):
        yield


@contextlib.contextmanager
def _implementation(name: str, function: Callable[..., Any]) -> Iterator[None]:
    with implemented("graphoffload", name, function, ("CPU", "CUDA")), replaced(ops.KERNELS, **{name: function}):
        yield


@contextlib.contextmanager
def host_copies(change: Callable[[Tensor], Any]) -> Iterator[None]:
    """Apply `change` in place to the host copy of every tensor once the copy is complete."""
    original = ops._copy_to_host

    def copy_to_host(x: Tensor, entry: Any) -> None:
        original(x, entry)
        if entry.host.written is not None:
            entry.host.written.synchronize()
        change(entry.host.buffer.flat(x.dtype))

    with replaced(ops, _copy_to_host=copy_to_host):
        yield
