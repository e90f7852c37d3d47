"""What a partitioner is asked for one joint graph, and what is known about the graph while it is planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from graphoffload.analysis.chains import Chain
from graphoffload.analysis.outputs import loss_bytes
from graphoffload.analysis.saved_values import GraphPair
from graphoffload.compiler.constraints import Constraint, constraints_for
from graphoffload.compiler.session import CompileSession
from graphoffload.facts.goals import Goal
from graphoffload.facts.limits import Limits
from graphoffload.facts.saved_tensors import SavedTable
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.options.config import OffloadConfig
from graphoffload.options.patterns import Resolution
from graphoffload.passes.prepare_joint import Binding
from graphoffload.patience import Patience
from graphoffload.planner.solver import Least
from graphoffload.torch_internals import partitioning


@dataclass(frozen=True, slots=True)
class Request:
    """What a partitioner is asked: the session, the joint graph and the arguments for torch's own partitioner.

    goal: the session's, or another one that the search tries.
    """

    session: CompileSession
    joint: GraphModule
    joint_inputs: Any
    arguments: dict[str, Any]
    goal: Goal
    parameters: frozenset[str] = frozenset()  # placeholders that only an optimizer writes to
    relax: bool = False  # forget advice to recompute, of checkpoint regions: what they hold is planned like the rest
    blocks: Mapping[str, int] = field(default_factory=dict)  # computed again whole, as checkpointing does (analysis/blocks.py)

    @property
    def activations(self) -> frozenset[str]:
        """Inputs that other graphs computed, and that nothing in this one writes to."""
        named = partitioning.placeholders_at(self.joint.graph, self.session.activations)
        return named - {node.name for node in partitioning.mutated_inputs(self.joint.graph)}

    @property
    def config(self) -> OffloadConfig:
        """What the user asks for."""
        return self.session.config

    @property
    def limits(self) -> Limits:
        """What the process may use."""
        return self.session.limits

    @property
    def estimates_turn(self) -> bool:
        """Whether the memory of eager code between forward and backward is not known, and has to fit all the same: all of the
        device is planned for."""
        limits, session = self.limits, self.session
        unknown = limits.turn_bytes is None and not session.is_part
        fills = not limits.explicit and limits.device_budget_bytes is not None
        return unknown and fills

    @property
    def num_fwd_outputs(self) -> int:
        """How many forward outputs are the model's own."""
        return int(self.arguments["num_fwd_outputs"])

    def constraints(self, table: SavedTable, resolution: Resolution) -> tuple[Constraint, ...]:
        """What the user's tags, patterns and policy ask of each activation of a table."""
        return constraints_for(table, self.config, resolution, fragment=bool(self.session.fragment))


@dataclass(slots=True)
class GraphAnalysis:
    """What is known about one joint graph while it is planned."""

    request: Request
    hardware: HardwareProfile
    pair: GraphPair
    table: SavedTable
    chains: dict[str, Chain]
    wanted: tuple[Constraint, ...]
    resolution: Resolution
    notes: list[str]
    binding: Binding
    outputs_stay: bool = True  # the caller holds the model's outputs throughout backward
    region_hint: str = ""  # that checkpoint regions decide on most of what backward reads
    patience: Patience | None = None  # the clock of planning; None: as long as it takes
    unfused_bytes: int | None = None  # operations that write so much each are fused only where one needs the other
    thorough: bool = True  # a budget is refused only after the search for the least one, which the error names
    least: list[Least] = field(default_factory=list)  # of the instances looked at; shared by the analyses made of this one
    again: frozenset[str] = frozenset()  # operations that `pair` computes again in backward since a trial chose it

    @property
    def turn_bytes(self) -> int:
        """Device memory of eager code between forward and backward: measured, or estimated where it has to fit."""
        return loss_bytes(self.pair) if self.request.estimates_turn else self.request.limits.turn_bytes or 0

    @property
    def fuses(self) -> bool:
        """Whether the inner compiler fuses operations."""
        return self.request.config.inner == "inductor"
