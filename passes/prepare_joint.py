"""Copies of the joint graph, and the tags on them that tell torch's partitioner what must be saved."""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from graphoffload.analysis.callers import CallersMemory, readers_of_unread
from graphoffload.analysis.chains import mutated_placeholders
from graphoffload.analysis.collectives import Collectives
from graphoffload.analysis.decisions import is_float
from graphoffload.analysis.module_paths import boundary_names, module_path, module_stack
from graphoffload.analysis.saved_values import real_uses
from graphoffload.analysis.storages import example_storage_nbytes, fake
from graphoffload.facts.saved_tensors import SavedTensor
from graphoffload.passes.casts import leave_out_casts
from graphoffload.passes.regions import give_own_memory
from graphoffload.torch_internals import checkpoint_tags, partitioning


def copy_graph(module: GraphModule) -> GraphModule:
    """A graph module with its own graph and node metadata; tensors, submodules and node names are the original's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, from copying a graph's output specification
        return partitioning.uncompiled_module(module, copy.deepcopy(module.graph))


def tagged_copy(joint: GraphModule, *, relax: bool, notes: list[str], blocks: Mapping[str, int] | None = None) -> GraphModule:
    """A copy to partition, with the user's tags in the form of torch's partitioner, and with tags for what must be saved.

    Args:
        relax: ignore advice to recompute. notes: gets a line that says so.
        blocks: operations that are computed again block by block, with the number of the block (analysis/blocks.py).
    """
    copied = copy_graph(joint)
    give_own_memory(copied)
    leave_out_casts(copied)
    _apply_tags(copied, relax=relax, notes=notes)
    for node in copied.graph.nodes:
        if blocks and node.name in blocks:
            node.meta.update(recompute=CheckpointPolicy.PREFER_RECOMPUTE, ac_graph_id=blocks[node.name])
    _save_what_reads_mutated_inputs(copied)
    return copied


def _apply_tags(joint: GraphModule, *, relax: bool, notes: list[str]) -> None:
    """Make torch's partitioner save activations tagged for the host, and ignore advice to recompute if it is relaxed."""
    relaxed = 0
    for node in joint.graph.nodes:
        policy = node.meta.get("recompute")
        if policy in (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD):
            if isinstance(node.meta.get("val"), torch.Tensor):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            else:
                del node.meta["recompute"]
                for user in node.users:
                    user.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        elif policy == CheckpointPolicy.PREFER_RECOMPUTE and relax:
            del node.meta["recompute"]
            relaxed += 1
    if relaxed:
        notes.append(f"checkpoint region relaxed: {relaxed} operations tagged by torch.utils.checkpoint were planned anew")


def _save_what_reads_mutated_inputs(joint: GraphModule) -> None:
    """Tag operations whose input is written to later: running them again would compute another value."""
    mutated = mutated_placeholders(joint.graph, partitioning.mutated_inputs(joint.graph))
    for placeholder in mutated:
        if fake(placeholder) is None:
            continue
        for user in real_uses(placeholder):  # a saved view of the input would be the input itself
            if user.op == "call_function" and isinstance(user.meta.get("val"), torch.Tensor):
                user.meta["recompute"] = CheckpointPolicy.MUST_SAVE


@dataclass(frozen=True, slots=True)
class Binding:
    """Requirements on every partition of one joint graph.

    Attributes:
        decisions: operations that must not run again, since a discrete decision depends on their bits (analysis/decisions.py).
        callers: reads of the caller's memory that are allowed (analysis/callers.py); None: not known yet.
        user_recomputed: operations of the user's checkpoint regions, which run again as the user asked.
        collectives: those that keep-all runs; None: not known yet.
    """

    decisions: frozenset[str] = frozenset()
    callers: CallersMemory | None = None
    user_recomputed: frozenset[str] = frozenset()
    collectives: Collectives | None = None


def bind(joint: GraphModule, binding: Binding) -> GraphModule:
    """Tag a copy of the joint graph with operations that must not run again, and with outputs that must not be read instead."""
    callers = binding.callers or CallersMemory()
    unread = frozenset(node.name for node in readers_of_unread(joint.graph, callers)) if binding.callers else frozenset()
    for node in joint.graph.nodes:
        if node.name in callers.again:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta.setdefault("ac_graph_id", 0)
        elif node.name in binding.decisions or node.name in unread or _is_of_saved(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            if node.name in binding.decisions and (smaller := _smaller_form(node, binding.user_recomputed)) is not None:
                smaller.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return joint


def _smaller_form(decision: Node, user_recomputed: frozenset[str]) -> Node | None:
    """The smallest form of a decision, of the operations of a block that follow it one by one; None if there is none.

        eq (a byte a score) ──▶ logical_not ──▶ any (a byte a row) ──▶ logical_not ──▶ where      saved: any, and not eq

    Nothing else reads what is in between, so backward needs none of it. The graph outside of blocks needs no tag: min-cut
    itself saves the smallest form there.
    """
    node, least, found = decision, _nbytes(decision), None
    while len(node.users) == 1:
        node = next(iter(node.users))
        if node.op != "call_function" or len(node.all_input_nodes) != 1 or is_float(node) or fake(node) is None:
            break
        if node.meta.get("recompute") != CheckpointPolicy.PREFER_RECOMPUTE or node.name in user_recomputed:
            break
        if _nbytes(node) < least:
            least, found = _nbytes(node), node
    return found


def _nbytes(node: Node) -> int:
    value = fake(node)
    return 0 if value is None else example_storage_nbytes(value)


def _is_of_saved(node: Node) -> bool:
    """Whether a node of a region is a result of a MUST_SAVE operation with several results: these are what is saved."""
    if node.target is not operator.getitem or node.meta.get("recompute") != CheckpointPolicy.PREFER_RECOMPUTE:
        return False
    return isinstance(node.args[0], Node) and node.args[0].meta.get("recompute") == CheckpointPolicy.MUST_SAVE


def users_own(joint: GraphModule) -> frozenset[str]:
    """Operations that a tagged copy recomputes because the user's checkpoint regions say so."""
    regions = ("must_recompute", "prefer_recompute")
    return frozenset(node.name for node in joint.graph.nodes if checkpoint_tags.tag_of(node.meta) in regions)


def tagged_operations(nodes: Iterable[Node]) -> list[SavedTensor]:
    """Operations with a binding tag, in the form that patterns match; they need not be saved activations."""
    return [
        SavedTensor(
            name=node.name,
            views=(node.name,),
            nbytes=None,
            dtype="",
            shape=(),
            strides=(),
            op=str(node.target),
            module=module_path(node),
            saved_by=module_stack(node),
            boundaries=boundary_names(node),
            tag=tag,
        )
        for node in nodes
        if (tag := checkpoint_tags.tag_of(node.meta)) is not None and tag.startswith("must_")
    ]
