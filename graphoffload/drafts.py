"""Drafts of a plan: each is one way to decide, partitioned again and simulated; the best of them is the plan.

    decide for a goal ──▶ partition again where something is recomputed ──▶ decide keep or offload ──▶ simulate ──▶ score
          ▲                                                                                              │
          └──────────────── a smaller budget or slowdown, or without recomputation, where it misses ─────┘

What recomputation does to memory and time is known once torch has partitioned with it; a decision is a draft until then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graphoffload import compat
from graphoffload.analysis.chains import Chain
from graphoffload.analysis.costs import Measured
from graphoffload.analysis.program import Instance, build_program
from graphoffload.analysis.regions import with_regions
from graphoffload.analysis.saved_values import GraphPair, returned_bytes, saved_table
from graphoffload.analysis.symbols import without_unknown_sizes
from graphoffload.analysis.timing import kernel_times, signature
from graphoffload.config import OffloadConfig
from graphoffload.decide import (
    Decided,
    Limits,
    actions_again,
    decide_actions,
    decide_again,
    saved_all_the_same,
    table_again,
    without_recomputation,
)
from graphoffload.errors import BudgetError
from graphoffload.folders import cache_dir
from graphoffload.fragments import WHOLE, Fragment
from graphoffload.hardware import HardwareProfile
from graphoffload.joint import tagged_copy
from graphoffload.modules import Resolution
from graphoffload.passes.tag import tag_joint
from graphoffload.plan.ahead import with_slack
from graphoffload.plan.simulator import Timeline, simulate
from graphoffload.saved import Action, SavedTable
from graphoffload.units import format_bytes
from graphoffload.wishes import Wish, wishes_for

_ATTEMPTS = 4
_SEARCHES = 2
_AS_SMALL = 0.002  # plans whose peaks differ by less than this share of keep-all's are as small as each other
_WORTH = 0.03
_UNUSED = 0.005  # of keep-all's time, left by a plan for a slowdown: operations that run apart take about as much


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
    wanted: tuple[Wish, ...]
    resolution: Resolution
    notes: list[str]
    outputs_stay: bool = True  # the caller holds the model's outputs throughout backward
    apart_bytes: int | None = None  # operations that write so much each are fused only where one needs the other

    @property
    def fuses(self) -> bool:
        """Whether the inner compiler fuses operations."""
        return self.request.config.inner == "inductor"


@dataclass(frozen=True, slots=True)
class Draft:
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


def feasible_draft(work: Work) -> Draft:
    """The best draft for a budget, where none meets it one of `_other_ways`; the smallest draft for a slowdown.

    Raises:
        BudgetError: no draft meets the budget in any way. It names the least budget that holds whatever the caller does.
    """
    if work.request.config.max_slowdown is not None:
        return _smallest(work)
    error: BudgetError | None = None
    for other in (work, *_other_ways(work)):
        try:
            draft = _best_draft(other, _instance(other))
        except BudgetError as failed:
            error = failed if error is None or other.outputs_stay else error
            continue
        return draft if other.apart_bytes is None else against(draft, work.request, _keep_all(_instance(work), work))
    assert error is not None
    raise error


def _other_ways(work: Work) -> Iterator[Work]:
    """Ways to need less memory: large operations that run apart, which costs time; a caller who does not hold what the model
    returns, which is not ours to decide; both."""
    returned = returned_bytes(work.pair)
    note = f"meets the budget only if nothing holds what the model returns ({format_bytes(returned)}) once backward begins"
    not_held = replace(work, outputs_stay=False, notes=[*work.notes, note])
    if work.fuses:
        yield _apart(work, "to meet the budget")
    if returned >= _least(work):
        yield not_held
        if work.fuses:
            yield _apart(not_held, "to meet the budget")


def _least(work: Work) -> int:
    return max(1, int(work.request.config.min_tensor_bytes))


def _apart(work: Work, why: str) -> Work:
    least = _least(work)
    note = f"operations that write {format_bytes(least)} or more each are not fused with each other, {why}"
    return replace(work, apart_bytes=least, notes=[*work.notes, note])


def _smallest(work: Work) -> Draft:
    """The best draft for a slowdown: of fused operations, or where those leave time unused, of operations apart."""
    instance = _instance(work)
    fused = _best_draft(work, instance)
    if not fused.decided.planned:
        return fused
    apart = _smallest_apart(work, instance, fused)
    return _smaller(work, instance, fused) if apart is None else min(fused, apart, key=lambda draft: draft.score)


def _smallest_apart(work: Work, instance: Instance, fused: Draft) -> Draft | None:
    """The smallest draft of operations apart; None where there is no time for that, nothing to take apart, or no memory to
    gain. Their slowdown is against their own keep-all, which is slower, until they are drafts."""
    keep = fused.decided.keep_timeline
    if not work.fuses or -fused.excess < _UNUSED * keep.time_s:
        return None
    apart = _apart(work, "which leaves less in memory at once")
    instance_apart = _instance(apart)
    if instance_apart.program == instance.program:
        return None
    ratio = keep.time_s / _keep_all(instance_apart, apart).time_s
    allowed = (1.0 + (work.request.config.max_slowdown or 0.0)) * ratio - 1.0
    if allowed <= 0.0:
        return None
    apart = replace(apart, request=replace(work.request, config=work.request.config.with_slowdown(allowed)))
    draft = _best_draft(apart, instance_apart)
    if (draft.decided.lower_bound_peak_bytes or 0) >= (fused.decided.lower_bound_peak_bytes or 0):
        return None
    return against(_smaller(apart, instance_apart, draft), work.request, keep)


def keep_all_draft(work: Work) -> Draft:
    """Everything that nobody decided is kept."""
    reason = "the step as it is: what was planned for the goal needs more memory, or none was asked for"
    keep = tuple(w if w.binding else replace(w, action="keep", binding=True, reason=reason) for w in work.wanted)
    return _draft(replace(work, wanted=keep, notes=[*work.notes]), _instance(work), work.request.limits, work.request.config)


def _keep_all(instance: Instance, work: Work) -> Timeline:
    return simulate(instance.program, instance.program.keep_actions(), work.hardware)


def against(draft: Draft, request: Request, keep: Timeline) -> Draft:
    """The draft beside another keep-all, of fused operations or of regions as written: plans of that kind take its time."""
    bound_s = None if draft.decided.lower_bound_s is None else min(draft.decided.lower_bound_s, keep.time_s)
    decided = replace(draft.decided, keep_timeline=keep, lower_bound_s=bound_s)
    excess = _excess(request, decided, draft.timeline)
    return replace(draft, work=replace(draft.work, request=request), decided=decided, excess=excess)


def _best_draft(work: Work, instance: Instance) -> Draft:
    """Plan, and where recomputation turns out to need more memory than was planned, plan again for less, at last without it.

    For as much less as it needs more, and where nothing meets that, for a half and a quarter of it.

    Raises:
        BudgetError: no draft meets the budget.
    """
    limits, config, best, less_bytes = work.request.limits, work.request.config, None, 0
    for _ in range(_ATTEMPTS):
        try:
            draft = _draft(work, instance, limits, config)
        except BudgetError:
            if best is None:
                raise
            if limits.device_budget_bytes is None or config.max_slowdown is not None:
                break
            less_bytes //= 2
            limits = replace(limits, device_budget_bytes=limits.device_budget_bytes + less_bytes)
            continue
        best = draft if best is None or draft.score < best.score else best
        if draft.excess <= 0 or not draft.decided.planned:
            break
        if config.max_slowdown is not None:
            over = draft.excess / draft.decided.keep_timeline.time_s
            config = config.with_slowdown(max(0.0, config.max_slowdown - 1.1 * over))
        elif limits.device_budget_bytes is not None:
            less_bytes = int(draft.excess) + 1
            limits = replace(limits, device_budget_bytes=limits.device_budget_bytes - less_bytes)
    assert best is not None
    if config.max_slowdown is not None:
        return best
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


def _or_without_recomputation(work: Work, instance: Instance, best: Draft) -> Draft:
    """`best`, or a draft in which nothing is recomputed that nobody asked to, if that is better."""
    with contextlib.suppress(BudgetError):
        kept = replace(work, wanted=without_recomputation(work.wanted))
        return min(best, _draft(kept, instance, work.request.limits, work.request.config), key=lambda draft: draft.score)
    return best


def _smaller(work: Work, instance: Instance, best: Draft) -> Draft:
    """A smaller plan within the slowdown, or one as small and faster, of drafts for half the slowdown and for budgets below
    `best`'s peak: what was recomputed for the least peak as it was estimated need not give the least once torch has partitioned
    again."""
    bound = best.decided.lower_bound_peak_bytes or 0
    if best.timeline.peak_bytes - bound > _WORTH * best.timeline.peak_bytes:
        half = work.request.config.with_slowdown((work.request.config.max_slowdown or 0.0) / 2)
        best = min(best, _draft(work, instance, work.request.limits, half), key=lambda draft: draft.score)
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
                low = bound if draft.score[:2] < best.score[:2] else low
                best, peak = replace(draft, decided=decided), draft.timeline.peak_bytes
    return best


def _draft(work: Work, instance: Instance, limits: Limits, config: OffloadConfig) -> Draft:
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
    return Draft(work, original, actions, reasons, decided, instance, timeline, _excess(request, decided, timeline))


def _excess(request: Request, decided: Decided, timeline: Timeline) -> float:
    """Bytes above the budget, or seconds above the slowdown; negative below."""
    if request.config.max_slowdown is not None:
        return timeline.time_s - (1.0 + request.config.max_slowdown) * decided.keep_timeline.time_s * (1.0 + 1e-9)
    budget = request.limits.device_budget_bytes
    return -1.0 if budget is None else float(timeline.peak_bytes + request.limits.reserve_bytes - budget)


def partition(request: Request, joint: GraphModule) -> tuple[GraphPair, SavedTable]:
    """Torch's min-cut on a tagged copy, and what it saves; the user's own tags are read from the joint graph as it came, but
    for advice to recompute where regions are relaxed."""
    pair = GraphPair(*compat.min_cut(joint, request.joint_inputs, request.arguments), request.num_fwd_outputs)
    table = without_unknown_sizes(pair, saved_table(pair, request.joint.graph.nodes))
    if request.relax:
        table = SavedTable(tuple(replace(t, tag=None) if t.tag == "prefer_recompute" else t for t in table.tensors))
    return pair, table


def device_name(table: SavedTable) -> str:
    """The device of the activations; "cpu" where they are nowhere else."""
    return next((tensor.device for tensor in table.tensors if tensor.device != "cpu"), "cpu")


def _instance(work: Work) -> Instance:
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
        apart_bytes=work.apart_bytes,
        measured=measured,
    )


def _partition_again(
    work: Work, actions: dict[str, Action], reasons: dict[str, str]
) -> tuple[dict[str, Action], dict[str, str]]:
    """Partition once more with tags that make the chosen activations recomputed; see decide.actions_again.

    An activation that only now is saved (min-cut cut a chain elsewhere than expected) is kept, and a note says so.
    """
    joint = tagged_copy(work.request.joint, relax=work.request.relax, notes=[])
    members = {tensor.name: (tensor.name, *tensor.views) for tensor in work.table.tensors}
    again = [name for name, action in actions.items() if action == "recompute"]
    recompute = {node for name in again for node in (*work.chains[name].nodes, *members[name])}
    save = {node for name, action in actions.items() if action != "recompute" for node in members[name]} - recompute
    tag_joint(joint, save=save, recompute=recompute)
    work.pair, table = partition(work.request, joint)
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
