"""Regions that torch compiles once and calls several times (torch.compiler.nested_compile_region): one subgraph, many calls.

    joint graph    r1 = invoke_subgraph(fw, x, w);   y1 = r1[0];  s1 = r1[1];  w1 = r1[2]     w1 is w: backward needs it
                   r2 = invoke_subgraph(fw, y1, w);  y2 = r2[0];  s2 = r2[1];  w2 = r2[2]
                   ...
                   d1 = invoke_subgraph(bw, s1, w1, d2)

torch partitions a region on its own, before the graph around it. The values that the region's backward needs are results of the
region's forward. The plan of the outer graph decides on these, call by call. Nothing inside a region is planned.

The results of every call have the fake tensors of the one subgraph. By their storages s1 and s2 would share memory, and one
copy would be made for both: wrong gradients. w1 would not share w's memory, although it does. passes/regions.py therefore gives
each result a fake tensor of its own, or that of the input that it is.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Graph, GraphModule, Node


def calls_region(node: Node) -> bool:
    """Whether a node is the call of a region."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "invoke_subgraph"


def subgraph_of(node: Node) -> GraphModule | None:
    """The region that a node calls; None for other nodes, and if the graph belongs to no module."""
    called = node.args[0] if calls_region(node) else None
    found = getattr(node.graph.owning_module, str(called.target), None) if isinstance(called, Node) else None
    return found if isinstance(found, GraphModule) else None


def with_regions(graphs: Iterable[Graph]) -> list[Graph]:
    """The graphs, and each region that they call once."""
    found = dict.fromkeys(graphs)
    for graph in list(found):
        found.update((region.graph, None) for node in graph.nodes if (region := subgraph_of(node)) is not None)
    return list(found)
