"""A model's blocks: the numbered modules of its lists, which torch.utils.checkpoint would be put around.

    model.layers.0 ─▶ model.layers.1 ─▶ model.norm        blocks: model.layers.0 and model.layers.1, with all that is inside

A block is the outermost numbered module around an operation, unless it is a single layer of torch.nn, such as those that a
Sequential numbers: to run one Linear again saves nothing. What must not run again is in no block: it is saved. A graph that is
itself one block of a model, compiled alone, has no blocks of its own: on request it is one block.

    block.norm, block.mlp.0 (Linear), block.mlp.1 (GELU), block.mlp.2 (Linear)      no blocks; on request one, with all of these
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping

from torch.fx import Graph, Node

from graphoffload.analysis.chains import may_run_again
from graphoffload.analysis.module_paths import module_class, module_stack

_NUMBERED = re.compile(r"((?:.*?\.)?\d+)(?:\.|$)")
_LAYERS = "torch.nn.modules."


def blocks_of(joint: Graph, *, whole: bool = False, share: float = 1.0) -> Mapping[str, int]:
    """Operations of forward that may run again, each with its block's number in the order of the graph, from 1 on.

    Where there are fewer than two blocks: empty, or with `whole` all operations as one block. What the user tagged is left out.
    share: of the blocks, the last ones; what the others save has more time to be copied.
    """
    found: dict[str, str] = {}
    everything: list[str] = []
    blocks: dict[str, bool] = {}  # in the order of the graph, and whether it is more than a layer
    backward: set[Node] = set()
    left_out: set[Node] = set()
    for node in joint.nodes:
        if str(node.target).startswith("tangents") or not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
            continue
        stack = module_stack(node)
        block = next((match[1] for path in stack if (match := _NUMBERED.match(path))), None)
        if node.op != "call_function" or node.meta.get("recompute") is not None or (block is None and not whole):
            continue
        if not may_run_again(node) or (node.target is operator.getitem and node.args[0] in left_out):
            left_out.add(node)
            continue
        everything.append(node.name)
        if block is not None:
            found[node.name] = block
            blocks[block] = blocks.get(block, False) or stack[-1] != block or not module_class(node).startswith(_LAYERS)
    numbers = {block: number for number, block in enumerate((one for one, is_more in blocks.items() if is_more), 1)}
    if len(numbers) > 1:
        first = len(numbers) - round(share * len(numbers))
        return {name: numbers[block] for name, block in found.items() if numbers.get(block, 0) > first}
    return dict.fromkeys(everything, 1) if whole else {}
