"""A model's blocks: the numbered modules of its lists, which torch.utils.checkpoint would be put around.

    model.layers.0 ─▶ model.layers.1 ─▶ model.norm        blocks: model.layers.0 and model.layers.1, with all that is inside

A block is the outermost numbered module around an operation. What must not run again is in no block: it is saved. A graph
that is itself one block of a model, compiled alone, has no numbered modules of its own: on request it is one block.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping

from torch.fx import Graph, Node

from graphoffload.analysis.chains import may_run_again
from graphoffload.analysis.module_paths import module_stack

_NUMBERED = re.compile(r"((?:.*?\.)?\d+)(?:\.|$)")


def blocks_of(joint: Graph, *, whole: bool = False, share: float = 1.0) -> Mapping[str, int]:
    """Operations of forward that may run again, each with its block's number in the order of the graph, from 1 on.

    Where there are fewer than two blocks: empty, or with `whole` all operations as one block. What the user tagged is left out.
    share: of the blocks, the last ones; what the others save has more time to be copied.
    """
    found: dict[str, int] = {}
    everything: list[str] = []
    numbers: dict[str, int] = {}
    backward: set[Node] = set()
    left_out: set[Node] = set()
    for node in joint.nodes:
        if str(node.target).startswith("tangents") or not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
            continue
        block = next((match[1] for path in module_stack(node) if (match := _NUMBERED.match(path))), None)
        if node.op != "call_function" or node.meta.get("recompute") is not None or (block is None and not whole):
            continue
        if not may_run_again(node) or (node.target is operator.getitem and node.args[0] in left_out):
            left_out.add(node)
            continue
        everything.append(node.name)
        if block is not None:
            found[node.name] = numbers.setdefault(block, len(numbers) + 1)
    if len(numbers) > 1:
        first = len(numbers) - round(share * len(numbers))
        return {name: number for name, number in found.items() if number > first}
    return dict.fromkeys(everything, 1) if whole else {}
