"""Recompute tags on the joint graph: the form in which decisions reach torch's own partitioner.

    producers ──▶ chain ──▶ saved activation decided "recompute"
    kept          MUST_RECOMPUTE (its chain up to kept values, too)

Min-cut could save a chain node without a tag instead of the activation. With tags, min-cut must cut above the chain.
`inductor_seeds` is never tagged: the seeds are saved, and the numbers drawn from them are the same again.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from graphoffload.passes.graphs import node_names


def tag_joint(joint: GraphModule, *, save: Iterable[str], recompute: Iterable[str]) -> GraphModule:
    """Write MUST_SAVE and MUST_RECOMPUTE tags; every other tag of ours or the user's on these nodes is replaced.

    Args:
        joint: the joint graph; only node metadata is written.
        save: names of nodes that must be saved. recompute: names of nodes that backward computes again.
    """
    nodes = node_names(joint.graph)
    for name in save:
        if name in nodes:
            nodes[name].meta["recompute"] = CheckpointPolicy.MUST_SAVE
    for name in recompute:
        if name in nodes and "inductor_seed" not in str(nodes[name].target):
            nodes[name].meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            nodes[name].meta.setdefault("ac_graph_id", 0)
    return joint
