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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from graphoffload.analysis.storages import fake, size_hint, storage_id, tensor_nbytes
from graphoffload.hardware import HardwareProfile

Kind = Literal["view", "kernel", "fused", "none"]

_KERNEL_WORDS = (
    "sort",
    "topk",
    "fft",
    "linalg",
    "c10d",
    "scan",
    "nonzero",
    "unique",
    "multinomial",
    "embedding_dense_backward",
    "attention",
    "convolution",
)
_INLINED_READS = 4  # Inductor computes a value again where it is read rather than store it, up to this many reads
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


@dataclass(slots=True)
class _Fusion:
    """Which storages exist, and for a value that does not, the storages it is computed from where it is read."""

    real: set[int]
    sources: dict[int, frozenset[int]]
    kinds: dict[Node, Kind]


def materialised(graph: Graph, *, fuses: bool) -> set[int]:
    """Storages that exist in memory, by identity."""
    return _fusion(graph, fuses=fuses).real


def _fusion(graph: Graph, *, fuses: bool) -> _Fusion:
    """Follow a fusing compiler: a value exists when a kernel or the graph's output reads it, when it is the smaller result of a
    reduction, or when several operations read it and computing it again for each would read too many others."""
    kinds = {node: kind_of(node, fuses=fuses) for node in graph.nodes}
    fusion = _Fusion(set(), {}, kinds)
    for node in graph.nodes:
        value = fake(node)
        if value is None or storage_id(value) in fusion.real or storage_id(value) in fusion.sources:
            continue
        sources = _sources(node, fusion)
        if kinds[node] != "fused" or _exists(node, sources, fusion):
            fusion.real.add(storage_id(value))
        else:
            fusion.sources[storage_id(value)] = sources
    return fusion


def _sources(node: Node, fusion: _Fusion) -> frozenset[int]:
    found: set[int] = set()
    for argument in node.all_input_nodes:
        value = fake(argument)
        if value is not None:
            identity = storage_id(value)
            found |= fusion.sources.get(identity, frozenset((identity,)))
    return frozenset(found)


def _exists(node: Node, sources: frozenset[int], fusion: _Fusion) -> bool:
    readers = _readers(node)
    if any(user.op == "output" or kind_of(user, fuses=True) == "kernel" for user in readers):
        return True
    value = fake(node)
    assert value is not None
    inputs = [tensor_nbytes(other) or 0 for argument in node.all_input_nodes if (other := fake(argument)) is not None]
    if inputs and 2 * (tensor_nbytes(value) or 0) * max(1, _widening(node)) <= max(inputs):
        return True
    return len(sources) > _INLINED_READS and len(readers) > 1


def _widening(node: Node) -> int:
    """A cast to half the width is no reduction."""
    value = fake(node)
    first = next((other for argument in node.all_input_nodes if (other := fake(argument)) is not None), None)
    return 1 if value is None or first is None else max(1, first.element_size() // value.element_size())


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


def node_costs(
    graph: Graph, hardware: HardwareProfile, *, fuses: bool, measured: Callable[[Node], float | None] | None = None
) -> list[NodeCost]:
    """Costs of all nodes of a graph in order. A fused value that does not exist in memory costs nothing where it is defined.

    `measured` gives a kernel's time in seconds where it is known; the others are priced by roofline.
    """
    fusion = _fusion(graph, fuses=fuses)
    sizes = {storage_id(value): value.untyped_storage().nbytes() for node in graph.nodes if (value := fake(node)) is not None}
    costs, seen_in_cluster = [], set[int]()
    for node in graph.nodes:
        kind = fusion.kinds[node]
        value = fake(node)
        unreal = kind == "fused" and value is not None and storage_id(value) not in fusion.real
        if kind in ("view", "none") or unreal:
            costs.append(NodeCost(kind, 0, 0, 0.0))
            continue
        if kind == "kernel":
            seen_in_cluster = set()
        first = not seen_in_cluster
        moved = _moved_bytes(node, fusion, sizes, seen_in_cluster if kind == "fused" else set())
        flops = _flops(node) if kind == "kernel" else 0
        seconds = measured(node) if measured is not None and kind == "kernel" else None
        if seconds is None:
            seconds = _time_s(node, flops, moved, hardware, launch=kind == "kernel" or first)
        costs.append(NodeCost(kind, flops, moved, seconds))
    return costs


def _moved_bytes(node: Node, fusion: _Fusion, sizes: dict[int, Any], seen: set[int]) -> int:
    identities = set(_sources(node, fusion))
    identities.update(
        storage_id(value)
        for value in tree_leaves(node.meta["val"])
        if isinstance(value, torch.Tensor) and value.layout == torch.strided
    )
    total = 0
    for identity in identities - seen:
        seen.add(identity)
        nbytes = sizes.get(identity, 0)
        total += nbytes if isinstance(nbytes, int) else 0
    return total


def _time_s(node: Node, flops: int, moved_bytes: int, hardware: HardwareProfile, *, launch: bool) -> float:
    bandwidth_s = moved_bytes / hardware.device_bandwidth_bytes_per_s
    if not flops:
        return bandwidth_s + (hardware.kernel_launch_s if moved_bytes and launch else 0.0)
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
        flops = int(size_hint(flop_registry[packet](*args, **kwargs, out_val=node.meta["val"]), unknown=0))
    except Exception:  # a formula that does not take this overload's arguments, or an unknown size: priced by its bytes
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
