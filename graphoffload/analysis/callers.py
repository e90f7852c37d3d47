"""The caller's memory: the caller may write to it between forward and backward, so backward may read only a part of it.

    h = f(x);  y = g(h @ w)        torch saves h. Recomputing f in backward would read x. The caller may have refilled x by
                                   then: through numpy, `.data`, a receive into the same buffer, the replay of a CUDA graph.

Autograd reports an in-place write to a saved tensor. Nothing reports the other writes. A plan's backward therefore reads only
the caller's memory that keep-all's backward reads, and parameters, which only an optimizer writes to. Buffers are not
parameters: the next forward may write to them before this forward's backward. An output of the model belongs to the caller
from the moment it is returned.

Tags are enough to ensure this. Keep-all's cut has x on forward's side. MUST_SAVE on the operations that read x can only move
more nodes to that side, so keep-all does not change. In every later partition x stays there as well: a recomputed value is a
chain that ends at saved values, and a chain that reads x is refused. One case remains: an output that keep-all's backward
recomputes. If a plan recomputes the inputs of this output, torch could read the caller's tensor instead, so the output is
tagged MUST_RECOMPUTE.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch.fx import Graph, Node

from graphoffload.analysis.saved_values import GraphPair, graph_outputs, saved_placeholders
from graphoffload.analysis.storages import fake, group_by_storage, only_views, storage_id
from graphoffload.torch_internals.checkpoint_tags import tag_of

_NOT_MEMORY = ("tangents", "fwd_seed", "fwd_base_offset", "fwd_rng_state", "bwd_seed", "bwd_base_offset", "bwd_rng_state")


@dataclass(frozen=True, slots=True)
class CallersMemory:
    """The caller's memory that a plan may read in backward, as names of nodes of the joint graph.

    Attributes:
        parameters: graph inputs that only an optimizer writes to.
        read: values in the caller's memory that backward reads under keep-all, or that one of the user's checkpoint regions
            reads.
        roots: for each value in `read`, the input, or the first node of the output's memory.
        again: outputs of the model that backward recomputes under keep-all, and must not read instead.
    """

    parameters: frozenset[str] = frozenset()
    read: frozenset[str] = frozenset()
    roots: frozenset[str] = frozenset()
    again: frozenset[str] = frozenset()


def callers_memory(pair: GraphPair, joint: Graph, parameters: frozenset[str]) -> CallersMemory:
    """The caller's memory that keep-all reads.

    Args:
        pair: the graphs as partitioned with everything kept.
        joint: the joint graph with the user's own tags only.
        parameters: as in CallersMemory.
    """
    roots = {node.name: root for node, root in foreign(pair)}
    saved = [node.name for node, _ in saved_placeholders(pair)]
    read = frozenset(name for name in (*saved, *_read_by_regions(joint)) if name in roots)
    backward = {node.name for node in pair.backward.graph.nodes if node.op == "call_function"}
    again = (name for name, root in roots.items() if name in backward and name not in read and root.op != "placeholder")
    return CallersMemory(parameters, read, frozenset(roots[name].name for name in read), frozenset(again))


def foreign(pair: GraphPair) -> Iterator[tuple[Node, Node]]:
    """Forward nodes in the caller's memory, each with its root. A root is an input, or the first node of an output's memory."""
    seen = set()
    for placeholder in inputs_of(pair.forward.graph):
        for node in _shown_by(placeholder):
            seen.add(node)
            yield node, placeholder
    groups = group_by_storage(node for node in pair.forward.graph.nodes if node.op == "call_function")
    for output in dict.fromkeys(graph_outputs(pair.forward)[: pair.num_fwd_outputs]):
        value = fake(output) if output is not None and output not in seen else None
        members = groups.pop(storage_id(value), []) if value is not None else []
        yield from ((member, members[0]) for member in members)


def inputs_of(graph: Graph) -> Iterator[Node]:
    """Placeholders of forward's tensors, without gradients, random state, sizes and opaque values."""
    for node in graph.find_nodes(op="placeholder"):
        if fake(node) is not None and not str(node.target).startswith(_NOT_MEMORY):
            yield node


def readers_of_unread(graph: Graph, callers: CallersMemory) -> Iterator[Node]:
    """Operations that read an input, or a part of one, that keep-all's backward does not read."""
    for placeholder in inputs_of(graph):
        if placeholder.name not in callers.parameters:
            shown = _shown_by(placeholder, stop=callers.read)
            yield from (user for node in shown for user in node.users if user.op == "call_function" and user not in shown)


def is_view(node: Node) -> bool:
    """Whether a node is a view of its argument's memory."""
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        return is_view(node.args[0])
    return node.op == "call_function" and only_views(node)


def _shown_by(placeholder: Node, stop: Collection[str] = ()) -> dict[Node, None]:
    """A placeholder and its views. The nodes that `stop` names, and the views of these, are left out."""
    found: dict[Node, None] = {}
    pending = [placeholder]
    while pending:
        node = pending.pop()
        if node not in found and node.name not in stop:
            found[node] = None
            pending.extend(user for user in node.users if is_view(user))
    return found


def _read_by_regions(joint: Graph) -> Iterator[str]:
    """Names of the values that the user's checkpoint regions read, and of the values that these are views of."""
    pending = [source for node in joint.nodes if _users_own(node) for source in node.all_input_nodes if not _users_own(source)]
    seen: set[Node] = set()
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            yield node.name
            pending.extend(node.all_input_nodes if is_view(node) else ())


def _users_own(node: Node) -> bool:
    return tag_of(node.meta) in ("must_recompute", "prefer_recompute")
