"""Patterns over the graphs of one model: with graph breaks each graph contains only some of the modules.

A model is the function that one torch.compile was given and that runs while Dynamo compiles. The parts of another model say
nothing about it, even if the configurations are equal.

Patterns that matched nowhere are reported after the last part. Sometimes no part is known to be the last: DDP cuts one graph
into parts of its own, the part after a break may need no gradient, and the functions that a frame skipped by Dynamo calls are
compiled by themselves. The report then comes once an optimizer has made two steps.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch.optim.optimizer import register_optimizer_step_post_hook

from graphoffload.errors import PatternWarning, warn
from graphoffload.options.patterns import Resolution, what_there_is


@dataclass(frozen=True, slots=True)
class Fragment:
    """The role of a graph in the user's compiled function: all of it (""), a part, or the last part; and the number of that
    model."""

    place: Literal["", "part", "last"] = ""
    model: int = 0

    def __bool__(self) -> bool:
        return bool(self.place)


WHOLE = Fragment()


@dataclass(slots=True)
class _Model:
    """One model under one configuration: whether it broke, what matched, and what was warned about.

    missing: patterns that matched in no part so far. steps: of optimizers since. paths, boundaries: modules and names of all
    parts.
    """

    breaks: bool = False
    matched: set[str] = field(default_factory=set)
    warned: set[str] = field(default_factory=set)
    missing: dict[str, None] = field(default_factory=dict)
    steps: int = 0
    paths: dict[str, None] = field(default_factory=dict)
    boundaries: dict[str, None] = field(default_factory=dict)


_STEPS = 2  # optimizer steps by which all parts of the trained model were compiled
_models: defaultdict[tuple[int, str], _Model] = defaultdict(_Model)
_numbers: dict[int, tuple[weakref.ref[Any], int]] = {}
_next = itertools.count(1)


def fragment_of(running: object, config: str, *, whole: bool) -> Fragment:
    """The role of the graph that is compiled now.

    Args:
        running: the function that torch.compile was given and that runs now; None if unknown.
        config: digest of the configuration. whole: no graph break ends this graph.
    """
    number = _number(running)
    known = _models[number, config]
    if not whole:
        known.breaks = True
        return Fragment("part", number)
    return Fragment("last" if known.breaks else "", number)


def _number(running: object) -> int:
    if running is None:
        return 0
    known = _numbers.get(id(running))
    if known is None or known[0]() is not running:
        known = _numbers[id(running)] = weakref.ref(running), next(_next)
    return known[1]


def remember(graph: Fragment, config: str, patterns: Iterable[str], resolution: Resolution) -> None:
    """Remember which patterns of a configuration (by its digest) matched in a graph, and for a part also which did not.

    A whole graph may have separate parts: the hooks of its module are compiled by themselves.
    """
    if graph == WHOLE:
        return
    known = _models[graph.model, config]
    known.matched.update(pattern for pattern in patterns if pattern not in resolution.unmatched)
    known.paths.update(dict.fromkeys(resolution.paths))
    known.boundaries.update(dict.fromkeys(resolution.boundaries))
    if graph and resolution.unmatched:
        known.missing.update(dict.fromkeys(resolution.unmatched))
        known.steps = 0


def warn_of_unmatched(model: int, config: str) -> None:
    """After the last graph of a model: one warning for each pattern that matched in none of its graphs."""
    known = _models[model, config]
    missing, known.missing = known.missing, {}
    for pattern in missing:
        if pattern in known.matched | known.warned:
            continue
        known.warned.add(pattern)
        warn(
            PatternWarning,
            f"pattern {pattern!r} matched no module in any graph of this model, so it has no effect. "
            f"{what_there_is(pattern, known.paths, known.boundaries)} Correct the pattern, or remove it.",
        )


def _after_step(*_: Any) -> None:
    for key, known in list(_models.items()):
        if known.missing:
            known.steps += 1
            if known.steps >= _STEPS:
                warn_of_unmatched(*key)


register_optimizer_step_post_hook(_after_step)
