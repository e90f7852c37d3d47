"""Backward half of a transfer.

    x = placeholder                        handle = placeholder
    ...                                    ...
    a = earlier(...)             ──▶       y = reload(handle, size, stride)     issued in time for
    ...                                    a = earlier(...)
    b = reader(view(x))                    wait(y, handle)                      the first reader
                                           b = reader(view(y))

y has the strides that this graph was compiled for. Saved views are taken of y by size, stride and offset. View operations
before the wait move to after it: they read nothing, but a compiler may fold a reader into them.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from graphoffload.analysis.saved_values import GraphPair
from graphoffload.analysis.storages import fake, same_size
from graphoffload.facts.plan import Plan, Transfer
from graphoffload.passes.graphs import describe, find, finish, fresh_fake, node_names, placeholders_first
from graphoffload.passes.symbols import Sizes
from graphoffload.runtime.layouts import contiguous_strides, is_dense
from graphoffload.runtime.ops import HANDLE_DTYPE


def insert_reloads(graphs: GraphPair, plan: Plan) -> GraphPair:
    """Insert reload and wait for every transfer, and read the reloaded tensor instead of the placeholder."""
    if not plan.transfers:
        return graphs
    graph = graphs.backward.graph
    placeholders_first(graph)
    sources, nodes = node_names(graphs.forward.graph), node_names(graph)
    at = {node: position for position, node in enumerate(graph.nodes)}

    def deadline(transfer: Transfer) -> tuple[int, int, int]:
        """Reloads that are issued at one place queue on one stream: the one with the earliest reader is issued first."""
        issued, needed = (find(nodes, name, plan.key) for name in (transfer.reload_before, transfer.wait_before))
        return at[issued], at[needed], transfer.id

    origins = {transfer.id: find(sources, transfer.tensor, plan.key) for transfer in plan.transfers}
    sizes = Sizes(graph, {name for transfer in plan.transfers for name in plan.saved[transfer.tensor].views})
    for transfer in sorted(plan.transfers, key=deadline):
        _reload_one(nodes, transfer, plan, origins[transfer.id], sizes)
    finish(graphs.backward)
    return graphs


def _reload_one(nodes: dict[str, Node], transfer: Transfer, plan: Plan, source: Node, sizes: Sizes) -> None:
    placeholders = [find(nodes, name, plan.key) for name in plan.saved[transfer.tensor].views]
    views = [fake(placeholder) for placeholder in placeholders]
    handle, graph = placeholders[0], placeholders[0].graph
    handle.meta = {**handle.meta}  # shared with the joint graph until here
    handle.meta.pop("tensor_meta", None)
    value = fake(source)
    assert value is not None
    with graph.inserting_before(find(nodes, transfer.reload_before, plan.key)):
        layout = (sizes.nodes(value.shape), sizes.nodes(_strides(value)))
        arguments = (handle, plan.key, transfer.id, *layout, value.dtype)
        y = graph.call_function(torch.ops.graphoffload.reload.default, arguments)
    describe(y, handle, fresh_fake(source, value.shape, _strides(value), value.dtype))
    first = find(nodes, transfer.wait_before, plan.key)
    with graph.inserting_before(first):
        wait = graph.call_function(torch.ops.graphoffload.wait.default, (y, handle, plan.key, transfer.id))
    describe(wait, handle, None)
    after: Node = wait
    for placeholder, view in zip(placeholders, views, strict=True):
        assert view is not None
        new = y
        if not _is_whole(view, value):
            with graph.inserting_after(after):
                new = graph.call_function(torch.ops.aten.as_strided.default, (y,))
            with graph.inserting_before(new):
                offset = sizes.nodes([_offset(view, value)])[0]
                new.args = (y, sizes.nodes(view.shape), sizes.nodes(view.stride()), offset)
            y_value = fake(y)
            assert y_value is not None
            with y_value.fake_mode:  # type: ignore[attr-defined]
                describe(new, placeholder, y_value.as_strided(view.shape, view.stride(), _offset(view, value)))
            after = new
        placeholder.replace_all_uses_with(new, delete_user_cb=lambda user: user not in (y, wait))
        after = _views_behind(new, wait, after)
        if placeholder is not handle:
            graph.erase_node(placeholder)
    describe(handle, handle, fresh_fake(source, (1,), (1,), HANDLE_DTYPE))


def _strides(value: torch.Tensor) -> tuple[int | torch.SymInt, ...]:
    """Strides of the copy: the value's own if its elements fill one block, else row-major; symbolic ones stay as they are."""
    if isinstance(value.numel(), int) and not is_dense(value.shape, value.stride()):
        return contiguous_strides(value.shape)
    return tuple(value.stride())


def _is_whole(view: torch.Tensor, source: torch.Tensor) -> bool:
    return (
        view.dim() == source.dim()
        and all(same_size(a, b) for a, b in zip(view.shape, source.shape, strict=True))
        and all(same_size(a, b) for a, b in zip(view.stride(), source.stride(), strict=True))
        and same_size(view.storage_offset(), source.storage_offset())
    )


def _offset(view: torch.Tensor, source: torch.Tensor) -> int | torch.SymInt:
    return view.storage_offset() - source.storage_offset()


def _views_behind(new: Node, wait: Node, after: Node) -> Node:
    """Move views of `new` that come before the wait to right after `after`; returns the last node moved."""
    pending, views = [new], set()
    while pending:
        for user in pending.pop().users:
            if user.op == "call_function" and user < wait and user is not new and "graphoffload" not in str(user.target):
                views.add(user)
                pending.append(user)
    for view in sorted(views):
        after.append(view)
        after = view
    return after
