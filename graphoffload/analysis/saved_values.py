"""Builds the SavedTable of a partitioned pair of graphs: for each saved activation its storage, its producer and readers, and
whether it may be offloaded.

    forward ─▶ (model outputs, saved values)       saved values ─▶ backward
               first num_fwd_outputs   the rest    placeholders of the same names

Several saved views of one storage are one activation, since its bytes are held and copied once. These are never offloaded:

    graph inputs, constants, their views   The caller holds the memory, so no bytes would be freed.
    aliases of a model output              The caller holds the memory, and may write to it.
    copies of inputs and outputs           Inductor removes such a copy if nothing saves it: the memory is then the caller's.
    symbols, opaque and non-strided        They are not bytes in one block of memory.
    results of collectives, unwaited for   They are being written to. What the wait returns is their memory, and may be.
    random state                           It is tiny and read by value.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from graphoffload.analysis.collectives import is_unwaited, read_until, waited
from graphoffload.analysis.module_paths import boundary_names, module_path, module_stack
from graphoffload.analysis.storages import (
    concrete,
    covers_storage,
    example_storage_nbytes,
    fake,
    group_by_storage,
    only_views,
    read_by,
    storage_id,
    storage_nbytes,
)
from graphoffload.errors import VerifyError
from graphoffload.facts.refusals import Refusal
from graphoffload.facts.saved_tensors import INPUT, GraphPosition, SavedTable, SavedTensor, Tag
from graphoffload.torch_internals.checkpoint_tags import tag_of
from graphoffload.torch_internals.operators import OpOverload, is_undeclared_view, schema_of


@dataclass(frozen=True, slots=True)
class GraphPair:
    """A forward and a backward graph as a partitioner returns them; the first `num_fwd_outputs` outputs are the model's.

    unhoisted: names of the forward's nodes in torch's order, if some were moved (passes/hoist.py).
    """

    forward: GraphModule
    backward: GraphModule
    num_fwd_outputs: int
    unhoisted: tuple[str, ...] = ()


def graph_outputs(module: GraphModule) -> list[Node | None]:
    """Arguments of the output node, with None for an argument that is no node."""
    output = next(iter(reversed(module.graph.nodes)))
    return [value if isinstance(value, Node) else None for value in output.args[0]]


def returned_bytes(pair: GraphPair) -> int:
    """Bytes that forward allocates for the model's outputs; symbolic sizes as in the example."""
    nodes = graph_outputs(pair.forward)[: pair.num_fwd_outputs]
    values = [fake(node) for node in nodes if node is not None and node.op == "call_function"]
    return sum({storage_id(value): example_storage_nbytes(value) for value in values if value is not None}.values())


def saved_placeholders(pair: GraphPair) -> Iterator[tuple[Node, Node]]:
    """(forward node, backward placeholder) of every saved value, in the order of the forward outputs."""
    placeholders = {node.name: node for node in pair.backward.graph.find_nodes(op="placeholder")}
    for node in graph_outputs(pair.forward)[pair.num_fwd_outputs :]:
        if node is not None and node.name in placeholders:
            yield node, placeholders[node.name]


def real_uses(node: Node) -> list[Node]:
    """Operations that read a value's memory: its users, looking through views of it."""
    tensor = fake(node)
    assert tensor is not None
    identity, found, pending, seen = storage_id(tensor), [], [node], {node}
    while pending:
        for user in pending.pop().users:
            if user in seen:
                continue
            seen.add(user)
            value = fake(user)
            if value is not None and storage_id(value) == identity and user.op == "call_function":
                pending.append(user)
            else:
                found.append(user)
    return found


def needed_by(placeholder: Node, forward_names: Collection[str]) -> list[Node]:
    """Backward operations that need a saved value. An operation that torch recomputes is replaced by its own readers."""
    pending, found, seen = list(real_uses(placeholder)), dict[Node, None](), set[Node]()
    while pending:
        user = pending.pop(0)
        if user in seen or user.op != "call_function":
            continue
        seen.add(user)
        if user.name in forward_names:
            pending.extend(user.users)
        else:
            found[user] = None
    return list(found)


def saved_table(pair: GraphPair, tags_from: Iterable[Node] = (), activations: Collection[str] = ()) -> SavedTable:
    """All saved activations of a pair, by storage, in order of production.

    Args:
        pair: the partitioned graphs; read, never written.
        activations: names of inputs that other graphs computed and that their caller lets go: saved activations as well.
        tags_from: nodes of the joint graph with the user's own tags only.
    """
    tags = {node.name: tag_of(node.meta) for node in tags_from}
    forward_at = {node: GraphPosition(at) for at, node in enumerate(pair.forward.graph.nodes)}
    backward_at = {node: GraphPosition(at) for at, node in enumerate(pair.backward.graph.nodes)}
    outputs = {
        storage_id(value)
        for node in graph_outputs(pair.forward)[: pair.num_fwd_outputs]
        if node is not None and (value := fake(node)) is not None
    }
    nodes = pair.forward.graph.nodes
    given = {node for node in nodes if node.op == "placeholder" and node.name in activations and _is_whole(node)}
    foreign = (node for node in nodes if node.op in ("placeholder", "get_attr") and node not in given)
    inputs = set(group_by_storage(foreign))  # constants live on
    members = group_by_storage(node for node in nodes if node.op == "call_function" or node in given)
    saved: dict[int, list[tuple[Node, Node]]] = {}
    for node, placeholder in saved_placeholders(pair):
        value = fake(node)
        if value is not None and storage_id(value) not in inputs:
            saved.setdefault(storage_id(value), []).append((node, placeholder))
    names = {node.name for node in nodes}
    for identity in saved:
        _check_one_memory(members[identity])
    callers = inputs | outputs | _copies_of(inputs | outputs, members)
    tensors = [
        _describe(pairs, members[identity], forward_at, backward_at, identity in outputs, identity in callers, tags, names)
        for identity, pairs in saved.items()
    ]
    return SavedTable(tuple(sorted(tensors, key=lambda tensor: tensor.produced_position)))


def _is_whole(node: Node) -> bool:
    """Whether a value is all of its storage: a part of one frees nothing."""
    value = fake(node)
    return value is not None and covers_storage(value)


def _check_one_memory(members: list[Node]) -> None:
    """Check that the nodes of one fake storage are views of one value.

    Raises:
        VerifyError: an operation gave the same fake tensor to two values. One copy would be made for both.
    """
    sources = {_source(node): node for node in reversed(members) if not any(other in members for other in read_by(node))}
    if len(sources) > 1:
        first, second, *_ = (node.name for node in reversed(sources.values()))
        raise VerifyError(
            f"{first} and {second} have one fake storage, but neither is a view of the other: their memory cannot be told "
            "apart, and a gradient could be wrong, so nothing was compiled. Please report this with a graph dump."
        )


def _source(node: Node) -> Hashable:
    """The origin of a value: the memory that it is a view of, else its operation.

    If Inductor removed a copy from the joint graph, the copy's views read the copied value but keep the copy's fake storage.
    """
    made = node.args[0] if node.target is operator.getitem and isinstance(node.args[0], Node) else node
    first = next(iter(made.all_input_nodes), None)
    value = fake(first) if first is not None else None
    return storage_id(value) if value is not None and only_views(made) else made


def _copies_of(callers: set[int], members: dict[int, list[Node]]) -> set[int]:
    """Storages that are a copy or a view of one of the caller's, or of such a copy; `members` are in the order of the graph.

    If Inductor removed a copy from the joint graph, the copy's views keep the copy's fake storage.
    """
    found: set[int] = set()
    for identity, nodes in members.items():
        root = nodes[0]
        source = root.args[0] if root.args and _copies_or_views(root) else None
        value = fake(source) if isinstance(source, Node) else None
        if value is not None and storage_id(value) in callers | found:
            found.add(identity)
    return found


def _copies_or_views(node: Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return False
    returns = schema_of(node.target).returns
    aliases = len(returns) == 1 and returns[0].alias_info is not None
    return aliases or node.target is torch.ops.aten.clone.default or is_undeclared_view(node.target)


def _describe(
    pairs: list[tuple[Node, Node]],
    members: list[Node],
    forward_at: dict[Node, GraphPosition],
    backward_at: dict[Node, GraphPosition],
    is_output: bool,
    is_the_callers: bool,
    tags: dict[str, Tag | None],
    forward_names: Collection[str],
) -> SavedTensor:
    base, why_not = _base(pairs, members)
    if is_the_callers:
        why_not = Refusal.COPY_OF_CALLERS.because()
    if is_output:
        why_not = Refusal.SHARES_WITH_OUTPUT.because()
    value = fake(base)
    assert value is not None
    readers = [user for _, placeholder in pairs for user in real_uses(placeholder)]
    uses = sorted({backward_at[user] for user in readers})
    needing = list(dict.fromkeys(user for _, placeholder in pairs for user in needed_by(placeholder, forward_names)))
    stacks = dict.fromkeys(path for user in needing for path in module_stack(user))
    names = dict.fromkeys(name for user in needing for name in boundary_names(user))
    # torch puts saved views at the end of forward, long after the last reader; the offload pass erases them
    readers_of = [u for m in members for u in m.users if u.op != "output" and not (u in members and only_views(u))]
    last_use = max([forward_at[base], *(forward_at[until] for reader in readers_of for until in read_until(reader))])
    tag = next((tags[m.name] for m in members if tags.get(m.name)), None)
    return SavedTensor(
        name=base.name,
        views=tuple(node.name for node, _ in pairs),
        nbytes=storage_nbytes(value),
        example_bytes=example_storage_nbytes(value),
        dtype=str(value.dtype).removeprefix("torch."),
        shape=tuple(_plain(size) for size in value.shape),
        strides=tuple(_plain(stride) for stride in value.stride()),
        op=INPUT if members[0].op == "placeholder" else str(members[0].target),
        module=module_path(base),
        saved_by=tuple(stacks),
        boundaries=tuple(names),
        produced_position=forward_at[base],
        last_forward_position=last_use,
        first_backward_position=uses[0] if uses else GraphPosition(0),
        backward_positions=tuple(uses),
        eligible=not why_not,
        why_not=why_not,
        tag=tag,
        saved_by_ops=tuple(dict.fromkeys(f"{user.target}@{module_path(user)}" for user in needing)),
        device=str(value.device),
    )


def _plain(value: int | torch.SymInt) -> int | str:
    known = concrete(value)
    return str(value) if known is None else known


def _base(pairs: list[tuple[Node, Node]], members: list[Node]) -> tuple[Node, str]:
    """The node whose memory is copied for a group of saved views, and why it cannot be copied ("" if it can)."""
    root = next(iter(waited(members)), members[0])
    why_not = _refusal(root)
    saved = [node for node, _ in pairs]
    if any(map(is_unwaited, (root, *saved))):
        return root, Refusal.COLLECTIVE.because()
    dtypes = {fake(node).dtype for node in (root, *saved)}  # type: ignore[union-attr]
    candidates = [node for node in waited(members) if covers_storage(fake(node))]  # type: ignore[arg-type]
    if len(dtypes) > 1:
        return root, Refusal.SEVERAL_DTYPES.because()
    if any(value.is_conj() or value.is_neg() for node in (root, *saved) if (value := fake(node)) is not None):
        return root, Refusal.LAZY_BITS.because()
    if candidates:
        return candidates[0], why_not
    if len(saved) == 1:
        return saved[0], why_not  # only this part of the larger storage is copied
    return root, why_not or Refusal.NOT_COVERED.because()


def _refusal(node: Node) -> str:
    value = fake(node)
    assert value is not None
    target = str(node.target)
    if type(value).__name__ not in ("FakeTensor", "Parameter"):
        return Refusal.NOT_PLAIN.because(type=type(value).__name__)
    if value.device.type == "meta":
        return Refusal.NO_MEMORY.because()
    if concrete(value.numel()) == 0:
        return Refusal.EMPTY.because()
    if any(mark in text for mark in ("rng_state", "inductor_seed") for text in (target, node.name)):
        return Refusal.RANDOM_STATE.because()
    return ""
