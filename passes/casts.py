"""Casts to the type that a value has already are left out.

    c = cast(x, float32)             c = cast(x, bfloat16)
    d = cast(c, bfloat16)   ──▶      mm(x), mm(c)             ──▶      mm(x), mm(x)
    mm(x), mm(d)            Inductor                          here

Adapters cast what they read to their own type, and autocast casts it back. Inductor joins the two casts in the joint graph, and
removes what is left after the partition. By then it is too late for a plan: x and c are two tensors to save, to copy and to
compute again, and under a plan Inductor removes no copies (compiler/inner_compile.py).
"""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

from graphoffload.analysis.callers import is_view
from graphoffload.analysis.storages import covers_storage, fake, group_by_storage, same_size, storage_id
from graphoffload.passes.graphs import may_write
from graphoffload.torch_internals import checkpoint_tags

_CAST = torch.ops.prims.convert_element_type.default


def leave_out_casts(module: GraphModule) -> None:
    """Have what reads a cast to the same type read its operand instead.

    A cast stays if it is a copy that somebody may tell from its operand: of an input, which may be written to before backward;
    one that is returned, or whose operand is; one of memory that is written to; and one that the user has tagged to be saved or
    offloaded. So it does if it is seen in another type (`view(dtype)`). Writes to `module`, which must be a copy.
    """
    graph = module.graph
    casts = [node for node in graph.find_nodes(op="call_function", target=_CAST) if _changes_nothing(node)]
    if not casts:
        return
    members, others = group_by_storage(graph.nodes), _memory_of_others(graph)
    for node in casts:
        (source,) = node.all_input_nodes
        value, memory = fake(node), fake(source)
        assert value is not None
        assert memory is not None
        if not others.isdisjoint((node, storage_id(value), _whole(source), storage_id(memory))):
            continue
        views = [view for view in members[storage_id(value)] if view is not node]
        if any(view.meta["val"].dtype != memory.dtype for view in views):
            continue
        del members[storage_id(value)]
        for view in views:
            seen = fake(view)
            assert seen is not None
            with seen.fake_mode:  # type: ignore[attr-defined]
                view.meta["val"] = memory.as_strided(seen.size(), seen.stride(), seen.storage_offset())
        members[storage_id(memory)].extend(views)
        node.replace_all_uses_with(source)
        graph.erase_node(node)


def _changes_nothing(node: Node) -> bool:
    """Whether a cast's result has the values, the type and the layout of its operand, and as much memory."""
    value, source = fake(node), fake(node.args[0]) if isinstance(node.args[0], Node) else None
    if value is None or source is None or value.dtype != source.dtype or value.device != source.device:
        return False
    if (tag := checkpoint_tags.tag_of(node.meta)) is not None and tag != "prefer_recompute":
        return False
    same = all(map(same_size, (*value.shape, *value.stride()), (*source.shape, *source.stride())))
    return same and covers_storage(source) and storage_id(value) != storage_id(source)


def _memory_of_others(graph: Graph) -> set[int | Node]:
    """Memory that somebody else may see or write to: of inputs, of outputs, and of operands of what may write. By storage, and
    by the node that it is a view of: once Inductor has removed a copy, views of it are views of what was copied, and their fake
    storage is still that of the copy."""
    found = set[int | Node]()
    for node in graph.nodes:
        shown: tuple[Node, ...] | list[Node] = (node,) if node.op == "placeholder" else ()
        if node.op == "output" or may_write(node):
            shown = node.all_input_nodes
        found.update(_whole(one) for one in shown)
        found.update(storage_id(value) for one in shown if (value := fake(one)) is not None)
    return found


def _whole(node: Node) -> Node:
    """What a node is a view of; itself, if it is none."""
    while is_view(node):
        (node, *_) = node.all_input_nodes
    return node
