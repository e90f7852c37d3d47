"""Names of modules in the metadata of a graph's nodes, replaced by those that the caller knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import GraphModule

_STACKS = ("nn_module_stack", "fwd_nn_module_stack")


def rename_modules(graph: GraphModule, renamed: Callable[[Mapping[str, Any]], dict[str, Any]]) -> None:
    """Write what `renamed` makes of each node's stack of modules, in a graph and the graphs inside it."""
    for module in graph.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            for kind in _STACKS:
                if stack := node.meta.get(kind):
                    node.meta[kind] = renamed(stack)
