"""Lifetimes of the values of one graph, in steps of the order in which the graph runs."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator

from torch.fx import Node

from graphoffload.analysis.fusion import Fusion
from graphoffload.analysis.storages import group_by_storage


def made_at(fusion: Fusion) -> dict[Node, int]:
    """The step at which each node's result exists. All results of a kernel exist from the kernel's last step on."""
    found = {node: at for at, node in enumerate(fusion.order)}
    for node in fusion.order:
        if node.target is operator.getitem:
            found[node] = found[node.all_input_nodes[0]]
    return found


def lives_in_memory(nodes: Iterable[Node], fusion: Fusion, at: dict[Node, int]) -> Iterator[tuple[int, Node, int, int]]:
    """(storage, producer, first step, last step) of each storage that exists in memory; `at` is `made_at(fusion)`."""
    for identity, members in group_by_storage(nodes).items():
        made = members[0]
        if identity in fusion.real:
            first, last = fusion.spans.get(made, (at[made], at[made]))
            yield identity, made, first, max([last, *(fusion.spans[reader][1] for reader in fusion.readers.get(identity, ()))])
