"""Operators: their overloads and schemas, registrations that are taken back, and two without a public name.

Seen in torch 2.11 to 2.15.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._functorch.autograd_function import autograd_function_apply
from torch._ops import OpOverload

__all__ = ["OpOverload", "autograd_function_apply", "implemented", "is_undeclared_view", "packet_of", "schema_of", "zero_all"]


def schema_of(target: OpOverload) -> torch.FunctionSchema:
    """What an operator takes and gives, and what of it is written to or shares memory. Without it: no rule for safety holds."""
    return target._schema


def is_undeclared_view(target: Any) -> bool:
    """Whether an operator's result is a view though its schema does not say so: what torch makes of a matrix product for more
    than two dimensions, in 2.15 for every linear layer under aot_eager; Inductor has it as a view.

    Without it: such a view counts as a reader of its memory, and as a value of its own.
    """
    return target is torch.ops.aten._unsafe_view.default


def packet_of(target: Any) -> Any:
    """The operator of all overloads, such as aten.sum for aten.sum.dim_IntList; None for what is no operator.

    torch counts FLOPs by it. Without it: no roofline time.
    """
    return target._overloadpacket if isinstance(target, OpOverload) else None


zero_all: Callable[[list[torch.Tensor]], object] = torch._foreach_zero_
"""Zero many tensors in one kernel, as optimizers do. Without it: a benchmark's step has a kernel for each gradient."""


@contextlib.contextmanager
def implemented(namespace: str, name: str, function: Callable[..., Any], keys: tuple[str, ...]) -> Iterator[None]:
    """A context in which an operator runs `function` for these dispatch keys.

    Without it: a test cannot break an op on purpose.
    """
    libraries = [torch.library.Library(namespace, "IMPL", key) for key in keys]
    try:
        for library in libraries:
            library.impl(name, function)
        yield
    finally:
        for library in libraries:
            library._destroy()
