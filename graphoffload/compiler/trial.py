"""A trial of a plan: one attempt to decide, partition again and simulate; plan_search.py makes several.

    decide for a goal ──▶ partition again if something is recomputed ──▶ decide keep or offload ──▶ simulate ──▶ score
          ▲                                                                                            │
          └──────────────── a smaller budget or slowdown, or without recomputation, if it misses ──────┘

The memory and time of recomputation are known only once torch has partitioned with it. Until then a decision is a trial.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule, Node

from graphoffload.analysis.costs import Measured
from graphoffload.analysis.decisions import repeated_decisions
from graphoffload.analysis.program import Instance, build_program
from graphoffload.analysis.regions import with_regions
from graphoffload.analysis.saved_values import GraphPair, saved_table
from graphoffload.analysis.symbols import without_unknown_sizes
from graphoffload.analysis.timing import kernel_times, signature
from graphoffload.cache_files import cache_dir
from graphoffload.compiler.decide import Decided, actions_again, decide_actions, decide_again, saved_all_the_same, table_again
from graphoffload.compiler.request import GraphAnalysis, Request
from graphoffload.errors import BudgetError
from graphoffload.facts.goals import Goal, Score
from graphoffload.facts.plan import Action
from graphoffload.facts.refusals import Refusal
from graphoffload.facts.saved_tensors import SavedTable
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.passes.hoist import hoist_saved
from graphoffload.passes.prepare_joint import bind, tagged_copy
from graphoffload.passes.tag import tag_joint
from graphoffload.planner.arrays import arrays_of
from graphoffload.planner.bottleneck import describe, held_at
from graphoffload.planner.memory_layers import MemoryLayers, layers_of
from graphoffload.planner.prefetch import with_slack
from graphoffload.planner.simulator import Timeline, evaluate, simulate
from graphoffload.torch_internals import inductor, partitioning
from graphoffload.units import format_bytes


@dataclass(frozen=True, slots=True)
class Trial:
    """One attempt to plan the joint graph: partitioned, decided and simulated. `excess`: by how much it misses its goal.

    shown_bound_s: about what the fastest plan takes, at the prices of recomputation that trials have shown; no proof. None:
    none has shown any.
    """

    analysis: GraphAnalysis
    original: SavedTable
    actions: dict[str, Action]
    reasons: dict[str, str]
    decided: Decided
    instance: Instance
    timeline: Timeline
    excess: float
    shown_bound_s: float | None = None

    @property
    def score(self) -> Score:
        """How good the trial is for the request's goal; less is better."""
        goal, keep_peak_bytes = self.analysis.request.goal, self.decided.keep_timeline.peak_bytes
        return goal.score(self.excess, self.timeline.peak_bytes, self.timeline.time_s, keep_peak_bytes)

    @property
    def is_open(self) -> bool:
        """Whether the planner has decided about something, or may: a number was given, and not everything is fixed."""
        free = any(constraint.action is None or not constraint.binding for constraint in self.analysis.wanted)
        return self.decided.planned or (free and self.analysis.request.goal.explicit)

    @property
    def layers(self) -> MemoryLayers:
        """What the timeline's memory and compute are made of, to be drawn."""
        chosen = [self.actions[tensor.name] for tensor in self.analysis.table.tensors]
        return layers_of(arrays_of(self.instance.program, self.analysis.hardware), chosen, self.timeline)

    def held(self) -> str:
        """ "at mm_57, which holds logits 500 MiB, ...": the step with the peak, and the tensors held there."""
        program = self.instance.program
        actions = [self.actions[tensor.name] for tensor in self.analysis.table.tensors]
        arrays = arrays_of(program, self.analysis.hardware)
        result = evaluate(arrays, actions, max_inflight_bytes=self.decided.max_inflight_bytes)
        held = describe(held_at(arrays, actions, result, result.peak_step))
        return f"at {program.step_name(result.peak_step)!r}, which holds {held}"


def keep_all_trial(analysis: GraphAnalysis) -> Trial:
    """Constraints under which all undecided activations are kept."""
    reason = "the step as it is: what was planned for the goal needs more memory, or none was asked for"
    keep = tuple(w if w.binding else replace(w, action="keep", binding=True, reason=reason) for w in analysis.wanted)
    analysis = replace(analysis, wanted=keep, notes=[*analysis.notes])
    return make_trial(analysis, instance_of(analysis), analysis.request.goal)


def keep_all(instance: Instance, analysis: GraphAnalysis) -> Timeline:
    """The simulation of keep-all."""
    return simulate(instance.program, instance.program.keep_actions(), analysis.hardware)


def against(trial: Trial, request: Request, keep: Timeline) -> Trial:
    """The trial with figures relative to another keep-all: of fused operations, or of regions as written."""
    bound_s = None if trial.decided.lower_bound_s is None else min(trial.decided.lower_bound_s, keep.time_s)
    decided = replace(trial.decided, keep_timeline=keep, lower_bound_s=bound_s)
    excess = excess_of(request, decided, trial.timeline)
    return replace(trial, analysis=replace(trial.analysis, request=request), decided=decided, excess=excess)


def on(trial: Trial, hardware: HardwareProfile) -> Trial:
    """The same actions on other hardware: scheduled, simulated and judged anew."""
    analysis = replace(trial.analysis, hardware=hardware)
    timeline = _schedule(analysis, trial.instance, trial.actions, trial.decided)
    return replace(trial, analysis=analysis, timeline=timeline, excess=excess_of(analysis.request, trial.decided, timeline))


def make_trial(analysis: GraphAnalysis, instance: Instance, goal: Goal) -> Trial:
    """Decide for `goal`; what is left after partitioning again is decided for the request's own."""
    request = analysis.request
    decided = decide_actions(analysis, instance.program, goal)
    analysis = replace(analysis, notes=[*analysis.notes, *decided.notes])
    original = analysis.table
    names = [tensor.name for tensor in original.tensors]
    actions, reasons = dict(zip(names, decided.actions, strict=True)), dict(zip(names, decided.reasons, strict=True))
    if "recompute" in decided.actions:
        actions, reasons = partition_again(analysis, actions, reasons)
        instance = instance_of(analysis)
        if decided.planned:
            wanted = request.constraints(analysis.table, analysis.resolution)
            with contextlib.suppress(BudgetError):  # the actions of before are simulated instead, and miss the budget
                decided = decide_again(analysis, decided, instance.program, wanted)
                names = [tensor.name for tensor in analysis.table.tensors]
                actions = dict(zip(names, decided.actions, strict=True))
                reasons.update(zip(names, decided.reasons, strict=True))
        analysis.notes.extend(saved_all_the_same(analysis.table, actions))
    timeline = _schedule(analysis, instance, actions, decided)
    return Trial(analysis, original, actions, reasons, decided, instance, timeline, excess_of(request, decided, timeline))


def excess_of(request: Request, decided: Decided, timeline: Timeline) -> float:
    """By how much a timeline misses the request's goal: bytes or seconds; negative where it meets it."""
    peak_bytes = timeline.peak_bytes + request.limits.reserve_bytes
    return request.goal.excess(peak_bytes, timeline.time_s, decided.keep_timeline.time_s)


def partition(request: Request, joint: GraphModule) -> tuple[GraphPair, SavedTable]:
    """Torch's min-cut on a tagged copy, and the values that it saves. The user's own tags are read from the original joint
    graph, except for advice to recompute if regions are relaxed."""
    cut = partitioning.min_cut(joint, request.joint_inputs, request.arguments)
    pair = hoist_saved(GraphPair(*cut, request.num_fwd_outputs))
    table = without_unknown_sizes(pair, saved_table(pair, request.joint.graph.nodes, request.activations))
    if request.relax:
        table = SavedTable(tuple(replace(t, tag=None) if t.tag == "prefer_recompute" else t for t in table.tensors))
    return pair, table


def device_name(table: SavedTable) -> str:
    """The device of the activations; "cpu" if they are on no other."""
    return next((tensor.device for tensor in table.tensors if tensor.device != "cpu"), "cpu")


def instance_of(analysis: GraphAnalysis) -> Instance:
    """The planning instance of the facts, with kernels' times where they are measured."""
    times: dict[str, Measured] = {}
    on_gpu = analysis.hardware.source != "cpu"
    images = analysis.fuses and inductor.images_channels_last(analysis.pair.forward, on_gpu=on_gpu)
    if analysis.hardware.source == "measured":
        graphs = (analysis.pair.forward.graph, analysis.pair.backward.graph)
        device = torch.device(device_name(analysis.table))
        times = kernel_times(with_regions(graphs), device, cache_dir(), images, analysis.fuses)

    def measured(node: Node) -> Measured | None:
        name = signature(node, images, analysis.fuses) if times else None
        return times.get(name) if name is not None else None

    return build_program(
        analysis.pair,
        analysis.table,
        analysis.hardware,
        fuses=analysis.fuses,
        static_bytes=analysis.request.limits.static_bytes,
        chains=analysis.chains,
        reserve_bytes=analysis.request.limits.reserve_bytes,
        turn_bytes=analysis.turn_bytes,
        outputs_stay=analysis.outputs_stay,
        unfused_bytes=analysis.unfused_bytes,
        measured=measured,
        channels_last=images,
    )


def partition_again(
    analysis: GraphAnalysis, actions: dict[str, Action], reasons: dict[str, str]
) -> tuple[dict[str, Action], dict[str, str]]:
    """Partition once more with tags that make the chosen activations recomputed; see decide.actions_again. What is in
    `analysis.again` stays computed again, but for what a decision of backward turned out to depend on.

    An activation that is saved only now (min-cut cut a chain at another place than expected) is kept, and a note says so. Two
    chains that are sound alone may together bring everything that a comparison reads into backward, and min-cut then moves the
    comparison there too. Such chains are kept, and the graph is partitioned without them.
    """
    members = {tensor.name: (tensor.name, *tensor.views) for tensor in analysis.table.tensors}
    while True:
        copied = tagged_copy(analysis.request.joint, relax=analysis.request.relax, notes=[], blocks=analysis.request.blocks)
        joint = bind(copied, analysis.binding)
        again = [name for name, action in actions.items() if action == "recompute"]
        chosen = {node for name in again for node in (*analysis.chains[name].nodes, *members[name])}
        recompute = chosen | (analysis.again - analysis.binding.decisions)
        save = {node for name, action in actions.items() if action != "recompute" for node in members[name]} - recompute
        tag_joint(joint, save=save, recompute=recompute)
        analysis.pair, table = partition(analysis.request, joint)
        found = repeated_decisions(analysis.pair, analysis.binding.user_recomputed).inexact
        if found.keys() <= analysis.binding.decisions:
            break
        analysis.binding = replace(analysis.binding, decisions=analysis.binding.decisions.union(found))
        refused = {}
        for name in again:
            ran = next((node for node in (*analysis.chains[name].nodes, *members[name]) if node in found), None)
            if ran is not None:
                refused[name] = Refusal.COMPARED_BY_BITS.because(target=ran)
        actions = {name: "keep" if name in refused else action for name, action in actions.items()}
        reasons = {name: refused.get(name, reason) for name, reason in reasons.items()}
        analysis.table = SavedTable(
            tuple(
                replace(tensor, recomputable=False, why_not_recompute=refused[tensor.name])
                if tensor.name in refused
                else tensor
                for tensor in analysis.table.tensors
            )
        )
    new = [tensor for tensor in table.tensors if tensor.name not in actions]
    if new:
        total = sum(tensor.planned_bytes for tensor in new)
        analysis.notes.append(f"recomputing {len(again)} activations saves {len(new)} others ({format_bytes(total)})")
    analysis.table = table_again(analysis.table, actions, table)
    analysis.chains, analysis.again = {}, frozenset(recompute)
    return actions_again(actions, reasons, analysis.table)


def _schedule(analysis: GraphAnalysis, instance: Instance, actions: dict[str, Action], decided: Decided) -> Timeline:
    chosen, window = [actions[tensor.name] for tensor in analysis.table.tensors], decided.max_inflight_bytes

    def simulated(reload_by: Mapping[int, int]) -> Timeline:
        return simulate(instance.program, chosen, analysis.hardware, max_inflight_bytes=window, reload_by=reload_by)

    timeline = simulated({})
    limit_bytes = timeline.peak_bytes
    if decided.planned:
        request = analysis.request
        limit_bytes = max(limit_bytes, (request.goal.device_budget_bytes or 0) - request.limits.reserve_bytes)
    late = not isinstance(analysis.request.config.max_inflight_bytes, int)  # else what is outstanding is the user's number
    return with_slack(instance.program, timeline, simulated, limit_bytes=limit_bytes, late=late)


def seen_from(analysis: GraphAnalysis, trial: Trial) -> Trial:
    """The trial of a graph whose blocks are computed again whole, with a decision for each activation of the plain graph."""
    reasons = dict.fromkeys((tensor.name for tensor in analysis.table.tensors), "computed again with its block")
    return replace(trial, original=analysis.table, reasons={**reasons, **trial.reasons})
