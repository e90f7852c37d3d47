"""Small tools that every pass uses."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from graphoffload.analysis.storages import fake
from graphoffload.errors import PlanError
from graphoffload.torch_internals.graphs import tensor_metadata
from graphoffload.torch_internals.operators import OpOverload, schema_of

# Metadata about the origin of an operation; "val" is never shared, since torch finds donated buffers by its identity.
_ORIGIN_KEYS = (
    "stack_trace", "nn_module_stack", "fwd_nn_module_stack", "source_fn_stack", "fwd_source_fn_stack", "custom", "seq_nr",
)  # fmt: skip


def node_names(graph: Graph) -> dict[str, Node]:
    """All nodes of a graph by name."""
    return {node.name: node for node in graph.nodes}


def find(nodes: dict[str, Node], name: str, plan: str) -> Node:
    """The node that a plan names.

    Raises:
        PlanError: the graph has no such node, so the plan was made for another one.
    """
    try:
        return nodes[name]
    except KeyError:
        raise PlanError(
            f"Plan {plan} names the node {name!r}, which this graph of {len(nodes)} nodes does not have: it was made for "
            "another graph, torch version or device. Remove the stored plan or compile anew "
            "(TORCHINDUCTOR_FORCE_DISABLE_CACHES=1)."
        ) from None


def fresh_fake(like: Node, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    """A fake tensor with a storage of its own, on the device of `like`'s value."""
    value = fake(like)
    assert value is not None
    mode = getattr(value, "fake_mode", None)
    assert mode is not None, like
    with mode:
        return torch.empty_strided(size, stride, dtype=dtype, device=value.device)


def describe(node: Node, origin: Node, value: Any) -> Node:
    """Give a new node its value and the origin of `origin`; returns the node."""
    for key in _ORIGIN_KEYS:
        if key in origin.meta:
            node.meta[key] = origin.meta[key]
    node.meta["val"] = value
    if isinstance(value, torch.Tensor):
        node.meta["tensor_meta"] = tensor_metadata(value)
    return node


def finish(module: torch.fx.GraphModule) -> None:
    """Check a changed graph and generate its code."""
    module.graph.lint()
    module.recompile()


def placeholders_first(graph: Graph) -> None:
    """Move operations that torch places between a backward graph's inputs to after the inputs."""
    placeholders = graph.find_nodes(op="placeholder")
    after: Node = placeholders[-1]
    early = [node for node in graph.nodes if node.op != "placeholder"]
    last_at = {node: at for at, node in enumerate(graph.nodes)}
    for node in early:
        if last_at[node] < last_at[placeholders[-1]]:
            after.append(node)
            after = node


def may_write(node: Node) -> bool:
    """Whether a node may write to memory: an operator that says so, and whatever is none, such as a user's kernel. An element
    of several results and a number are none either, and write to nothing."""
    if node.op != "call_function":
        return False
    if isinstance(node.target, OpOverload):
        return schema_of(node.target).is_mutable
    return node.target is not operator.getitem and not isinstance(
        node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat)
    )
