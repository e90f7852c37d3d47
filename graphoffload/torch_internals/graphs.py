"""fx graphs: metadata of tensors, and expressions over symbolic sizes written as nodes. Seen in torch 2.11 to 2.15."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node, Proxy
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis


def tensor_metadata(value: torch.Tensor) -> Any:
    """What torch keeps in `node.meta["tensor_meta"]`. Without it: passes of torch that read it miss our nodes."""
    return _extract_tensor_metadata(value)


class _OverProxies(PythonReferenceAnalysis):
    """torch's own divides in sympy, and rounds numbers alone. Memory-efficient attention's statistics have as many numbers as
    32 * ceil(tokens / 32)."""

    @staticmethod
    def int_truediv(a: Any, b: Any) -> Any:
        """a / b."""
        return a / b

    @staticmethod
    def modular_indexing(a: Any, b: Any, c: Any) -> Any:
        """a // b % c."""
        return a // b % c

    @staticmethod
    def ceil_to_int(a: Any, dtype: torch.dtype) -> Any:
        """The least integer that is not below a."""
        return _called(math.ceil, a)

    @staticmethod
    def floor_to_int(a: Any, dtype: torch.dtype) -> Any:
        """The largest integer that is not above a."""
        return _called(math.floor, a)

    @staticmethod
    def trunc_to_int(a: Any, dtype: torch.dtype) -> Any:
        """Without what is behind the point."""
        return _called(math.trunc, a)

    @staticmethod
    def round_to_int(a: Any, dtype: torch.dtype) -> Any:
        """The nearest integer."""
        return _called(round, a)


def _called(function: Callable[[Any], Any], a: Any) -> Any:
    """A call of a function of Python, which no proxy notices by itself."""
    return a.tracer.create_proxy("call_function", function, (a,), {}) if isinstance(a, Proxy) else function(a)


def write_out(expression: sympy.Expr, environment: dict[sympy.Symbol, Node]) -> Any:
    """The value of an expression over nodes of one graph, whose operations become nodes: a proxy, or a number. Without it: no
    tensor of a symbolic size can be reloaded."""
    tracers = {node.graph: GraphAppendingTracer(node.graph) for node in environment.values()}  # a maximum takes one tracer
    proxies = {symbol: Proxy(node, tracers[node.graph]) for symbol, node in environment.items()}
    return sympy_interp(_OverProxies, proxies, expression)


def can_be_written(expression: sympy.Expr) -> bool:
    """Whether `write_out` knows all functions of an expression. Without it: a size of a new kind ends the compile."""
    graph = Graph()
    try:
        write_out(expression, {symbol: graph.placeholder(str(symbol)) for symbol in expression.free_symbols})
    except (ArithmeticError, AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return False
    return True
