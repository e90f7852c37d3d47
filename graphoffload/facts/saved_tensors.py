"""Saved activations as facts: names, bytes and positions. No torch, no graph: they print, compare, hash and save as JSON.

    SavedTensor   one *storage* that backward needs (several saved views of it are one copy, and its bytes count once)
    SavedTable    all of them for one joint graph, in the order they are produced

A GraphPosition is the index of a node in its graph's order of nodes. The planner counts steps of the fused order instead
(planner/problem.py: StepIndex). Names are those of graph nodes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, NewType

GraphPosition = NewType("GraphPosition", int)
"""Index of a node in the order of its graph, forward or backward."""
INPUT = "input"
"""SavedTensor.op of an input that another graph computed, where it counts as an activation of this one."""
Tag = Literal["must_save", "must_recompute", "must_offload", "prefer_save", "prefer_recompute", "prefer_offload"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """One saved activation, counted by storage.

    Attributes:
        name: graph node whose memory would be copied (the base of all views in `views`).
        views: names of the values that the backward graph receives; all are in this storage.
        nbytes: bytes of the storage; None if a size is symbolic.
        example_bytes: the same with the sizes of the example that was compiled.
        dtype: such as "bfloat16". shape, strides: of `name`, elements; symbolic sizes as strings.
        op: operation that produced it, such as "aten.mm.default".
        module: path of the module that produced it ("" if unknown), such as "model.layers.0.mlp.up_proj".
        saved_by: paths of the modules with an operation that needs it for backward, and `module`. Patterns match these.
        boundaries: names given by mark_boundary for any of `saved_by`.
        produced_position, last_forward_position: positions of its producer and of its last reader in the forward graph.
        first_backward_position: position in the backward graph of the first consumer that must run.
        backward_positions: positions in the backward graph of all consumers.
        eligible: whether it may be offloaded; `why_not` says why not.
        recomputable: whether it may be recomputed; `why_not_recompute` says why not.
        tag: the user's CheckpointPolicy tag; None if there is none.
        device: such as "cuda:0".
        saved_by_ops: backward operations that need it, each with its innermost module: "aten.mm.default@model.layers.0.mlp".
            An operation that the partitioner recomputes is replaced by its own readers.
    """

    name: str
    views: tuple[str, ...]
    nbytes: int | None
    dtype: str
    shape: tuple[int | str, ...]
    strides: tuple[int | str, ...]
    op: str
    module: str = ""
    saved_by: tuple[str, ...] = ()
    boundaries: tuple[str, ...] = ()
    produced_position: GraphPosition = GraphPosition(0)
    last_forward_position: GraphPosition = GraphPosition(0)
    first_backward_position: GraphPosition = GraphPosition(0)
    backward_positions: tuple[GraphPosition, ...] = ()
    eligible: bool = True
    why_not: str = ""
    recomputable: bool = True
    why_not_recompute: str = ""
    tag: Tag | None = None
    device: str = "cpu"
    saved_by_ops: tuple[str, ...] = ()
    example_bytes: int = 0

    @property
    def planned_bytes(self) -> int:
        """Bytes of the storage as it is planned: a symbolic size counts as in the example that was compiled."""
        return self.example_bytes if self.nbytes is None else self.nbytes

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SavedTensor:
        """Inverse of to_dict."""
        fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class SavedTable:
    """Saved activations of one joint graph, in the order of production."""

    tensors: tuple[SavedTensor, ...] = ()

    @property
    def saved_bytes(self) -> int:
        """Bytes of all storages; symbolic sizes count as in the example that was compiled."""
        return sum(tensor.planned_bytes for tensor in self.tensors)

    @property
    def eligible_bytes(self) -> int:
        """Bytes that may be offloaded."""
        return sum(tensor.planned_bytes for tensor in self.tensors if tensor.eligible)

    def __getitem__(self, name: str) -> SavedTensor:
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return any(tensor.name == name for tensor in self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)
