"""Functions of autograd that are linears of packed weights: they compute each token from that token alone.

    forward:   y = gemm_4bit(x, codes, scales)               codes and scales: the same for all tokens
    backward:  dx = dy @ dequantize(codes, scales)

Dynamo makes one operation of such a function, with a graph for each direction. Both are read here: a backward that is not the
forward's derivative may sum over tokens where the forward does not. Forward returns its outputs, and what backward is given;
in torch 2.11 an output that nobody reads may stand beside the product.
Wrong when: Dynamo gives these graphs another form. Then nothing is found, and such an MLP is not computed in slices.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from graphoffload.torch_internals.operators import OpOverload, autograd_function_apply, schema_of

_PACKED = {"bitsandbytes::gemm_4bit"}
"""Products of tokens, the first argument, and a packed matrix."""
_VIEWS = {"view", "reshape", "t", "transpose", "contiguous"}


def tokens_of(node: Node) -> Node | None:
    """The operand whose tokens a linear of packed weights computes on; None where an operation is no such linear."""
    if node.target is not autograd_function_apply or len(node.args) < 3:
        return None
    forward, backward = _body(node.args[0]), _body(node.args[1])
    if forward is None or backward is None:
        return None
    for at, operand in enumerate(node.args[2:]):
        if isinstance(operand, Node) and _is_linear_of(at, len(node.args) - 2, forward, backward):
            return operand
    return None


def is_view(node: Node) -> bool:
    """Whether an operation only looks at its first argument in another shape."""
    return node.op == "call_method" and node.target in _VIEWS


def is_linear(node: Node) -> bool:
    """Whether a linear is of one matrix and one vector for all tokens."""
    given = arguments(node, "input", "weight", "bias")
    matrix, bias = value_of(given.get("weight")), value_of(given.get("bias"))
    return isinstance(matrix, Tensor) and matrix.dim() == 2 and (bias is None or bias.dim() == 1)


def casts(node: Node) -> bool:
    """Whether a `to` is given a dtype alone."""
    return all(isinstance(given, torch.dtype) for given in (*node.args[1:], *node.kwargs.values()))


def arguments(node: Node, *names: str) -> dict[str, Any]:
    """What an operation is given, by its parameters' names."""
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def value_of(node: Any) -> Any:
    """The value that Dynamo left on a node; None for what is none."""
    return node.meta.get("example_value") if isinstance(node, Node) else None


def _is_linear_of(at: int, operands: int, forward: GraphModule, backward: GraphModule) -> bool:
    """Whether forward and backward compute on the tokens of one operand, and on nothing else that has tokens."""
    given = _placeholders(forward, operands)
    returned = _returned(forward)
    if not given or len(returned) != 2:
        return False
    tokens = _followed(forward, {given[at]})
    outputs, saved = (_sequence(part) for part in returned)
    if tokens is None or not outputs or outputs[0] not in tokens or tokens.intersection(outputs[1:]):
        return False
    taken = _placeholders(backward, len(outputs) + len(saved))
    if not taken or any(node.users for node in taken[1 : len(outputs)]):
        return False
    after = {taken[0], *(node for node, value in zip(taken[len(outputs) :], saved, strict=True) if value in tokens)}
    tokens = _followed(backward, after)
    gradients = _returned(backward)
    computed = [place for place, value in enumerate(gradients) if value is not None]
    return tokens is not None and len(gradients) == operands and computed == [at] and gradients[at] in tokens


def _followed(body: GraphModule, tokens: set[Node]) -> set[Node] | None:
    """All values of a graph that have tokens, each computed from one token; None where one is computed otherwise."""
    for node in body.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        given = tokens.intersection(node.all_input_nodes)
        if given and _by_token(node, given):
            tokens.add(node)
        elif given or not _is_pure(node):
            return None
    return tokens


def _by_token(node: Node, tokens: set[Node]) -> bool:
    """Whether an operation is a cast of tokens, or a product of them and one matrix."""
    if not node.args or tokens != {node.args[0]} or "out" in node.kwargs:
        return False
    if node.op == "call_method":
        return node.target == "to" and casts(node)
    if node.target is F.linear:
        return is_linear(node)
    if node.target is torch.matmul:
        matrix = value_of(arguments(node, "input", "other").get("other"))
        return isinstance(matrix, Tensor) and matrix.dim() == 2
    return isinstance(node.target, OpOverload) and schema_of(node.target).name in _PACKED


def _is_pure(node: Node) -> bool:
    """Whether an operation without tokens always gives the same and writes to nothing. One without a result switches a mode."""
    if "out" in node.kwargs:
        return False
    if not node.all_input_nodes:
        return not node.users
    if node.op == "call_method":
        return is_view(node) or node.target == "to"
    if isinstance(node.target, OpOverload):
        return not schema_of(node.target).is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags
    return node.target in (torch.t, torch.transpose, torch.mul, operator.mul)


def _body(given: Any) -> GraphModule | None:
    owner = given.graph.owning_module if isinstance(given, Node) and given.op == "get_attr" else None
    body = getattr(owner, str(given.target), None) if owner is not None else None
    return body if isinstance(body, GraphModule) else None


def _placeholders(body: GraphModule, count: int) -> list[Node]:
    """The last `count` of them, since a context may come first; none where there are fewer or more."""
    found = [node for node in body.graph.nodes if node.op == "placeholder"]
    return found[len(found) - count :] if count <= len(found) <= count + 1 else []


def _returned(body: GraphModule) -> Sequence[Any]:
    return _sequence(next(node for node in body.graph.nodes if node.op == "output").args[0])


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else [value]
