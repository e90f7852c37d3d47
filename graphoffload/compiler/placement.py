"""From a simulated timeline to a Plan: steps of the simulation become positions in the graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphoffload.analysis.program import Instance
from graphoffload.analysis.saved_values import GraphPair
from graphoffload.compiler.decide import Decided
from graphoffload.facts.plan import Action, Decision, Plan, Transfer
from graphoffload.facts.saved_tensors import SavedTable
from graphoffload.planner.predicted import in_plan_order, prediction_of
from graphoffload.planner.simulator import Scheduled, Timeline
from graphoffload.torch_internals import releases


@dataclass(frozen=True, slots=True)
class PlannedPair:
    """Partitioned graphs with their simulation.

    Attributes:
        original: saved activations before anything was recomputed; `table`: those of `pair`.
        release_late: every release is at the end of forward (decide.Decided).
    """

    pair: GraphPair
    original: SavedTable
    table: SavedTable
    instance: Instance
    timeline: Timeline
    release_late: bool = False


def make_plan(
    planned: PlannedPair,
    actions: Mapping[str, Action],
    reasons: Mapping[str, str],
    decided: Decided,
    *,
    key: str,
    name: str,
    notes: Sequence[str],
    device: str,
    checksum: bool,
    unfused_bytes: int | None = None,
) -> Plan:
    """The plan of one pair of graphs.

    Args:
        actions, reasons: by SavedTensor name; a tensor that is only in `planned.original` is recomputed.
        notes, device, checksum, unfused_bytes: as in Plan.
    """
    original, table, timeline = planned.original, planned.table, planned.timeline
    places = _Places(planned)
    transfers = tuple(_transfer(planned, places, number, item) for number, item in enumerate(in_plan_order(timeline)))
    gone = [tensor for tensor in original.tensors if tensor.name not in actions]
    tensors = sorted((*table.tensors, *gone), key=lambda tensor: tensor.produced_position)
    decisions = tuple(
        Decision(
            tensor.name, actions.get(tensor.name, "recompute"), reasons.get(tensor.name, "saved because others are recomputed")
        )
        for tensor in tensors
    )
    prediction = prediction_of(
        timeline,
        decided.keep_timeline,
        reserve_bytes=planned.instance.program.reserve_bytes,
        lower_bound_s=decided.lower_bound_s,
        lower_bound_peak_bytes=decided.lower_bound_peak_bytes,
    )
    return Plan(
        key=key,
        graph=name,
        decisions=decisions,
        transfers=transfers,
        prediction=prediction,
        notes=tuple(notes),
        saved=SavedTable(tuple(tensors)),
        torch_version=releases.torch_version(),
        device=device,
        checksum=checksum,
        unfused_bytes=unfused_bytes,
    )


class _Places:
    """The graphs' nodes by position. The instance knows before which node an op must be inserted to run at a step."""

    def __init__(self, planned: PlannedPair) -> None:
        pair = planned.pair
        self.forward, self.backward = list(pair.forward.graph.nodes), list(pair.backward.graph.nodes)
        self.after_inputs = max(at for at, node in enumerate(self.backward) if node.op == "placeholder") + 1


def _transfer(planned: PlannedPair, places: _Places, number: int, item: Scheduled) -> Transfer:
    """A scheduled transfer with its nodes in the graphs."""
    tensor = planned.table.tensors[item.candidate]
    wait_at = max(tensor.backward_positions[0], places.after_inputs)
    reload_at = min(max(planned.instance.backward_places[item.reload_at], places.after_inputs), wait_at)
    return Transfer(
        id=number,
        tensor=tensor.name,
        nbytes=tensor.nbytes,
        offload_after=tensor.name,
        release_after=_release_after(planned, places, item),
        reload_before=places.backward[reload_at].name,
        wait_before=places.backward[wait_at].name,
        module=tensor.module,
    )


def _release_after(planned: PlannedPair, places: _Places, item: Scheduled) -> str | None:
    """The forward node after which a release is inserted; None at the end of forward."""
    if item.release_at is None or planned.release_late:
        return None
    tensor = planned.table.tensors[item.candidate]
    instance = planned.instance
    place = instance.forward_places[item.release_at + 1] - 1
    position = max(place, instance.last_reader[item.candidate], tensor.last_forward_position, tensor.produced_position)
    while places.forward[position].op == "placeholder":
        position += 1
    return None if places.forward[position].op == "output" else places.forward[position].name
