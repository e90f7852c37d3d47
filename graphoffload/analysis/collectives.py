"""Collectives in a graph: tensor parallelism, gathered parameters, tokens that are sent to experts.

    x ──▶ all_gather ──▶ y ──▶ wait ──▶ z ──▶ mm        y is being written to; z is the same memory, and whole
                                                        x is read until the wait

All ranks must run the same collectives in the same order, whatever each of them plans. Therefore no plan decides on them: one
is run again in backward only where the user's own tags say so, and then under every plan; and a result is neither copied nor
counted as a value of its own before its wait.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from torch.fx import Graph, Node

from graphoffload.torch_internals.collectives import is_collective, is_wait, returns_at_once


@dataclass(frozen=True, slots=True)
class Collectives:
    """Names of the collectives, waits included, that a pair of graphs runs with everything kept, in order.

    joint: those of the joint graph, which has every one once.
    """

    forward: tuple[str, ...]
    backward: tuple[str, ...]
    joint: tuple[str, ...]

    def violations(self, forward: Graph, backward: Graph) -> Iterator[str]:
        """How other graphs of the same joint graph differ."""
        ran = [("forward", collectives_of(forward), self.forward), ("backward", collectives_of(backward), self.backward)]
        for name, now, kept in ran:
            if now != kept:
                at = next(at for at, (one, other) in enumerate(zip_longest(now, kept)) if one != other)
                here, there = (" ".join(names[at : at + 1]) or "none" for names in (now, kept))
                yield f"collective {at} of {name} is {here}, and with everything kept it is {there}"
        for name, now, again in (("forward", ran[0][1], ()), ("backward", ran[1][1], ran[0][1])):
            own = [each for each in now if each not in again]
            if own != [each for each in self.joint if each in own]:
                yield f"{name} runs its collectives in another order than the joint graph: {', '.join(own)}"


def collectives_of(graph: Graph) -> tuple[str, ...]:
    """Names of a graph's collectives and waits, in the order in which they run."""
    return tuple(node.name for node in graph.nodes if node.op == "call_function" and is_collective(node.target))


def is_unwaited(node: Node) -> bool:
    """Whether a node's value is a collective's result, or one of several, before the wait for it."""
    made = node.args[0] if node.target is operator.getitem and isinstance(node.args[0], Node) else node
    return made.op == "call_function" and returns_at_once(made.target)


def waited(members: Iterable[Node]) -> list[Node]:
    """The nodes in one memory that may be read: all, or those from the wait for a collective on."""
    members = list(members)
    if not members or not is_unwaited(members[0]):
        return members
    first = next((at for at, node in enumerate(members) if is_wait(node.target)), len(members))
    return [node for node in members[first:] if not is_unwaited(node)]


def read_until(reader: Node) -> Iterator[Node]:
    """The nodes until which a reader reads its arguments: itself, or the waits for it where it is a collective."""
    yield reader
    if reader.op == "call_function" and returns_at_once(reader.target):
        results = [user for user in reader.users if user.target is operator.getitem]
        yield from (user for node in (reader, *results) for user in node.users if is_wait(user.target))
