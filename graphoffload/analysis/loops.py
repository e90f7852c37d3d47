"""The loops of a kernel that reduces, and what one of them stores for another.

    amax ▏ sum(exp(x - amax)), random ▏ exp(x - amax) / sum * (random > p)         a loop ends where its result is read

Where a row fits in registers, there are none. Inductor keeps rows of up to 1024 numbers there if all that a reduction reads is
contiguous: a number for each element, for each row or for each column. A mask of several heads is not, and 64 are the limit
(get_reduction_hint in torch/_inductor/codegen/simd_kernel_features.py).

Each loop reads its rows anew. Rows of a norm are in a cache by then, and cost a quarter of their bytes; rows as long as a
vocabulary are not, and the loops that reduce them compute more than they read (docs/results/fused-kernels.json).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch.fx import Node

from graphoffload.analysis.reductions import axis_of, loops, row_length
from graphoffload.analysis.storages import fake, storage_id, tensors_of

_CACHED = 16384
"""Numbers in a row. Up to about this length, rows that a GPU works at together are in its caches: 32 KiB of bfloat16 for each
of an H200's 1056 blocks of threads are 33 of 50 MiB."""
_FROM_CACHE, _REDUCED = 0.25, 1.3
"""Times the bytes of its rows: a loop that reads a row from a cache, and one that reduces a row that is in none."""


class Kernels(Protocol):
    """What is known of a graph's kernels (fusion.py)."""

    real: set[int]

    def read_by(self, node: Node) -> frozenset[int]:
        """Existing storages that a kernel reads to compute this node."""

    def needed_within(self, kernel: Sequence[Node]) -> dict[Node, set[Node]]:
        """The operations of a kernel that each of them is computed from."""


def is_read_in_another_loop(node: Node, readers: Sequence[Node], kernel: Sequence[Node], kernels: Kernels) -> bool:
    """Whether a loop of a value's kernel ends between the value and a reader, which then loads what the first loop has stored.

    Args:
        kernel: the operations of the value's kernel in their order, `node` and `readers` among them.
    """
    if not any(loops(one, _read_by(one, kernels)) for one in kernel):
        return False
    found = _loop_of_each(kernel, kernels)
    return any(found[reader] != found[node] for reader in readers)


def bytes_again(kernel: Sequence[Node], kernels: Kernels, sizes: Mapping[int, int]) -> dict[Node, float]:
    """What the loops of a kernel over long rows cost besides the bytes that it reads once, in bytes, by the first operation of
    each loop.

    Args:
        kernel: its operations, in their order. sizes: of storages, in bytes.
    """
    lengths = [row_length(one) or 0 for one in kernel if axis_of(one) == "rows" and loops(one, _read_by(one, kernels))]
    if not lengths:
        return {}
    by_loop = dict[int, list[Node]]()
    for one, loop in _loop_of_each(kernel, kernels).items():
        by_loop.setdefault(loop, []).append(one)
    found, known = dict[Node, float](), set[int]()
    for nodes in by_loop.values():
        made = {storage_id(value) for one in nodes for value in tensors_of(one)}
        read = {identity for one in nodes for identity in kernels.read_by(one)} - made
        nbytes, first = (float(sum(sizes.get(identity, 0) for identity in some)) for some in (read, read - known))
        known |= read | made
        if max(lengths) <= _CACHED:
            found[nodes[0]] = _FROM_CACHE * (nbytes - first)
        else:
            reduces = any(axis_of(one) == "rows" for one in nodes)
            found[nodes[0]] = (_REDUCED if reduces else 1.0) * nbytes - first
    return found


def _loop_of_each(kernel: Sequence[Node], kernels: Kernels) -> dict[Node, int]:
    """The number of the loop that each operation of a kernel is in, the first one 0."""
    needs, found, open_loop, loop = kernels.needed_within(kernel), dict[Node, int](), set[Node](), 0
    for one in kernel:
        if not needs[one].isdisjoint(open_loop):
            loop, open_loop = loop + 1, set()
        found[one] = loop
        if axis_of(one) is not None:
            open_loop.add(one)
    return found


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
