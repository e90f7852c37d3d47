"""Where a backward graph can read a symbolic size from."""

from __future__ import annotations

import sympy
import torch
from torch.fx import Graph, Node

from graphoffload.analysis.storages import fake


def symbol_sources(graph: Graph) -> dict[sympy.Symbol, tuple[Node, int | None]]:
    """For each symbol a placeholder that is it (dim None), or a gradient or graph input whose size `dim` is it.

    Saved activations are no source: the handle that takes an activation's place has none of its sizes.
    """
    sources: dict[sympy.Symbol, tuple[Node, int | None]] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and isinstance(value.node.expr, sympy.Symbol):
            sources[value.node.expr] = (node, None)
    for node in graph.find_nodes(op="placeholder"):
        tensor = fake(node)
        if tensor is None or not str(node.target).startswith(("tangents", "primals")):
            continue
        for dim, size in enumerate(tensor.shape):
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                sources.setdefault(size.node.expr, (node, dim))
    return sources


def missing_symbols(graph: Graph, tensor: torch.Tensor) -> list[str]:
    """Symbols in a tensor's sizes and strides that the graph has no source for."""
    known = symbol_sources(graph)
    wanted = {
        symbol
        for value in (*tensor.shape, *tensor.stride(), tensor.storage_offset())
        if isinstance(value, torch.SymInt)
        for symbol in value.node.expr.free_symbols
    }
    return sorted(str(symbol) for symbol in wanted if symbol not in known)
