"""The loops of a kernel that reduces, and what one of them stores for another.

    amax ▏ sum(exp(x - amax)), random ▏ exp(x - amax) / sum * (random > p)         a loop ends where its result is read

Where a row fits in registers, there are none. Inductor keeps rows of up to 1024 numbers there if all that a reduction reads is
contiguous: a number for each element, for each row or for each column. A mask of several heads is not, and 64 are the limit
(get_reduction_hint in torch/_inductor/codegen/simd_kernel_features.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch.fx import Node

from graphoffload.analysis.reductions import axis_of, loops
from graphoffload.analysis.storages import fake, storage_id


class Kernels(Protocol):
    """What is known of a graph's kernels (fusion.py)."""

    real: set[int]

    def needed_within(self, kernel: Sequence[Node]) -> dict[Node, set[Node]]:
        """The operations of a kernel that each of them is computed from."""


def is_read_in_another_loop(node: Node, readers: Sequence[Node], kernel: Sequence[Node], kernels: Kernels) -> bool:
    """Whether a loop of a value's kernel ends between the value and a reader, which then loads what the first loop has stored.

    Args:
        kernel: the operations of the value's kernel in their order, `node` and `readers` among them.
    """
    if not any(loops(one, _read_by(one, kernels)) for one in kernel):
        return False
    needs, found, open_loop, loop = kernels.needed_within(kernel), dict[Node, int](), set[Node](), 0
    for one in kernel:
        if not needs[one].isdisjoint(open_loop):
            loop, open_loop = loop + 1, set()
        found[one] = loop
        if axis_of(one) is not None:
            open_loop.add(one)
    return any(found[reader] != found[node] for reader in readers)


def _read_by(node: Node, kernels: Kernels) -> Iterator[torch.Tensor]:
    """Tensors in memory that an operation is computed from, as it sees them."""
    pending, seen = [node], {node}
    while pending:
        for source in pending.pop().all_input_nodes:
            value = fake(source)
            if value is None or source in seen:
                continue
            seen.add(source)
            if storage_id(value) in kernels.real or source.op == "placeholder":
                yield value
            else:
                pending.append(source)
