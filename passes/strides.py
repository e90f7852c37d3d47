"""Backward gets the strides that forward's code really gives an activation.

Reloads return them:

    y = reload(handle, size, stride of the graph)   ──▶   y = reload(handle, size, stride of forward's code)

A compiler may give a tensor other strides than the graph says, and torch tells backward's compile the strides of forward's
results. Forward returns handles, so backward would be compiled for the graph's strides, and every reload would copy the bytes
into them on the device: on an H200, 14 of a ViT's 19 reloads. If strides are not known (a forward from torch's cache, another
compiler) the graph's stay, and runtime.layouts handles the difference. They also stay where only dimensions of one element have
others: that is the same memory, but what is computed from it would get other strides.

Convolutions read images in the layout of forward's convolutions:

    convolution_backward(gradient, x, ...)   ──▶   convolution_backward(gradient, clone(x, channels_last), ...)

Inductor runs forward's on channels_last memory, and saves x so, but a graph of backward alone has no convolution to tell it.
What is kept arrives in that layout; what was offloaded before forward laid it out, or is computed again, has the graph's.
cuDNN has no kernel for a depthwise convolution's backward on contiguous bfloat16, and torch's own takes four times as long. A
pointwise kernel that computes x again writes the clone instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from graphoffload.analysis.storages import fake, with_views
from graphoffload.passes.graphs import describe, finish, fresh_fake, node_names
from graphoffload.passes.prepare_joint import copy_graph
from graphoffload.runtime.layouts import is_dense, same_layout
from graphoffload.torch_internals.fake_tensors import FakeTensor


def reload_as_laid_out(module: GraphModule, key: str, strides: Mapping[int, Sequence[int]]) -> int:
    """Change the reloads of a plan's backward graph, in place, to the known strides by id; returns how many changed."""
    changed = 0
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.graphoffload.reload.default):
        handle, plan, id, size, stride, dtype = node.args
        known = strides.get(id)
        if plan != key or known is None or _is_viewed_by_strides(node):
            continue
        numbers = all(isinstance(number, int) for number in (*size, *stride))
        if numbers and is_dense(size, known) and not same_layout(size, known, stride):
            node.args = (handle, plan, id, size, list(known), dtype)
            describe(node, node, fresh_fake(node, size, known, dtype))
            changed += 1
    if changed:
        finish(module)
    return changed


def images_as_laid_out(module: GraphModule, inputs: Sequence[Any]) -> int:
    """Have convolutions of a backward graph read their images in channels_last memory, in place; returns how many are copied.

    `inputs`: fake tensors with the strides that the graph's inputs really have.
    """
    read = {node: readers for node in module.graph.nodes if (readers := _convolutions_of(node))}
    real = _propagated(module, inputs) if read else {}
    changed = 0
    for node, readers in read.items():
        value = fake(real[node.name])
        if value is None or value.dim() != 4 or value.is_contiguous(memory_format=torch.channels_last):
            continue
        with module.graph.inserting_before(min(readers)):
            clone = module.graph.call_function(torch.ops.aten.clone.default, (node,), {"memory_format": torch.channels_last})
        with value.fake_mode:  # type: ignore[attr-defined]
            describe(clone, node, value.clone(memory_format=torch.channels_last))
        for reader in readers:
            reader.replace_input_with(node, clone)
        changed += 1
    if changed:
        finish(module)
    return changed


_BACKWARD = torch.ops.aten.convolution_backward.default
_CONVOLUTIONS: dict[object, int] = {torch.ops.aten.convolution.default: 0, _BACKWARD: 1}
"""With the position of the images that each reads."""


def _convolutions_of(images: Node) -> list[Node]:
    """Those that read a node's images, one in backward among them; none of an input, which is as forward has saved it, or of a
    convolution's result, which Inductor lays out."""
    if images.op == "placeholder" or images.target in _CONVOLUTIONS:
        return []
    found = [user for user in images.users if (at := _CONVOLUTIONS.get(user.target)) is not None and user.args[at] is images]
    return found if any(user.target is _BACKWARD for user in found) else []


def _propagated(module: GraphModule, inputs: Sequence[Any]) -> dict[str, Node]:
    """The nodes of a copy by name, with the values that they have for these inputs; as Inductor does, views may copy."""
    copied = copy_graph(module)
    for view in copied.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        view.target = torch.ops.aten.reshape.default
    mode = next(value.fake_mode for value in inputs if isinstance(value, FakeTensor))
    FakeTensorProp(copied, mode).propagate_dont_convert_inputs(*inputs)
    return node_names(copied.graph)


def _is_viewed_by_strides(node: Node) -> bool:
    """Whether a view of a node's memory is taken by strides and offset instead of by shape."""
    return any(user.target is torch.ops.aten.as_strided.default for member in with_views(node) for user in member.users)
