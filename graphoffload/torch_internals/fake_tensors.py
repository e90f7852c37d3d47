"""Fake tensors, and the way out of their modes. Seen in torch 2.11 to 2.15."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import _disable_current_modes

from graphoffload.torch_internals.patching import replaced

__all__ = [
    "UNKNOWN", "FakeTensor", "FakeTensorMode", "flex_attention_on_any_device", "numbers_read_by", "outside_all_modes",
    "outside_fake_mode",
]  # fmt: skip

UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException)
"""What torch raises where fake tensors are asked for what they do not know. Without it: explain() stops at the first
`.item()`."""

outside_fake_mode = unset_fake_temporarily
"""A context in which tensors are real, while a graph is traced. Without it: the captured ops' counters would be fake."""


@contextlib.contextmanager
def outside_all_modes() -> Iterator[None]:
    """A context in which tensors are real and no other mode sees an operation either. Without it: measuring a device while a
    graph is traced would time Python."""
    with unset_fake_temporarily(), _disable_current_modes():
        yield


@contextlib.contextmanager
def flex_attention_on_any_device() -> Iterator[None]:
    """A context in which FlexAttention does not ask whether its device has a backward: nothing is computed with fake tensors.
    Without it: explain() of such a model on a machine without a GPU stops there."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    if not hasattr(module, "_validate_device"):
        yield
        return
    with replaced(module, _validate_device=lambda *_: None):
        yield


@contextlib.contextmanager
def numbers_read_by(read: Callable[[str, torch.Tensor], Any]) -> Iterator[None]:
    """A context in which `read(name, fake)` answers int(fake), float(fake) and what indexes by a fake tensor.

    torch reads the numbers in `torch.tensor([fake])` without asking a mode. Without it: explain() stops there.
    """

    def reading(name: str) -> Callable[[torch.Tensor], Any]:
        undisturbed: Callable[[torch.Tensor], Any] = torch.compiler.disable(lambda fake: read(name, fake))
        return undisturbed

    with replaced(FakeTensor, **{name: reading(name) for name in ("__index__", "__int__", "__float__")}):
        yield
