"""A trial of a plan: one way to decide, partitioned again and simulated; search.py makes several.

    decide for a goal ──▶ partition again where something is recomputed ──▶ decide keep or offload ──▶ simulate ──▶ score
          ▲                                                                                              │
          └──────────────── a smaller budget or slowdown, or without recomputation, where it misses ─────┘

What recomputation does to memory and time is known once torch has partitioned with it; a decision is a trial until then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graphoffload.analysis.chains import Chain
from graphoffload.analysis.costs import Measured
from graphoffload.analysis.decisions import repeated_decisions
from graphoffload.analysis.program import Instance, build_program
from graphoffload.analysis.regions import with_regions
from graphoffload.analysis.saved_values import GraphPair, saved_table
from graphoffload.analysis.symbols import without_unknown_sizes
from graphoffload.analysis.timing import kernel_times, signature
from graphoffload.cache_files import cache_dir
from graphoffload.compiler.constraints import Constraint, constraints_for
from graphoffload.compiler.decide import Decided, actions_again, decide_actions, decide_again, saved_all_the_same, table_again
from graphoffload.errors import BudgetError
from graphoffload.facts.limits import Limits
from graphoffload.facts.plan import Action
from graphoffload.facts.saved_tensors import SavedTable
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.monitor.pattern_coverage import WHOLE, Fragment
from graphoffload.options.config import OffloadConfig
from graphoffload.options.patterns import Resolution
from graphoffload.passes.prepare_joint import Binding, bind, tagged_copy
from graphoffload.passes.tag import tag_joint
from graphoffload.planner.prefetch import with_slack
from graphoffload.planner.simulator import Timeline, simulate
from graphoffload.torch_internals import partitioning
from graphoffload.units import format_bytes

_AS_SMALL = 0.002  # plans whose peaks differ by less than this share of keep-all's are as small as each other


@dataclass(frozen=True, slots=True)
class Request:
    """What a partitioner is asked: the joint graph, the arguments for torch's own partitioner, and the identity of the plan."""

    joint: GraphModule
    joint_inputs: Any
    arguments: dict[str, Any]
    config: OffloadConfig
    key: str
    name: str
    limits: Limits
    fragment: Fragment = WHOLE
    parameters: frozenset[str] = frozenset()  # placeholders that only an optimizer writes to
    relax: bool = False  # forget advice to recompute, of checkpoint regions: what they hold is planned like the rest

    @property
    def num_fwd_outputs(self) -> int:
        """How many forward outputs are the model's own."""
        return int(self.arguments["num_fwd_outputs"])


@dataclass(slots=True)
class Work:
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
    unfused_bytes: int | None = None  # operations that write so much each are fused only where one needs the other

    @property
    def fuses(self) -> bool:
        """Whether the inner compiler fuses operations."""
        return self.request.config.inner == "inductor"


@dataclass(frozen=True, slots=True)
class Trial:
    """One way to plan the joint graph: partitioned, decided and simulated. `excess`: by how much it misses its goal."""

    work: Work
    original: SavedTable
    actions: dict[str, Action]
    reasons: dict[str, str]
    decided: Decided
    instance: Instance
    timeline: Timeline
    excess: float

    @property
    def score(self) -> tuple[float, int, float]:
        """Less is better: what misses its goal least, then what is fastest; for a slowdown the fastest of the smallest."""
        size = 0
        if self.work.request.config.max_slowdown is not None:
            size = round(self.timeline.peak_bytes / (_AS_SMALL * self.decided.keep_timeline.peak_bytes))
        return max(0.0, self.excess), size, self.timeline.time_s


def keep_all_trial(work: Work) -> Trial:
    """Everything that nobody decided is kept."""
    reason = "the step as it is: what was planned for the goal needs more memory, or none was asked for"
    keep = tuple(w if w.binding else replace(w, action="keep", binding=True, reason=reason) for w in work.wanted)
    work = replace(work, wanted=keep, notes=[*work.notes])
    return make_trial(work, instance_of(work), work.request.limits, work.request.config)


def keep_all(instance: Instance, work: Work) -> Timeline:
    """What keeping everything is simulated to take."""
    return simulate(instance.program, instance.program.keep_actions(), work.hardware)


def against(trial: Trial, request: Request, keep: Timeline) -> Trial:
    """The trial beside another keep-all, of fused operations or of regions as written: plans of that kind take its time."""
    bound_s = None if trial.decided.lower_bound_s is None else min(trial.decided.lower_bound_s, keep.time_s)
    decided = replace(trial.decided, keep_timeline=keep, lower_bound_s=bound_s)
    excess = excess_of(request, decided, trial.timeline)
    return replace(trial, work=replace(trial.work, request=request), decided=decided, excess=excess)


def make_trial(work: Work, instance: Instance, limits: Limits, config: OffloadConfig) -> Trial:
    """Decide for `limits` and `config`; what is left after partitioning again is decided for the request's own."""
    request = work.request
    decided = decide_actions(instance.program, work.table, work.wanted, config, limits, work.hardware)
    work = replace(work, notes=[*work.notes, *decided.notes])
    original = work.table
    names = [tensor.name for tensor in original.tensors]
    actions, reasons = dict(zip(names, decided.actions, strict=True)), dict(zip(names, decided.reasons, strict=True))
    if "recompute" in decided.actions:
        actions, reasons = _partition_again(work, actions, reasons)
        instance = instance_of(work)
        if decided.planned:
            wanted = constraints_for(work.table, request.config, work.resolution, fragment=bool(request.fragment))
            with contextlib.suppress(BudgetError):  # the actions of before are simulated instead, and miss the budget
                decided = decide_again(decided, instance.program, wanted, request.config, request.limits, work.hardware)
                names = [tensor.name for tensor in work.table.tensors]
                actions = dict(zip(names, decided.actions, strict=True))
                reasons.update(zip(names, decided.reasons, strict=True))
        work.notes.extend(saved_all_the_same(work.table, actions))
    timeline = _schedule(work, instance, actions, decided)
    return Trial(work, original, actions, reasons, decided, instance, timeline, excess_of(request, decided, timeline))


def excess_of(request: Request, decided: Decided, timeline: Timeline) -> float:
    """Bytes above the budget, or seconds above the slowdown; negative below."""
    if request.config.max_slowdown is not None:
        return timeline.time_s - (1.0 + request.config.max_slowdown) * decided.keep_timeline.time_s * (1.0 + 1e-9)
    budget = request.limits.device_budget_bytes
    return -1.0 if budget is None else float(timeline.peak_bytes + request.limits.reserve_bytes - budget)


def partition(request: Request, joint: GraphModule) -> tuple[GraphPair, SavedTable]:
    """Torch's min-cut on a tagged copy, and what it saves; the user's own tags are read from the joint graph as it came, but
    for advice to recompute where regions are relaxed."""
    pair = GraphPair(*partitioning.min_cut(joint, request.joint_inputs, request.arguments), request.num_fwd_outputs)
    table = without_unknown_sizes(pair, saved_table(pair, request.joint.graph.nodes))
    if request.relax:
        table = SavedTable(tuple(replace(t, tag=None) if t.tag == "prefer_recompute" else t for t in table.tensors))
    return pair, table


def device_name(table: SavedTable) -> str:
    """The device of the activations; "cpu" where they are nowhere else."""
    return next((tensor.device for tensor in table.tensors if tensor.device != "cpu"), "cpu")


def instance_of(work: Work) -> Instance:
    """The planning instance of what is known, with kernels' times where they are measured."""
    times: dict[str, Measured] = {}
    if work.hardware.source == "measured":
        graphs = (work.pair.forward.graph, work.pair.backward.graph)
        times = kernel_times(with_regions(graphs), torch.device(device_name(work.table)), cache_dir())

    def measured(node: Node) -> Measured | None:
        name = signature(node) if times else None
        return times.get(name) if name is not None else None

    return build_program(
        work.pair,
        work.table,
        work.hardware,
        fuses=work.fuses,
        static_bytes=work.request.limits.static_bytes,
        chains=work.chains,
        reserve_bytes=work.request.limits.reserve_bytes,
        outputs_stay=work.outputs_stay,
        unfused_bytes=work.unfused_bytes,
        measured=measured,
    )


def _partition_again(
    work: Work, actions: dict[str, Action], reasons: dict[str, str]
) -> tuple[dict[str, Action], dict[str, str]]:
    """Partition once more with tags that make the chosen activations recomputed; see decide.actions_again.

    An activation that only now is saved (min-cut cut a chain elsewhere than expected) is kept, and a note says so. Two chains
    that are sound alone may together bring all that a comparison reads into backward, and min-cut then takes the comparison
    there with them: such chains are kept, and the graph is partitioned without them.
    """
    members = {tensor.name: (tensor.name, *tensor.views) for tensor in work.table.tensors}
    while True:
        joint = bind(tagged_copy(work.request.joint, relax=work.request.relax, notes=[]), work.binding)
        again = [name for name, action in actions.items() if action == "recompute"]
        recompute = {node for name in again for node in (*work.chains[name].nodes, *members[name])}
        save = {node for name, action in actions.items() if action != "recompute" for node in members[name]} - recompute
        tag_joint(joint, save=save, recompute=recompute)
        work.pair, table = partition(work.request, joint)
        found = repeated_decisions(work.pair, work.binding.user_recomputed).inexact
        if found.keys() <= work.binding.decisions:
            break
        work.binding = replace(work.binding, decisions=work.binding.decisions.union(found))
        refused = {}
        for name in again:
            ran = next((node for node in (*work.chains[name].nodes, *members[name]) if node in found), None)
            if ran is not None:
                refused[name] = f"its recomputation runs {ran} again, by whose bits backward decides or compares ({found[ran]})"
        actions = {name: "keep" if name in refused else action for name, action in actions.items()}
        reasons = {name: refused.get(name, reason) for name, reason in reasons.items()}
        work.table = SavedTable(
            tuple(
                replace(tensor, recomputable=False, why_not_recompute=refused[tensor.name])
                if tensor.name in refused
                else tensor
                for tensor in work.table.tensors
            )
        )
    new = [tensor for tensor in table.tensors if tensor.name not in actions]
    if new:
        total = sum(tensor.planned_bytes for tensor in new)
        work.notes.append(f"recomputing {len(again)} activations saves {len(new)} others ({format_bytes(total)})")
    work.table = table_again(work.table, actions, table)
    work.chains = {}
    return actions_again(actions, reasons, work.table)


def _schedule(work: Work, instance: Instance, actions: dict[str, Action], decided: Decided) -> Timeline:
    chosen, window = [actions[tensor.name] for tensor in work.table.tensors], decided.max_inflight_bytes

    def simulated(reload_by: Mapping[int, int]) -> Timeline:
        return simulate(instance.program, chosen, work.hardware, max_inflight_bytes=window, reload_by=reload_by)

    timeline = simulated({})
    limit_bytes = timeline.peak_bytes
    if decided.planned and work.request.config.max_slowdown is None:
        limits = work.request.limits
        limit_bytes = max(limit_bytes, (limits.device_budget_bytes or 0) - limits.reserve_bytes)
    late = not isinstance(work.request.config.max_inflight_bytes, int)  # else what is outstanding is the user's number
    return with_slack(instance.program, timeline, simulated, limit_bytes=limit_bytes, late=late)
