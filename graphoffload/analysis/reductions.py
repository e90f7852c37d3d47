"""Reductions, and the number of elements that an operation iterates over."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch.fx import Node

from graphoffload.analysis.kernels import Axis, Space
from graphoffload.analysis.storages import concrete, fake, size_hint, size_key, tensors_of
from graphoffload.analysis.stored import elements, scatters
from graphoffload.torch_internals.inductor import mixes_sums
from graphoffload.torch_internals.operators import packet_of

_REDUCTIONS = ("sum", "mean", "amax", "amin", "prod", "argmax", "argmin", "any", "all", "var", "std", "var_mean", "std_mean")
_IN_REGISTERS, _ALWAYS_IN_REGISTERS = 1024, 64
"""Elements of a row that a reduction holds at once, if it reads contiguous memory and in any case
(should_use_persistent_reduction in torch/_inductor/choices.py)."""


def axis_of(node: Node) -> Axis | None:
    """The axis of a reduction: "rows" if it reduces the last dimension, else "columns". None for other operations."""
    if (reduced := _reduced(node)) is None:
        return None
    source, dims = reduced
    return "rows" if source.dim() == 0 or source.dim() - 1 in dims else "columns"


def loops(node: Node, reads: Iterable[torch.Tensor] = ()) -> bool:
    """Whether a reduction loops over what it reads. Short rows are in registers as a whole, unless their length is symbolic.

    reads: tensors in memory that it is computed from, where that is known.
    """
    if (reduced := _reduced(node)) is None:
        return False
    source, dims = reduced
    length = row_length(node)
    if axis_of(node) != "rows" or length is None or length > _IN_REGISTERS:
        return True
    if length <= _ALWAYS_IN_REGISTERS:
        return False
    rows, whole = math.prod(size for dim, size in enumerate(source.shape) if dim not in dims), source.numel()
    contiguous = {1, length, size_key(rows), size_key(whole)}
    return any(elements(read) not in contiguous for read in reads)


def row_length(node: Node) -> int | None:
    """How many elements a reduction makes one of; None where that is symbolic, and for other operations."""
    if (reduced := _reduced(node)) is None:
        return None
    source, dims = reduced
    return concrete(math.prod(source.shape[dim] for dim in dims))


def _reduced(node: Node) -> tuple[torch.Tensor, set[int]] | None:
    """What a reduction reads, and the dimensions of it that it reduces; None for other operations."""
    packet = packet_of(node.target)
    source = fake(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
    if packet is None or packet.__name__ not in _REDUCTIONS or source is None:
        return None
    given = node.args[1] if len(node.args) > 1 else None
    dims = [given] if isinstance(given, int) else given if isinstance(given, (list, tuple)) else []
    every = range(source.dim())
    return source, {every[dim] for dim in dims if isinstance(dim, int) and every} or {*every}


def mixes(node: Node, axis: Axis | None) -> bool:
    """Whether a reduction of all rows or all columns is large enough to run with one of the other axis."""
    source, value = fake(node.args[0]) if axis and isinstance(node.args[0], Node) else None, fake(node)
    if source is None or value is None or source.dim() < 2:
        return False
    rows, columns = math.prod(source.shape[:-1]), source.shape[-1]
    if size_key(value.numel()) != size_key(rows if axis == "rows" else columns):
        return False
    return mixes_sums(size_hint(rows, unknown=0), size_hint(columns, unknown=0))


def space_of(node: Node) -> Space | None:
    """The number of elements that an operation iterates over: the inputs of a reduction or a scatter, else its output. None if
    it has no tensors."""
    sizes = [value.numel() for value in tensors_of(node)]
    packet = packet_of(node.target)
    if packet is not None and (packet.__name__ in _REDUCTIONS or scatters(node)):
        sizes += [value.numel() for argument in node.all_input_nodes for value in tensors_of(argument)]
    return size_key(max(sizes, key=size_hint)) if sizes else None
