"""Memory that is kept is saved once.

    return (out, x, transpose, slice)      return (out, x)

    x, transpose, slice = placeholders     x = placeholder
    ...                          ──▶       transpose = permute(x, ...)
    b = reader(transpose)                  slice = slice(x, ...)
                                           ...

torch counts every saved value that is not an alias of an input or an output as donated, one by one. Inductor then overwrites x
after the last reader of x, while a reader of the transpose is still to come. Min-cut by itself saves several views of one
storage, and does so more often under recompute tags. An offloaded storage is already saved as one handle.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from graphoffload.analysis.collectives import waited
from graphoffload.analysis.saved_values import GraphPair, graph_outputs, saved_placeholders
from graphoffload.analysis.storages import fake, group_by_storage, storage_id
from graphoffload.analysis.symbols import symbol_sources
from graphoffload.facts.plan import Plan
from graphoffload.passes.graphs import describe, finish, fresh_fake, placeholders_first
from graphoffload.passes.symbols import Sizes
from graphoffload.torch_internals.operators import OpOverload, schema_of

Pair = tuple[Node, Node]
_NO_CHECK = "saved_tensor_with_no_vc_check"  # torch keeps these last among the saved values


def save_memory_once(graphs: GraphPair, plan: Plan) -> GraphPair:
    """Save one of several saved values that share memory; backward takes the others as views of it.

    If backward cannot take a view, since a size in it is unknown there, forward saves a copy instead. The plan does not matter
    here.
    """
    groups = shared_memory(graphs)
    if not groups:
        return graphs
    placeholders_first(graphs.backward.graph)
    sizes = Sizes(graphs.backward.graph)
    for root, pairs in groups:
        if not _save_one(graphs, root, pairs, sizes):
            _save_copies(graphs, pairs[1:])
    finish(graphs.forward)
    finish(graphs.backward)
    return graphs


def shared_memory(graphs: GraphPair) -> list[tuple[Node, list[Pair]]]:
    """(first value in it, [(forward node, backward placeholder), …]) of each storage that is saved more than once.

    Memory of inputs and of model outputs is never donated, so torch may save it more than once.
    """
    members = group_by_storage(graphs.forward.graph.nodes)
    outputs = graph_outputs(graphs.forward)[: graphs.num_fwd_outputs]
    kept = set(group_by_storage(node for node in outputs if node is not None))
    saved: dict[int, list[Pair]] = {}
    for node, placeholder in saved_placeholders(graphs):
        value = fake(node)
        if value is not None:
            saved.setdefault(storage_id(value), []).append((node, placeholder))
    return [
        (next(iter(waited(members[identity])), members[identity][0]), pairs)
        for identity, pairs in saved.items()
        if len(pairs) > 1 and identity not in kept and members[identity][0].op == "call_function"
    ]


def _save_one(graphs: GraphPair, root: Node, pairs: list[Pair], sizes: Sizes) -> bool:
    """Save the first value that all others are views of, one of `pairs` or else `root`; False if there is none."""
    graph = graphs.backward.graph
    known = set(symbol_sources(graph))
    for source in dict.fromkeys((*(node for node, _ in pairs), root)):
        chains = [_views(source, node, root) for node, _ in pairs]
        views = [view for chain in chains for view in chain or ()]
        if None not in chains and all(_symbols(view) <= known for view in views):
            break
    else:
        return False
    inputs = dict(pairs)
    if source not in inputs:
        first, old = pairs[0]
        source.meta = {key: value for key, value in source.meta.items() if key != _NO_CHECK}
        if first.meta.get(_NO_CHECK):
            source.meta[_NO_CHECK] = True
        with graph.inserting_before(old):
            inputs[source] = describe(graph.placeholder(source.name), source, source.meta["val"])
        _change_saved(graphs, {first: source})
    made = {source: inputs[source]}
    anchor = graph.find_nodes(op="placeholder")[-1].next
    with graph.inserting_before(anchor):
        for view in views:
            if view not in made:
                made[view] = _take_again(graph, view, made, sizes)
    for node, placeholder in pairs:
        if node is not source:
            placeholder.replace_all_uses_with(made[node])
            graph.erase_node(placeholder)
    _change_saved(graphs, {node: None for node, _ in pairs if node is not source})
    return True


def _views(source: Node, node: Node, root: Node) -> list[Node] | None:
    """Operations that make `node` from `source`, in order; None if it is not a view of it."""
    chain: list[Node] = []
    while node is not source:
        tensors = [other for other in node.all_input_nodes if not isinstance(other.meta.get("val"), (int, torch.SymInt))]
        mutates = isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable
        if node is root or node.op != "call_function" or len(tensors) != 1 or mutates:
            return None
        chain.append(node)
        node = tensors[0]
    return chain[::-1]


def _symbols(view: Node) -> set[object]:
    values = (node.meta.get("val") for node in view.all_input_nodes)
    return {symbol for value in values if isinstance(value, torch.SymInt) for symbol in value.node.expr.free_symbols}


def _take_again(graph: Graph, view: Node, made: dict[Node, Node], sizes: Sizes) -> Node:
    def argument(node: Node) -> Node | int:
        return made[node] if node in made else sizes.nodes([node.meta["val"]])[0]

    target: Callable[..., object] = view.target  # type: ignore[assignment]
    again = graph.call_function(target, map_arg(view.args, argument), map_arg(view.kwargs, argument))
    return describe(again, view, view.meta["val"])


def _save_copies(graphs: GraphPair, pairs: list[Pair]) -> None:
    graph = graphs.forward.graph
    output = next(iter(reversed(graph.nodes)))
    for node, placeholder in pairs:
        value = fake(node)
        assert value is not None
        with value.fake_mode:  # type: ignore[attr-defined]
            copy = value.clone()
        with graph.inserting_before(output):
            clone = describe(graph.call_function(torch.ops.aten.clone.default, (node,)), node, copy)
        if node.meta.get(_NO_CHECK):
            clone.meta[_NO_CHECK] = True
        placeholder.meta = {**placeholder.meta}  # shared with the joint graph until here
        describe(placeholder, placeholder, fresh_fake(node, copy.shape, copy.stride(), copy.dtype))
        _change_saved(graphs, {node: clone})


def _change_saved(graphs: GraphPair, change: dict[Node, Node | None]) -> None:
    """Replace values among the saved ones; None drops one."""
    output = next(iter(reversed(graphs.forward.graph.nodes)))
    values: list[object] = list(output.args[0])
    first = graphs.num_fwd_outputs
    saved = [change.get(value, value) if isinstance(value, Node) else value for value in values[first:]]
    saved = [new for new, old in zip(saved, values[first:], strict=True) if new is not None or old is None]
    output.args = ((*values[:first], *saved),) if isinstance(output.args[0], tuple) else ([*values[:first], *saved],)
    if "desc" in output.meta and len(output.meta["desc"]) != first + len(saved):
        output.meta.pop("desc")
