"""Forward half of a transfer.

x = producer(...)                      x = producer(...)
y = consumer(x)                        handle = offload(x)
...                          ──▶       y = consumer(x)
return (out, x)                        ...
                                       release(x, handle)
                                       return (out, handle)
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from graphoffload.analysis.saved_values import GraphPair
from graphoffload.analysis.storages import fake, group_by_storage, only_views, storage_id
from graphoffload.facts.plan import Plan
from graphoffload.passes.graphs import describe, find, finish, fresh_fake, node_names
from graphoffload.runtime.ops import HANDLE_DTYPE


def insert_offloads(graphs: GraphPair, plan: Plan) -> GraphPair:
    """Insert offload and release for every transfer, and save the handle instead of the activation.

    Several saved views of one storage are saved as one handle: it takes the place of the first, and the others leave the
    outputs.
    """
    if not plan.transfers:
        return graphs
    graph = graphs.forward.graph
    nodes = node_names(graph)
    output = next(iter(reversed(graph.nodes)))
    outputs: list[object] = list(output.args[0])
    kept, saved = outputs[: graphs.num_fwd_outputs], outputs[graphs.num_fwd_outputs :]
    for transfer in plan.transfers:
        source = find(nodes, transfer.tensor, plan.key)
        arguments = (plan.key, transfer.id)
        with graph.inserting_after(_after_inputs(find(nodes, transfer.offload_after, plan.key))):
            handle = graph.call_function(torch.ops.graphoffload.offload.default, (source, *arguments))
        describe(handle, source, fresh_fake(source, (1,), (1,), HANDLE_DTYPE))
        if transfer.release_after is None:
            before = output
        else:  # if that is the producer, the offload comes in between
            before = max(find(nodes, transfer.release_after, plan.key), handle).next
        with graph.inserting_before(before):
            release = graph.call_function(torch.ops.graphoffload.release.default, (source, handle, *arguments))
        describe(release, source, None)
        saved = _save_handle(saved, handle, plan.saved[transfer.tensor].views)
    output.args = ((*kept, *saved),) if isinstance(output.args[0], tuple) else ([*kept, *saved],)
    if "desc" in output.meta and len(output.meta["desc"]) != len(kept) + len(saved):
        output.meta.pop("desc")
    _erase_unread_views(graph, [nodes[transfer.tensor] for transfer in plan.transfers])
    finish(graphs.forward)
    return graphs


def _after_inputs(node: Node) -> Node:
    """The node itself; for an input, the last one."""
    return node.graph.find_nodes(op="placeholder")[-1] if node.op == "placeholder" else node


def _erase_unread_views(graph: Graph, sources: list[Node]) -> None:
    """Views that were made to be saved: torch makes them at the end of forward, after the release."""
    members = group_by_storage(graph.nodes)
    for source in sources:
        value = fake(source)
        assert value is not None
        for view in reversed(members[storage_id(value)]):
            if not view.users and only_views(view):
                graph.erase_node(view)


def _save_handle(saved: list[object], handle: Node, views: tuple[str, ...]) -> list[object]:
    placed, result = False, []
    for value in saved:
        if isinstance(value, Node) and value.name in views:
            if placed:
                continue
            placed = True
            if value.meta.get("saved_tensor_with_no_vc_check"):
                handle.meta["saved_tensor_with_no_vc_check"] = True
            value = handle
        result.append(value)
    assert placed, views
    return result
