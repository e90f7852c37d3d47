"""What each graph node costs by roofline, and which values exist in memory at all once pointwise operations are fused.

A node is one of
    view     moves nothing
    kernel   runs alone: matrix products, attention, convolutions, sorts, collectives, custom operations
    fused    pointwise operations and reductions: those between two kernels are one cluster, which reads each input once and
             writes only what a kernel, another cluster or the graph's output asks for

Under an inner compiler that does not fuse, every operation that is not a view is a kernel.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from graphoffload.analysis.storages import fake, storage_id, tensor_nbytes
from graphoffload.hardware import HardwareProfile

Kind = Literal["view", "kernel", "fused", "none"]

_KERNEL_WORDS = ("sort", "topk", "fft", "linalg", "c10d", "scan", "nonzero", "unique", "multinomial", "embedding_dense_backward")
_FUSED_NAMESPACES = ("aten", "prims", "inductor_prims")


@dataclass(frozen=True, slots=True)
class NodeCost:
    """flops of the operation; bytes it moves through device memory; its time on the given hardware."""

    kind: Kind
    flops: int
    moved_bytes: int
    time_s: float


def kind_of(node: Node, *, fuses: bool) -> Kind:
    """How a node runs; see the module's docstring."""
    if node.op != "call_function" or node.target is operator.getitem:
        return "none"
    value = node.meta.get("val")
    if not isinstance(value, (torch.Tensor, tuple, list)):
        return "none"
    if _is_view(node):
        return "view"
    if not fuses or not isinstance(node.target, torch._ops.OpOverload):
        return "kernel"
    packet = node.target._overloadpacket
    name = str(node.target)
    if packet in flop_registry or node.target.namespace not in _FUSED_NAMESPACES or any(word in name for word in _KERNEL_WORDS):
        return "kernel"
    return "fused"


def _is_view(node: Node) -> bool:
    value, first = fake(node), node.args[0] if node.args else None
    source = fake(first) if isinstance(first, Node) else None
    return value is not None and source is not None and storage_id(value) == storage_id(source)


def materialised(graph: Graph, *, fuses: bool) -> set[int]:
    """Storages that exist in memory, by identity."""
    found: set[int] = set()
    cluster, number = {}, 0
    kinds = {node: kind_of(node, fuses=fuses) for node in graph.nodes}
    for node in graph.nodes:
        number += kinds[node] == "kernel"
        cluster[node] = number
    for node in graph.nodes:
        value = fake(node)
        if value is None or storage_id(value) in found:
            continue
        alone = node.op == "placeholder" or kinds[node] in ("kernel", "none")
        if alone or any(_asks_for(user, kinds, cluster[user] != cluster[node]) for user in _readers(node)):
            found.add(storage_id(value))
    return found


def _readers(node: Node) -> list[Node]:
    value = fake(node)
    assert value is not None
    found, pending = [], [node]
    while pending:
        for user in pending.pop().users:
            other = fake(user)
            if other is not None and storage_id(other) == storage_id(value):
                pending.append(user)
            else:
                found.append(user)
    return found


def _asks_for(user: Node, kinds: dict[Node, Kind], elsewhere: bool) -> bool:
    return user.op == "output" or kinds[user] == "kernel" or elsewhere


def node_costs(graph: Graph, hardware: HardwareProfile, *, fuses: bool) -> list[NodeCost]:
    """Costs of all nodes of a graph in order."""
    real = materialised(graph, fuses=fuses)
    costs, seen_in_cluster = [], set[int]()
    for node in graph.nodes:
        kind = kind_of(node, fuses=fuses)
        if kind in ("view", "none"):
            costs.append(NodeCost(kind, 0, 0, 0.0))
            continue
        if kind == "kernel":
            seen_in_cluster = set()
        moved = _moved_bytes(node, real, seen_in_cluster if kind == "fused" else set())
        flops = _flops(node) if kind == "kernel" else 0
        costs.append(NodeCost(kind, flops, moved, _time_s(node, flops, moved, hardware)))
    return costs


def _moved_bytes(node: Node, real: set[int], seen: set[int]) -> int:
    total = 0
    values = [fake(arg) for arg in tree_leaves((node.args, node.kwargs)) if isinstance(arg, Node)]
    outputs = [value for value in tree_leaves(node.meta["val"]) if isinstance(value, torch.Tensor)]
    for value in (*values, *outputs):
        if value is None or value.layout != torch.strided:
            continue
        identity = storage_id(value)
        if identity in real and identity not in seen:
            seen.add(identity)
            total += min(tensor_nbytes(value) or 0, int(value.untyped_storage().nbytes()) if tensor_nbytes(value) else 0)
    return total


def _time_s(node: Node, flops: int, moved_bytes: int, hardware: HardwareProfile) -> float:
    bandwidth_s = moved_bytes / hardware.device_bandwidth_bytes_per_s
    if not flops:
        return bandwidth_s + (hardware.kernel_launch_s if moved_bytes else 0.0)
    value = next(v for v in tree_leaves(node.meta["val"]) if isinstance(v, torch.Tensor))
    rate = hardware.matmul_rate_flops_per_s(str(value.dtype).removeprefix("torch."))
    return max(bandwidth_s, flops / rate) + hardware.kernel_launch_s


def _flops(node: Node) -> int:
    target = node.target
    packet = target._overloadpacket if isinstance(target, torch._ops.OpOverload) else None
    if packet not in flop_registry:
        return 0
    args, kwargs = tree_map(_value, node.args), tree_map(_value, node.kwargs)
    try:
        flops = int(flop_registry[packet](*args, **kwargs, out_val=node.meta["val"]))
    except Exception:  # a formula that does not take this overload's arguments, or a symbolic size: priced by its bytes
        return 0
    return flops // 2 if _is_causal(node) else flops


def _is_causal(node: Node) -> bool:
    if "attention" not in str(node.target) or not isinstance(node.target, torch._ops.OpOverload):
        return False
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
        if argument.name == "is_causal":
            return value is True
    return node.kwargs.get("is_causal") is True


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, Node) else argument
