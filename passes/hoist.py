"""What forward computes for backward alone is computed where its operands are.

    relu = relu(mm)                          relu = relu(mm)
    drop = mul(gt, relu)                     mask = le(relu, 0)
    ...                             ──▶      drop = mul(gt, relu)
    mask = le(relu, 0)                       ...
    return (out, mask)                       return (out, mask)

torch traces such operations with backward, so they are at the end of the forward graph. There all that they read has stayed in
memory, and Inductor writes kernels of their own for them. A saved view is moved as well: memory counts as saved from it on.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch.fx import Node

from graphoffload.analysis.saved_values import GraphPair, graph_outputs
from graphoffload.analysis.storages import example_nbytes, example_storage_nbytes, fake, only_views, storage_id
from graphoffload.passes.graphs import may_write, node_names
from graphoffload.torch_internals.operators import OpOverload

Place = tuple[int, int]
_NAMESPACES = ("aten", "prims")


def hoist_saved(pair: GraphPair) -> GraphPair:
    """Move each operation whose result only backward reads to right behind the last of its operands, with those before it that
    serve nothing else.

    They are moved if that takes no memory: their result is a view, or something else that they read is not saved and has as
    many bytes. Nothing is moved that is random or a collective, or past an operation that writes to memory, nor a view whose
    fake storage is not its operand's.
    """
    nodes = list(pair.forward.graph.nodes)
    moved = _hoisted(pair, nodes)
    if not moved:
        return pair
    places: dict[Node, Place] = {}
    writes = -1
    for at, node in enumerate(nodes):
        places[node] = (at, -1)
        if node in moved:
            behind, _ = max((places[operand] for operand in node.all_input_nodes), default=(min(at, moved[node]), 0))
            if behind >= writes:
                places[node] = (behind, at)
        elif may_write(node):
            writes = at
    ordered = sorted(nodes, key=places.__getitem__)
    for before, node in pairwise(ordered):
        if node in moved:
            before.append(node)
    return replace(pair, unhoisted=tuple(node.name for node in nodes))


def as_torch_has_it(pair: GraphPair) -> None:
    """Undo `hoist_saved` for a plan that keeps everything, whose code is plain torch's. Nothing else may have been moved."""
    nodes = node_names(pair.forward.graph)
    for before, node in pairwise(nodes[name] for name in pair.unhoisted):
        before.append(node)


def _hoisted(pair: GraphPair, nodes: list[Node]) -> dict[Node, int]:
    """The operations to be moved. Each has the place that it stands behind if it has no operands, as a constant has none."""
    outputs = graph_outputs(pair.forward)
    returned = {node for node in outputs[: pair.num_fwd_outputs] if node is not None}
    late: set[Node] = set()
    for node in reversed(nodes):
        readers = node.users if _is_movable(node) and node not in returned else ()
        if readers and all(user in late or user.op == "output" for user in readers):
            late.add(node)
    inputs = {storage_id(value) for node in nodes if node.op == "placeholder" and (value := fake(node)) is not None}
    saved = {storage_id(value) for node in outputs if node is not None and (value := fake(node)) is not None}
    found: dict[Node, int] = {}
    at = {node: place for place, node in enumerate(nodes)}
    for node in late.intersection(outputs[pair.num_fwd_outputs :]):
        value = fake(node)
        if value is None or _is_view_of_another(node):
            continue
        group, read = _with_operands(node, late)
        memory = {storage_id(of): example_storage_nbytes(of) for one in read if (of := fake(one)) is not None}
        freed = max((nbytes for identity, nbytes in memory.items() if identity not in inputs | saved), default=-1)
        if storage_id(value) in memory.keys() - inputs or freed >= example_nbytes(value):
            last = max(at[one] for one in read)
            found |= {one: min(last, found.get(one, last)) for one in group}
    return found


def _is_view_of_another(node: Node) -> bool:
    """Whether a view's fake storage is not that of its operand: of two equal operations torch has left out one, whose views are
    views of the other now. Nothing tells who else reads that memory, so it counts as saved from the end of forward on."""
    while only_views(node):
        (operand, *_) = node.all_input_nodes
        value, seen = fake(node), fake(operand)
        if value is not None and seen is not None and storage_id(value) != storage_id(seen):
            return True
        node = operand
    return False


def _with_operands(node: Node, late: set[Node]) -> tuple[set[Node], set[Node]]:
    """An operation with those before it that are late as well, and what they read besides."""
    group, read, pending = {node}, set[Node](), [node]
    while pending:
        for operand in pending.pop().all_input_nodes:
            if operand not in late:
                read.add(operand)
            elif operand not in group:
                group.add(operand)
                pending.append(operand)
    return group, read


def _is_movable(node: Node) -> bool:
    if node.op != "call_function":
        return False
    if isinstance(node.target, OpOverload):
        seeded = torch.Tag.nondeterministic_seeded in node.target.tags
        return node.target.namespace in _NAMESPACES and not seeded and not may_write(node)
    return not may_write(node)
