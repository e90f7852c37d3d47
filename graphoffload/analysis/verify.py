"""Static safety rules, one small function each, checked on the rewritten graphs before anything is compiled.

A rule yields one sentence for each violation. Each rule excludes a way to a wrong gradient:

    once         Every transfer is offloaded, released, reloaded and waited for exactly once.
    same_source  Release names the same value that offload copies. (A temporary would be freed during the copy.)
    last_use     No forward operation reads the source after its release. (The memory may have been reused.)
    saved        The handle is saved, and the source's memory is not. (Else no memory is freed.)
    readers      No backward operation but wait touches the reloaded tensor before the wait.
    outputs      The model's own outputs are unchanged.
    counterpart  Saved values and backward inputs correspond one to one.
    donated      No two saved values share memory. (torch would donate it twice, and Inductor would overwrite it too early.)
    fresh        No inserted value shares a fake storage with another value. (torch would donate or alias its memory.)
    callers      Backward reads no memory of the caller but that which keep-all reads. (The caller may have written to it.)
    decisions    No discrete decision is made again on recomputed floats. (Other last bits could turn it.)
    collectives  Both graphs run keep-all's collectives, in the joint graph's order. (Other ranks wait for just these.)
    waited       No offload copies a collective's result before the wait for it. (It is being written to.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from graphoffload.analysis.callers import CallersMemory, foreign
from graphoffload.analysis.collectives import Collectives, is_unwaited, read_until
from graphoffload.analysis.decisions import repeated_decisions
from graphoffload.analysis.saved_values import GraphPair, graph_outputs, saved_placeholders
from graphoffload.analysis.storages import fake, group_by_storage, storage_id
from graphoffload.errors import VerifyError
from graphoffload.facts.plan import Plan
from graphoffload.torch_internals.operators import schema_of

_OPS = ("offload", "release", "reload", "wait")


@dataclass(slots=True)
class _Case:
    graphs: GraphPair
    plan: Plan
    output_names: tuple[str | None, ...]
    callers: CallersMemory | None = None
    user_recomputed: frozenset[str] = frozenset()
    collectives: Collectives | None = None
    ops: dict[str, dict[int, list[Node]]] = field(default_factory=dict)
    at: dict[Node, int] = field(default_factory=dict)


Rule = Callable[[_Case], Iterator[str]]


def verify_graphs(
    graphs: GraphPair,
    plan: Plan,
    output_names: tuple[str | None, ...],
    callers: CallersMemory | None = None,
    user_recomputed: frozenset[str] = frozenset(),
    collectives: Collectives | None = None,
) -> None:
    """Check every rule.

    Args:
        output_names: names of the forward's outputs before any pass; the first `num_fwd_outputs` must be unchanged.
        callers: the caller's memory that keep-all reads; None if it is unknown, and the rule is skipped.
        user_recomputed: operations of the user's checkpoint regions.
        collectives: those that keep-all runs; None if they are unknown, and the rule is skipped.

    Raises:
        VerifyError: with every violation of every rule.
    """
    case = _Case(graphs, plan, output_names, callers, user_recomputed, collectives)
    for graph in (graphs.forward.graph, graphs.backward.graph):
        case.at.update({node: position for position, node in enumerate(graph.nodes)})
    for name in _OPS:
        case.ops[name] = _by_id(graphs, getattr(torch.ops.graphoffload, name).default)
    found = [f"{rule.__name__}: {text}" for rule in RULES for text in rule(case)]
    if found:
        shown = "\n  ".join(found[:20])
        raise VerifyError(
            f"The rewritten graph {plan.graph} breaks {len(found)} safety rule(s); nothing was run:\n  {shown}\n"
            'This is a defect of graphoffload: please report it with a dump (GRAPHOFFLOAD_DUMP_DIR). policy="keep" avoids it.'
        )


def _by_id(graphs: GraphPair, target: object) -> dict[int, list[Node]]:
    found: dict[int, list[Node]] = {}
    for graph in (graphs.forward.graph, graphs.backward.graph):
        for node in graph.nodes:
            if node.target is target:
                found.setdefault(_transfer_id(node), []).append(node)
    return found


def _transfer_id(node: Node) -> int:
    position = [argument.name for argument in schema_of(node.target).arguments].index("id")  # type: ignore[arg-type]
    return int(node.args[position])  # type: ignore[arg-type]


def once(case: _Case) -> Iterator[str]:
    """Every transfer is offloaded, released, reloaded and waited for exactly once."""
    for transfer in case.plan.transfers:
        for name in _OPS:
            count = len(case.ops[name].get(transfer.id, ()))
            if count != 1:
                yield f"transfer {transfer.id} ({transfer.tensor}) has {count} {name} ops"


def same_source(case: _Case) -> Iterator[str]:
    """Release names the same value that offload copies, and comes after offload."""
    for transfer, offload, release in _pairs(case, "offload", "release"):
        if offload.args[0] is not release.args[0] or release.args[1] is not offload:
            yield f"{transfer}: release names {release.args[:2]}, offload copies {offload.args[0]}"
        if case.at[release] < case.at[offload]:
            yield f"{transfer}: release stands before offload"


def last_use(case: _Case) -> Iterator[str]:
    """No forward operation reads the source's storage after its release."""
    groups = group_by_storage(case.graphs.forward.graph.nodes)
    for transfer, offload, release in _pairs(case, "offload", "release"):
        source = offload.args[0]
        assert isinstance(source, Node)
        value = fake(source)
        assert value is not None
        if source.meta.get("val") is not None and case.at[source] > case.at[offload]:
            yield f"{transfer}: offloaded before it is produced"
        for member in groups[storage_id(value)]:
            for user in member.users:
                if any(case.at[until] > case.at[release] and fake(until) is not None for until in read_until(user)):
                    yield f"{transfer}: {user.name} reads {member.name} after its release"


def saved(case: _Case) -> Iterator[str]:
    """The handle is saved, and no value that shares the source's memory is."""
    outputs = [node for node in graph_outputs(case.graphs.forward) if node is not None]
    memory = {storage_id(value) for node in outputs if (value := fake(node)) is not None}
    for transfer, offload, _ in _pairs(case, "offload", "release"):
        if offload not in outputs:
            yield f"{transfer}: its handle is not saved"
        source = offload.args[0]
        assert isinstance(source, Node)
        value = fake(source)
        if value is not None and storage_id(value) in memory:
            yield f"{transfer}: its memory is still an output of the forward"


def readers(case: _Case) -> Iterator[str]:
    """No operation but wait touches the reloaded tensor or a view of it before the wait."""
    for transfer, reload, wait in _pairs(case, "reload", "wait"):
        if wait.args[0] is not reload:
            yield f"{transfer}: wait names {wait.args[0]}, reload writes {reload.name}"
        if case.at[wait] < case.at[reload]:
            yield f"{transfer}: wait stands before reload"
        for user in reload.users:
            if user is not wait and case.at[user] < case.at[wait]:
                yield f"{transfer}: {user.name} uses {reload.name} before the wait"


def outputs(case: _Case) -> Iterator[str]:
    """The model's own outputs are unchanged."""
    count = case.graphs.num_fwd_outputs
    now = tuple(None if node is None else node.name for node in graph_outputs(case.graphs.forward))
    if now[:count] != case.output_names[:count]:
        yield f"model outputs were {case.output_names[:count]}, are {now[:count]}"


def counterpart(case: _Case) -> Iterator[str]:
    """Saved values and backward inputs correspond one to one in shape and dtype. Symbolic sizes are compared as text."""
    sent = graph_outputs(case.graphs.forward)[case.graphs.num_fwd_outputs :]
    received = [
        node
        for node in case.graphs.backward.graph.find_nodes(op="placeholder")
        if not str(node.target).startswith(("tangents", "bwd_seed", "bwd_base_offset", "bwd_rng_state"))
    ]
    sent_text = sorted(_layout(node) for node in sent if node is not None)
    received_text = sorted(_layout(node) for node in received)
    if len(sent) == len(received) and sent_text != received_text:
        yield f"forward saves {sent_text}, backward receives {received_text}"
    if len(sent) != len(received):
        yield f"forward saves {len(sent)} values, backward receives {len(received)}"


def fresh(case: _Case) -> Iterator[str]:
    """No handle and no reloaded tensor shares a fake storage with a value other than its views."""
    for graph, name in ((case.graphs.forward.graph, "offload"), (case.graphs.backward.graph, "reload")):
        groups = group_by_storage(graph.nodes)
        for nodes in case.ops[name].values():
            for node in nodes:
                value = fake(node)
                assert value is not None
                strangers = [other.name for other in groups[storage_id(value)] if not _comes_from(other, node)]
                if strangers:
                    yield f"{node.name} shares a fake storage with {strangers}"


def donated(case: _Case) -> Iterator[str]:
    """No two saved values share memory, except for that of inputs and of model outputs, which torch never donates."""
    graphs = case.graphs
    outputs = graph_outputs(graphs.forward)
    inputs = [node for node in graphs.forward.graph.nodes if node.op in ("placeholder", "get_attr")]
    safe = group_by_storage(node for node in (*inputs, *outputs[: graphs.num_fwd_outputs]) if node is not None)
    for identity, nodes in group_by_storage(node for node in outputs[graphs.num_fwd_outputs :] if node is not None).items():
        if len(nodes) > 1 and identity not in safe:
            yield f"{', '.join(node.name for node in nodes)} are saved side by side and share memory"


def callers(case: _Case) -> Iterator[str]:
    """Backward reads no memory of the caller but parameters and memory that keep-all reads. An input counts as a whole."""
    if case.callers is None:
        return
    roots = dict(foreign(case.graphs))
    for node, _ in saved_placeholders(case.graphs):
        root = roots.get(node)
        if root is not None and root.name not in case.callers.roots | case.callers.parameters:
            yield f"backward reads {node.name}, which lies in the memory of {root.name}, and keep-all does not"


def decisions(case: _Case) -> Iterator[str]:
    """No discrete decision is made again on recomputed floats."""
    for name, what in repeated_decisions(case.graphs, case.user_recomputed).inexact.items():
        yield f"backward runs {name} again, and {what} decides by its bits"


def collectives(case: _Case) -> Iterator[str]:
    """Both graphs run keep-all's collectives, in the order of the joint graph."""
    if case.collectives is not None:
        yield from case.collectives.violations(case.graphs.forward.graph, case.graphs.backward.graph)


def waited(case: _Case) -> Iterator[str]:
    """No offload copies a collective's result before the wait for it."""
    for transfer, offload, _ in _pairs(case, "offload", "release"):
        source = offload.args[0]
        assert isinstance(source, Node)
        if is_unwaited(source):
            yield f"{transfer}: {source.name} is copied before the wait for its collective"


def _comes_from(node: Node, origin: Node) -> bool:
    while node is not origin:
        inputs = [argument for argument in node.args if isinstance(argument, Node)]
        if not inputs:
            return False
        node = inputs[0]
    return True


def _pairs(case: _Case, first: str, second: str) -> Iterator[tuple[str, Node, Node]]:
    for transfer in case.plan.transfers:
        left, right = case.ops[first].get(transfer.id, []), case.ops[second].get(transfer.id, [])
        if len(left) == 1 and len(right) == 1:
            yield f"transfer {transfer.id} ({transfer.tensor})", left[0], right[0]


def _layout(node: Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    return type(value).__name__


RULES: tuple[Rule, ...] = (
    once, same_source, last_use, saved, readers, outputs, counterpart, donated, fresh, callers, decisions, collectives, waited,
)  # fmt: skip
