"""From a partitioned pair of graphs to the instance that is planned: a Program of steps, buffers and candidates.

Every graph node is one step, in the order in which a fusing compiler will run them, which is not quite the graph's.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch.fx import Node

from graphoffload.analysis.chains import Chain
from graphoffload.analysis.costs import Measured, NodeCost, node_costs
from graphoffload.analysis.fusion import Fusion, fusion_of
from graphoffload.analysis.lifetimes import lives_in_memory, made_at
from graphoffload.analysis.saved_values import GraphPair, graph_outputs
from graphoffload.analysis.storages import example_nbytes, example_storage_nbytes, fake, storage_id
from graphoffload.facts.saved_tensors import GraphPosition, SavedTable, SavedTensor
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.planner.problem import Buffer, Candidate, Program, Recompute, Step, StepIndex


@dataclass(frozen=True, slots=True)
class Instance:
    """A Program, whose steps are graph nodes by name in the order in which they run, and what ties it to the graph.

    Attributes:
        forward_places, backward_places: for each step, and for the end, where in the graph something stands that is to run as
            late as it can before that step: in front of the node at the first such position in forward, at the last in
            backward. It may run earlier: steps can be one kernel.
        last_reader: for each candidate, the position in the forward graph of the last operation whose kernel reads it. A
            release in front of it would make a compiler compute early what it reads.
        kernels: how many run in both graphs at least.
    """

    program: Program
    last_reader: tuple[GraphPosition, ...]
    forward_places: tuple[int, ...]
    backward_places: tuple[int, ...]
    kernels: int


@dataclass(frozen=True, slots=True)
class _Runs:
    """How both graphs run once they are fused, and where each node stands in that order."""

    forward: Fusion
    backward: Fusion
    forward_at: dict[Node, int]
    backward_at: dict[Node, int]


def build_program(
    pair: GraphPair,
    table: SavedTable,
    hardware: HardwareProfile,
    *,
    fuses: bool,
    static_bytes: int,
    chains: Mapping[str, Chain],
    reserve_bytes: int = 0,
    outputs_stay: bool = True,
    unfused_bytes: int | None = None,
    measured: Callable[[Node], Measured | None] | None = None,
) -> Instance:
    """The planning instance of a pair.

    Args:
        table: its saved activations. chains: by SavedTensor name, those that may be recomputed.
        static_bytes: device bytes that live throughout: parameters, gradients, inputs, what lives outside the graph.
        reserve_bytes: device bytes to keep free.
        outputs_stay: the caller holds what the model returns until backward is over, not only until it begins.
        unfused_bytes: the compiler fuses no two operations that write so much each and do not need each other.
        measured: a kernel's time in seconds and its workspace in bytes where they were measured.
    """
    runs = _runs(pair, fuses=fuses, unfused_bytes=unfused_bytes)
    forward = node_costs(runs.forward, hardware, measured=measured)
    backward = node_costs(runs.backward, hardware, measured=measured)
    index = {tensor.name: at for at, tensor in enumerate(table.tensors)}
    times = {node.name: cost for node, cost in zip(runs.forward.order, forward, strict=True)}
    lives = _reread_by_chains(table, chains, index, _lives(pair, table, runs))
    held = _held_and_saved(pair, table, chains, lives) if outputs_stay else {}
    candidates = tuple(
        _candidate(tensor, chains.get(tensor.name), index, times, life, is_held=tensor.name in held)
        for tensor, life in zip(table.tensors, lives, strict=True)
    )
    begun = runs.backward.begun
    places = _places(runs.backward)
    program = Program(
        forward=_steps(runs.forward, forward),
        backward=_steps(runs.backward, backward),
        buffers=(*_buffers(pair, runs, outputs_stay), *held.values()),
        candidates=candidates,
        static_bytes=static_bytes,
        reserve_bytes=reserve_bytes,
        reload_steps=tuple(begun[place] for place in places[:-1]),
    )
    first = tuple(bisect_left(runs.forward.begun, runs.forward.begun[place]) for place in _places(runs.forward))
    kernels = runs.forward.kernels + runs.backward.kernels
    return Instance(program, tuple(life.last_reader for life in lives), first, places, kernels)


def _runs(pair: GraphPair, *, fuses: bool, unfused_bytes: int | None) -> _Runs:
    forward, backward = (
        fusion_of(module.graph, fuses=fuses, unfused_bytes=unfused_bytes) for module in (pair.forward, pair.backward)
    )
    return _Runs(forward, backward, made_at(forward), made_at(backward))


def _steps(fusion: Fusion, costs: list[NodeCost]) -> tuple[Step, ...]:
    return tuple(Step(node.name, cost.time_s, cost.workspace_bytes) for node, cost in zip(fusion.order, costs, strict=True))


def _places(fusion: Fusion) -> tuple[int, ...]:
    """For each step, and for the end, the last position in the graph at which no more than the steps before it have run."""
    return tuple(bisect_right(fusion.begun, step) - 1 for step in range(len(fusion.order) + 1))


@dataclass(frozen=True, slots=True)
class _Life:
    """When a saved activation is in use, by the kernels that make and read it; `last_reader`: see Instance."""

    produced_at: StepIndex
    last_forward_use: StepIndex
    backward_uses: tuple[StepIndex, ...]
    last_reader: GraphPosition


def _lives(pair: GraphPair, table: SavedTable, runs: _Runs) -> list[_Life]:
    """The life of every tensor of the table. In backward a tensor is needed from where the wait runs that stands before the
    first operation of the graph that reads it, until its last kernel ends."""
    nodes = {node.name: node for node in pair.forward.graph.nodes}
    graph_at = {node: GraphPosition(at) for at, node in enumerate(pair.forward.graph.nodes)}
    backward = list(pair.backward.graph.nodes)
    placeholders = {node.name: node for node in pair.backward.graph.find_nodes(op="placeholder")}
    lives = []
    for tensor in table.tensors:
        value = fake(nodes[tensor.name])
        assert value is not None
        made = StepIndex(runs.forward_at[nodes[tensor.name]])
        forward_readers = runs.forward.readers.get(storage_id(value), ())
        last = max([made, *(StepIndex(runs.forward.spans[node][1]) for node in forward_readers)])
        last_reader = max([tensor.last_forward_position, *(graph_at[node] for node in forward_readers)])
        uses: set[StepIndex] = set()
        for name in tensor.views:
            saved = fake(placeholders[name])
            assert saved is not None
            readers = runs.backward.readers.get(storage_id(saved), ())
            uses.update(StepIndex(at) for node in readers for at in runs.backward.spans[node])
        if tensor.backward_positions:
            wait = runs.backward.begun[min(tensor.backward_positions)]
            uses.add(StepIndex(min([wait, *(runs.backward_at[backward[at]] for at in tensor.backward_positions)])))
        lives.append(_Life(made, last, tuple(sorted(uses)), last_reader))
    return lives


def _reread_by_chains(
    table: SavedTable, chains: Mapping[str, Chain], index: Mapping[str, int], lives: list[_Life]
) -> list[_Life]:
    """A kernel may store one of its results before another one that it is computed from: to the plan both are there when the
    later one is."""
    found: list[_Life] = []
    for at, (tensor, life) in enumerate(zip(table.tensors, lives, strict=True)):
        reads = [index[name] for name in chains[tensor.name].reads if name in index] if tensor.name in chains else []
        made = max([life.produced_at, *(found[read].produced_at for read in reads if read < at)])
        found.append(replace(life, produced_at=made, last_forward_use=max(made, life.last_forward_use)))
    return found


def _candidate(
    tensor: SavedTensor,
    chain: Chain | None,
    index: Mapping[str, int],
    times: Mapping[str, NodeCost],
    life: _Life,
    *,
    is_held: bool,
) -> Candidate:
    """`is_held`: the caller holds it whatever is decided here, so that a buffer has its bytes; none can be won."""
    recompute = None
    if chain is not None and not chain.why_not and chain.nodes and all(name in index for name in chain.reads):
        seconds = sum(times[name].time_s for name in chain.nodes if name in times)
        reads = tuple(sorted(index[name] for name in chain.reads if index[name] < index[tensor.name]))
        recompute = Recompute(time_s=seconds, reads=reads)
    return Candidate(
        name=tensor.name,
        nbytes=0 if is_held else tensor.planned_bytes,
        produced_at=life.produced_at,
        last_forward_use=life.last_forward_use,
        backward_uses=life.backward_uses,
        can_offload=tensor.eligible,
        recompute=recompute,
        group=re.sub(r"\d+", "*", f"{tensor.module} {tensor.op} {tensor.shape} {tensor.dtype}"),
    )


def _held_and_saved(pair: GraphPair, table: SavedTable, chains: Mapping[str, Chain], lives: list[_Life]) -> dict[str, Buffer]:
    """Memory of what the model returns as well as saves, by SavedTensor name: recomputing it frees nothing as long as the
    caller holds it. Counted until backward has used it last."""
    returned = {node for node in graph_outputs(pair.forward)[: pair.num_fwd_outputs] if node is not None}
    storages = {storage_id(value) for node in returned if (value := fake(node)) is not None}
    nodes = {node.name: node for node in pair.forward.graph.nodes}
    offset, held = len(nodes), dict[str, Buffer]()
    for tensor, life in zip(table.tensors, lives, strict=True):
        value = fake(nodes[tensor.name])
        if value is None or storage_id(value) not in storages:
            continue
        again = [
            other.backward_uses[0]
            for reader, other in zip(table.tensors, lives, strict=True)
            if other.backward_uses and reader.name in chains and tensor.name in chains[reader.name].reads
        ]
        until = max((*life.backward_uses, *again), default=life.last_forward_use - offset)
        held[tensor.name] = Buffer(tensor.name, tensor.planned_bytes, life.produced_at, offset + until)
    return held


def _buffers(pair: GraphPair, runs: _Runs, outputs_stay: bool) -> tuple[Buffer, ...]:
    """Device memory besides saved activations and graph inputs: temporaries, model outputs, gradients."""
    forward_nodes, backward_nodes = list(pair.forward.graph.nodes), list(pair.backward.graph.nodes)
    outputs = {node for node in graph_outputs(pair.forward)[: pair.num_fwd_outputs] if node is not None}
    saved = {node for node in graph_outputs(pair.forward)[pair.num_fwd_outputs :] if node is not None}
    total = len(forward_nodes) + len(backward_nodes)
    offset = len(forward_nodes)
    until = total - 1 if outputs_stay else offset
    buffers = _live_ranges(forward_nodes, runs.forward, runs.forward_at, 0, until, held=outputs, skip=saved)
    inputs = {node for node in pair.backward.graph.find_nodes(op="placeholder") if not str(node.target).startswith("tangents")}
    grads = {node for node in graph_outputs(pair.backward) if node is not None}
    buffers += _live_ranges(backward_nodes, runs.backward, runs.backward_at, offset, total - 1, held=grads, skip=inputs)
    # Gradients of outputs come from autograd, which holds them until backward returns. Their fake storages cannot be trusted:
    # torch 2.11 traces them as the outputs themselves.
    for node in pair.backward.graph.find_nodes(op="placeholder"):
        value = fake(node)
        if value is not None and str(node.target).startswith("tangents"):
            buffers.append(Buffer(node.name, example_nbytes(value), offset, total - 1))
    return tuple(buffers)


def _live_ranges(
    nodes: list[Node], fusion: Fusion, at: dict[Node, int], offset: int, end: int, *, held: set[Node], skip: set[Node]
) -> list[Buffer]:
    skipped = {storage_id(value) for node in skip if (value := fake(node)) is not None}
    skipped |= {storage_id(value) for node in nodes if node.op == "placeholder" and (value := fake(node)) is not None}
    kept = {storage_id(value) for node in held if (value := fake(node)) is not None}
    buffers = []
    for identity, made, first, last in lives_in_memory(nodes, fusion, at):
        value = fake(made)
        if identity in skipped or value is None:
            continue
        until = end if identity in kept else offset + last
        buffers.append(Buffer(made.name, example_storage_nbytes(value), offset + first, until))
    return buffers
