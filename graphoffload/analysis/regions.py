"""Regions that torch compiles once and calls often (torch.compiler.nested_compile_region): one subgraph, many calls.

    joint graph    r1 = invoke_subgraph(fw, x, w);   y1 = r1[0];  s1 = r1[1];  w1 = r1[2]     w1 is w: backward needs it
                   r2 = invoke_subgraph(fw, y1, w);  y2 = r2[0];  s2 = r2[1];  w2 = r2[2]
                   ...
                   d1 = invoke_subgraph(bw, s1, w1, d2)

torch partitions a region by itself, before the graph around it. What its backward needs leaves it as a result of its
forward, and is planned there, call by call; so within a region nothing is planned, and torch's partition stands.

Every call's results have the fake tensors of the one subgraph. By their storages s1 and s2 would be one memory, of which one
copy is made (wrong gradients, once), and w1 would not be w. passes/regions.py gives each its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Graph, GraphModule, Node


def calls_region(node: Node) -> bool:
    """Whether a node is the call of a region."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "invoke_subgraph"


def subgraph_of(node: Node) -> GraphModule | None:
    """The region that a node calls; None for other nodes, and where the graph is no module's."""
    called = node.args[0] if calls_region(node) else None
    found = getattr(node.graph.owning_module, str(called.target), None) if isinstance(called, Node) else None
    return found if isinstance(found, GraphModule) else None


def with_regions(graphs: Iterable[Graph]) -> list[Graph]:
    """Graphs and, once each, the regions that they call."""
    found = dict.fromkeys(graphs)
    for graph in list(found):
        found.update((region.graph, None) for node in graph.nodes if (region := subgraph_of(node)) is not None)
    return list(found)
