"""Views by strides of what a graph computes become views by shape.

    m = mul(a, b)                       2 x 1 x 8 x 1, rows of 8 in the joint graph
    v = as_strided(m, [2, 8], [8, 1])   ──▶   v = view(m, [2, 8])

A view by strides reads memory as the joint graph has it. Inductor may lay out a result in another way, such as a convolution's
with its channels last; torch tells backward's compile the strides of forward's results, and the strides of what is computed
again from them follow. A view by strides of that would read other elements, and gradients would be wrong. torch sees to the
layout only where the view and what it is of are in one graph. Group norms on a CPU are decomposed into such views.
Inputs of the graph keep their strides, so views of them stay.
Wrong when: another operation reads memory by numbers of its own. Custom operators and Triton kernels get the strides that they
were traced with, from Inductor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from graphoffload.analysis.storages import example_storage_nbytes, fake, size_hint
from graphoffload.passes.graphs import finish
from graphoffload.runtime.layouts import is_dense
from graphoffload.torch_internals.graphs import tensor_metadata
from graphoffload.torch_internals.operators import OpOverload

aten = torch.ops.aten


def view_by_shape(joint: GraphModule) -> int:
    """Change what a joint graph reads and writes by strides, in place; returns how many operations changed."""
    changed = 0
    for target, change in ((aten.as_strided.default, _view), (aten.as_strided_scatter.default, _scatter)):
        for node in joint.graph.find_nodes(op="call_function", target=target):
            source = node.args[0]
            if source.op == "placeholder" or not _fills_its_memory(fake(source)):
                continue
            with joint.graph.inserting_before(node):
                new = change(joint, node, source)
            if new is not None:
                node.replace_all_uses_with(new)
                joint.graph.erase_node(node)
                changed += 1
    if changed:
        finish(joint)
    return changed


def _fills_its_memory(value: Tensor | None) -> bool:
    """Whether a tensor is all of its memory, without gaps: then its elements in the order of their strides are that memory."""
    if value is None or size_hint(value.storage_offset(), unknown=1) != 0:
        return False
    whole = size_hint(value.numel(), unknown=0) * value.element_size()
    return 0 < whole == example_storage_nbytes(value) and is_dense(*_hints(value))


def _hints(value: Tensor) -> tuple[list[int], list[int]]:
    return [size_hint(size, unknown=0) for size in value.shape], [size_hint(step, unknown=0) for step in value.stride()]


def _view(joint: GraphModule, node: Node, source: Node) -> Node:
    """The memory of the source as one row, and what `node` sees of that."""
    value, result = fake(source), fake(node)
    assert value is not None
    assert result is not None
    row = _in_order(joint, node, source, _order(value))
    if _is_whole(result, value):
        return _made(joint, node, aten.view.default, row, node.args[1])
    return _made(joint, node, aten.as_strided.default, _made(joint, node, aten.view.default, row, [-1]), *node.args[1:])


def _scatter(joint: GraphModule, node: Node, source: Node) -> Node | None:
    """The memory of the source as one row with what `node` writes into it, in the shape of the source; None where sizes are no
    numbers."""
    value = fake(source)
    assert value is not None
    if not all(type(size) is int for size in value.shape):
        return None
    order = _order(value)
    row = _made(joint, node, aten.view.default, _in_order(joint, node, source, order), [-1])
    row = _made(joint, node, aten.as_strided_scatter.default, row, *node.args[1:])
    row = _made(joint, node, aten.view.default, row, [value.shape[dim] for dim in order])
    return _in_order(joint, node, row, [order.index(dim) for dim in range(len(order))])


def _order(value: Tensor) -> list[int]:
    """The dimensions in the order of memory, the slowest first; those of one element stay where nothing else moves."""
    sizes, steps = _hints(value)
    order = sorted(range(len(sizes)), key=lambda dim: -steps[dim] if sizes[dim] != 1 else 0)
    long = [dim for dim in order if sizes[dim] != 1]
    return order if long != sorted(long) else list(range(len(sizes)))


def _in_order(joint: GraphModule, node: Node, source: Node, order: Sequence[int]) -> Node:
    return source if list(order) == sorted(order) else _made(joint, node, aten.permute.default, source, list(order))


def _is_whole(result: Tensor, value: Tensor) -> bool:
    """Whether a view by strides is all of a memory, row by row; False for sizes that are no numbers."""
    numbers = (*result.shape, *result.stride(), result.storage_offset(), *value.shape)
    if not all(type(number) is int for number in numbers):
        return False
    return bool(result.storage_offset() == 0 and result.numel() == value.numel() and result.is_contiguous())


def _made(joint: GraphModule, like: Node, target: OpOverload, source: Node, *args: Any) -> Node:
    """A new operation, with the origin and the tags of `like`."""
    made = joint.graph.call_function(target, (source, *args))
    made.meta.update(like.meta)
    made.meta["val"] = target(*map_arg(made.args, lambda node: node.meta["val"]))
    made.meta["tensor_meta"] = tensor_metadata(made.meta["val"])
    return made
