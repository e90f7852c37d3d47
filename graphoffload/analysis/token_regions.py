"""Parts of a Dynamo graph that compute each token from that token alone, and hold much more than they are given: MLPs.

    x (tokens, 4096) ─▶ linear (14336) ─▶ silu ─▶ mul ─▶ linear (4096) ─▶ y        held inside: 4 x 14336 for each token
                   └──▶ linear (14336) ───────────▲                                at the ends: 2 x 4096

Such a part gives the same where it runs for a slice of the tokens at a time (passes/slices.py), and holds a slice's share.
What may be in one is a list of operations: an operation that is not known here may read other tokens.
Wrong when: a function of the list is given a meaning of its own by a tensor subclass. Subclasses are in no region.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from graphoffload.analysis.token_functions import arguments, casts, is_linear, is_view, tokens_of, value_of
from graphoffload.torch_internals.fake_tensors import FakeTensor

_POINTWISE: set[Any] = {
    F.silu, F.gelu, F.relu, F.relu6, F.elu, F.leaky_relu, F.mish, F.softplus, F.hardswish, F.sigmoid, F.tanh, F.logsigmoid,
    torch.sigmoid, torch.tanh, torch.relu, torch.exp, torch.abs, torch.square, torch.sqrt, torch.rsqrt, torch.neg, torch.erf,
    torch.pow, torch.clamp, torch.mul, torch.add, torch.sub, torch.div, torch.maximum, torch.minimum,
    operator.mul, operator.add, operator.sub, operator.truediv, operator.neg, operator.pow,
}  # fmt: skip
_METHODS = {
    "float", "half", "bfloat16", "double", "sigmoid", "tanh", "relu", "exp", "abs", "square", "sqrt", "rsqrt", "neg",
    "pow", "clamp", "mul", "add", "sub", "div", "clone",
}  # fmt: skip
_STALE = {
    "as_strided_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_",
}  # fmt: skip
"""They give a tensor another shape in place, and so what Dynamo left of its value: what that says was not so before."""
_MODES = {"_enter_inference_mode"}
"""Splitting tokens makes views, which are not traced in such a mode."""
_WIDER = 2.0
"""A region holds at least so many times the bytes of its inputs and its output."""


@dataclass(slots=True)
class TokenRegion:
    """Operations of a graph that compute each token by itself.

    Attributes:
        nodes: in their order, nothing else between them but views of what was there before the first one; the last one is all
            that others read, and it is contiguous.
        whole: values from outside that hold all tokens, in the order of their first use. dim: the dimension of the tokens,
            counted from the last one, so the same for all of them. length: its size.
        inside_bytes: what the nodes but for the last one compute.
    """

    nodes: tuple[Node, ...]
    whole: tuple[Node, ...]
    dim: int
    length: int
    inside_bytes: int


def regions_by_token(graph: Graph, slices: int) -> list[TokenRegion]:
    """The regions of a graph that may be computed in so many slices, in their order; no node is in two."""
    found: list[TokenRegion] = []
    if any(_misleads(node) for body in _bodies(graph) for node in body.nodes):
        return found
    for run in _runs(graph):
        first, members = 0, set(run)
        while first < len(run):
            region = _region(run, first, slices, members) if _widens(run[first]) else None
            if region is not None:
                found.append(region)
            first += len(region.nodes) if region is not None else 1
    return found


def _bodies(graph: Graph) -> Iterator[Graph]:
    """A graph and those that its operations run."""
    yield graph
    owner = graph.owning_module
    modules = owner.modules() if owner is not None else ()
    yield from (body.graph for body in modules if isinstance(body, GraphModule) and body is not owner)


def _misleads(node: Node) -> bool:
    """Whether values of the graph, or what can be computed there, are not what they seem."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op in ("call_method", "call_function") and (name in _STALE or name in _MODES)


def _runs(graph: Graph) -> Iterator[list[Node]]:
    """Operations on tokens that follow each other. Nothing between them can write to what they read, and nothing reads it but
    views of what was there before, such as a packed matrix in the shape that its product takes."""
    run: list[Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        if is_view(node) and not any(given in run for given in node.all_input_nodes):
            continue
        if _by_token(node):
            run.append(node)
        elif run:
            yield run
            run = []


def _region(run: Sequence[Node], first: int, slices: int, members: Collection[Node]) -> TokenRegion | None:
    """The shortest region that begins here and ends in one value that is no wider than what it is given. members: of `run`."""
    inside: set[Node] = set()
    waiting: set[Node] = set()  # what operations further on read
    width = value_of(_on_tokens(run[first])[0]).shape[-1]
    for last in range(first, len(run)):
        node = run[last]
        inside.add(node)
        if _is_unread(node):
            continue
        if not node.users:
            return None  # nothing that others read comes of it
        waiting = {other for other in waiting if not inside.issuperset(other.users)} | {node}
        if waiting == {node} and _may_end(value_of(node), width):
            nodes = tuple(run[first : last + 1])
            region = _sliced(nodes, inside, slices)
            if region is None:
                return None
            ends = _nbytes(node) + sum(map(_nbytes, region.whole))
            if region.inside_bytes >= _WIDER * ends:
                return region
        if any(user not in members for user in node.users):
            return None
    return None


def _may_end(value: Any, width: int) -> bool:
    """Whether a value may be what a region ends in: the slices' results side by side have its strides."""
    return isinstance(value, Tensor) and value.dim() > 1 and value.shape[-1] <= width and value.is_contiguous()


def _sliced(nodes: tuple[Node, ...], inside: set[Node], slices: int) -> TokenRegion | None:
    """A region of these nodes; None where something has other tokens."""
    shape = value_of(nodes[-1]).shape
    dim = _dimension(shape, slices)
    if dim is None:
        return None
    length, whole = shape[dim], []
    for node in nodes:
        if any(part.dim() != len(shape) or part.shape[dim] != length for part in _made(node)):
            return None
        for given in _on_tokens(node):
            operand = value_of(given)
            if given in inside or given in whole:
                continue
            if not isinstance(operand, Tensor):
                return None
            if operand.dim() < -dim or operand.shape[dim] == 1:
                continue  # the same for every token
            if operand.dim() != len(shape) or operand.shape[dim] != length:
                return None
            whole.append(given)
    if any(given in inside or given in whole for node in nodes for given in _parameters(node)):
        return None
    held = sum(_nbytes(node) for node in nodes[:-1] if isinstance(value_of(node), Tensor))
    return TokenRegion(nodes, tuple(whole), dim, length, held)


def _dimension(shape: Sequence[int], slices: int) -> int | None:
    """The dimension to slice, counted from the last: the first one that slices divide, else the longest.

    Slices but for the last one are of two tokens and more. A single one goes with any number of others, so that a mistake here
    would be no error but a wrong result.
    """
    before = shape[:-1]
    even = [at for at, size in enumerate(before) if size % slices == 0 and size > slices]
    at = even[0] if even else max(range(len(before)), key=lambda at: before[at])
    return at - len(shape) if before[at] > slices else None


def _by_token(node: Node) -> bool:
    """Whether an operation computes each token from that token, writes to nothing and draws no random number."""
    value = value_of(node)
    parts = value if isinstance(value, tuple | list) else [value]
    if not parts or not all(_is_plain(part) for part in parts):
        return False
    if tokens_of(node) is not None:
        return all(_is_plain(value_of(given)) for given in node.args[2:] if isinstance(given, Node))
    if not all(_is_plain(value_of(given)) or isinstance(value_of(given), tuple | list) for given in node.all_input_nodes):
        return False
    if node.op == "call_function" and node.target is F.dropout:
        return _is_idle_dropout(node)
    if any(flag is True for flag in (*node.args[1:], *node.kwargs.values())):
        return False  # F.relu(x, True) writes over its input
    if node.kwargs.get("inplace") or "out" in node.kwargs:
        return False
    if node.op == "call_method":
        return node.target in _METHODS or (node.target == "to" and casts(node)) or (node.target == "chunk" and _of_last(node))
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return _is_part(node) or _is_unread(node)
    if node.target is torch.chunk:
        return _of_last(node)
    return is_linear(node) if node.target is F.linear else node.target in _POINTWISE


def _is_part(node: Node) -> bool:
    """Whether it is one of several chunks, or the product of packed weights: what else that gives holds no tokens."""
    source, at = node.args
    given = value_of(source)
    if not isinstance(source, Node) or not isinstance(at, int) or not isinstance(given, tuple | list):
        return False
    return tokens_of(source) is None or at == 0


def _is_unread(node: Node) -> bool:
    """Whether it takes what a function gives beside a product that others read, and nobody reads it."""
    if node.users or node.target is not operator.getitem or not isinstance(node.args[0], Node):
        return False
    return tokens_of(node.args[0]) is not None and any(other.users for other in node.args[0].users)


def _of_last(node: Node) -> bool:
    given = arguments(node, "input", "chunks", "dim")
    return given.get("dim", 0) in (-1, value_of(given["input"]).dim() - 1)


def _is_idle_dropout(node: Node) -> bool:
    given = arguments(node, "input", "p", "training", "inplace")
    return (given.get("p", 0.5) == 0 or given.get("training", True) is False) and not given.get("inplace")


def _on_tokens(node: Node) -> list[Node]:
    """The operands whose tokens an operation computes on: all but the parameters of a linear."""
    if node.target is F.linear:
        return [arguments(node, "input")["input"]]
    packed = tokens_of(node)
    return list(node.all_input_nodes) if packed is None else [packed]


def _made(node: Node) -> Sequence[Any]:
    """The values that an operation computes for the tokens; beside the product of packed weights, others may be returned."""
    value = value_of(node)
    if _is_unread(node):
        return []
    if isinstance(value, Tensor):
        return [value]
    return list(value) if tokens_of(node) is None else [value[0]]


def _parameters(node: Node) -> list[Node]:
    """The operands of a linear that all tokens share. One may be its tokens as well, where it is given them twice."""
    if node.target is F.linear:
        given = arguments(node, "input", "weight", "bias")
        return [value for name in ("weight", "bias") if isinstance(value := given.get(name), Node)]
    packed = tokens_of(node)
    if packed is None:
        return []
    operands = [value for value in node.args[2:] if isinstance(value, Node)]
    operands.remove(packed)
    return operands


def _widens(node: Node) -> bool:
    packed = tokens_of(node)
    if packed is not None:
        return bool(value_of(node)[0].shape[-1] > value_of(packed).shape[-1])
    return node.target is F.linear and value_of(node).shape[-1] > value_of(_on_tokens(node)[0]).shape[-1]


def _is_plain(value: Any) -> bool:
    """A tensor that is no subclass, of sizes that are numbers: to look at a symbol would make it one."""
    plain = isinstance(value, Tensor) and type(value) in (FakeTensor, Tensor, torch.nn.Parameter)
    return plain and all(type(size) is int for size in value.shape)


def _nbytes(node: Node) -> int:
    value = value_of(node)
    return int(math.prod(value.shape) * value.element_size())

