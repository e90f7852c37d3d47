"""Fake tensors for the results of regions and of waits for collectives, each with the memory that it will have.

analysis/regions.py and analysis/collectives.py say what these are.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graphoffload.analysis.regions import calls_region, subgraph_of
from graphoffload.analysis.storages import concrete, fake, read_by, storage_id
from graphoffload.torch_internals.collectives import is_wait


def give_own_memory(module: GraphModule) -> None:
    """Give the results of each call of a region fake tensors with storages of their own, or of the operands that they are, and
    what a wait returns the storage that it waits for.

    Views of them follow. Writes `meta["val"]` of nodes of `module`, which must be a copy.
    """
    if not any(calls_region(node) or is_wait(node.target) for node in module.graph.nodes):
        return
    moved: dict[Node, int] = {}  # nodes with another storage now, and the one that they had
    results: dict[tuple[Node, int], torch.Tensor] = {}
    for node in module.graph.nodes:
        value = fake(node)
        if node.op != "call_function" or value is None:
            continue
        call = node.args[0] if node.target is operator.getitem else None
        if isinstance(call, Node) and calls_region(call):
            node.meta["val"] = _result(call, node.args[1], value, results)
            moved[node] = storage_id(value)
            continue
        awaited = fake(node.all_input_nodes[0]) if is_wait(node.target) else None
        if awaited is not None:
            node.meta["val"] = _as(awaited, value, awaited.storage_offset())
            moved[node] = storage_id(value)
            continue
        shown = next((source for source in read_by(node) if moved.get(source) == storage_id(value)), None)
        if shown is not None:
            node.meta["val"] = _as(fake(shown), value, value.storage_offset())
            moved[node] = storage_id(value)


def _result(call: Node, index: Any, value: torch.Tensor, results: dict[tuple[Node, int], torch.Tensor]) -> torch.Tensor:
    """One result of a call: of its operand's memory where the region hands that through, else of memory of its own."""
    region = subgraph_of(call)
    inside = next(iter(reversed(region.graph.nodes))).args[0][index] if region is not None else None
    shown = fake(inside) if isinstance(inside, Node) else None
    if region is not None and shown is not None:
        for placeholder, operand in zip(region.graph.find_nodes(op="placeholder"), call.args[2:], strict=False):
            given, known = fake(placeholder), fake(operand) if isinstance(operand, Node) else None
            if given is not None and known is not None and storage_id(given) == storage_id(shown):
                return _as(known, shown, known.storage_offset() + shown.storage_offset() - given.storage_offset())
    whole = results.setdefault((call, storage_id(value)), _fresh(value))
    return _as(whole, value, value.storage_offset())


def _fresh(value: torch.Tensor) -> torch.Tensor:
    """A fake tensor with a storage of its own, as large as the value's."""
    nbytes = concrete(value.untyped_storage().nbytes())
    with value.fake_mode:  # type: ignore[attr-defined]
        if nbytes is None or nbytes % value.element_size():
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
        return torch.empty(nbytes // value.element_size(), dtype=value.dtype, device=value.device)


def _as(memory: torch.Tensor | None, value: torch.Tensor, offset: int | torch.SymInt) -> torch.Tensor:
    """Memory seen with a value's sizes and strides."""
    assert memory is not None
    with value.fake_mode:  # type: ignore[attr-defined]
        return memory.as_strided(value.size(), value.stride(), offset)
