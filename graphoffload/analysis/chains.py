"""What recomputing a saved activation means: the operations to run again, and what they read.

    a (saved) ──▶ norm ──▶ mul ──▶ x (saved)        chain of x: norm, mul        reads: a
                  w (parameter) ─┘

The chain goes up from the activation to what is saved anyway and to graph inputs. It is refused where running an operation
again would not give the same value or has an effect: randomness that is not drawn from a saved seed, inputs that the forward
writes to or the caller may (callers.py: their value is another one by then), discrete decisions, which other last bits would
turn (decisions.py), collectives, operations that mutate, and operations nobody told us anything about.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from graphoffload.analysis.callers import CallersMemory, foreign, is_view
from graphoffload.analysis.decisions import decided_on, depends_on_bits, is_input, repeated_decisions, trace_of, used_by_forward
from graphoffload.analysis.saved_values import GraphPair
from graphoffload.analysis.storages import fake, group_by_storage, storage_id
from graphoffload.facts.refusals import Refusal
from graphoffload.facts.saved_tensors import SavedTable
from graphoffload.torch_internals.operators import OpOverload, schema_of
from graphoffload.torch_internals.partitioning import mutated_inputs

_PURE_NAMESPACES = ("aten", "prims", "inductor_prims")


@dataclass(frozen=True, slots=True)
class Chain:
    """`nodes`: names of operations to run again, in order; `reads`: names of SavedTensors; `why_not`: "" when it is sound."""

    nodes: tuple[str, ...]
    reads: tuple[str, ...]
    why_not: str = ""


@dataclass(slots=True)
class _Around:
    """What a chain is judged by.

    Attributes:
        owner: forward node -> name of the SavedTensor whose storage it lives in.
        mutated: placeholders that the forward writes to. callers: what keep-all reads of the caller's memory.
        roots: nodes in the caller's memory, each with its root.
        used, decided: of decisions.used_by_forward and decided_on.
        bound: operations that must not run again, since backward decides by the bits of what they compute.
    """

    owner: Mapping[Node, str]
    mutated: frozenset[Node]
    callers: CallersMemory
    roots: Mapping[Node, Node]
    used: frozenset[str]
    decided: frozenset[str]
    bound: frozenset[str] = frozenset()

    def forbids(self, node: Node) -> str:
        """Why the memory of a node that lies in the caller's must not be read in backward; "" where it may."""
        root = self.roots[node]
        if root in self.mutated:
            return Refusal.READS_WRITTEN.because(name=root.name)
        if node.name in self.callers.read or root.name in self.callers.parameters:
            return ""
        if is_view(node) and all(source not in self.roots or not self.forbids(source) for source in node.all_input_nodes):
            return ""
        kind = "an input" if root.op == "placeholder" else "an output"
        return Refusal.READS_CALLERS.because(name=root.name, kind=kind)

    def is_an_inputs(self, node: Node) -> bool:
        """Whether a node lies in the memory of an input."""
        return node in self.roots and self.roots[node].op == "placeholder"


def chain_of(targets: tuple[Node, ...], own: str, around: _Around, fixed: Collection[str] = ()) -> Chain:
    """The chain that recomputes one saved activation.

    Args:
        targets: forward nodes of the activation's storage that backward receives. own: name of this SavedTensor.
        fixed: names of SavedTensors that are never recomputed.
    """
    nodes: set[Node] = set()
    reads: dict[str, None] = {}
    pending, owner = list(targets), around.owner
    while pending:
        node = pending.pop()
        if node in nodes:
            continue
        saved = owner.get(node, own) != own
        ends = saved or node.op != "call_function" or (around.is_an_inputs(node) and node.name in around.callers.read)
        why_not = around.forbids(node) if ends and node in around.roots else ""
        if why_not:
            return Chain((), (), why_not)
        if saved:
            reads[owner[node]] = None
        if ends:
            continue
        if "inductor_seed" in str(node.target):
            continue
        why_not = _refusal(node)
        if node.name in around.bound:
            why_not = Refusal.COMPARED_BY_BITS.because(target=node.target)
        if why_not:
            return Chain((), (), why_not)
        nodes.add(node)
        pending.extend(node.all_input_nodes)
    why_not = _decides_again(nodes, own, around, fixed)
    return Chain((), (), why_not) if why_not else Chain(tuple(node.name for node in sorted(nodes)), tuple(reads))


def _decides_again(nodes: Collection[Node], own: str, around: _Around, fixed: Collection[str]) -> str:
    """Why a chain that decides on floats is refused: they are computed, or saved now and recomputed by another plan."""

    def stored(node: Node) -> bool:
        return is_input(node) or around.owner.get(node, own) != own

    for node in sorted(nodes):
        if depends_on_bits(node, around.used, around.decided):
            trace = trace_of(node, stored)
            others = (source for source in trace.stored if not is_input(source) and around.owner[source] not in fixed)
            if trace.computed or any(others):
                return Refusal.DECIDES_AGAIN.because(target=node.target)
    return ""


def _refusal(node: Node) -> str:
    target = node.target
    if target is operator.getitem or not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
        return ""
    if not isinstance(target, OpOverload):
        return Refusal.UNKNOWN_EFFECTS.because(target=getattr(target, "__name__", target))
    if target.namespace not in _PURE_NAMESPACES:
        return Refusal.UNKNOWN_EFFECTS.because(target=target)
    if schema_of(target).is_mutable:
        return Refusal.WRITES.because(target=target)
    if "batch_norm" in str(target):
        return Refusal.UPDATES_STATISTICS.because(target=target)
    if "attention" in str(target):
        return Refusal.ATTENTION.because(target=target)
    if torch.Tag.nondeterministic_seeded in target.tags:
        return Refusal.RANDOM.because(target=target)
    return ""


def mutated_placeholders(forward: Graph, named: frozenset[Node]) -> frozenset[Node]:
    """Placeholders that the forward writes to: those that AOTAutograd names, and targets of in-place operations."""
    found = set(named)
    for node in forward.nodes:
        if node.op == "call_function" and isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable:
            found.update(arg for arg in node.all_input_nodes if arg.op == "placeholder")
    return frozenset(found)


def chains_of(
    pair: GraphPair,
    table: SavedTable,
    callers: CallersMemory,
    user_recomputed: frozenset[str],
    bound: frozenset[str] = frozenset(),
) -> dict[str, Chain]:
    """By SavedTensor name, the operations that compute it again.

    Args:
        callers: what keep-all reads of the caller's memory. user_recomputed: as in decisions.repeated_decisions.
        bound: operations that were bound to be saved for a decision of backward. Torch may save the decision in their place,
            where it saves less; running them again would take it anew.
    """
    nodes = {node.name: node for node in pair.forward.graph.nodes}
    groups = group_by_storage(node for node in pair.forward.graph.nodes if node.op == "call_function")
    owner: dict[Node, str] = {}
    for tensor in table.tensors:
        value = fake(nodes[tensor.name])
        assert value is not None
        owner.update(dict.fromkeys(groups[storage_id(value)], tensor.name))
    mutated = mutated_placeholders(pair.forward.graph, mutated_inputs(pair.forward.graph))
    used = used_by_forward(pair)
    around = _Around(owner, mutated, callers, dict(foreign(pair)), used, decided_on(pair, used), bound)
    looked_at = repeated_decisions(pair, user_recomputed).exact
    found: dict[str, Chain] = {}
    for tensor in table.tensors:
        what = next((looked_at[name] for name in tensor.views if name in looked_at), None)
        if what is not None:
            found[tensor.name] = Chain((), (), Refusal.LOOKED_AT.because(target=what))
            continue
        targets = tuple(nodes[name] for name in dict.fromkeys((*tensor.views, tensor.name)))
        fixed = {name for name, chain in found.items() if chain.why_not}
        found[tensor.name] = chain_of(targets, tensor.name, around, fixed)
    return found
