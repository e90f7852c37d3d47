"""Reloads return the strides that forward's code really gives an activation.

    y = reload(handle, size, stride of the graph)   ──▶   y = reload(handle, size, stride of forward's code)

A compiler may give a tensor other strides than the graph says, and torch tells backward's compile the strides of forward's
results. Forward returns handles, so backward would be compiled for the graph's strides, and every reload would copy the bytes
into them on the device: on an H200, 14 of a ViT's 19 reloads. If strides are not known (a forward from torch's cache, another
compiler) the graph's stay, and runtime.layouts handles the difference. They also stay where only dimensions of one element have
others: that is the same memory, but what is computed from it would get other strides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.fx import GraphModule, Node

from graphoffload.analysis.storages import with_views
from graphoffload.passes.graphs import describe, finish, fresh_fake
from graphoffload.runtime.layouts import is_dense, same_layout


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


def _is_viewed_by_strides(node: Node) -> bool:
    """Whether a view of a node's memory is taken by strides and offset instead of by shape."""
    return any(user.target is torch.ops.aten.as_strided.default for member in with_views(node) for user in member.users)
