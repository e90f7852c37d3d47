"""A plan: the decisions for one graph and their predicted cost. No torch, no graph: plans print, compare, hash, save as JSON.

Decision      keep / recompute / offload for one SavedTensor, with a reason (a keep has one too)
Transfer      one offload with its release, reload and wait, tied together by id
Prediction    peaks and times of the plan and of keep-all
Plan          decisions, transfers and prediction for one graph
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Literal

from graphoffload.facts.saved_tensors import SavedTable, SavedTensor

Action = Literal["keep", "recompute", "offload"]
FORMAT = 2
"""Format number of a plan as JSON. It changes whenever an older reader would misread a field or lack one."""
TINY_BYTES = 1024
"""A graph that saves less, and keeps it, has no line and no table of its own."""
_HARDLY_MORE = 1.1


@dataclass(frozen=True, slots=True)
class Decision:
    """The action for one saved activation, and its reason."""

    name: str
    action: Action
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One storage's way to the host and back. One timeline determines all four places.

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
    """The predicted cost of a plan. Bytes are absolute device bytes at the peak; times are for one forward and backward.

    No peak includes `reserve_bytes`, which the plan leaves free for later allocations. `with_reserve` adds them.

    A time of 0.0 means that there were no hardware numbers (a CPU-only machine).
    """

    keep_peak_bytes: int = 0
    predicted_peak_bytes: int = 0
    keep_time_s: float = 0.0
    predicted_time_s: float = 0.0
    lower_bound_time_s: float | None = None
    host_bytes: int = 0
    stall_s: float = 0.0
    lower_bound_peak_bytes: int | None = None  # for a plan for a slowdown: no plan within it has a smaller peak
    reserve_bytes: int = 0

    def with_reserve(self, peak_bytes: int) -> int:
        """A peak plus the reserve; 0 for a peak that was not predicted."""
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
    """Decisions for one graph.

    Attributes:
        key: identifies graph, module names, annotations and configuration together.
        unfused_bytes: two independent operations that write this many bytes each are not fused; None: they may be.
        device: the device of the tensors.
        hardware: name of the profile that the plan was made for; "" if it is this device's own.
        part: other graphs are trained with this one. The figures do not include the memory that these keep.
        host_budget_bytes: the host memory that the plan was limited to; None: unlimited.
        hint: what the user could change, for the line of the plan or of its step.
        variant: name of the recipe that the graph is compiled by, where the plan of a step says which; "" if planned alone.
        outputs_held: the predicted peak includes the model's outputs throughout backward.
        turn_bytes: what the predicted peak includes of eager code between forward and backward, such as a loss.
    """

    key: str
    graph: str
    decisions: tuple[Decision, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    prediction: Prediction = Prediction()
    notes: tuple[str, ...] = ()
    saved: SavedTable = SavedTable()  # noqa: RUF009 (frozen)
    torch_version: str = ""
    device: str = "cpu"
    checksum: bool = False
    summary: str = ""
    hardware: str = ""
    unfused_bytes: int | None = None
    part: bool = False
    host_budget_bytes: int | None = None
    outputs_held: bool = True
    variant: str = ""
    hint: str = ""
    turn_bytes: int = 0

    def suits_host(self, host_budget_bytes: int | None) -> bool:
        """Whether this plan is right for so much host memory.

        The plan must need no more. It must also not have been limited by less: either all saved activations would have fitted
        then, or there is hardly more memory now.
        """
        if host_budget_bytes is None or self.host_budget_bytes is None:
            return host_budget_bytes == self.host_budget_bytes
        everything = sum(tensor.planned_bytes for tensor in self.saved.tensors)
        unbounded = self.host_budget_bytes >= min(everything, host_budget_bytes / _HARDLY_MORE)
        return unbounded and self.prediction.host_bytes <= host_budget_bytes

    def action(self, name: str) -> Action:
        """The action for a SavedTensor's name; "keep" if the plan does not mention it."""
        for decision in self.decisions:
            if decision.name == name:
                return decision.action
        return "keep"

    def bytes_of(self, action: Action) -> int:
        """Bytes of all storages with this decision."""
        chosen = {decision.name for decision in self.decisions if decision.action == action}
        return sum(tensor.planned_bytes for tensor in self.saved.tensors if tensor.name in chosen)

    @property
    def is_tiny(self) -> bool:
        """Whether everything is kept and backward reads hardly anything, so that there is nothing to tell."""
        known = all(tensor.nbytes is not None for tensor in self.saved.tensors)
        return known and not self.changes_anything and self.saved.saved_bytes < TINY_BYTES

    @property
    def changes_anything(self) -> bool:
        """Whether any activation is offloaded or recomputed."""
        return any(decision.action != "keep" for decision in self.decisions)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes copied to the host in one forward."""
        return self.bytes_of("offload")

    @property
    def recomputed_bytes(self) -> int:
        """Bytes that backward recomputes."""
        return self.bytes_of("recompute")

    def to_json(self) -> str:
        """The whole plan as JSON; Plan.from_json reads it back."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Inverse of to_json.

        Raises:
            ValueError: the text is no JSON, or a plan in the format of another release.
        """
        data = json.loads(text)
        found = data.pop("format", None)
        if found != FORMAT:
            raise ValueError(f"this plan has format {found}, and format {FORMAT} is read here: plan again with this release.")
        data["saved"] = SavedTable(tuple(SavedTensor.from_dict(t) for t in data["saved"]["tensors"]))
        data["decisions"] = tuple(Decision(**d) for d in data["decisions"])
        data["transfers"] = tuple(Transfer(**t) for t in data["transfers"])
        data["prediction"] = Prediction(**data["prediction"])
        data["notes"] = tuple(data["notes"])
        return cls(**data)
