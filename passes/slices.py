"""MLPs of a Dynamo graph, computed for a slice of the tokens at a time.

    x ─ linear ─ silu ─ linear ─ y        x ─ split ─┬─ linear ─ silu ─ linear ─┬─ cat ─ y
                                                     └─ linear ─ silu ─ linear ─┘

Nothing is marked: what each slice saves is kept, recomputed or offloaded by the plan, like everything else. Each token's result
is the same; gradients of parameters are sums over slices, so they round otherwise.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from graphoffload.analysis.token_regions import TokenRegion


def compute_in_slices(module: GraphModule, regions: Sequence[TokenRegion], slices: int) -> GraphModule:
    """Write the regions as so many slices each, in place."""
    graph = module.graph
    joined_of: dict[Node, Node] = {}  # a region may begin with what another one ended in
    for region in regions:
        given = [joined_of.get(whole, whole) for whole in region.whole]
        first, last = region.nodes[0], region.nodes[-1]
        size = -(-region.length // slices)
        _clear(region)
        with graph.inserting_before(first):
            splits = {whole: graph.call_function(torch.split, (whole, size), {"dim": region.dim}) for whole in given}
            parts = {whole: _like(split, first) for whole, split in splits.items()}
            results = [_slice(graph, region, parts, at) for at in range(-(-region.length // size))]
            joined = _like(graph.call_function(torch.cat, (results,), {"dim": region.dim}), last)
        joined.meta["example_value"] = last.meta["example_value"]
        joined_of[last] = joined
        last.replace_all_uses_with(joined)
        for node in reversed(region.nodes):
            graph.erase_node(node)
    module.recompile()
    return module


def _clear(region: TokenRegion) -> None:
    """Put what stands between a region's nodes before it: views of what was there already."""
    inside, node, last = set(region.nodes), region.nodes[0], region.nodes[-1]
    while node is not last:
        node, here = node.next, node
        if here not in inside:
            region.nodes[0].prepend(here)


def _slice(graph: Graph, region: TokenRegion, parts: Mapping[Node, Node], at: int) -> Node:
    """One slice of a region: its nodes again, on one part of what holds all tokens."""
    made: dict[Node, Node] = {}
    for whole, part in parts.items():
        made[whole] = _like(graph.call_function(operator.getitem, (part, at)), region.nodes[0])
    for node in region.nodes:
        made[node] = graph.node_copy(node, lambda given: made.get(given, given))
        made[node].meta.pop("example_value", None)
    return made[region.nodes[-1]]


def _like(node: Node, other: Node) -> Node:
    """Give a new node the module and the place in the user's code of another one."""
    node.meta.update({name: value for name, value in other.meta.items() if name != "example_value"})
    return node
