"""What each graph node costs: by roofline, or as measured.

Fused operations are priced by the bytes that really move: those between two kernels are one cluster, which reads each input
once and writes only what a kernel, another cluster or the graph's output asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from graphoffload.analysis.fusion import Fusion, Kind
from graphoffload.analysis.storages import concrete, fake, size_hint, storage_id
from graphoffload.hardware import HardwareProfile


@dataclass(frozen=True, slots=True)
class NodeCost:
    """flops of the operation; bytes it moves through device memory; its time on the given hardware; bytes it needs while it
    runs besides inputs and outputs."""

    kind: Kind
    flops: int
    moved_bytes: int
    time_s: float
    workspace_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """What a kernel took when it ran alone: seconds, and bytes it allocated besides its outputs."""

    time_s: float
    workspace_bytes: int


def node_costs(
    fusion: Fusion, hardware: HardwareProfile, *, measured: Callable[[Node], Measured | None] | None = None
) -> list[NodeCost]:
    """Costs of all nodes of a graph, in the order in which they run. A fused value that does not exist in memory costs nothing
    where it is defined.

    `measured` gives what is known of a kernel; the others are priced by roofline.
    """
    sizes = {storage_id(value): value.untyped_storage().nbytes() for node in fusion.kinds if (value := fake(node)) is not None}
    costs, seen_in_cluster = [], set[int]()
    for node in fusion.order:
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
        known = measured(node) if measured is not None and kind == "kernel" else None
        if known is None:
            seconds = _time_s(node, flops, moved, hardware, launch=kind == "kernel" or first)
            known = Measured(seconds, _workspace_bytes(node) if kind == "kernel" and hardware.source != "cpu" else 0)
        costs.append(NodeCost(kind, flops, moved, known.time_s, known.workspace_bytes))
    return costs


def _workspace_bytes(node: Node) -> int:
    """What an attention backward on a GPU allocates while it runs: the query's gradient in float32, a number a row, and where
    several query heads share a key head, keys' and values' gradients of each. Other kernels: nothing worth counting.

    Seen with cuDNN's attention on an H200 (docs/benchmarks.md).
    """
    if "attention" not in str(node.target) or "backward" not in str(node.target):
        return 0
    tensors = [value for argument in node.args[:4] if isinstance(argument, Node) and (value := fake(argument)) is not None]
    counts = [count for value in tensors if (count := concrete(value.numel())) is not None]
    if len(tensors) < 4 or len(counts) < 4 or tensors[1].dim() != 4:
        return 0
    _, query, key, _ = tensors
    rows = 4 * counts[1] // max(1, concrete(query.shape[-1]) or 1)
    expanded = 2 * counts[1] * query.element_size() if counts[2] < counts[1] and key.shape[1] != query.shape[1] else 0
    return 4 * counts[1] + rows + expanded


def _moved_bytes(node: Node, fusion: Fusion, sizes: dict[int, Any], seen: set[int]) -> int:
    identities = set(fusion.read_by(node))
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
