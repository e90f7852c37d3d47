"""Builds the planning instance of a partitioned pair of graphs: a Program of steps, buffers and candidates.

    forward graph    a = mm    b = gelu(a)    c = mm(b)              backward graph    ...

    steps            mm        gelu           mm        |  ...       one for each node, with its time and workspace
    candidate a      ├────────────────┤       ·         |  · ├──┤    produced, last forward use, backward uses
    buffer           logits, temporaries, gradients                  memory that no decision changes

A fusing compiler does not run the nodes in the order of the graph (fusion.py). The steps are in the order in which they run.
`Instance` maps steps back to places in the graph. planner/problem.py defines the problem.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from torch.fx import Node

from graphoffload.analysis.chains import Chain
from graphoffload.analysis.costs import Measured, NodeCost, node_costs
from graphoffload.analysis.fusion import Fusion, fusion_of
from graphoffload.analysis.images import ImageCopies, image_copies
from graphoffload.analysis.lifetimes import donated_until, lives_in_memory, made_at
from graphoffload.analysis.saved_values import GraphPair, graph_outputs
from graphoffload.analysis.storages import example_nbytes, example_storage_nbytes, fake, storage_id
from graphoffload.facts.saved_tensors import GraphPosition, SavedTable, SavedTensor
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.planner.problem import Buffer, Candidate, Program, Recompute, Step, StepIndex
from graphoffload.torch_internals.partitioning import config

TURN = "eager code between forward and backward"
"""The name of the step that stands for it."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A Program and its relation to the graphs. The program's steps are nodes by name, in the order in which they run.

    Attributes:
        forward_places, backward_places: for each step, and for the end, a position in the graph. An operation that is inserted
            before the node at this position runs as late as possible before the step. It may run earlier if several steps are
            one kernel.
        last_reader: for each candidate, the position in the forward graph of the last operation whose kernel reads it. If a
            release came before that operation, the compiler would compute the operation's inputs early.
        kernels: the least number of kernels of both graphs.
    """

    program: Program
    last_reader: tuple[GraphPosition, ...]
    forward_places: tuple[int, ...]
    backward_places: tuple[int, ...]
    kernels: int


@dataclass(frozen=True, slots=True)
class _Runs:
    """Both graphs as they run once they are fused, and the step at which each node's result exists."""

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
    turn_bytes: int = 0,
    outputs_stay: bool = True,
    unfused_bytes: int | None = None,
    measured: Callable[[Node], Measured | None] | None = None,
    channels_last: bool = False,
) -> Instance:
    """The planning instance of a pair.

    Args:
        table: the saved activations of the pair.
        chains: the chains of the activations that may be recomputed, by SavedTensor name.
        static_bytes: device bytes that live throughout: parameters, gradients, inputs, memory outside the graph.
        reserve_bytes: device bytes to keep free.
        turn_bytes: device bytes that eager code takes between forward and backward, such as a loss, above what forward leaves.
            The forward's last step, which returns, stands for it.
        outputs_stay: the caller holds the model's outputs until backward ends, not only until it begins.
        unfused_bytes: the compiler does not fuse two independent operations that write this many bytes each.
        measured: returns a kernel's measured time and workspace; None for a kernel that was not measured.
        channels_last: the compiler runs convolutions of images on channels_last memory.
    """
    copies = image_copies(pair, channels_last=channels_last) if fuses else ImageCopies()
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
        forward=_with_turn(_steps(runs.forward, forward), turn_bytes),
        backward=_steps(runs.backward, backward),
        buffers=(*_buffers(pair, runs, outputs_stay, copies), *_copied(pair, table, runs, copies), *held.values()),
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


def _with_turn(forward: tuple[Step, ...], turn_bytes: int) -> tuple[Step, ...]:
    *steps, last = forward
    return (*steps, replace(last, name=TURN, workspace_bytes=last.workspace_bytes + turn_bytes)) if turn_bytes else forward


def _places(fusion: Fusion) -> tuple[int, ...]:
    """For each step, and for the end, the last position in the graph at which only earlier steps have run."""
    return tuple(bisect_right(fusion.begun, step) - 1 for step in range(len(fusion.order) + 1))


@dataclass(frozen=True, slots=True)
class _Life:
    """The steps at which kernels produce and read a saved activation; `last_reader` as in Instance.

    `overwritten_at` as in Candidate.
    """

    produced_at: StepIndex
    last_forward_use: StepIndex
    backward_uses: tuple[StepIndex, ...]
    last_reader: GraphPosition
    overwritten_at: StepIndex | None


def _lives(pair: GraphPair, table: SavedTable, runs: _Runs) -> list[_Life]:
    """The life of every tensor of the table.

    In backward a tensor is needed from its wait until its last reader's kernel ends. The wait is inserted before the first
    operation of the graph that reads the tensor, and may run earlier than the kernel of that operation.
    """
    nodes = {node.name: node for node in pair.forward.graph.nodes}
    graph_at = {node: GraphPosition(at) for at, node in enumerate(pair.forward.graph.nodes)}
    backward = list(pair.backward.graph.nodes)
    placeholders = {node.name: node for node in pair.backward.graph.find_nodes(op="placeholder")}
    over = donated_until(backward, runs.backward, _donated(pair, table, placeholders))
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
        until = over.get(placeholders[tensor.views[0]])
        lives.append(_Life(made, last, tuple(sorted(uses)), last_reader, None if until is None else StepIndex(until + 1)))
    return lives


def _donated(pair: GraphPair, table: SavedTable, placeholders: Mapping[str, Node]) -> set[Node]:
    """Inputs of the backward whose memory torch lets it write over.

    These are the saved activations that share no memory with an input of the forward or with an output that its caller gets
    (collect_bw_donated_buffer_idxs in torch/_functorch/_aot_autograd/graph_compile.py).
    """
    if not config.donated_buffer:
        return set()
    callers = [*pair.forward.graph.find_nodes(op="placeholder"), *graph_outputs(pair.forward)[: pair.num_fwd_outputs]]
    held = {storage_id(value) for node in callers if node is not None and (value := fake(node)) is not None}
    nodes = {node.name: node for node in pair.forward.graph.nodes}
    found = set()
    for tensor in table.tensors:
        value = fake(nodes[tensor.name])
        if len(tensor.views) == 1 and value is not None and storage_id(value) not in held:
            found.add(placeholders[tensor.views[0]])
    return found


def _reread_by_chains(
    table: SavedTable, chains: Mapping[str, Chain], index: Mapping[str, int], lives: list[_Life]
) -> list[_Life]:
    """Lives in which an activation is produced no earlier than the activations that its chain reads.

    One kernel may store a result before another result that the first is computed from. The plan counts both from the later
    one on.
    """
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
    """The candidate of one saved activation. `is_held`: the caller holds the memory anyway, so a buffer has its bytes, and the
    candidate has none."""
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
        overwritten_at=life.overwritten_at,
    )


def _held_and_saved(pair: GraphPair, table: SavedTable, chains: Mapping[str, Chain], lives: list[_Life]) -> dict[str, Buffer]:
    """Buffers of the activations that the model also returns, by SavedTensor name, until their last use in backward.

    Recomputing such an activation frees no memory while the caller holds it.
    """
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


def _copied(pair: GraphPair, table: SavedTable, runs: _Runs, copies: ImageCopies) -> Iterator[Buffer]:
    """Copies of images and weights. Those of an input that is saved live as long as it; of an input that the table has, the
    table's is the copy from the end of forward on, since its caller lets go of the other. One kernel makes all copies of a
    gradient, each for one convolution."""
    placeholders = {node.name: node for node in pair.backward.graph.find_nodes(op="placeholder")}
    counted, offset = {tensor.name for tensor in table.tensors}, len(runs.forward.order)
    for node in pair.forward.graph.find_nodes(op="placeholder"):
        if node.name in copies.saved:
            first, *_ = sorted(_read_at(runs.forward, node)) or [(0, 0)]
            again = _read_at(runs.backward, placeholders[node.name]) if node.name not in counted else []
            last = max((end for _, end in again), default=-1)
            yield Buffer(f"{node.name} channels_last", example_nbytes(node.meta["val"]), first[0], offset + last)
    for of_one, made, begin in ((copies.forward, runs.forward_at, 0), (copies.backward, runs.backward_at, offset)):
        at = {node.name: begin + step for node, step in made.items()}
        first_steps: dict[str, int] = {}
        for reader, operand, nbytes in sorted(of_one, key=lambda copy: at[copy[0]]):
            yield Buffer(f"{operand} for {reader}", nbytes, first_steps.setdefault(operand, at[reader]), at[reader])


def _read_at(fusion: Fusion, node: Node) -> list[tuple[int, int]]:
    """The first and the last step of the kernels that read a node's memory."""
    value = fake(node)
    return [] if value is None else [fusion.spans[reader] for reader in fusion.readers.get(storage_id(value), ())]


def _buffers(pair: GraphPair, runs: _Runs, outputs_stay: bool, copies: ImageCopies) -> tuple[Buffer, ...]:
    """Device memory besides saved activations and graph inputs: temporaries, model outputs, gradients."""
    forward_nodes, backward_nodes = list(pair.forward.graph.nodes), list(pair.backward.graph.nodes)
    outputs = {node for node in graph_outputs(pair.forward)[: pair.num_fwd_outputs] if node is not None}
    saved = {node for node in graph_outputs(pair.forward)[pair.num_fwd_outputs :] if node is not None}
    total = len(forward_nodes) + len(backward_nodes)
    offset = len(forward_nodes)
    until = total - 1 if outputs_stay else offset
    apart = {node for node in outputs if node.name in copies.as_given}
    buffers = _live_ranges(forward_nodes, runs.forward, runs.forward_at, 0, until, held=outputs, skip=saved, apart=apart)
    inputs = {node for node in pair.backward.graph.find_nodes(op="placeholder") if not str(node.target).startswith("tangents")}
    grads = {node for node in graph_outputs(pair.backward) if node is not None}
    buffers += _live_ranges(backward_nodes, runs.backward, runs.backward_at, offset, total - 1, held=grads, skip=inputs)
    # Autograd holds the gradients of outputs until backward returns. Their fake storages are of no use: torch 2.11 traces these
    # gradients as the outputs themselves.
    for node in pair.backward.graph.find_nodes(op="placeholder"):
        value = fake(node)
        if value is not None and str(node.target).startswith("tangents"):
            buffers.append(Buffer(node.name, example_nbytes(value), offset, total - 1))
    return tuple(buffers)


def _live_ranges(
    nodes: list[Node],
    fusion: Fusion,
    at: dict[Node, int],
    offset: int,
    end: int,
    *,
    held: set[Node],
    skip: set[Node],
    apart: Collection[Node] = (),
) -> list[Buffer]:
    skipped = {storage_id(value) for node in skip if (value := fake(node)) is not None}
    skipped |= {storage_id(value) for node in nodes if node.op == "placeholder" and (value := fake(node)) is not None}
    kept = {storage_id(value) for node in held if (value := fake(node)) is not None}
    buffers = []
    for identity, made, first, last in lives_in_memory(nodes, fusion, at, skip=skipped, apart=apart):
        value = fake(made)
        if value is None:
            continue
        until = end if identity in kept else offset + last
        buffers.append(Buffer(made.name, example_storage_nbytes(value), offset + first, until))
    return buffers
