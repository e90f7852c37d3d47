"""The chain that recomputes a saved activation: the operations that run again, and the saved values that they read.

    a (saved) ──▶ norm ──▶ mul ──▶ x (saved)        chain of x: norm, mul        reads: a
                  w (parameter) ─┘

The chain starts at the activation and follows the operations' inputs up to other saved activations and graph inputs. A chain
is refused if running one of its operations again could give another value or has a side effect:

    random numbers                     unless they are drawn from a saved seed
    inputs that may have changed       forward writes to them, or the caller may (callers.py)
    discrete decisions                 other last bits of a float may turn them (decisions.py)
    collectives                        the other ranks run them once (collectives.py)
    operations that write to their arguments, and custom operations: their effects are unknown, but for those of LIBRARIES

Checkmate (Jain et al., MLSys 2020) lets every value be recomputed at any step. A chain here runs once, in backward, and ends at
values that this plan saves.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from graphoffload.analysis.callers import CallersMemory, foreign, is_view
from graphoffload.analysis.costs import FLASH, argument_of
from graphoffload.analysis.decisions import decided_on, depends_on_bits, is_input, repeated_decisions, trace_of, used_by_forward
from graphoffload.analysis.saved_values import GraphPair
from graphoffload.analysis.storages import fake, group_by_storage, storage_id
from graphoffload.facts.refusals import Refusal, refusal_of
from graphoffload.facts.saved_tensors import SavedTable
from graphoffload.torch_internals.collectives import is_collective
from graphoffload.torch_internals.operators import OpOverload, schema_of
from graphoffload.torch_internals.partitioning import mutated_inputs
from graphoffload.torch_internals.pytrees import tree_leaves

_PURE_NAMESPACES = ("aten", "prims", "inductor_prims")
LIBRARIES = frozenset({"bitsandbytes", "torchao"})
"""Namespaces whose operations follow from their arguments alone, where their schema writes to none of them. A result that is no
float is a decision, and refused."""
_TRITON = "triton_kernel_wrapper_functional"
"""A kernel of the user's, which writes to copies alone. A result that is no float is a decision here too."""


@dataclass(frozen=True, slots=True)
class Chain:
    """The recomputation of one saved activation.

    Attributes:
        nodes: names of the operations to run again, in order.
        reads: names of the SavedTensors that they read.
        why_not: why the activation must not be recomputed; "" when it may be.
    """

    nodes: tuple[str, ...]
    reads: tuple[str, ...]
    why_not: str = ""


@dataclass(slots=True)
class _ForwardFacts:
    """Facts about the forward graph that decide whether a chain is refused.

    Attributes:
        owner: forward node -> name of the SavedTensor whose storage it lives in.
        mutated: placeholders that the forward writes to.
        callers: the caller's memory that keep-all reads.
        roots: nodes in the caller's memory, each with its root.
        used, decided: results of decisions.used_by_forward and decisions.decided_on.
        bound: operations that must not run again, since a decision of backward depends on the bits of their results.
    """

    owner: Mapping[Node, str]
    mutated: frozenset[Node]
    callers: CallersMemory
    roots: Mapping[Node, Node]
    used: frozenset[str]
    decided: frozenset[str]
    bound: frozenset[str] = frozenset()

    def forbids(self, node: Node) -> str:
        """Why backward must not read a node in the caller's memory; "" if it may."""
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
        """Whether a node is in the memory of an input."""
        return node in self.roots and self.roots[node].op == "placeholder"


def chain_of(targets: tuple[Node, ...], own: str, facts: _ForwardFacts, fixed: Collection[str] = ()) -> Chain:
    """The chain that recomputes one saved activation.

    Args:
        targets: forward nodes of the activation's storage that backward receives.
        own: name of this SavedTensor.
        fixed: names of SavedTensors that are never recomputed.
    """
    nodes: set[Node] = set()
    reads: dict[str, None] = {}
    pending, owner = list(targets), facts.owner
    while pending:
        node = pending.pop()
        if node in nodes:
            continue
        saved = owner.get(node, own) != own
        ends = saved or node.op != "call_function" or (facts.is_an_inputs(node) and node.name in facts.callers.read)
        why_not = facts.forbids(node) if ends and node in facts.roots else ""
        if why_not:
            return Chain((), (), why_not)
        if saved:
            reads[owner[node]] = None
        if ends:
            continue
        if "inductor_seed" in str(node.target):
            continue
        why_not = _refusal(node)
        if node.name in facts.bound:
            why_not = Refusal.COMPARED_BY_BITS.because(target=node.target)
        if why_not:
            return Chain((), (), why_not)
        nodes.add(node)
        pending.extend(node.all_input_nodes)
    why_not = _decides_again(nodes, own, facts, fixed)
    return Chain((), (), why_not) if why_not else Chain(tuple(node.name for node in sorted(nodes)), tuple(reads))


def _decides_again(nodes: Collection[Node], own: str, facts: _ForwardFacts, fixed: Collection[str]) -> str:
    """Why a chain that makes a decision on floats is refused; "" if it is not.

    The floats repeat to the bit only if every plan saves them. A float that is computed in the chain does not repeat, nor does
    one that is saved now and that another plan may recompute.
    """

    def stored(node: Node) -> bool:
        return is_input(node) or facts.owner.get(node, own) != own

    for node in sorted(nodes):
        if depends_on_bits(node, facts.used, facts.decided):
            trace = trace_of(node, stored)
            others = (source for source in trace.stored if not is_input(source) and facts.owner[source] not in fixed)
            if trace.computed or any(others):
                return Refusal.DECIDES_AGAIN.because(target=node.target)
    return ""


def _refusal(node: Node) -> str:
    target, results = node.target, _results(node)
    if target is operator.getitem or not results:
        return ""
    if not isinstance(target, OpOverload):
        name = getattr(target, "__name__", target)
        repeats = name == _TRITON and all(value.is_floating_point() for value in results)
        return "" if repeats else Refusal.UNKNOWN_EFFECTS.because(target=name)
    if is_collective(target):
        return Refusal.COLLECTIVE_AGAIN.because(target=target)
    attention = target.namespace in FLASH
    known = target.namespace in LIBRARIES and all(value.is_floating_point() for value in results)
    if target.namespace not in _PURE_NAMESPACES and not attention and not known:
        return Refusal.UNKNOWN_EFFECTS.because(target=target)
    if schema_of(target).is_mutable:
        return Refusal.WRITES.because(target=target)
    if "batch_norm" in str(target):
        return Refusal.UPDATES_STATISTICS.because(target=target)
    if attention or "attention" in str(target):
        return Refusal.ATTENTION.because(target=target)
    if torch.Tag.nondeterministic_seeded in target.tags:
        return Refusal.RANDOM.because(target=target)
    return ""


def _results(node: Node) -> list[torch.Tensor]:
    """The tensors that an operation gives."""
    return [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor)]


def may_run_again(node: Node) -> bool:
    """Whether an operation of a block that is computed again may run twice: what a chain may run, and attention without random
    numbers."""
    if "inductor_seed" in str(node.target):
        return False
    why_not = _refusal(node)
    return not why_not or (refusal_of(why_not) is Refusal.ATTENTION and not argument_of(node, ("dropout_p",)))


def mutated_placeholders(forward: Graph, named: frozenset[Node]) -> frozenset[Node]:
    """Placeholders that the forward writes to: those that AOTAutograd names, and the arguments of in-place operations."""
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
    """The chain of every saved activation, by SavedTensor name.

    Args:
        callers: the caller's memory that keep-all reads.
        user_recomputed: as in decisions.repeated_decisions.
        bound: operations that are tagged MUST_SAVE for a decision of backward. torch may save the decision instead of their
            results, if the decision is smaller. Running these operations again would repeat the decision.
    """
    nodes = {node.name: node for node in pair.forward.graph.nodes}
    groups = group_by_storage(node for node in pair.forward.graph.nodes if node.op == "call_function")
    owner: dict[Node, str] = {}
    for tensor in table.tensors:
        value = fake(nodes[tensor.name])
        assert value is not None
        owner.update(dict.fromkeys((nodes[tensor.name], *groups.get(storage_id(value), ())), tensor.name))
    mutated = mutated_placeholders(pair.forward.graph, mutated_inputs(pair.forward.graph))
    used = used_by_forward(pair)
    facts = _ForwardFacts(owner, mutated, callers, dict(foreign(pair)), used, decided_on(pair, used), bound)
    looked_at = repeated_decisions(pair, user_recomputed).exact
    found: dict[str, Chain] = {}
    for tensor in table.tensors:
        what = next((looked_at[name] for name in tensor.views if name in looked_at), None)
        if what is not None:
            found[tensor.name] = Chain((), (), Refusal.LOOKED_AT.because(target=what))
            continue
        targets = tuple(nodes[name] for name in dict.fromkeys((*tensor.views, tensor.name)))
        fixed = {name for name, chain in found.items() if chain.why_not}
        found[tensor.name] = chain_of(targets, tensor.name, facts, fixed)
    return found


def with_chains(table: SavedTable, chains: Mapping[str, Chain]) -> SavedTable:
    """The table, with what chains (of chains_of) say of each activation: that it can be recomputed, or why not."""
    why_not = {name: chain.why_not for name, chain in chains.items()}
    return SavedTable(
        tuple(replace(t, recomputable=not why_not[t.name], why_not_recompute=why_not[t.name]) for t in table.tensors)
    )
