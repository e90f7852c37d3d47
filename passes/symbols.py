"""Symbolic sizes in the backward graph: expressions over its symbol inputs, inserted as nodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import sympy
import torch
from torch.fx import Graph, Node, Proxy

from graphoffload.analysis.symbols import symbol_sources
from graphoffload.torch_internals.graphs import write_out


class Sizes:
    """Turns symbolic ints into nodes of one graph; each symbol is read once, right after the last placeholder.

    handles: names of placeholders that are handles, or will be.
    """

    def __init__(self, graph: Graph, handles: Collection[str] = ()) -> None:
        self._graph = graph
        self._sources = symbol_sources(graph, handles)
        self._read: dict[sympy.Symbol, Node] = {}

    def nodes(self, values: Sequence[int | torch.SymInt]) -> list[int | Node]:
        """Arguments for an op: ints as they are, symbolic ones as nodes at the graph's insertion point."""
        return [int(value) if isinstance(value, int) else self._node(value) for value in values]

    def _node(self, value: torch.SymInt) -> int | Node:
        expression = value.node.expr
        if expression.is_number:
            return int(expression)
        environment = {symbol: self._symbol(symbol) for symbol in expression.free_symbols}
        before = set(self._graph.nodes)
        result = write_out(expression, environment)
        for node in self._graph.nodes:
            if node not in before:
                arguments = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in node.args]
                node.meta["val"] = node.target(*arguments)
        return result.node if isinstance(result, Proxy) else int(result)

    def _symbol(self, symbol: sympy.Symbol) -> Node:
        if symbol not in self._read:
            node, dim = self._sources[symbol]
            if dim is None:
                self._read[symbol] = node
            else:
                last = self._graph.find_nodes(op="placeholder")[-1]
                with self._graph.inserting_after(last):
                    size = self._graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
                size.meta["val"] = node.meta["val"].shape[dim]
                self._read[symbol] = size
        return self._read[symbol]
