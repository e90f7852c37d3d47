"""A model of a fusing compiler: the values that exist in memory, the operations that run as one kernel, and the kernels' order.

Each node has one of three kinds:
    view     It moves no data.
    kernel   It runs alone: matrix products, grouped ones included, attention, convolutions, sorts, scans, collectives, custom
             operations, and whatever else Inductor does not compute itself.
    fused    It is a pointwise operation or a reduction. If neither a kernel nor the graph's output reads its value, the value
             need not exist: its readers compute it (stored.py). Fused operations whose values exist run as one kernel if they
             share data and no other kernel must run between them.

    gate ─┬─▶ silu ─▶ mul ──▶ mm            mul and dgate each compute silu, which does not exist. One kernel writes mul, dgate
    up ───┤                                 and dup, so all three are in memory at once, and gate, up and d until it has run.
    d ────┴─▶ dgate ─▶ mm, dup ─▶ mm

The sum of a matrix product and another value is one kernel with the product (addmm), unless only pointwise operations read the
sum on a GPU. The gradients of a weight that is used several times are added in this way.

Under an inner compiler that does not fuse, every operation but a view is a kernel, and every value exists.

The rules follow Inductor (torch/_inductor/scheduler.py, ir.py), whose score of a pair is the bytes that it shares. The model is
wrong where Inductor's further rules decide otherwise: its limits for single backends, templates with epilogues, loop orders.
Memory and time of the plan are then slightly off.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.fx import Graph, Node
from torch.utils.flop_counter import flop_registry

from graphoffload.analysis.addmm import added_to_products
from graphoffload.analysis.kernels import Axis, Kernel, Space, add_needs, in_order, runs_after, take_over
from graphoffload.analysis.loops import is_read_in_another_loop
from graphoffload.analysis.reductions import axis_of, loops, mixes, space_of
from graphoffload.analysis.storages import example_storage_nbytes, fake, is_in, storage_id, tensors_of, with_views
from graphoffload.analysis.stored import (
    Operations,
    exists,
    is_large,
    is_random,
    operations_after,
    operations_of,
    takes_many_reads,
)
from graphoffload.torch_internals.inductor import falls_back, most_reads
from graphoffload.torch_internals.operators import OpOverload, packet_of

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
    "_mm",
    "cumsum",
    "cumprod",
)
FARTHEST = 20  # the greatest distance, in operations, at which two operations are fused under a plan
CRUMBS = 0.01  # two independent operations are fused only if they share more than this fraction of the smaller one's bytes
_FUSED_NAMESPACES = ("aten", "prims", "inductor_prims")


SAVES_STATE, TAKES_STATE, TAKES_STATE_ON_GPU = "run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state"
"""How torch calls a random operation of a checkpoint region: `run_and_save_rng_state(op, *args)` returns (state, value), and
`run_with_rng_state(state, op, *args)` returns the value. `graphsafe_run_with_rng_state(op, *args, rng_state=...)` takes the
place of both on a GPU."""
WITH_RANDOM_STATE = (SAVES_STATE, TAKES_STATE, TAKES_STATE_ON_GPU)
"""All of them. Their nodes have no value."""


def kind_of(node: Node, *, fuses: bool) -> Kind:
    """The kind of a node; see the module's docstring."""
    if node.op != "call_function" or node.target is operator.getitem:
        return "none"
    if not isinstance(value_of(node), (torch.Tensor, tuple, list)):
        return "none"
    if _is_view(node):
        return "view"
    if not fuses or not isinstance(node.target, OpOverload):
        return "kernel"
    name = str(node.target)
    if packet_of(node.target) in flop_registry or any(word in name for word in _KERNEL_WORDS):
        return "kernel"
    return "kernel" if node.target.namespace not in _FUSED_NAMESPACES or falls_back(node.target) else "fused"


def value_of(node: Node) -> object:
    """The value that tracing left on a node; that of its results for random operations of regions, which have none."""
    if "val" in node.meta or getattr(node.target, "__name__", "") not in WITH_RANDOM_STATE:
        return node.meta.get("val")
    results = sorted((user.args[1], user) for user in node.users if user.target is operator.getitem and "val" in user.meta)
    return tuple(user.meta["val"] for _, user in results) or None


def _is_view(node: Node) -> bool:
    source = fake(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
    return source is not None and is_in(node, storage_id(source))


@dataclass(slots=True)
class Fusion:
    """How the nodes of one graph run.

    Attributes:
        real: storages that exist in memory.
        sources: storage that does not exist -> the existing storages that it is computed from.
        late: storage that exists only from a later turn on -> that turn, and what readers before it compute it from.
        large: storage of a value that takes many operations -> its node. It exists if another kernel reads it.
        added: sum -> the matrix product in the same kernel. The product's own result does not exist. sums: the other way round.
        order: the nodes in the order in which they run. The nodes of a kernel are adjacent. A node that belongs to no kernel is
            near its place in the graph.
        spans: node -> first and last index in `order` of its kernel. Nodes without a kernel are absent.
        readers: storage that exists -> the nodes whose kernels read it.
        inside: storage of a large value that exists in its kernel alone -> the nodes that read it there.
        unfused_bytes: two independent operations that write this many bytes each are not fused.
        begun: position in the graph -> the number of nodes of `order` that have run before an operation inserted there runs.
            The last entry is for the end of the graph.
        fuses: whether the compiler fuses at all.
        places: node -> its position in the graph.
    """

    kinds: dict[Node, Kind]
    real: set[int] = field(default_factory=set)
    sources: dict[int, frozenset[int]] = field(default_factory=dict)
    late: dict[int, tuple[int, frozenset[int]]] = field(default_factory=dict)
    large: dict[int, Node] = field(default_factory=dict)
    added: dict[Node, Node] = field(default_factory=dict)
    sums: dict[Node, Node] = field(default_factory=dict)
    order: list[Node] = field(default_factory=list)
    spans: dict[Node, tuple[int, int]] = field(default_factory=dict)
    readers: dict[int, list[Node]] = field(default_factory=dict)
    inside: dict[int, list[Node]] = field(default_factory=dict)
    unfused_bytes: int | None = None
    begun: list[int] = field(default_factory=list)
    fuses: bool = True
    places: dict[Node, int] = field(init=False)

    def __post_init__(self) -> None:
        self.places = {node: at for at, node in enumerate(self.kinds)}

    @property
    def kernels(self) -> int:
        """The least number of kernels: some operations launch several, and a region launches one for each of its own."""
        return len(set(self.spans.values())) - len(self.added)

    def read_by(self, node: Node) -> frozenset[int]:
        """Existing storages that a kernel reads to compute this node."""
        found: set[int] = set()
        for argument in node.all_input_nodes:
            for value in tensors_of(argument):
                found |= self.read_for(storage_id(value), node)
        return frozenset(found)

    def read_for(self, identity: int, reader: Node) -> frozenset[int]:
        """Existing storages that a node's kernel reads for the value in a storage."""
        turn, sources = self.late.get(identity, (0, frozenset[int]()))
        return sources if 2 * self.places[reader] < turn else self.sources.get(identity, frozenset((identity,)))

    def needed_within(self, kernel: Sequence[Node]) -> dict[Node, set[Node]]:
        """The operations of a kernel that each of them is computed from."""
        made_by = {storage_id(value): one for one in kernel for value in tensors_of(one)}
        inside = [(one, self.inside[identity]) for identity, one in made_by.items() if identity in self.inside]
        needs = dict[Node, set[Node]]()
        for node in kernel:
            before = {made_by[read] for read in self.read_by(node) if read in made_by} - {node}
            before |= {one for one, readers in inside if node in readers}
            needs[node] = before.union(*(needs.get(other, ()) for other in before))
        return needs


def fusion_of(graph: Graph, *, fuses: bool, unfused_bytes: int | None = None) -> Fusion:
    """The model of one graph. `stored.py` says which values exist."""
    fusion = Fusion({node: kind_of(node, fuses=fuses) for node in graph.nodes}, unfused_bytes=unfused_bytes, fuses=fuses)
    fusion.added = added_to_products(graph, fusion.kinds)
    fusion.kinds.update(dict.fromkeys(fusion.added, "kernel"))
    fusion.sums = {product: added for added, product in fusion.added.items()}
    computed: dict[int, Operations] = {}
    for node in graph.nodes:
        value = fake(node)
        if value is None or storage_id(value) in fusion.real or storage_id(value) in fusion.sources:
            continue
        sources = fusion.read_by(node)
        for identity in sources & fusion.late.keys():  # it is read, and no longer computed
            computed.pop(identity, None)
        if node in fusion.sums:
            fusion.sources[storage_id(value)] = sources
        elif fusion.kinds[node] != "fused" or exists(node, fusion.kinds):
            fusion.real.add(storage_id(value))
            if (operations := operations_after(node)) is not None:
                computed[storage_id(value)] = operations
            elif (turn := _turn(node, fusion, sources)) > 2 * fusion.places[node] + 1:
                operations = operations_of(node, computed)
                if not is_large(node, sources, operations):
                    fusion.late[storage_id(value)], computed[storage_id(value)] = (turn, sources), operations
        elif is_large(node, sources, operations := operations_of(node, computed)):
            fusion.large[storage_id(value)] = node
            fusion.real.add(storage_id(value))
        else:
            computed[storage_id(value)] = operations
            fusion.sources[storage_id(value)] = sources
    _group(graph, fusion)
    for identity, node in fusion.large.items():
        _leave_out(identity, node, fusion)
    return fusion


def _leave_out(identity: int, node: Node, fusion: Fusion) -> None:
    """Let a value not exist that only the kernel reads that computes it, unless a loop of that kernel reads it once more."""
    readers, sources = fusion.readers.get(identity, []), fusion.read_by(node)
    if not readers or any(fusion.spans[reader] != fusion.spans[node] for reader in readers):
        return
    if takes_many_reads(node, sources) and any(loops(reader) for reader in readers):
        return
    first, last = fusion.spans[node]
    if is_read_in_another_loop(node, readers, fusion.order[first : last + 1], fusion):
        return
    fusion.real.discard(identity)
    fusion.sources[identity] = sources
    fusion.inside[identity] = fusion.readers.pop(identity)
    for other, found in fusion.sources.items():
        if identity in found:
            fusion.sources[other] = found - {identity} | sources
    for other, (turn, found) in fusion.late.items():
        if identity in found:
            fusion.late[other] = turn, found - {identity} | sources


def _group(graph: Graph, fusion: Fusion) -> None:
    """Fill `order`, `spans` and `readers`. A fused operation joins the kernel that it shares the most bytes with."""
    kernels: list[Kernel] = []
    made_by: dict[int, int] = {}
    touching: dict[int, list[int]] = {}
    sizes = {storage_id(value): example_storage_nbytes(value) for node in graph.nodes for value in tensors_of(node)}
    order = 0
    for node in graph.nodes:
        kind = fusion.kinds[node]
        value = fake(node)
        if kind not in ("kernel", "fused") or (kind == "fused" and value is not None and storage_id(value) in fusion.sources):
            continue
        order += 1
        reads = fusion.read_by(node)
        for identity in reads:
            fusion.readers.setdefault(identity, []).append(node)
        needs = {made_by[identity] for identity in reads if identity in made_by}
        space = space_of(node) if kind == "fused" else None
        weights = {identity: sizes.get(identity, 0) for identity in reads}
        outputs = {identity: sizes.get(identity, 0) for identity in map(storage_id, tensors_of(node))}
        written = sum(outputs.values())
        axis = axis_of(node) if space else None
        home = _home(kernels, touching, weights, written, needs, space, axis, order, fusion, node) if space else None
        turn = _turn(node, fusion, reads)
        if home is None:
            home = Kernel(len(kernels), turn, order, space)
            kernels.append(home)
        for number in needs - {home.number}:
            if _are_numbers_for(kernels[number], space):
                made_by.update((storage_id(value), home.number) for value in tensors_of(kernels[number].nodes[0]))
                take_over(home, kernels[number])
                needs.discard(number)
        home.turn = min(home.turn, turn)
        home.nodes.append(node)
        if axis is not None:
            home.axes.add(axis)
        add_needs(kernels, home, needs)
        home.touched |= weights | outputs
        home.written += written
        for identity in outputs:
            made_by.setdefault(identity, home.number)
        if kind == "fused":
            for identity in (*reads, *outputs):
                touching.setdefault(identity, []).append(home.number)
    _place(kernels, fusion)


def _home(
    kernels: list[Kernel],
    touching: dict[int, list[int]],
    reads: dict[int, int],
    written: int,
    needs: set[int],
    space: Space,
    axis: Axis | None,
    order: int,
    fusion: Fusion,
    node: Node,
) -> Kernel | None:
    """The kernel that an operation joins; None if it starts one.

    The kernel has the same iteration space, is near, and reads or writes some of the same storages. If the operation does not
    read the kernel's results, these are more than a few bytes, and it reduces no columns, which takes another order. Nothing it
    needs must run after the kernel. Reductions of rows and of columns mix if they are large and neither needs the other.
    """
    shared: dict[int, int] = {}
    for identity, nbytes in reads.items():
        for number in set(touching.get(identity, ())):
            shared[number] = shared.get(number, 0) + nbytes
    across = {number: axis is not None and bool(kernels[number].axes - {axis}) for number in shared}
    numbers = {number for number in needs if _are_numbers_for(kernels[number], space)}
    for number in sorted(shared, key=lambda n: (n not in numbers, not across[n], shared[n], n), reverse=True):
        kernel = kernels[number]
        if kernel.space != space or order - kernel.order > FARTHEST:
            continue
        if number not in needs and axis == "columns" and not kernel.axes:
            continue
        if number not in needs and shared[number] <= CRUMBS * min(sum(reads.values()) + written, sum(kernel.touched.values())):
            continue
        if number not in needs and fusion.unfused_bytes is not None and min(kernel.written, written) >= fusion.unfused_bytes:
            continue
        if runs_after(kernels, number, needs):
            continue
        if across[number] and (number in needs or not mixes(node, axis)):
            continue
        return kernel
    return None


def _are_numbers_for(kernel: Kernel, space: Space | None) -> bool:
    """Whether a kernel makes random numbers alone, which no other one reads yet: it becomes part of their reader's."""
    return kernel.space == space is not None and not kernel.users and len(kernel.nodes) == 1 and is_random(kernel.nodes[0])


def _turn(node: Node, fusion: Fusion, reads: frozenset[int]) -> int:
    """The earliest turn of an operation's kernel. An operation's own turn is twice its place in the graph, plus one.

    A pointwise value is stored right before its first reader that cannot compute the value itself. It is stored at its own turn
    if the graph returns it, if it is large, or if it has several readers of which one cannot compute it. A product that runs in
    the kernel of a sum runs where the sum is.
    """
    places, value, kind = fusion.places, fake(node), fusion.kinds[node]
    own = 2 * places[fusion.sums.get(node, node)] + 1
    if kind != "fused" or value is None or axis_of(node) is not None or len(reads) > most_reads(value.device.type):
        return own
    if storage_id(value) in fusion.large:
        return own
    turns: list[int] = []
    for member in with_views(node):
        asking = [user for user in member.users if user.op == "output" or fusion.kinds[user] == "kernel"]
        turns += [own if user.op == "output" else 2 * places[fusion.sums.get(user, user)] for user in asking]
        if len(member.users) > 1 and any(user.op == "output" or len(reads) > 1 for user in asking):
            turns.append(2 * places[member] + 1)
    return min(turns, default=own)


def _place(kernels: list[Kernel], fusion: Fusion) -> None:
    """Fill `order`, `spans` and `begun`. A node that belongs to no kernel is put near its place in the graph."""
    sequence, turns = in_order(kernels)
    members = {node for kernel in kernels for node in kernel.nodes}
    others = [(at, node) for at, node in enumerate(fusion.kinds) if node not in members]
    others.reverse()
    ends = [0]
    for kernel in sequence:
        while others and 2 * others[-1][0] < kernel.turn:
            fusion.order.append(others.pop()[1])
        start = len(fusion.order)
        fusion.order.extend(kernel.nodes)
        fusion.spans.update(dict.fromkeys(kernel.nodes, (start, len(fusion.order) - 1)))
        ends.append(len(fusion.order))
    fusion.order.extend(node for _, node in reversed(others))
    turns.reverse()
    run = 0
    for at in range(len(fusion.kinds) + 1):
        while turns and turns[-1][0] < 2 * at:
            run = turns.pop()[1]
        fusion.begun.append(ends[run])
