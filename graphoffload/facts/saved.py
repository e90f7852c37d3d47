"""Facts about saved activations and the decisions on them. No torch, no graph: they print, compare, hash and save as JSON.

    SavedTensor   one *storage* that backward needs (several saved views of it are one copy, and its bytes count once)
    SavedTable    all of them for one joint graph, in the order they are produced
    Decision      keep / recompute / offload for one SavedTensor, with its reason (a keep has one too)
    Transfer      one offload with its release, reload and wait, tied together by id
    Plan          decisions and transfers for one graph, and what they are predicted to cost

Positions are indices into the program order of the forward and of the backward graph; names are those of graph nodes.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal

Action = Literal["keep", "recompute", "offload"]
Tag = Literal["must_save", "must_recompute", "must_offload", "prefer_save", "prefer_recompute", "prefer_offload"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """One saved activation, counted by storage.

    Attributes:
        name: graph node whose memory would be copied (the base of all views in `views`).
        views: names of the values that the backward graph receives; all live in this storage.
        nbytes: bytes of the storage; None when a size is symbolic.
        example_bytes: the same with the sizes of the example that was compiled.
        dtype: such as "bfloat16". shape, strides: of `name`, elements; symbolic sizes as strings.
        op: operation that produced it, such as "aten.mm.default".
        module: path of the module that produced it ("" when unknown), such as "model.layers.0.mlp.up_proj".
        saved_by: module paths with an operation that needs it for backward, and `module`; this is what patterns match.
        boundaries: names given by mark_boundary for any of `saved_by`.
        produced_at, last_forward_use: positions in the forward graph.
        first_backward_use: position in the backward graph of the first consumer that must run.
        backward_uses: positions in the backward graph of every real consumer.
        eligible: whether it may be offloaded; `why_not` says why not.
        recomputable: whether it may be recomputed; `why_not_recompute` says why not.
        tag: a CheckpointPolicy tag of the user, None without one.
        device: such as "cuda:0".
        saved_by_ops: backward operations that need it, each with its innermost module: "aten.mm.default@model.layers.0.mlp".
            What the partitioner recomputes in between is looked through.
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
    produced_at: int = 0
    last_forward_use: int = 0
    first_backward_use: int = 0
    backward_uses: tuple[int, ...] = ()
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
    """Saved activations of one joint graph in the order of production."""

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


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to one saved activation, and why."""

    name: str
    action: Action
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One storage's way to the host and back. The four positions come from one timeline.

    Attributes:
        id: ties offload, release, reload and wait together.
        tensor: SavedTensor.name. nbytes: None when symbolic.
        offload_after: forward node after which the D2H copy starts.
        release_after: forward node after which compute waits for the copy and the source's memory is free;
            None: at the end of the forward graph.
        reload_before: backward node before which the H2D copy starts.
        wait_before: backward node before which compute waits for it: the first consumer that must run.
        module: for messages.
    """

    id: int
    tensor: str
    nbytes: int | None
    offload_after: str
    release_after: str | None
    reload_before: str
    wait_before: str
    module: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a plan is predicted to cost. Bytes are absolute device bytes at the peak; times are one forward and backward.

    `reserve_bytes` are in none of the peaks: left free beside them, for what comes later. `with_reserve` adds them.

    A time of 0.0 means that no hardware numbers were at hand (a CPU-only machine).
    """

    keep_peak_bytes: int = 0
    predicted_peak_bytes: int = 0
    keep_time_s: float = 0.0
    predicted_time_s: float = 0.0
    lower_bound_time_s: float | None = None
    host_bytes: int = 0
    stall_s: float = 0.0
    lower_bound_peak_bytes: int | None = None  # of a plan for a slowdown: no other within it has a smaller peak
    reserve_bytes: int = 0

    def with_reserve(self, peak_bytes: int) -> int:
        """A peak as it will be once the reserve is taken; 0 for one that was not predicted."""
        return peak_bytes + self.reserve_bytes if peak_bytes else 0

    @property
    def predicted_slowdown(self) -> float:
        """Extra time relative to keep-all, 0.02 for 2 %; 0.0 when nothing changes."""
        return self.predicted_time_s / self.keep_time_s - 1.0 if self.keep_time_s else 0.0

    @property
    def lower_bound_slowdown(self) -> float | None:
        """Extra time that no plan for the same budget can undercut; None when no bound was computed."""
        if self.lower_bound_time_s is None or not self.keep_time_s:
            return None
        return self.lower_bound_time_s / self.keep_time_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Decisions for one graph. `key` identifies graph, module names, annotations and configuration together.

    `apart_bytes`: two operations that write so much each and do not need each other are not fused; None: they may be.
    `device`: that of the tensors; `hardware`: name of the profile that was planned for, "" where it is this device's own.
    `part`: other graphs are trained with this one, and what they keep is in none of its figures.
    """

    key: str
    graph: str
    decisions: tuple[Decision, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    prediction: Prediction = Prediction()
    notes: tuple[str, ...] = ()
    saved: SavedTable = SavedTable()
    torch_version: str = ""
    device: str = "cpu"
    checksum: bool = False
    summary: str = ""
    hardware: str = ""
    apart_bytes: int | None = None
    part: bool = False

    def action(self, name: str) -> Action:
        """Decision for a SavedTensor's name; "keep" when the plan does not mention it."""
        for decision in self.decisions:
            if decision.name == name:
                return decision.action
        return "keep"

    def bytes_of(self, action: Action) -> int:
        """Bytes of all storages with this decision."""
        chosen = {decision.name for decision in self.decisions if decision.action == action}
        return sum(tensor.planned_bytes for tensor in self.saved.tensors if tensor.name in chosen)

    @property
    def changes_anything(self) -> bool:
        """Whether anything is not kept."""
        return any(decision.action != "keep" for decision in self.decisions)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes copied to the host in one forward."""
        return self.bytes_of("offload")

    @property
    def recomputed_bytes(self) -> int:
        """Bytes that backward computes again instead of keeping."""
        return self.bytes_of("recompute")

    def to_json(self) -> str:
        """The whole plan as JSON; Plan.from_json reads it back."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Inverse of to_json."""
        data = json.loads(text)
        data["saved"] = SavedTable(tuple(SavedTensor.from_dict(t) for t in data["saved"]["tensors"]))
        data["decisions"] = tuple(Decision(**d) for d in data["decisions"])
        data["transfers"] = tuple(Transfer(**t) for t in data["transfers"])
        data["prediction"] = Prediction(**data["prediction"])
        data["notes"] = tuple(data["notes"])
        return cls(**data)
