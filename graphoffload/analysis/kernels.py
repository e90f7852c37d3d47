"""Kernels that operations join one by one, and the order in which the kernels run.

An operation may join a kernel that other kernels already read from. It must not close a cycle:

    A ──▶ B                                          B reads a result of A.
    x joins A, and x reads a result of C:            A now runs after C, and so does B.
    y wants to join C, and y reads a result of B:    refused, since C would have to run both before and after B.

When a kernel gets a new input, every kernel that runs after it gets the same ancestors at once. `ancestors` are therefore exact
at any time, and `runs_after` finds a cycle before it is closed. Inductor's scheduler keeps ancestors for the same reason
(torch/_inductor/scheduler.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from typing import Literal

from torch.fx import Node

Axis = Literal["rows", "columns"]
Space = int | str  # a number of elements; text if it is symbolic


@dataclass(slots=True, eq=False)
class Kernel:
    """Nodes that run as one kernel.

    Attributes:
        number: index among the kernels.
        turn: the earliest turn at which it runs (fusion.py).
        order: index of its first operation among the graph's operations.
        space: elements that it iterates over; None if it runs alone.
        nodes: its operations.
        touched: bytes of each storage that it reads or writes.
        written: bytes that it writes.
        needs, users: numbers of the kernels that it reads from, and of those that read from it.
        ancestors: numbers of all kernels that run before it, as bits.
        axes: whether it reduces rows, columns, or both.
    """

    number: int
    turn: int
    order: int
    space: Space | None
    nodes: list[Node] = field(default_factory=list)
    touched: dict[int, int] = field(default_factory=dict)
    written: int = 0
    needs: set[int] = field(default_factory=set)
    users: set[int] = field(default_factory=set)
    ancestors: int = 0
    axes: set[Axis] = field(default_factory=set)


def runs_after(kernels: Sequence[Kernel], number: int, needs: set[int]) -> bool:
    """Whether an operation that needs the kernels `needs` must run after kernel `number`, and so cannot join it.

    This is so if another one of `needs` runs after kernel `number`. Reading from kernel `number` itself is no obstacle.
    """
    return any(kernels[other].ancestors >> number & 1 for other in needs if other != number)


def add_needs(kernels: Sequence[Kernel], home: Kernel, needs: set[int]) -> None:
    """Make `home`, and every kernel that runs after it, run after the kernels `needs` too."""
    added = 0
    for number in needs - {home.number}:
        added |= kernels[number].ancestors | 1 << number
        kernels[number].users.add(home.number)
        home.needs.add(number)
    growing = [home]
    while growing:
        kernel = growing.pop()
        if added & ~kernel.ancestors:
            kernel.ancestors |= added
            growing.extend(kernels[number] for number in kernel.users)


def take_over(home: Kernel, other: Kernel) -> None:
    """Make the operations of a kernel that needs nothing, and that no kernel needs, part of `home`. It is empty afterwards, and
    nothing joins it."""
    home.nodes += other.nodes
    home.touched |= other.touched
    home.written += other.written
    home.turn, home.order = min(home.turn, other.turn), max(home.order, other.order)
    other.nodes, other.touched, other.written, other.space = [], {}, 0, None


def in_order(kernels: Sequence[Kernel]) -> tuple[list[Kernel], list[tuple[int, int]]]:
    """The kernels in the order in which they run; and (turn, kernels that have run once this turn is over), by turn.

    A kernel runs when its turn comes, or as soon as all that it needs has run, if that is later. What it needs does not run
    earlier for it (`torch_internals.inductor.in_graph_order`).
    """
    import networkx as nx

    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(kernels)))
    graph.add_edges_from((need, kernel.number) for kernel in kernels for need in kernel.needs)
    sequence = [kernels[at] for at in nx.lexicographical_topological_sort(graph, key=lambda at: kernels[at].turn)]
    return sequence, list(zip(accumulate((kernel.turn for kernel in sequence), max), count(1)))
