"""Which values a fusing compiler stores, and which ones their readers compute.

Inductor lets every reader of a pointwise value compute it, whatever its size and however many readers it has, unless one of
these holds (`run_node` in torch/_inductor/graph.py; `should_realize_on_reuse`, `has_exceeded_max_reads` in ir.py):

    exists   A kernel or the graph's output reads it. It is a reduction's smaller result. It is scattered.
    large    It takes too many reads: more than 4 if it has several readers or one that repeats it, and more than `most_reads`
             in any case. Or it takes more operations than `most_operations` and several reads or a reader that repeats it, or
             more than 100 operations. Or it is random numbers.
             Inductor stores it where it stands, and its readers begin anew from there. The kernel runs at the value's turn, not
             at its reader's. If no other kernel reads the value, it is never written to memory.

A value that exists may exist only from the first kernel on that reads it, as where a matrix product reads a view of it. Readers
before that kernel compute it all the same.

Reads, numbers and casts are operations, and what is needed twice counts once; two parts of a tensor are two reads. Three
examples from a U-Net's block in bfloat16, `conv(silu(group_norm(x)))`, on a GPU:

    x.float()                              one read, two operations: the norm's sums and its result compute it each
    group_norm(x).float() in backward      five reads (x, mean, rstd, weight, bias) and two readers: large, in float32
    the sum in the norm's own backward     eight reads, 35 operations: large. The gradient of x is written there, before the
                                           backward of the block's shortcut, which the graph has in between

The count is that of Inductor but for some operations of several parts, such as a gather, which count as one here. A value of
these may be large for Inductor alone; it is then predicted to run later than it does.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping

import torch
from torch.fx import Node

from graphoffload.analysis.storages import concrete, example_nbytes, fake, is_in, size_hint, size_key, storage_id, with_views
from graphoffload.torch_internals.inductor import most_operations, most_reads
from graphoffload.torch_internals.operators import OpOverload, packet_of

# Inductor writes these into memory, at places that it learns while they run: a reader cannot compute them.
_SCATTERS = (
    "index_put", "_unsafe_index_put", "_unsafe_masked_index_put_accumulate", "index_add", "index_copy", "scatter",
    "scatter_add", "scatter_reduce",
)  # fmt: skip
_MOVES, _FILLS = ("clone", "expand", "alias"), ("full", "full_like", "scalar_tensor", "zeros", "ones")
_ARITHMETIC = ("add", "sub", "mul", "div")
_RANDOM = ("inductor_random", "inductor_randint")
_NUMBERLESS = ("pow", "iota", "slice_scatter")
_DIVIDED = ("mean", "var", "var_mean")
_LONGEST = 100  # Inductor stores what takes more operations than this even if it reads one tensor
_INLINED_READS = 4  # Inductor stores a value that several operations read only if computing it reads more tensors than this
Operations = frozenset[object]
"""What computes one element of a value: nodes, parts of storages that are read, numbers, and casts."""


def exists(node: Node, kinds: Mapping[Node, str]) -> bool:
    """Whether a fused operation's value is in memory, however few operations compute it."""
    readers = readers_of(node)
    if scatters(node) or any(user.op == "output" or kinds[user] == "kernel" for user in readers):
        return True
    value = fake(node)
    assert value is not None
    inputs = [example_nbytes(other) for argument in node.all_input_nodes if (other := fake(argument)) is not None]
    return bool(inputs) and 2 * example_nbytes(value) * max(1, _widening(node)) <= max(inputs)


def is_large(node: Node, sources: frozenset[int], operations: Operations) -> bool:
    """Whether Inductor stores a value since too many reads or operations compute it, or since it is random."""
    value = fake(node)
    assert value is not None
    if is_random(node):
        return True
    most = most_operations(value.device.type)
    if len(sources) < 2 and not _is_repeated(node):
        most = max(most, _LONGEST)
    return takes_many_reads(node, sources) or len(operations) > most


def is_random(node: Node) -> bool:
    """Whether a value is random numbers."""
    return getattr(packet_of(node.target), "__name__", "") in _RANDOM


def takes_many_reads(node: Node, sources: frozenset[int]) -> bool:
    """Whether Inductor stores a value since too many reads compute it, as of a long sum."""
    value = fake(node)
    assert value is not None
    reused = len(readers_of(node)) > 1 or _is_repeated(node)
    return len(sources) > (_INLINED_READS if reused else most_reads(value.device.type))


def _is_repeated(node: Node) -> bool:
    """Whether a pointwise operation reads each element of a value several times, as of a mask for several heads."""
    value = fake(node)
    sizes = (other.numel() for user in readers_of(node) if is_pointwise(user) and (other := fake(user)) is not None)
    return value is not None and any(size_hint(size) > size_hint(value.numel()) for size in sizes)


def operations_of(node: Node, computed: Mapping[int, Operations]) -> Operations:
    """The operations that compute one element of a node's value. computed: those of each storage, for others than one read."""
    value, name = fake(node), getattr(packet_of(node.target), "__name__", "")
    numbers = [number for number in node.args if type(number) in (int, float)] if name not in _NUMBERLESS else []
    alpha = node.kwargs.get("alpha", 1)
    found: set[object] = {(repr(number), _read_as(node)) for number in numbers}
    if isinstance(alpha, (int, float)) and alpha != 1:  # the second operand is multiplied first
        found |= {(repr(alpha), _read_as(node)), (node, "factor")}
    if name not in (*_MOVES, *_FILLS) and not _is_cast_to_itself(node):
        found.add(node)
    if name == "addcmul" and value is not None and (value.device.type == "cpu" or node.kwargs.get("value", 1) != 1):
        factor = (repr(node.kwargs.get("value", 1)), _read_as(node))
        found |= {(node, "product"), factor, (node, "scaled")}  # one operation on a GPU, where the factor is 1
    if name == "slice_scatter":
        bound = min((number for number in node.args[3:5] if isinstance(number, int) and number > 0), default=0)
        found |= {"index", ("bound", bound), (node, "comparison"), (node, "mask")}
    for argument in node.all_input_nodes:
        other = fake(argument)
        if value is None or other is None:
            continue
        identity = storage_id(other)
        part = identity, size_key(other.storage_offset()), elements(other)
        found |= _of_part(argument, part, computed[identity]) if identity in computed else {part}
        if (read := _computed_in(argument)) != (needed := _computed_in(node)) and _is_cast_to_fit(name, read, needed):
            found.add((identity, needed))
    return frozenset(found)


def _computed_in(node: Node) -> torch.dtype | None:
    """The type that Inductor computes a value in. It is that of the widest operand even where the graph says a narrower one, as
    torch 2.11 does where it replaces the scatter of a loss's gradient by a float32 `where`."""
    value = fake(node)
    if value is None:
        return None
    operands = [other.dtype for argument in node.all_input_nodes if (other := fake(argument)) is not None and other.dim()]
    if getattr(packet_of(node.target), "__name__", "") not in _ARITHMETIC or not value.dtype.is_floating_point:
        return value.dtype
    return max((value.dtype, *operands), key=lambda dtype: dtype.itemsize if dtype.is_floating_point else 0)


def _is_cast_to_itself(node: Node) -> bool:
    """Whether a value is computed in the type already that it is cast to."""
    is_cast = getattr(packet_of(node.target), "__name__", "") == "convert_element_type"
    return is_cast and _computed_in(node.all_input_nodes[0]) == _computed_in(node)


def _of_part(argument: Node, part: tuple[int, int | str, int | str], operations: Operations) -> Operations:
    """The operations that compute a part of a value: of another part, the last operation and the reads as large are others."""
    whole = argument
    while whole.all_input_nodes and is_in(whole.all_input_nodes[0], part[0]):
        whole = whole.all_input_nodes[0]
    value = fake(whole)
    size = 0 if value is None else elements(value)
    if value is None or size == part[2]:
        return operations
    moved = {one for one in operations if one is whole or (isinstance(one, tuple) and len(one) == 3 and one[2] == size)}
    return operations - moved | {(one, part) for one in moved}


def elements(value: torch.Tensor) -> int | str:
    """How many elements of memory a value shows: an expanded one is read where the one that it expands is."""
    sizes = [size for size, stride in zip(value.shape, value.stride(), strict=True) if concrete(stride) != 0]
    return size_key(value.numel() if len(sizes) == value.dim() else math.prod(sizes))


def operations_after(node: Node) -> Operations | None:
    """What computes a value that a reduction stores in another form: a mean is read as a sum, and divided. None: it is read."""
    value, name = fake(node), getattr(packet_of(node.target), "__name__", "")
    if node.target is operator.getitem:
        name = getattr(packet_of(node.all_input_nodes[0].target), "__name__", "") if node.args[1] == 0 else ""
    if value is None or name not in _DIVIDED:
        return None
    identity = storage_id(value)
    return frozenset((identity, (identity, "count"), (identity, "division")))


def _read_as(node: Node) -> torch.dtype | None:
    """The type in which an operation reads a number: a comparison's is that of what it compares."""
    value = fake(node)
    if value is None or value.dtype is not torch.bool:
        return None if value is None else value.dtype
    return next((other.dtype for argument in node.all_input_nodes if (other := fake(argument)) is not None), value.dtype)


def _is_cast_to_fit(name: str, read: torch.dtype | None, needed: torch.dtype | None) -> bool:
    """Whether an operation reads an operand of another width than its own."""
    both = read is not None and needed is not None and read.is_floating_point and needed.is_floating_point
    return both and name != "convert_element_type"


def scatters(node: Node) -> bool:
    """Whether an operation writes at places that it learns while it runs."""
    return getattr(packet_of(node.target), "__name__", "") in _SCATTERS


def _widening(node: Node) -> int:
    """How many times wider the elements of a node's input are: a cast to half the width is no reduction."""
    value = fake(node)
    first = next((other for argument in node.all_input_nodes if (other := fake(argument)) is not None), None)
    return 1 if value is None or first is None else max(1, first.element_size() // value.element_size())


def is_pointwise(node: Node) -> bool:
    """Whether an operation computes each element from one element of each operand."""
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def readers_of(node: Node) -> list[Node]:
    """Nodes that read a node's memory, directly or through a view."""
    own = with_views(node)
    return [user for member in own for user in member.users if user not in own]
