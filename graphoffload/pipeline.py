"""One joint graph, from analysis to rewritten graphs: the flow of the whole package on one page.

    joint ─copy─▶ min-cut ─▶ saved_table ─▶ wishes ─▶ decide ─▶ [tag, min-cut again] ─▶ schedule ─▶ passes ─▶ verify
                  keep-all    facts                    actions    only to recompute       Plan

The joint graph that torch handed over is never written to; everything works on copies of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graphoffload import compat
from graphoffload.analysis.chains import Chain, chains_of
from graphoffload.analysis.costs import Measured
from graphoffload.analysis.modules_of import boundary_names, module_path
from graphoffload.analysis.program import Instance, build_program
from graphoffload.analysis.saved_values import GraphPair, graph_outputs, returned_bytes, saved_table
from graphoffload.analysis.symbols import without_unknown_sizes
from graphoffload.analysis.timing import kernel_times, signature
from graphoffload.config import OffloadConfig
from graphoffload.decide import (
    Decided,
    Limits,
    actions_again,
    decide_actions,
    decide_again,
    goal_missed,
    saved_all_the_same,
    table_again,
    with_noise,
    without_recomputation,
)
from graphoffload.errors import BudgetError, GoalMissedWarning, NotOffloadedWarning, warn
from graphoffload.folders import cache_dir
from graphoffload.fragments import WHOLE, Fragment, matched_somewhere, warn_of_unmatched
from graphoffload.hardware import HardwareProfile, resolve_hardware
from graphoffload.joint import copy_graph, tagged_copy, tagged_operations
from graphoffload.modules import Resolution, resolve
from graphoffload.passes.offload import insert_offloads
from graphoffload.passes.once import save_memory_once
from graphoffload.passes.reload import insert_reloads
from graphoffload.passes.tag import tag_joint
from graphoffload.plan.ahead import with_slack
from graphoffload.plan.simulator import Timeline, simulate
from graphoffload.planned import PlannedPair, make_plan
from graphoffload.policies import patterns_of
from graphoffload.saved import Action, Plan, SavedTable
from graphoffload.units import format_bytes
from graphoffload.verify import verify_graphs
from graphoffload.wishes import Wish, check_tags, wishes_for, without_effect

_ATTEMPTS = 4
_SEARCHES = 3
_WORTH = 0.03


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

    @property
    def num_fwd_outputs(self) -> int:
        """How many forward outputs are the model's own."""
        return int(self.arguments["num_fwd_outputs"])


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The result: graphs to compile, their plan, and the graphs before the passes for a dump (None without one)."""

    graphs: GraphPair
    plan: Plan
    before: GraphPair | None
    timeline: Timeline
    keep_timeline: Timeline
    hint: str = ""


@dataclass(slots=True)
class _Work:
    """What is known about one joint graph while it is planned."""

    request: Request
    hardware: HardwareProfile
    pair: GraphPair
    table: SavedTable
    chains: dict[str, Chain]
    wanted: tuple[Wish, ...]
    resolution: Resolution
    notes: list[str]
    outputs_stay: bool = True  # the caller holds the model's outputs throughout backward


@dataclass(frozen=True, slots=True)
class _Draft:
    """One way to plan the joint graph: partitioned, decided and simulated. `excess`: by how much it misses its goal."""

    work: _Work
    original: SavedTable
    actions: dict[str, Action]
    reasons: dict[str, str]
    decided: Decided
    instance: Instance
    timeline: Timeline
    excess: float

    @property
    def score(self) -> tuple[float, float]:
        """Less is better: what misses its goal least, then what is fastest (of plans for a slowdown: smallest)."""
        cost = self.timeline.time_s if self.work.request.config.max_slowdown is None else self.timeline.peak_bytes
        return max(0.0, self.excess), cost


def rewrite(request: Request) -> Rewritten:
    """Plan one joint graph and rewrite it.

    Raises:
        GraphOffloadError: a budget that cannot be met, contradictory tags, patterns that match nothing, a broken safety rule.
    """
    draft = _feasible_draft(_analyse(replace(request, config=with_noise(request.config))))
    work, decided = draft.work, draft.decided
    for text in decided.warnings:
        warn(NotOffloadedWarning, text, stacklevel=4)
    if draft.excess > 0 and request.limits.explicit:  # the planner's own plans that miss a budget are errors
        warn(GoalMissedWarning, goal_missed(request.config, request.limits, draft.timeline, decided), stacklevel=4)
    plan = make_plan(
        PlannedPair(work.pair, draft.original, work.table, draft.instance, draft.timeline, decided.release_late),
        draft.actions,
        draft.reasons,
        decided,
        key=request.key,
        name=request.name,
        notes=work.notes,
        device=_device(work.table),
        checksum=request.config.verify == "checksum",
    )
    before = _copies(work.pair) if request.config.dump_dir else None
    names = tuple(None if node is None else node.name for node in graph_outputs(work.pair.forward))
    graphs = save_memory_once(insert_reloads(insert_offloads(work.pair, plan), plan), plan)
    if request.config.verify != "off":
        verify_graphs(graphs, plan, names)
    return Rewritten(graphs, plan, before, draft.timeline, decided.keep_timeline, decided.hint)


def _feasible_draft(work: _Work) -> _Draft:
    """The best draft. Where there is none because the caller may hold what the model returns, one for a caller who does not.

    Raises:
        BudgetError: no draft meets the budget either way.
    """
    try:
        return _best_draft(work)
    except BudgetError:
        returned = returned_bytes(work.pair)
        if returned < max(1, int(work.request.config.min_tensor_bytes)):
            raise
        note = f"meets the budget only if nothing holds what the model returns ({format_bytes(returned)}) once backward begins"
        with contextlib.suppress(BudgetError):
            return _best_draft(replace(work, outputs_stay=False, notes=[*work.notes, note]))
        raise


def _best_draft(work: _Work) -> _Draft:
    """Plan, and where recomputation turns out to need more memory than was planned, plan again for less, at last without it.

    Raises:
        BudgetError: no draft meets the budget.
    """
    instance = _instance(work)
    limits, config, best = work.request.limits, work.request.config, None
    for _ in range(_ATTEMPTS):
        try:
            draft = _draft(work, instance, limits, config)
        except BudgetError:
            if best is None:
                raise
            break
        best = draft if best is None or draft.score < best.score else best
        if draft.excess <= 0 or not draft.decided.planned:
            break
        if config.max_slowdown is not None:
            over = draft.excess / draft.decided.keep_timeline.time_s
            config = config.with_slowdown(max(0.0, config.max_slowdown - 1.1 * over))
        elif limits.device_budget_bytes is not None:
            limits = replace(limits, device_budget_bytes=limits.device_budget_bytes - int(draft.excess) - 1)
    assert best is not None
    if best.decided.planned and config.max_slowdown is not None:
        return _smaller(work, instance, best)
    if best.decided.planned and best.excess > 0:
        best = _or_without_recomputation(work, instance, best)
    if best.decided.planned and best.excess > 0:
        budget = work.request.limits.device_budget_bytes or 0
        slowdown = best.timeline.time_s / best.decided.keep_timeline.time_s - 1.0
        raise BudgetError(
            f"device_budget {format_bytes(budget)}: no plan was found that meets it. The least feasible one found is "
            f"{format_bytes(budget + int(best.excess))} ({budget + int(best.excess)} bytes) at {slowdown:+.1%} "
            "time. Raise device_budget to that, or make the batch or sequence smaller."
        )
    return best


def _or_without_recomputation(work: _Work, instance: Instance, best: _Draft) -> _Draft:
    """`best`, or a draft in which nothing is recomputed that nobody asked to, if that is better."""
    with contextlib.suppress(BudgetError):
        kept = replace(work, wanted=without_recomputation(work.wanted))
        return min(best, _draft(kept, instance, work.request.limits, work.request.config), key=lambda draft: draft.score)
    return best


def _smaller(work: _Work, instance: Instance, best: _Draft) -> _Draft:
    """A smaller plan within the slowdown, of drafts for budgets below `best`'s peak: what was recomputed for the least peak as
    it was estimated need not give the least once torch has partitioned again."""
    bound = best.decided.lower_bound_peak_bytes or 0
    if best.timeline.peak_bytes - bound > _WORTH * best.timeline.peak_bytes:
        best = _or_without_recomputation(work, instance, best)
    low, peak = bound, best.timeline.peak_bytes
    for _ in range(_SEARCHES):
        if peak - low <= _WORTH * peak:
            break
        low = (low + peak) // 2
        budget = low + work.request.limits.reserve_bytes
        limits = replace(work.request.limits, device_budget_bytes=budget)
        config = replace(work.request.config, max_slowdown=None, device_budget=budget)
        with contextlib.suppress(BudgetError):
            draft = _draft(work, instance, limits, config)
            if draft.score < best.score:
                decided = replace(draft.decided, lower_bound_s=None, lower_bound_peak_bytes=bound)
                best, low, peak = replace(draft, decided=decided), bound, draft.timeline.peak_bytes
    return best


def _draft(work: _Work, instance: Instance, limits: Limits, config: OffloadConfig) -> _Draft:
    """Decide for `limits` and `config`; what is left after partitioning again is decided for the request's own."""
    request = work.request
    decided = decide_actions(instance.program, work.table, work.wanted, config, limits, work.hardware)
    work = replace(work, notes=[*work.notes, *decided.notes])
    original = work.table
    names = [tensor.name for tensor in original.tensors]
    actions, reasons = dict(zip(names, decided.actions, strict=True)), dict(zip(names, decided.reasons, strict=True))
    if "recompute" in decided.actions:
        actions, reasons = _partition_again(work, actions, reasons)
        instance = _instance(work)
        if decided.planned:
            wanted = wishes_for(work.table, request.config, work.resolution, fragment=bool(request.fragment))
            with contextlib.suppress(BudgetError):  # the actions of before are simulated instead, and miss the budget
                decided = decide_again(decided, instance.program, wanted, request.config, request.limits, work.hardware)
                names = [tensor.name for tensor in work.table.tensors]
                actions = dict(zip(names, decided.actions, strict=True))
                reasons.update(zip(names, decided.reasons, strict=True))
        work.notes.extend(saved_all_the_same(work.table, actions))
    timeline = _schedule(work, instance, actions, decided)
    return _Draft(work, original, actions, reasons, decided, instance, timeline, _excess(request, decided, timeline))


def _excess(request: Request, decided: Decided, timeline: Timeline) -> float:
    """Bytes above the budget, or seconds above the slowdown; negative below."""
    if request.config.max_slowdown is not None:
        return timeline.time_s - (1.0 + request.config.max_slowdown) * decided.keep_timeline.time_s * (1.0 + 1e-9)
    budget = request.limits.device_budget_bytes
    return -1.0 if budget is None else float(timeline.peak_bytes + request.limits.reserve_bytes - budget)


def _copies(pair: GraphPair) -> GraphPair:
    return GraphPair(copy_graph(pair.forward), copy_graph(pair.backward), pair.num_fwd_outputs)


def _analyse(request: Request) -> _Work:
    notes: list[str] = []
    pair, table = _partition(request, tagged_copy(request.joint, relax=request.limits.explicit, notes=notes))
    chains = chains_of(pair, table)
    table = SavedTable(
        tuple(
            replace(tensor, recomputable=not chains[tensor.name].why_not, why_not_recompute=chains[tensor.name].why_not)
            for tensor in table.tensors
        )
    )
    hardware = resolve_hardware(request.config.hardware, _device(table))
    resolution, wanted = _wanted(request, table, notes)
    symbolic = sum(tensor.nbytes is None for tensor in table.tensors)
    measured_by_size = request.config.max_slowdown is not None or request.limits.device_budget_bytes is not None
    if symbolic and measured_by_size and any(wish.action is None for wish in wanted):
        notes.append(f"{symbolic} of {len(table)} activations change their size: planned for the sizes of this call")
    return _Work(request, hardware, pair, table, chains, wanted, resolution, notes)


def _partition(request: Request, joint: GraphModule) -> tuple[GraphPair, SavedTable]:
    """Torch's min-cut on a tagged copy, and what it saves; the user's own tags are read from the joint graph as it came, but
    for advice to recompute where a number was given."""
    pair = GraphPair(*compat.min_cut(joint, request.joint_inputs, request.arguments), request.num_fwd_outputs)
    table = without_unknown_sizes(pair, saved_table(pair, request.joint.graph.nodes))
    if request.limits.explicit:
        table = SavedTable(tuple(replace(t, tag=None) if t.tag == "prefer_recompute" else t for t in table.tensors))
    return pair, table


def _wanted(request: Request, table: SavedTable, notes: list[str]) -> tuple[Resolution, tuple[Wish, ...]]:
    """Wishes for all activations; patterns are resolved on the joint graph, which also has the modules that save nothing."""
    nodes = [node for node in request.joint.graph.nodes if node.op == "call_function"]
    operations: dict[str, list[str]] = {}
    boundaries: dict[str, list[str]] = {}
    for node in nodes:
        path = module_path(node)
        operations.setdefault(path, []).append(str(node.target))
        for name in boundary_names(node):
            boundaries.setdefault(name, []).append(path)
    config = request.config
    patterns = patterns_of(config.policy, config.offload_modules)
    resolution = resolve(patterns, [p for p in operations if p], boundaries, operations)
    if request.fragment:
        model, digest = request.fragment.model, config.digest()
        matched_somewhere(model, digest, (pattern for pattern in patterns if pattern not in resolution.unmatched))
        if request.fragment.place == "last":
            warn_of_unmatched(model, digest, resolution.unmatched, resolution.error())
    check_tags(tagged_operations(nodes), config, resolution)
    wanted = wishes_for(table, config, resolution, fragment=bool(request.fragment))
    notes.extend(without_effect(table, config, resolution))
    return resolution, wanted


def _device(table: SavedTable) -> str:
    return next((tensor.device for tensor in table.tensors if tensor.device != "cpu"), "cpu")


def _instance(work: _Work) -> Instance:
    times: dict[str, Measured] = {}
    if work.hardware.source == "measured":
        graphs = (work.pair.forward.graph, work.pair.backward.graph)
        times = kernel_times(graphs, torch.device(_device(work.table)), cache_dir())

    def measured(node: Node) -> Measured | None:
        name = signature(node) if times else None
        return times.get(name) if name is not None else None

    return build_program(
        work.pair,
        work.table,
        work.hardware,
        fuses=work.request.config.inner == "inductor",
        static_bytes=work.request.limits.static_bytes,
        chains=work.chains,
        reserve_bytes=work.request.limits.reserve_bytes,
        outputs_stay=work.outputs_stay,
        measured=measured,
    )


def _partition_again(
    work: _Work, actions: dict[str, Action], reasons: dict[str, str]
) -> tuple[dict[str, Action], dict[str, str]]:
    """Partition once more with tags that make the chosen activations recomputed; see decide.actions_again.

    An activation that only now is saved (min-cut cut a chain elsewhere than expected) is kept, and a note says so.
    """
    joint = tagged_copy(work.request.joint, relax=work.request.limits.explicit, notes=[])
    members = {tensor.name: (tensor.name, *tensor.views) for tensor in work.table.tensors}
    again = [name for name, action in actions.items() if action == "recompute"]
    recompute = {node for name in again for node in (*work.chains[name].nodes, *members[name])}
    save = {node for name, action in actions.items() if action != "recompute" for node in members[name]} - recompute
    tag_joint(joint, save=save, recompute=recompute)
    work.pair, table = _partition(work.request, joint)
    new = [tensor for tensor in table.tensors if tensor.name not in actions]
    if new:
        total = sum(tensor.planned_bytes for tensor in new)
        work.notes.append(f"recomputing {len(again)} activations saves {len(new)} others ({format_bytes(total)})")
    work.table = table_again(work.table, actions, table)
    work.chains = {}
    return actions_again(actions, reasons, work.table)


def _schedule(work: _Work, instance: Instance, actions: dict[str, Action], decided: Decided) -> Timeline:
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
