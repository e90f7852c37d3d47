"""Break an operation on purpose. A test that still passes inside one of these is no test.

with reloads(lambda y: y.zero_()): ...       # what backward gets is zeros
with offloads(lambda x: x + 1): ...          # what goes to the host is something else
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
    """Apply `change` in place to every tensor that comes back from the host (also in twin mode), before its reader."""
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
    """Apply `change` in place to the host copy of every tensor right after it was written (on a GPU: when it is complete)."""
    original = ops._copy_to_host

    def copy_to_host(x: Tensor, entry: Any) -> None:
        original(x, entry)
        if entry.host.written is not None:
            entry.host.written.synchronize()
        change(entry.host.buffer.flat(x.dtype))

    with replaced(ops, _copy_to_host=copy_to_host):
        yield
