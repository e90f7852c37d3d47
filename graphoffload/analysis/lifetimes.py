"""Lifetimes of the values of one graph, in steps of the order in which the graph runs.

A fused kernel may write its result over an operand, and then both are one piece of memory:

    mm ─▶ dgelu ─▶ mm_1          dgelu alone reads mm, each element for its own: mm ends one step before dgelu exists

Inductor does so where nothing else is left to read the operand (decide_inplace_update in torch/_inductor/scheduler.py), and the
operand is a temporary, or a saved activation that AOTAutograd donates to backward. It takes the first operand that it may: if
that is a large value of the same kernel (stored.py), the operands after it stay.

A reader that comes before the value is stored computes it, and so reads its operands as well:

    saved ─▶ mul ─┬─▶ gelu's backward ─▶ mm     addmm has Inductor store mul, and gelu's backward comes before it: both read
                  └─────────────────▶ addmm     saved, which neither is written over. Other kernels have a value of several
                                                reads stored where it stands

Both must lie in memory in the same order. A kernel with several results, such as a convolution's backward, makes them in the
order that its inputs have when it runs, which may be another than the graph's (channels_last). A result that the graph returns
has the order of the first operand, whatever that is. The layout of another one is what most of its operands have:

    convolution_backward ─▶ getitem ─▶ add(getitem, y) ─▶ output    one piece of memory: the gradient of a block with a shortcut
                                       add(y, getitem) ─▶ output    two: y may be contiguous, and the convolution's images not
                                       add(getitem, y) ─▶ slice     two: it may have the order of what y is computed from
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch.fx import Node

from graphoffload.analysis.fusion import Fusion
from graphoffload.analysis.storages import fake, group_by_storage, same_size, storage_id, with_views
from graphoffload.analysis.stored import is_pointwise, readers_of
from graphoffload.torch_internals.inductor import config
from graphoffload.torch_internals.operators import OpOverload


def made_at(fusion: Fusion) -> dict[Node, int]:
    """The step at which each node's result exists. All results of a kernel exist from the kernel's last step on."""
    found = {node: at for at, node in enumerate(fusion.order)}
    for node in fusion.order:
        if node.target is operator.getitem:
            found[node] = found[node.all_input_nodes[0]]
    return found


def lives_in_memory(
    nodes: Iterable[Node],
    fusion: Fusion,
    at: dict[Node, int],
    *,
    skip: Collection[int] = (),
    apart: Collection[Node] = (),
) -> Iterator[tuple[int, Node, int, int]]:
    """(storage, producer, first step, last step) of each storage that exists in memory; `at` is `made_at(fusion)`.

    Args:
        skip: storages to leave out. apart: nodes that are written over no operand.
    """
    groups = group_by_storage(nodes)
    over = _overwritten(groups, fusion, frozenset(), apart)
    lives = {identity: members[0] for identity, members in groups.items() if identity in fusion.real and identity not in skip}
    parts = {identity: _written_into(made, lives, fusion) for identity, made in lives.items()}
    inside = frozenset().union(*parts.values())
    for identity, made in lives.items():
        if identity not in inside:
            first, last = fusion.spans.get(made, (at[made], at[made]))
            first = min([first, *(fusion.spans[lives[part]][0] for part in parts[identity])])
            ends = [fusion.spans[reader][1] for reader in fusion.readers.get(identity, ())]
            last = over[identity] if identity in over else max([last, *ends])
            if first <= last:  # else it is the result's memory from the start: what one loop of a kernel leaves for another
                yield identity, made, first, last


def _written_into(made: Node, lives: Mapping[int, Node], fusion: Fusion) -> set[int]:
    """Storages of a concatenation's operands that are parts of its memory: Inductor allocates it when the first is written."""
    if made.target is not torch.ops.aten.cat.default or not fusion.fuses:
        return set()
    written = (node for node in made.all_input_nodes if fusion.kinds[node] == "fused" or node in fusion.added)
    return {storage_id(value) for node in written if (value := fake(node)) is not None and lives.get(storage_id(value)) is node}


def donated_until(nodes: Iterable[Node], fusion: Fusion, donated: Collection[Node]) -> dict[Node, int]:
    """The last step of each donated placeholder that another value takes over from; no entry for any other.

    Args:
        nodes: of the backward. fusion: of the same graph. donated: placeholders whose memory nothing outside the graph reads.
    """
    groups = group_by_storage(nodes)
    over = _overwritten(groups, fusion, donated)
    return {members[0]: over[identity] for identity, members in groups.items() if members[0] in donated and identity in over}


def _overwritten(
    groups: dict[int, list[Node]], fusion: Fusion, donated: Collection[Node], apart: Collection[Node] = ()
) -> dict[int, int]:
    """The last step before another value takes over, for each storage that the last operation that reads it writes over.

    A result takes over one operand at most. A temporary is tried first, since it is there under any plan.
    """
    found: dict[int, int] = {}
    if not fusion.fuses or not config.inplace_buffers:
        return found
    writers = set(apart)
    for identity, members in sorted(groups.items(), key=lambda item: item[1][0] in donated):
        if identity not in fusion.real or _is_returned(members):
            continue
        if not (_is_donated(members, donated) or _may_go(members[0], fusion)):
            continue
        made, writer = members[0], _last_reader(identity, fusion)
        if writer is None:
            continue
        value, result = fake(made), fake(writer)
        assert value is not None
        if writer in writers or result is None or fusion.kinds[writer] != "fused" or storage_id(result) not in fusion.real:
            continue
        if fusion.spans.get(made) == fusion.spans[writer] and identity not in fusion.large:  # both are results of one kernel
            continue
        if _is_computed_again(writer, fusion):
            continue
        if made.target is operator.getitem and not (writer.args[0] is made and _is_returned([writer])):
            continue
        if _fits(value, result) and _reads_in_step(writer, identity, fusion) and not _takes_another(writer, identity, fusion):
            writers.add(writer)
            found[identity] = fusion.spans[writer][0] - 1
    return found


def _last_reader(identity: int, fusion: Fusion) -> Node | None:
    """The operation that is the only one left to read a storage when it runs: in the last kernel that reads it, the one that
    needs all others; None if there is none."""
    readers = fusion.readers.get(identity, [])
    first, last = max((fusion.spans[reader] for reader in readers), default=(0, -1))
    inside = {reader for reader in readers if fusion.spans[reader] == (first, last)}
    if len(inside) < 2:
        return next(iter(inside), None)
    needs = fusion.needed_within(fusion.order[first : last + 1])
    return next((reader for reader in inside if inside - {reader} <= needs[reader]), None)


def _takes_another(writer: Node, identity: int, fusion: Fusion) -> bool:
    """Whether an operation writes over a large value of its own kernel, which it reads before a storage."""
    result, pending, seen = fake(writer), [*reversed(writer.all_input_nodes)], {writer}
    assert result is not None
    while pending:
        node = pending.pop()
        value = fake(node)
        if value is None or node in seen:
            continue
        seen.add(node)
        if storage_id(value) == identity:
            return False
        if fusion.inside.get(storage_id(value)) == [writer] and _fits(value, result):
            return True
        if storage_id(value) in fusion.sources and storage_id(value) not in fusion.inside:
            pending += reversed(node.all_input_nodes)
    return False


def _fits(value: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether a result has the type and the layout of a value."""
    return value.dtype == result.dtype and _in_step(value, result)


def _is_computed_again(writer: Node, fusion: Fusion) -> bool:
    """Whether a reader computes a value itself, since it comes before the one for which Inductor stores that."""
    value = fake(writer)
    if value is None or storage_id(value) in fusion.large or not is_pointwise(writer):
        return False
    if any(user.op == "output" for member in with_views(writer) if len(member.users) > 1 for user in member.users):
        return False  # it is stored where it stands
    readers = readers_of(writer)
    asking = [user for user in readers if user.op == "output" or fusion.kinds[user] == "kernel"]
    products = [user for user in asking if user in fusion.added or user.target is torch.ops.aten.addmm.default]
    if not asking or (len(products) < len(asking) and len(fusion.read_by(writer)) > 1):
        return False
    first = min(fusion.places[user] for user in asking)
    return any(fusion.kinds[user] == "fused" and fusion.places[user] < first for user in readers)


def _is_returned(members: list[Node]) -> bool:
    """Whether a result of the graph is in a storage."""
    return any(user.op == "output" for member in members for user in member.users)


def _is_donated(members: list[Node], donated: Collection[Node]) -> bool:
    """Whether a storage is that of one donated placeholder."""
    inputs = [member for member in members if member.op == "placeholder"]
    return len(inputs) == 1 and inputs[0] is members[0] and inputs[0] in donated


def _may_go(made: Node, fusion: Fusion) -> bool:
    """Whether a value is a temporary of its graph. Of operations with several results, those that run alone have results that
    are memory of their own."""
    maker = made.all_input_nodes[0] if made.target is operator.getitem else made
    if not isinstance(maker.target, OpOverload) or maker.target.namespace not in ("aten", "prims"):
        return False
    if maker.target is torch.ops.aten.cat.default:  # its operands are written into it: Inductor does not give it away
        return False
    return maker in fusion.spans and (maker is made or fusion.kinds[maker] == "kernel")


def _in_step(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the elements of two tensors lie in memory in the same order, without gaps."""
    if _same_sizes(one.shape, other.shape) and _same_sizes(one.stride(), other.stride()):
        return same_size(one.untyped_storage().nbytes(), other.untyped_storage().nbytes())
    return same_size(one.numel(), other.numel()) and _is_contiguous(one) and _is_contiguous(other)


def _same_sizes(one: Sequence[int | torch.SymInt], other: Sequence[int | torch.SymInt]) -> bool:
    return len(one) == len(other) and all(map(same_size, one, other))


def _is_contiguous(tensor: torch.Tensor) -> bool:
    """Whether the last dimension lies next to itself, and so on. A symbolic tensor's own method may add guards."""
    expected: int | torch.SymInt = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not same_size(size, 1) and not same_size(stride, expected):
            return False
        expected = expected * size
    return True


def _reads_in_step(writer: Node, identity: int, fusion: Fusion) -> bool:
    """Whether each element of a result is computed from the same element of a storage, through values that do not exist too."""
    pending, seen = [writer], {writer}
    while pending:
        node = pending.pop()
        value = fake(node)
        if value is None or not (fusion.kinds[node] == "view" or is_pointwise(node)):
            return False
        for source in node.all_input_nodes:
            read = fake(source)
            if read is None:
                continue
            behind = storage_id(read)
            if identity not in fusion.read_for(behind, node):
                continue
            if not _in_step(read, value) if fusion.kinds[node] == "view" else not _same_sizes(read.shape, value.shape):
                return False
            if source not in seen and (behind != identity or fusion.kinds[source] == "view"):
                seen.add(source)
                pending.append(source)
    return True
