"""Kernels that grow, and the order in which they run.

A kernel is joined by operations one after the other, also when other kernels need it already:

    A ◀── B          B reads what A wrote
    A joined by x, which reads what C wrote: now A runs after C, and so does B
    C joined by y, which reads what B wrote: it must not, C would run after B as well as before it

So whatever a kernel comes to need, all that runs after it comes to need too, at once: `ancestors` are exact at every moment,
and who asks them before an operation joins never closes a cycle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch.fx import Node

Axis = Literal["rows", "columns"]


@dataclass(slots=True, eq=False)
class Kernel:
    """Nodes that run as one, when its `turn` comes or later; its first is the `order`-th operation of the graph.

    `space`: elements it iterates over; None: it runs alone.

    `touched`: bytes of each storage that it reads or writes; `written`: of those that it writes.

    `needs` are the numbers of the kernels it reads from, `users` of those that read from it, `ancestors` of all that run before
    it, as bits. `axes`: whether it reduces rows, columns, or both.
    """

    number: int
    turn: int
    order: int
    space: int | None
    nodes: list[Node] = field(default_factory=list)
    touched: dict[int, int] = field(default_factory=dict)
    written: int = 0
    needs: set[int] = field(default_factory=set)
    users: set[int] = field(default_factory=set)
    ancestors: int = 0
    axes: set[Axis] = field(default_factory=set)


def runs_after(kernels: Sequence[Kernel], number: int, needs: set[int]) -> bool:
    """Whether something that needs all of `needs` runs after kernel `number` even if it does not read from it, and so cannot
    be part of it."""
    return any(kernels[other].ancestors >> number & 1 for other in needs if other != number)


def add_needs(kernels: Sequence[Kernel], home: Kernel, needs: set[int]) -> None:
    """`home` runs after these as well, and so does all that runs after `home`."""
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


def in_order(kernels: Sequence[Kernel]) -> tuple[list[Kernel], list[tuple[int, int]]]:
    """Kernels as they run: each when its turn comes, after all that it needs, which is fetched from behind it. And for each
    turn the number of kernels that have run after it."""
    opened: set[int] = set()
    placed: set[int] = set()
    sequence: list[Kernel] = []
    turns: list[tuple[int, int]] = []
    for kernel in sorted(kernels, key=lambda kernel: (kernel.turn, kernel.number)):
        pending = [(kernel, False)]
        while pending:
            current, ready = pending.pop()
            if current.number in placed:
                continue
            if ready:
                placed.add(current.number)
                sequence.append(current)
                continue
            assert current.number not in opened, f"kernel {current.number} needs itself: {current.nodes}"
            opened.add(current.number)
            pending.append((current, True))
            pending.extend((kernels[number], False) for number in sorted(current.needs, reverse=True) if number not in placed)
        turns.append((kernel.turn, len(sequence)))
    return sequence, turns
