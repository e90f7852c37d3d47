"""What recomputing a saved activation means: the operations to run again, and what they read.

    a (saved) ──▶ norm ──▶ mul ──▶ x (saved)        chain of x: norm, mul        reads: a
                  w (parameter) ─┘

The chain goes up from the activation to what is saved anyway and to graph inputs. It is refused where running an operation
again would not give the same bits or has an effect: randomness that is not drawn from a saved seed, inputs that the forward
writes to (their value is another one by then), collectives, operations that mutate, and operations nobody told us anything
about.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from graphoffload.analysis.saved_values import GraphPair
from graphoffload.analysis.storages import fake, group_by_storage, storage_id
from graphoffload.compat import mutated_inputs
from graphoffload.saved import SavedTable

_PURE_NAMESPACES = ("aten", "prims", "inductor_prims")


@dataclass(frozen=True, slots=True)
class Chain:
    """`nodes`: names of operations to run again, in order; `reads`: names of SavedTensors; `why_not`: "" when it is sound."""

    nodes: tuple[str, ...]
    reads: tuple[str, ...]
    why_not: str = ""


def chain_of(targets: tuple[Node, ...], owner: Mapping[Node, str], own: str, mutated: frozenset[Node]) -> Chain:
    """The chain that recomputes one saved activation.

    Args:
        targets: forward nodes of the activation's storage that backward receives.
        owner: forward node -> name of the SavedTensor whose storage it lives in.
        own: name of this SavedTensor.
        mutated: placeholders that the forward writes to.
    """
    nodes: set[Node] = set()
    reads: dict[str, None] = {}
    pending = list(targets)
    while pending:
        node = pending.pop()
        if node in nodes:
            continue
        if node.op == "placeholder":
            if node in mutated:
                return Chain((), (), f"its recomputation reads {node.name}, which forward writes to")
            continue
        if node.op != "call_function":
            continue
        if owner.get(node, own) != own:
            reads[owner[node]] = None
            continue
        if "inductor_seed" in str(node.target):
            continue
        why_not = _refusal(node)
        if why_not:
            return Chain((), (), why_not)
        nodes.add(node)
        pending.extend(node.all_input_nodes)
    return Chain(tuple(node.name for node in sorted(nodes)), tuple(reads))


def _refusal(node: Node) -> str:
    target = node.target
    if target is operator.getitem or not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
        return ""
    if not isinstance(target, torch._ops.OpOverload):
        return f"its recomputation runs {getattr(target, '__name__', target)}, whose effects are unknown"
    if target.namespace not in _PURE_NAMESPACES:
        return f"its recomputation runs {target}, whose effects are unknown"
    if target._schema.is_mutable:
        return f"its recomputation runs {target}, which writes to its arguments"
    if "batch_norm" in str(target):
        return f"its recomputation runs {target}, which updates running statistics"
    if "attention" in str(target):
        return f"its recomputation runs {target}, which is as dear as the products around it and may draw random numbers"
    if torch.Tag.nondeterministic_seeded in target.tags:
        return f"its recomputation draws random numbers ({target})"
    return ""


def compared(placeholder: Node, forward_names: Collection[str]) -> bool:
    """Whether backward asks if a saved value, or what it recomputes from it, equals another tensor's elements.

    So do gradients of amax, amin and scatter_reduce: they look for the elements that are the maximum. A compiler may compute a
    value in other bits the second time (fused into another loop, vectorised or not): nothing is equal then, and 0 / 0 is NaN.
    """
    pending, seen = [placeholder], set()
    while pending:
        for user in pending.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if user.target in _EQUALITY and _is_float(placeholder):
                return True
            if user.op == "call_function" and (user.name in forward_names or user.target in _MOVES):
                pending.append(user)
    return False


_EQUALITY = frozenset((torch.ops.aten.eq.Tensor, torch.ops.aten.ne.Tensor))
_MOVES = frozenset(
    (
        torch.ops.aten.expand.default, torch.ops.aten.unsqueeze.default, torch.ops.aten.view.default,
        torch.ops.aten.permute.default, torch.ops.aten.gather.default, torch.ops.aten.squeeze.dim,
    )
)  # fmt: skip


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def mutated_placeholders(forward: Graph, named: frozenset[Node]) -> frozenset[Node]:
    """Placeholders that the forward writes to: those that AOTAutograd names, and targets of in-place operations."""
    found = set(named)
    for node in forward.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            found.update(arg for arg in node.all_input_nodes if arg.op == "placeholder")
    return frozenset(found)


def chains_of(pair: GraphPair, table: SavedTable) -> dict[str, Chain]:
    """By SavedTensor name, the operations that compute it again."""
    nodes = {node.name: node for node in pair.forward.graph.nodes}
    groups = group_by_storage(node for node in pair.forward.graph.nodes if node.op == "call_function")
    owner: dict[Node, str] = {}
    for tensor in table.tensors:
        value = fake(nodes[tensor.name])
        assert value is not None
        owner.update(dict.fromkeys(groups[storage_id(value)], tensor.name))
    mutated = mutated_placeholders(pair.forward.graph, mutated_inputs(pair.forward.graph))
    inputs = {node.name: node for node in pair.backward.graph.find_nodes(op="placeholder")}
    found = {}
    for tensor in table.tensors:
        targets = tuple(nodes[name] for name in dict.fromkeys((*tensor.views, tensor.name)))
        found[tensor.name] = chain_of(targets, owner, tensor.name, mutated)
        if any(compared(inputs[name], nodes.keys()) for name in tensor.views if name in inputs):
            found[tensor.name] = Chain((), (), "backward looks for equal elements, and other bits would not be equal")
    return found
