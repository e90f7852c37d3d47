"""torch.utils.checkpoint regions in the model: as written, or relaxed if a number was given.

    keep-all      the step as the program says it: regions are recomputed, as under plain torch.compile
    no number     regions stay as written; the planner and policies decide about activations saved outside them
    a budget      the fastest plan that fits, regions as written or relaxed (planned anew like everything else)
    a slowdown    the smallest plan within it, as written or relaxed; its peak is never above keep-all's

Every figure is relative to that one keep-all (decision 15), so a plan that recomputes less than the regions do has a negative
slowdown. MUST_* tags bind in all cases, and so do regions that hold collectives
(analysis/collectives.py). Both ways are tried only if the better one is not known beforehand: plans with the
regions as written take at least keep-all's time.

A model without regions gets some for a budget that is not met otherwise, or at a high price: its blocks, computed again whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from graphoffload.analysis.blocks import blocks_of
from graphoffload.analysis.storages import example_storage_nbytes, fake, storage_id
from graphoffload.compiler.plan_search import feasible_trial
from graphoffload.compiler.request import GraphAnalysis, Request
from graphoffload.compiler.trial import Trial, against, keep_all_trial
from graphoffload.errors import BudgetError
from graphoffload.facts.goals import WithinSlowdown
from graphoffload.facts.saved_tensors import SavedTable
from graphoffload.planner.simulator import Timeline
from graphoffload.torch_internals.collectives import is_collective
from graphoffload.units import format_bytes

_SAME = 1e-9
_NOT_RELAXED = (
    "checkpoint regions stay as written, since they hold collectives: all ranks must run these again alike, and each plans for "
    "itself. Leave checkpointing off to have their activations planned"
)


def trial_of(request: Request, analyse: Callable[..., GraphAnalysis]) -> Trial:
    """The trial to take, of those with the model's checkpoint regions as written and of those with them relaxed.

    Args:
        analyse: facts about the joint graph for a request; Request.relax says whether regions are forgotten. A second argument
            is what was required of the graph before.

    Raises:
        BudgetError: no trial meets the budget either way.
    """
    analysis = analyse(request)
    if not any(map(_advised, request.joint.graph.nodes)):
        return _never_larger(feasible_trial(analysis, lambda plain: in_blocks(plain, analyse)), analysis)
    analysis.region_hint, advice = _decided_by_regions(request.joint, analysis.table)
    analysis.notes.extend([f"{analysis.region_hint}: {advice}"] if analysis.region_hint else [])
    if any(_advised(node) and is_collective(node.target) for node in request.joint.graph.nodes):
        analysis.notes.append(_NOT_RELAXED)
        return _never_larger(feasible_trial(analysis), analysis)
    relaxing = replace(request, relax=True)
    if not request.goal.explicit:
        try:
            return feasible_trial(analysis)
        except BudgetError as error:
            return _relaxed(relaxing, analyse, keep_all_trial(analysis).timeline, error)
    keep = keep_all_trial(analysis)
    if isinstance(request.goal, WithinSlowdown):
        written = _never_larger(feasible_trial(analysis), analysis)
        return _better(written, _relaxed_within(relaxing, request.goal, analyse, keep.timeline))
    try:
        relaxed = _relaxed(relaxing, analyse, keep.timeline, None)
    except BudgetError as error:
        try:
            return feasible_trial(analysis)
        except BudgetError as failed:
            raise min(error, failed, key=_least_named) from None
    if relaxed.excess <= 0 and relaxed.timeline.time_s <= keep.timeline.time_s * (1.0 + _SAME):
        return relaxed
    try:
        return _better(feasible_trial(analysis), relaxed)
    except BudgetError:
        return relaxed


def in_blocks(
    analysis: GraphAnalysis, analyse: Callable[..., GraphAnalysis], *, whole: bool = False, share: float = 1.0
) -> GraphAnalysis | None:
    """The same graph with every block a region that is computed again; None if the model has no blocks, or somebody has decided
    about an activation: by policy, pattern or tag. `whole`: a graph without blocks is one. share: of the blocks, the last ones.

    What is required of any plan's partitions stays: no decision is made again, no random number is drawn again, and backward
    reads no more of the caller's memory.
    """
    asked = any(wanted.action is not None and wanted.allowed != ("keep",) for wanted in analysis.wanted)
    blocks = {} if asked else blocks_of(analysis.request.joint.graph, whole=whole, share=share)
    if not blocks:
        return None
    again = analyse(replace(analysis.request, blocks=blocks), analysis.binding)
    said = _in_words(blocks)
    said += " is computed again whole" if said.endswith("block") else " are computed again whole"
    note = f"{said} in backward, as torch.utils.checkpoint does; slowdowns are against keeping all"
    return replace(again, patience=analysis.patience, thorough=analysis.thorough, notes=[*again.notes, note])


def _in_words(blocks: Mapping[str, int]) -> str:
    """Which blocks these are: all of a graph, or the last ones."""
    count = len(set(blocks.values()))
    return "blocks" if min(blocks.values()) == 1 else "the last block" if count == 1 else f"the last {count} blocks"


def hint_of(trial: Trial) -> str:
    """Part of the plan's line: regions were relaxed, or they decide about most of the bytes that backward reads."""
    if trial.analysis.request.relax:
        faster = trial.timeline.time_s / trial.decided.keep_timeline.time_s - 1.0
        return f"checkpoint regions relaxed ({faster:+.1%} time against the step as written)".replace("%", " %")
    if blocks := trial.analysis.request.blocks:
        return f"{_in_words(blocks)} computed again whole, as checkpointing does"
    return trial.analysis.region_hint


def _advised(node: Node) -> bool:
    return node.meta.get("recompute") == CheckpointPolicy.PREFER_RECOMPUTE


def _relaxed(
    request: Request, analyse: Callable[[Request], GraphAnalysis], keep: Timeline, instead_of: BudgetError | None
) -> Trial:
    try:
        return _against(feasible_trial(analyse(request)), request, keep)
    except BudgetError as error:
        raise instead_of or error from None


def _relaxed_within(
    request: Request, goal: WithinSlowdown, analyse: Callable[[Request], GraphAnalysis], keep: Timeline
) -> Trial | None:
    """The smallest relaxed trial within a slowdown of the step as written; None where relaxing leaves no time for it."""
    analysis = analyse(request)
    own = keep_all_trial(analysis).timeline
    allowed = goal.allowed(keep.time_s, own.time_s)
    if allowed < 0.0:
        return None
    analysis = replace(analysis, request=replace(request, goal=WithinSlowdown(allowed)))
    return _against(feasible_trial(analysis), request, keep)


def _against(trial: Trial, request: Request, keep: Timeline) -> Trial:
    """The relaxed trial, with figures relative to the step as written."""
    trial = against(trial, request, keep)
    note = "keep-all is the step as written, with its checkpoint regions; slowdowns are against it"
    return replace(trial, analysis=replace(trial.analysis, notes=[*trial.analysis.notes, note]))


def _better(written: Trial, relaxed: Trial | None) -> Trial:
    """The better of both for the goal; its bounds hold for plans of both kinds."""
    if relaxed is None:
        return written
    best = min(relaxed, written, key=lambda trial: trial.score)
    times = [trial.decided.lower_bound_s for trial in (written, relaxed)]
    peaks = [trial.decided.lower_bound_peak_bytes for trial in (written, relaxed)]
    decided = replace(
        best.decided,
        lower_bound_s=min((time for time in times if time is not None), default=None) if None not in times else None,
        lower_bound_peak_bytes=min((p for p in peaks if p is not None), default=None) if None not in peaks else None,
    )
    return replace(best, decided=decided)


def _never_larger(trial: Trial, analysis: GraphAnalysis) -> Trial:
    """The trial, or keep-all if a plan for a slowdown has a higher peak than keep-all."""
    larger = trial.timeline.peak_bytes > trial.decided.keep_timeline.peak_bytes
    worse = larger and trial.decided.planned and isinstance(analysis.request.goal, WithinSlowdown)
    return keep_all_trial(analysis) if worse else trial


def _least_named(error: BudgetError) -> int:
    """The least budget that a BudgetError names as met, in bytes."""
    return 1 << 62 if error.least_bytes is None else error.least_bytes


def _decided_by_regions(joint: GraphModule, table: SavedTable) -> tuple[str, str]:
    """A note if backward reads more bytes that checkpoint regions recompute than saved ones."""
    nbytes = _recomputed_bytes(joint, table)
    if nbytes <= table.saved_bytes:
        return "", ""
    total = format_bytes(nbytes + table.saved_bytes)
    advice = (
        "no policy reaches those. Switch gradient checkpointing off (gradient_checkpointing=False) to let graphoffload decide "
        "on them, or give a device_budget"
    )
    return f"checkpoint regions recompute {format_bytes(nbytes)} of the {total} that backward reads", advice


def _recomputed_bytes(joint: GraphModule, table: SavedTable) -> int:
    """Bytes of the regions that autograd would save if they were not recomputed: read by backward, and not saved."""
    saved = {name for tensor in table.tensors for name in (tensor.name, *tensor.views)}
    backward: set[Node] = set()
    found: dict[int, int] = {}
    kept: set[int] = set()
    for node in joint.graph.nodes:
        if (node.op == "placeholder" and str(node.target).startswith("tangents")) or not backward.isdisjoint(
            node.all_input_nodes
        ):
            backward.add(node)
    for node in joint.graph.nodes:
        value = fake(node)
        if value is None or node in backward or node.op != "call_function":
            continue
        if node.name in saved:
            kept.add(storage_id(value))
        elif _advised(node) and not backward.isdisjoint(node.users):
            found[storage_id(value)] = example_storage_nbytes(value)
    return sum(nbytes for identity, nbytes in found.items() if identity not in kept)
