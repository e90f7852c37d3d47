"""The four ops as a CUDA graph may capture them.

    handle = offload(x)                    handle = offload_captured(x)
    release(x, handle)             ──▶     release_captured(x, handle)

Inductor cuts its CUDA graphs at the former and captures the latter (runtime/captured.py).
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from graphoffload.passes.graphs import finish
from graphoffload.runtime.captured import NAMES


def make_capturable(module: GraphModule) -> int:
    """Replace the ops of a forward or backward graph, in place; returns how many were replaced."""
    ours = torch.ops.graphoffload
    instead = {getattr(ours, name).default: getattr(ours, f"{name}_captured").default for name in NAMES}
    nodes = [node for node in module.graph.nodes if node.target in instead]
    for node in nodes:
        node.target = instead[node.target]
    finish(module)
    return len(nodes)
