"""Graphs whose MLPs are computed in slices of the tokens: when they are looked at, and what a plan chooses from then.

    no plan meets the budget ─▶ the same graph in slices, planned like any other        a graph that is planned alone
       nor does one in slices ─▶ the error names the least budget that is met in either way
    family of a graph ─▶ two more variants, "light" and "smallest" in slices            a graph of a step

A slice is no decision about an activation: it makes others out of one. So a graph in slices is another graph, and its plan
keeps, recomputes and offloads what each slice saves. Slices are the last resort: gradients round otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch.fx import GraphModule

from graphoffload.compiler.compile_variant import Compiled, Graph, compile_by, in_slices, regions_of
from graphoffload.compiler.device_limits import device_budget_now, device_of, map_by_pages_if_tight
from graphoffload.errors import BudgetError
from graphoffload.facts.recipe import FIRST, SMALLEST
from graphoffload.log import log

_Made = TypeVar("_Made")

SLICES = 8
"""More save little: an eighth of what an MLP holds is about as much as its input and its output."""
_TIGHT = 0.8
"""Of the device: what eager code holds beside a call of a first step, such as logits, is not known yet."""
_MATTERS = 0.02
"""Of the budget: regions that hold less at a time are not looked at in slices. It takes a few seconds."""


def made_or_in_slices(graph: Graph, fresh: Callable[[], GraphModule], make: Callable[[Graph], _Made]) -> _Made:
    """What `make` makes of a graph that is planned alone; in slices where no plan meets the budget otherwise.

    Args:
        fresh: makes a copy of Dynamo's graph, since compiling writes to it.

    Raises:
        BudgetError: no plan meets the budget in either way; of both errors the one with the lower budget.
    """
    if not _has_regions(graph):
        return make(graph)
    try:
        return make(replace(graph, has_resort=True))
    except BudgetError as error:
        least_bytes = error.least_bytes or 0
    if (sliced := _written(graph, fresh)) is not None:
        log.info("%s: no plan meets the budget; planning it with MLPs in %d slices of the tokens", graph.name, sliced.slices)
        try:
            return make(sliced)
        except BudgetError as error:
            if (error.least_bytes or 0) <= least_bytes:
                raise
        except Exception as error:  # a last resort fails for no other reason than what it is for
            log.info("%s: it cannot be planned in slices: %s", graph.name, error)
    return make(replace(graph, module=fresh()))  # once more, to name the least budget


def first_of_several(graph: Graph, fresh: Callable[[], GraphModule]) -> Compiled:
    """A graph that is one of several, compiled before anything is known of its step; in slices where the device has too little
    for a single call otherwise. Then memory is mapped by pages: what is saved leaves pieces that are too small for a long
    sequence."""
    compiled, most_bytes = compile_by(graph, FIRST), _most_bytes(device_of(graph.inputs))
    if compiled.plan is None or compiled.plan.prediction.predicted_peak_bytes <= _TIGHT * most_bytes:
        return compiled
    map_by_pages_if_tight(device_of(graph.inputs), most_bytes, most_bytes, of_a_step=True)
    sliced = _written(graph, fresh)
    try:
        compiled = compiled if sliced is None else compile_by(sliced, SMALLEST.in_slices(sliced.slices))
    except Exception as error:
        log.info("%s is not compiled in slices: %s", graph.name, error)
    return replace(compiled, tight=True)


def _written(graph: Graph, fresh: Callable[[], GraphModule]) -> Graph | None:
    """A graph in slices; None where it has no MLP, or cannot be written so: it is compiled at once then."""
    try:
        return in_slices(graph, fresh(), SLICES)
    except Exception as error:
        log.info("%s is not in slices: %s", graph.name, error)
        return None


def _has_regions(graph: Graph) -> bool:
    """Whether a graph may be in slices, for all that can be seen without writing it so."""
    try:
        return bool(regions_of(graph.module, SLICES))
    except Exception as error:
        log.info("%s is not in slices: %s", graph.name, error)
        return False


def _most_bytes(device: torch.device) -> int:
    """What a process may have allocated in its first step; more than anything where nothing says so."""
    return device_budget_now(device, of_a_step=True) if device.type == "cuda" else 1 << 62


def held_at_once(module: GraphModule) -> int:
    """What the largest part of a graph that may be in slices holds while it runs, in bytes."""
    return max((region.inside_bytes for region in regions_of(module, SLICES)), default=0)


def may_pay(held_bytes: int, budget_bytes: int | None) -> bool:
    """Whether a step may need variants in slices of a graph of which a part holds this much at once."""
    return bool(budget_bytes) and held_bytes > _MATTERS * (budget_bytes or 0)
