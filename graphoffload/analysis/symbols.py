"""Sources of symbolic sizes in backward. An activation with a size that has no source is not offloaded.

A reload allocates memory of the activation's sizes. A symbolic size must come from another input of the backward graph, since
the handle that replaces the activation has none of its sizes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import sympy
import torch
from torch.fx import Graph, Node

from graphoffload.analysis.saved_values import GraphPair
from graphoffload.analysis.storages import fake
from graphoffload.facts.refusals import Refusal
from graphoffload.facts.saved_tensors import INPUT, SavedTable
from graphoffload.torch_internals.graphs import can_be_written


def symbol_sources(graph: Graph, handles: Collection[str] = ()) -> dict[sympy.Symbol, tuple[Node, int | None]]:
    """For each symbol a placeholder with its value (dim None), or a gradient or graph input with this size in dimension `dim`.

    Saved activations are no sources: a handle may replace each of them. `handles`: names of inputs that are such activations.
    """
    sources: dict[sympy.Symbol, tuple[Node, int | None]] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and isinstance(value.node.expr, sympy.Symbol):
            sources[value.node.expr] = (node, None)
    for node in graph.find_nodes(op="placeholder"):
        tensor = fake(node)
        if tensor is None or node.name in handles or not str(node.target).startswith(("tangents", "primals")):
            continue
        for dim, size in enumerate(tensor.shape):
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                sources.setdefault(size.node.expr, (node, dim))
    return sources


def missing_symbols(graph: Graph, tensor: torch.Tensor, handles: Collection[str] = ()) -> list[str]:
    """Symbols in a tensor's sizes and strides for which the graph has no source; `handles` as in symbol_sources."""
    known = symbol_sources(graph, handles)
    wanted = {
        symbol
        for value in (*tensor.shape, *tensor.stride(), tensor.storage_offset())
        if isinstance(value, torch.SymInt)
        for symbol in value.node.expr.free_symbols
    }
    return sorted(str(symbol) for symbol in wanted if symbol not in known)


def _unwritable(tensor: torch.Tensor) -> list[str]:
    """Sizes and strides of a tensor for which no nodes can be written."""
    symbolic = [value.node.expr for value in (*tensor.shape, *tensor.stride()) if isinstance(value, torch.SymInt)]
    return [str(expression) for expression in symbolic if not can_be_written(expression)]


def without_unknown_sizes(pair: GraphPair, table: SavedTable) -> SavedTable:
    """The table, with every activation refused that has a size without a source in backward, or by a function that is not
    known."""
    nodes = {node.name: node for node in pair.forward.graph.nodes}
    inputs = {name for tensor in table.tensors if tensor.op == INPUT for name in tensor.views}
    result = []
    for tensor in table.tensors:
        value = fake(nodes[tensor.name])
        assert value is not None
        missing = list[str]()
        if tensor.nbytes is None and tensor.eligible:
            missing = missing_symbols(pair.backward.graph, value, inputs) or _unwritable(value)
        if missing:
            why = Refusal.UNKNOWN_SIZE.because(symbols=", ".join(missing))
            tensor = replace(tensor, eligible=False, why_not=why)
        result.append(tensor)
    return SavedTable(tuple(result))
