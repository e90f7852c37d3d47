"""The cost of each graph node, and of eager operations: measured where its kernel could be timed, else by the roofline model.

    time = max(FLOPs / achieved FLOP/s, bytes moved / device bandwidth) + kernel launch

The roofline model (Williams, Waterman, Patterson, CACM 2009) bounds a kernel by its arithmetic or by its memory traffic. FLOPs
are those of torch's own registry (torch.utils.flop_counter), and attention's are counted here. A fused kernel reads each of its
inputs once, and writes only the values that exist in memory (fusion.py). An operation without a FLOP formula is bound by its
bytes; random numbers, erf and tanh take time besides (arithmetic.py), and so do loops over long rows (loops.py). A collective
is priced by the bytes that a device sends to the others, and is never timed; its wait costs nothing:

    all-gather        result - argument          all-reduce      2 x argument x (n - 1) / n, for a group of n
    reduce-scatter    argument - result          others          argument

`Work` is what one operation does, whatever the hardware: the same for a node of a graph and for an operation of eager code.

The model is wrong for small kernels that use a part of the device, for operations that read at random addresses (embedding,
scatter), for products whose sizes do not fill the matrix units, and for collectives over several hosts, or that wait for a
slower rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import flop_registry

from graphoffload.analysis.arithmetic import besides_s
from graphoffload.analysis.fusion import (
    SAVES_STATE,
    TAKES_STATE,
    TAKES_STATE_ON_GPU,
    Fusion,
    Kind,
    fusion_of,
    value_of,
)
from graphoffload.analysis.lifetimes import lives_in_memory, made_at
from graphoffload.analysis.loops import bytes_again
from graphoffload.analysis.regions import subgraph_of
from graphoffload.analysis.storages import (
    concrete,
    example_nbytes,
    example_storage_nbytes,
    fake,
    group_by_storage,
    size_hint,
    storage_id,
)
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.torch_internals.collectives import group_size, is_collective
from graphoffload.torch_internals.operators import OpOverload, packet_of, schema_of
from graphoffload.torch_internals.pytrees import tree_leaves, tree_map

# Shares of a matrix product's rate that cuDNN's attention reaches on an H200, causal at 32k tokens. A mask that is read from
# memory multiplies them by the third number (4k tokens), and dropout by the others (docs/results/attention-dropout.json).
# docs/history has the other measurements.
_ATTENTION_FORWARD = 0.91
_ATTENTION_BACKWARD = 0.75
_ATTENTION_WITH_MASK = 0.54
_FORWARD_WITH_DROPOUT = 0.44
_BACKWARD_WITH_DROPOUT = 0.77
FLASH = frozenset({"flash_attn", "flash_attn_3"})
"""Namespaces of the flash-attn packages: all their operations are attention."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one operation does, whatever the hardware.

    Attributes:
        flops: of the operation. moved_bytes: through device memory.
        dtype: the one whose rate counts. share: of a matrix product's rate that the operation achieves.
        sent_bytes: to other devices, by a collective; None for every other operation.
        launches: it starts a kernel; else it is a part of one.
    """

    flops: int
    moved_bytes: int
    dtype: str = ""
    share: float = 1.0
    sent_bytes: int | None = None
    launches: bool = True

    def time_s(self, hardware: HardwareProfile) -> float:
        """Its time by the roofline model."""
        bandwidth_s = self.moved_bytes / hardware.device_bandwidth_bytes_per_s
        if self.sent_bytes is not None:
            return hardware.collective_latency_s + max(bandwidth_s, self.sent_bytes / hardware.peer_bytes_per_s)
        if not self.flops:
            return bandwidth_s + (hardware.kernel_launch_s if self.moved_bytes and self.launches else 0.0)
        rate = hardware.matmul_rate_flops_per_s(self.dtype) * self.share
        return max(bandwidth_s, self.flops / rate) + hardware.kernel_launch_s


@dataclass(frozen=True, slots=True)
class NodeCost:
    """The cost of one node.

    Attributes:
        flops: of the operation.
        moved_bytes: bytes that it moves through device memory.
        time_s: its time on the given hardware.
        workspace_bytes: memory that it allocates while it runs, besides its outputs.
    """

    kind: Kind
    flops: int
    moved_bytes: int
    time_s: float
    workspace_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """A kernel's time when it ran alone, and the bytes that it allocated besides its outputs."""

    time_s: float
    workspace_bytes: int


def node_costs(
    fusion: Fusion, hardware: HardwareProfile, *, measured: Callable[[Node], Measured | None] | None = None
) -> list[NodeCost]:
    """Costs of all nodes of a graph, in the order in which they run. A fused value that does not exist in memory costs nothing
    where it is defined.

    `measured` returns a kernel's measurement. The time of a kernel without one follows from the roofline model.
    """
    sizes = {storage_id(value): example_storage_nbytes(value) for node in fusion.kinds if (value := fake(node)) is not None}
    costs, seen_in_cluster = [], set[int]()
    regions: dict[GraphModule, NodeCost] = {}
    again = _read_again(fusion, sizes, hardware)
    for node in fusion.order:
        kind = fusion.kinds[node]
        value = fake(node)
        unreal = kind == "fused" and value is not None and storage_id(value) not in fusion.real
        extra_s = besides_s(node, fusion, sizes, hardware) + again.get(node, 0.0)
        if kind in ("view", "none") or unreal:
            costs.append(NodeCost(kind, 0, 0, extra_s))
            continue
        if kind == "kernel":
            seen_in_cluster = set()
        if (region := subgraph_of(node)) is not None:
            if region not in regions:
                regions[region] = _cost_of_region(region, fusion, hardware, measured)
            costs.append(regions[region])
            continue
        first = not seen_in_cluster
        moved = _moved_bytes(node, fusion, sizes, seen_in_cluster if kind == "fused" else _moved_before(node, fusion))
        called = operation_of(node)
        work = work_of(called, moved, computes=kind == "kernel", launches=kind == "kernel" or first)
        known = measured(node) if measured is not None and kind == "kernel" else None
        if known is None:
            workspace = _workspace_bytes(called) if kind == "kernel" and hardware.source != "cpu" else 0
            known = Measured(work.time_s(hardware), workspace)
        costs.append(NodeCost(kind, work.flops, moved, known.time_s + extra_s, known.workspace_bytes))
    return costs


def _read_again(fusion: Fusion, sizes: Mapping[int, int], hardware: HardwareProfile) -> dict[Node, float]:
    """Seconds that loops over long rows take besides the bytes of their kernels, by operation (loops.py)."""
    if hardware.source == "cpu":
        return {}
    found = dict[Node, float]()
    for first, last in set(fusion.spans.values()):
        kernel = fusion.order[first : last + 1]
        if fusion.kinds[kernel[0]] == "fused":
            found.update(bytes_again(kernel, fusion, sizes))
    return {node: nbytes / hardware.device_bandwidth_bytes_per_s for node, nbytes in found.items()}


def _cost_of_region(
    region: GraphModule, around: Fusion, hardware: HardwareProfile, measured: Callable[[Node], Measured | None] | None
) -> NodeCost:
    """The cost of one call of a region: the sum over its operations. Its temporaries are its workspace."""
    fusion = fusion_of(region.graph, fuses=around.fuses, unfused_bytes=around.unfused_bytes)
    costs = node_costs(fusion, hardware, measured=measured)
    flops, moved, time_s = (sum(getattr(cost, name) for cost in costs) for name in ("flops", "moved_bytes", "time_s"))
    alive = [cost.workspace_bytes for cost in costs]
    edges = [*region.graph.find_nodes(op="placeholder"), *next(iter(reversed(region.graph.nodes))).all_input_nodes]
    outside = set(group_by_storage(edges))
    for identity, made, first, last in lives_in_memory(region.graph.nodes, fusion, made_at(fusion)):
        if identity not in outside:
            nbytes = example_storage_nbytes(fake(made))  # type: ignore[arg-type]
            alive[first : last + 1] = [held + nbytes for held in alive[first : last + 1]]
    return NodeCost("kernel", flops, moved, time_s, max(alive, default=0))


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation, its arguments and its value. Tensors stand for themselves, whether a node or eager code has them."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    value: Any


def operation_of(node: Node) -> Operation:
    """The operation that a node calls.

    torch wraps random operations of checkpoint regions (`WITH_RANDOM_STATE`). For these the wrapped operation is returned.
    """
    name = getattr(node.target, "__name__", "")
    value = value_of(node)
    args, kwargs = tree_map(_value, node.args), tree_map(_value, dict(node.kwargs))
    if name == SAVES_STATE and isinstance(value, (tuple, list)) and len(value) > 1:
        return Operation(args[0], args[1:], kwargs, value[1])
    if name == TAKES_STATE:
        return Operation(args[1], args[2:], kwargs, value)
    if name == TAKES_STATE_ON_GPU:
        own = {key: argument for key, argument in kwargs.items() if key != "rng_state"}
        return Operation(args[0], args[1:], own, value)
    return Operation(node.target, args, kwargs, value)


def work_of(operation: Operation, moved_bytes: int, *, computes: bool = True, launches: bool = True) -> Work:
    """What an operation does that moves so many bytes. computes: its FLOPs count; fused operations are bound by memory."""
    flops = _flops(operation) if computes else 0
    if is_collective(operation.target):
        return Work(flops, moved_bytes, sent_bytes=sent_bytes(operation))
    if not flops:
        return Work(0, moved_bytes, launches=launches)
    value = next(v for v in tree_leaves(operation.value) if isinstance(v, torch.Tensor))
    return Work(flops, moved_bytes, str(value.dtype).removeprefix("torch."), _share_of_matmul(operation))


def _workspace_bytes(node: Operation) -> int:
    """Bytes that an attention backward allocates on a GPU while it runs; 0 for other kernels, which allocate little.

    The workspace holds the query's gradient in float32 and one float for each row. If several query heads share a key head, it
    also holds the gradients of keys and values for each query head. Observed with cuDNN's attention on an H200 (docs/history).
    """
    if "attention" not in str(node.target) or "backward" not in str(node.target):
        return 0
    tensors = [value for value in node.args[:4] if _is_dense(value)]
    counts = [count for value in tensors if (count := concrete(value.numel())) is not None]
    if len(tensors) < 4 or len(counts) < 4 or tensors[1].dim() != 4:
        return 0
    _, query, key, _ = tensors
    rows = 4 * counts[1] // max(1, concrete(query.shape[-1]) or 1)
    expanded = 2 * counts[1] * query.element_size() if counts[2] < counts[1] and key.shape[1] != query.shape[1] else 0
    return 4 * counts[1] + rows + expanded


def _moved_before(node: Node, fusion: Fusion) -> set[int]:
    """Storages whose traffic a sum's matrix product already paid for: the product's inputs, and the result of the sum."""
    product, value = fusion.added.get(node), fake(node)
    return {*fusion.read_by(product), storage_id(value)} if product is not None and value is not None else set()


def _moved_bytes(node: Node, fusion: Fusion, sizes: dict[int, int], seen: set[int]) -> int:
    identities = set(fusion.read_by(node))
    identities.update(
        storage_id(value)
        for value in tree_leaves(value_of(node))
        if isinstance(value, torch.Tensor) and value.layout == torch.strided
    )
    total = 0
    for identity in identities - seen:
        seen.add(identity)
        total += sizes.get(identity, 0)
    return total


def sent_bytes(node: Operation) -> int:
    """Bytes that one device sends to the others in a collective, at most; a group that is not known may be a large one."""
    given, got = (
        sum(example_nbytes(value) for value in tree_leaves(found) if isinstance(value, torch.Tensor))
        for found in (node.args, node.value)
    )
    name = str(node.target)
    if "all_gather" in name or "reduce_scatter" in name:
        return abs(got - given)
    if "all_reduce" not in name:
        return given
    ranks = group_size(argument_of(node, ("group_name", "group")))
    return 2 * given * (ranks - 1) // ranks if ranks else 2 * given


def _share_of_matmul(node: Operation) -> float:
    """The share of a matrix product's rate that an operation achieves."""
    if "attention" not in str(node.target) and getattr(node.target, "namespace", "") not in FLASH:
        return 1.0
    backward = "backward" in str(node.target)
    share = _ATTENTION_BACKWARD if backward else _ATTENTION_FORWARD
    if argument_of(node, ("dropout_p",)):
        share *= _BACKWARD_WITH_DROPOUT if backward else _FORWARD_WITH_DROPOUT
    return share * _ATTENTION_WITH_MASK if argument_of(node, ("attn_mask", "attn_bias")) is not None else share


def _flops(node: Operation) -> int:
    target = node.target
    packet = packet_of(target)
    if "attention" in str(target):
        return _attention_flops(node)
    if "_grouped_mm" in str(target):
        return _grouped_flops(node)
    if getattr(target, "namespace", "") in FLASH:
        return _flash_flops(node)
    if "gemm_4bit" in str(target):
        return 2 * size_hint(node.args[0].numel(), unknown=0) * size_hint(node.value.shape[-1], unknown=0)
    if packet not in flop_registry:
        return 0
    try:
        return int(size_hint(flop_registry[packet](*node.args, **node.kwargs, out_val=node.value), unknown=0))
    except Exception:  # the formula does not take this overload's arguments, or a size is unknown: bound by its bytes
        return 0


def _attention_flops(node: Operation) -> int:
    """FLOPs of attention: two products of queries and keys in forward, five in backward, half of that if it is causal.

    torch's registry has no formula for the CPU's attention operations, and a plan for another GPU may be made on a CPU.
    """
    backward = "backward" in str(node.target)
    values = [value for value in node.args[backward : backward + 2] if _is_dense(value)]
    if len(values) < 2 or any(value.dim() != 4 for value in values):
        return 0
    query, key = values
    batch, heads, rows, width = (size_hint(size, unknown=0) for size in query.shape)
    columns = size_hint(key.shape[2], unknown=0)
    flops = (10 if backward else 4) * batch * heads * rows * columns * width
    return int(flops // 2 if argument_of(node, ("is_causal",)) is True else flops)


def _flash_flops(node: Operation) -> int:
    """FLOPs of flash-attn's operations, whose heads come after the rows; packed sequences have no batch."""
    backward = "backward" in str(node.target)
    values = [value for value in node.args[backward : backward + 2] if _is_dense(value)]
    if len(values) < 2:
        return 0
    query, key = values
    columns = size_hint(key.shape[1], unknown=0) if key.dim() == 4 else argument_of(node, ("max_seqlen_k",))
    flops = (10 if backward else 4) * size_hint(query.numel(), unknown=0) * (columns if isinstance(columns, int) else 0)
    return flops // 2 if argument_of(node, ("causal", "is_causal")) is True else flops


def _grouped_flops(node: Operation) -> int:
    """FLOPs of products of groups: each row of a two-dimensional factor is in one group, and meets that group's matrix only.

    torch's registry has no formula for them.
    """
    values = [value for value in node.args[:2] if _is_dense(value)]
    if len(values) < 2:
        return 0
    left, right = ([size_hint(size, unknown=0) for size in value.shape] for value in values)
    groups = left[0] if len(left) == len(right) == 3 else 1
    return 2 * groups * left[-2] * left[-1] * right[-1]


def argument_of(node: Node | Operation, names: tuple[str, ...]) -> Any:
    """The value of an operation's argument, whether it is given by position or by name; None if there is no such argument."""
    if not isinstance(node.target, OpOverload):
        return None
    for argument, value in zip(schema_of(node.target).arguments, node.args, strict=False):
        if argument.name in names:
            return value
    return next((node.kwargs[name] for name in names if name in node.kwargs), None)


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, Node) else argument
