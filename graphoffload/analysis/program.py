"""From a partitioned pair of graphs to the instance that is planned: a Program of steps, buffers and candidates.

Every graph node is one step, so that a position in the program is a position in the graph.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from torch.fx import Graph, Node

from graphoffload.analysis.chains import Chain
from graphoffload.analysis.costs import NodeCost, materialised, node_costs
from graphoffload.analysis.saved_values import GraphPair, graph_outputs
from graphoffload.analysis.storages import fake, group_by_storage, storage_id, storage_nbytes, tensor_nbytes
from graphoffload.hardware import HardwareProfile
from graphoffload.plan.program import Buffer, Candidate, Program, Recompute, Step
from graphoffload.saved import Action, SavedTable, SavedTensor


def build_program(
    pair: GraphPair,
    table: SavedTable,
    hardware: HardwareProfile,
    *,
    fuses: bool,
    static_bytes: int,
    chains: Mapping[str, Chain],
    fixed: Mapping[str, Action],
    reserve_bytes: int = 0,
    measured: Callable[[Node], float | None] | None = None,
) -> Program:
    """The planning instance of a pair.

    Args:
        table: its saved activations. chains: by SavedTensor name, those that may be recomputed.
        fixed: actions that are no longer free, by SavedTensor name.
        static_bytes: device bytes that live throughout: parameters, gradients, inputs, what lives outside the graph.
        reserve_bytes: device bytes to keep free.
        measured: a kernel's time in seconds where it was measured.
    """
    forward = node_costs(pair.forward.graph, hardware, fuses=fuses, measured=measured)
    backward = node_costs(pair.backward.graph, hardware, fuses=fuses, measured=measured)
    index = {tensor.name: at for at, tensor in enumerate(table.tensors)}
    times = {node.name: cost for node, cost in zip(pair.forward.graph.nodes, forward, strict=True)}
    candidates = tuple(
        _candidate(tensor, chains.get(tensor.name), fixed.get(tensor.name), index, times) for tensor in table.tensors
    )
    return Program(
        forward=_steps(pair.forward.graph, forward),
        backward=_steps(pair.backward.graph, backward),
        buffers=_buffers(pair, fuses=fuses),
        candidates=candidates,
        static_bytes=static_bytes,
        reserve_bytes=reserve_bytes,
    )


def _steps(graph: Graph, costs: list[NodeCost]) -> tuple[Step, ...]:
    return tuple(Step(node.name, cost.time_s) for node, cost in zip(graph.nodes, costs, strict=True))


def _candidate(
    tensor: SavedTensor, chain: Chain | None, fixed: Action | None, index: Mapping[str, int], times: Mapping[str, NodeCost]
) -> Candidate:
    recompute = None
    if chain is not None and not chain.why_not and chain.nodes and all(name in index for name in chain.reads):
        seconds = sum(times[name].time_s for name in chain.nodes if name in times)
        reads = tuple(sorted(index[name] for name in chain.reads if index[name] < index[tensor.name]))
        recompute = Recompute(time_s=seconds, reads=reads)
    return Candidate(
        name=tensor.name,
        nbytes=tensor.nbytes or 0,
        produced_at=tensor.produced_at,
        last_forward_use=max(tensor.last_forward_use, tensor.produced_at),
        backward_uses=tensor.backward_uses,
        can_offload=tensor.eligible,
        recompute=recompute,
        fixed=fixed,
        group=re.sub(r"\d+", "*", f"{tensor.module} {tensor.op} {tensor.shape} {tensor.dtype}"),
    )


def _buffers(pair: GraphPair, *, fuses: bool) -> tuple[Buffer, ...]:
    """Device memory besides saved activations and graph inputs: temporaries, model outputs, gradients."""
    forward_nodes, backward_nodes = list(pair.forward.graph.nodes), list(pair.backward.graph.nodes)
    outputs = {node for node in graph_outputs(pair.forward)[: pair.num_fwd_outputs] if node is not None}
    saved = {node for node in graph_outputs(pair.forward)[pair.num_fwd_outputs :] if node is not None}
    total = len(forward_nodes) + len(backward_nodes)
    buffers = _live_ranges(forward_nodes, pair.forward.graph, 0, total - 1, held=outputs, skip=saved, fuses=fuses)
    inputs = {node for node in pair.backward.graph.find_nodes(op="placeholder") if not str(node.target).startswith("tangents")}
    grads = {node for node in graph_outputs(pair.backward) if node is not None}
    buffers += _live_ranges(
        backward_nodes, pair.backward.graph, len(forward_nodes), total - 1, held=grads, skip=inputs, fuses=fuses
    )
    # Gradients of outputs come from autograd, which holds them until backward returns. Their fake storages cannot be trusted:
    # torch 2.11 traces them as the outputs themselves.
    for node in pair.backward.graph.find_nodes(op="placeholder"):
        value = fake(node)
        if value is not None and str(node.target).startswith("tangents"):
            buffers.append(Buffer(node.name, tensor_nbytes(value) or 0, len(forward_nodes), total - 1))
    return tuple(buffers)


def _live_ranges(
    nodes: list[Node], graph: Graph, offset: int, end: int, *, held: set[Node], skip: set[Node], fuses: bool
) -> list[Buffer]:
    real = materialised(graph, fuses=fuses)
    at = {node: position for position, node in enumerate(nodes)}
    skipped = {storage_id(value) for node in skip if (value := fake(node)) is not None}
    skipped |= {
        storage_id(value)
        for node in nodes
        if node.op == "placeholder" and (value := fake(node)) is not None
    }
    kept = {storage_id(value) for node in held if (value := fake(node)) is not None}
    buffers = []
    for identity, members in group_by_storage(nodes).items():
        value = fake(members[0])
        if identity not in real or identity in skipped or value is None:
            continue
        last = max([at[user] for member in members for user in member.users], default=at[members[0]])
        nbytes = storage_nbytes(value) or 0
        buffers.append(Buffer(members[0].name, nbytes, offset + at[members[0]], end if identity in kept else offset + last))
    return buffers
