"""One joint graph, from analysis to rewritten graphs: the flow of the whole package on one page.

    joint ─copy─▶ min-cut ─▶ saved_table ─▶ constraints ─▶ decide ─▶ [tag, min-cut again] ─▶ schedule ─▶ passes ─▶ verify
                  keep-all    facts                    actions    only to recompute       Plan

torch's joint graph is never written to; everything works on copies of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from graphoffload.analysis.callers import callers_memory
from graphoffload.analysis.chains import chains_of, with_chains
from graphoffload.analysis.collectives import Collectives, collectives_of
from graphoffload.analysis.decisions import repeated_decisions
from graphoffload.analysis.module_paths import boundary_names, module_path, module_roots
from graphoffload.analysis.outputs import returned_by
from graphoffload.analysis.saved_values import GraphPair, graph_outputs
from graphoffload.analysis.verify import verify_graphs
from graphoffload.compiler.checkpoint_regions import hint_of, in_blocks, trial_of
from graphoffload.compiler.constraints import Constraint, check_tags, without_effect
from graphoffload.compiler.decide import Decided
from graphoffload.compiler.link import hardware_of
from graphoffload.compiler.placement import PlannedPair, make_plan
from graphoffload.compiler.recipes import is_small, recipe_trial
from graphoffload.compiler.request import GraphAnalysis, Request
from graphoffload.compiler.trial import Trial, device_name, partition, seen_from
from graphoffload.errors import BudgetError, GoalMissedWarning, NotOffloadedWarning, warn
from graphoffload.facts.goals import Goal, WithinSlowdown
from graphoffload.facts.limits import Limits
from graphoffload.facts.plan import Plan
from graphoffload.facts.recipe import EVERYTHING_KEPT, FIRST, SMALLEST
from graphoffload.facts.saved_tensors import SavedTable
from graphoffload.monitor.pattern_coverage import remember, warn_of_unmatched
from graphoffload.options.patterns import Resolution, resolve
from graphoffload.options.policies import patterns_of
from graphoffload.passes.hoist import as_torch_has_it
from graphoffload.passes.offload import insert_offloads
from graphoffload.passes.once import save_memory_once
from graphoffload.passes.prepare_joint import Binding, bind, copy_graph, tagged_copy, tagged_operations, users_own
from graphoffload.passes.reload import insert_reloads
from graphoffload.planner.memory_layers import MemoryLayers
from graphoffload.planner.problem import Candidate
from graphoffload.planner.simulator import Timeline


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The result: graphs to compile, their plan, and the graphs before the passes for a dump (None without one).

    kernels: expected number of kernels that the graphs run.
    candidates: those that were planned for the final graphs. layers: what their memory and their compute are made of.
    """

    graphs: GraphPair
    plan: Plan
    before: GraphPair | None
    timeline: Timeline
    keep_timeline: Timeline
    kernels: int
    hint: str = ""
    candidates: tuple[Candidate, ...] = ()
    layers: MemoryLayers = MemoryLayers()  # noqa: RUF009 (frozen)


def rewrite(request: Request) -> Rewritten:
    """Plan one joint graph and rewrite it.

    Raises:
        GraphOffloadError: a budget that cannot be met, contradictory tags, patterns that match nothing, a broken safety rule.
    """
    try:
        trial = _within(request)
    except BudgetError as error:
        if not (cache := _cache_of(request)):
            raise
        told = BudgetError(f"{error} {cache}.")
        told.least_bytes = error.least_bytes
        raise told from error
    analysis, decided = trial.analysis, trial.decided
    for text in decided.warnings:
        warn(NotOffloadedWarning, text)
    alone = request.session.recipe is None
    if trial.excess > 0 and request.goal.explicit and alone:  # the planner's own plans that miss a budget are errors
        warn(GoalMissedWarning, _goal_missed(request.goal, request.limits, trial.timeline, decided))
    plan = make_plan(
        PlannedPair(analysis.pair, trial.original, analysis.table, trial.instance, trial.timeline, decided.release_late),
        trial.actions,
        trial.reasons,
        decided,
        key=request.session.key,
        name=request.session.name,
        notes=analysis.notes,
        device=device_name(analysis.table),
        checksum=request.config.verify == "checksum",
        unfused_bytes=analysis.unfused_bytes,
    )
    if not plan.changes_anything:
        as_torch_has_it(analysis.pair)
    recipe = request.session.recipe
    variant, turn = "" if recipe is None else recipe.name, analysis.turn_bytes
    plan = replace(plan, outputs_held=analysis.outputs_stay, variant=variant, turn_bytes=turn)
    before = _copies(analysis.pair) if request.config.dump_dir else None
    names = tuple(None if node is None else node.name for node in graph_outputs(analysis.pair.forward))
    graphs = save_memory_once(insert_reloads(insert_offloads(analysis.pair, plan), plan), plan)
    if request.config.verify != "off":
        bound = analysis.binding
        verify_graphs(graphs, plan, names, bound.callers, bound.user_recomputed, bound.collectives)
    slices = f"MLPs in {request.session.slices} slices of the tokens" if request.session.slices else ""
    hint = "; ".join(filter(None, (hint_of(trial), slices, returned_by(analysis.pair).cache_hint, decided.hint)))
    instance = trial.instance
    candidates = instance.program.candidates
    keep = decided.keep_timeline
    return Rewritten(graphs, plan, before, trial.timeline, keep, instance.kernels, hint, candidates, trial.layers)


def _within(request: Request) -> Trial:
    """A trial that has room for an eager loss. What is only estimated is no reason to refuse."""
    session = request.session
    if not request.estimates_turn:
        return _trial(request)
    has_resort, session.has_resort = session.has_resort, True
    try:
        return _trial(request)
    except BudgetError:
        session.limits = replace(request.limits, turn_bytes=0)
    finally:
        session.has_resort = has_resort
    return _trial(request)


def _trial(request: Request) -> Trial:
    """What the graph's goal needs if it is planned alone; else the variant that a step's plan asks for."""
    recipe = request.session.recipe
    if recipe is None:
        return trial_of(request, analyse)
    analysis = analyse(request)
    if recipe is FIRST:
        recipe = request.session.recipe = EVERYTHING_KEPT if is_small(analysis, request.limits.room_bytes) else SMALLEST
    blocks = in_blocks(analysis, analyse, whole=True, share=recipe.blocks) if recipe.blocks else None
    return recipe_trial(analysis, recipe) if blocks is None else seen_from(analysis, recipe_trial(blocks, recipe))


def _goal_missed(goal: Goal, limits: Limits, timeline: Timeline, decided: Decided) -> str:
    """What a plan that nobody but the user decided misses, and what to do about it."""
    slowdown = timeline.time_s / decided.keep_timeline.time_s - 1.0
    asked, missed = goal.missed(timeline.peak_bytes + limits.reserve_bytes, slowdown)
    return (
        f"{asked} is not met: {missed}. Policy, patterns and tags decide every activation, and nothing is left to plan. Leave "
        'some of them to the planner (policy="auto"), or change the number.'
    )


def _cache_of(request: Request) -> str:
    """The hint on a key-value cache for an error, which has no plan to carry it."""
    hint = returned_by(partition(request, tagged_copy(request.joint, relax=False, notes=[]))[0]).cache_hint
    return f"{hint[:1].upper()}{hint[1:]}"


def _copies(pair: GraphPair) -> GraphPair:
    return GraphPair(copy_graph(pair.forward), copy_graph(pair.backward), pair.num_fwd_outputs)


def analyse(request: Request, known: Binding | None = None) -> GraphAnalysis:
    """What is known about a joint graph before anything is decided.

    Args:
        known: the requirements of the graph as plain torch partitions it, where it is partitioned in another way.
    """
    notes: list[str] = []
    pair, table, binding = _keep_all(request, notes, known)
    notes.extend(returned_by(pair).notes(table.saved_bytes))
    assert binding.callers is not None
    chains = chains_of(pair, table, binding.callers, binding.user_recomputed, binding.decisions)
    table = with_chains(table, chains)
    hardware = hardware_of(request.config.hardware, device_name(table))
    resolution, wanted = _wanted(request, table, notes)
    symbolic = sum(tensor.nbytes is None for tensor in table.tensors)
    measured_by_size = isinstance(request.goal, WithinSlowdown) or request.goal.device_budget_bytes is not None
    if symbolic and measured_by_size and any(constraint.action is None for constraint in wanted):
        notes.append(f"{symbolic} of {len(table)} activations change their size: planned for the sizes of this call")
    return GraphAnalysis(request, hardware, pair, table, chains, wanted, resolution, notes, binding)


def _keep_all(request: Request, notes: list[str], known: Binding | None) -> tuple[GraphPair, SavedTable, Binding]:
    """Torch's own partition, repeated while backward makes discrete decisions on recomputed floats; and the rules for later
    partitions."""
    joint = tagged_copy(request.joint, relax=request.relax, notes=notes, blocks=request.blocks)
    binding = Binding(user_recomputed=users_own(joint)) if known is None else known
    joint = joint if known is None else bind(joint, known)
    while True:
        pair, table = partition(request, joint)
        decisions = binding.decisions.union(repeated_decisions(pair, binding.user_recomputed).inexact)
        if decisions == binding.decisions and known is not None:
            return pair, table, binding
        if decisions == binding.decisions:
            callers = callers_memory(pair, request.joint.graph, request.parameters)
            orders = (collectives_of(graph) for graph in (pair.forward.graph, pair.backward.graph, request.joint.graph))
            return pair, table, replace(binding, callers=callers, collectives=Collectives(*orders))
        binding = replace(binding, decisions=decisions)
        joint = bind(tagged_copy(request.joint, relax=request.relax, notes=[], blocks=request.blocks), binding)


def _wanted(request: Request, table: SavedTable, notes: list[str]) -> tuple[Resolution, tuple[Constraint, ...]]:
    """Constraints for all activations. Patterns are resolved on the joint graph: it also has modules that save nothing."""
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
    roots = dict.fromkeys(root for node in nodes for root in module_roots(node))
    resolution = resolve(patterns, [p for p in operations if p], boundaries, operations, tuple(roots))
    remember(request.session.fragment, config.digest(), patterns, resolution)
    if request.session.fragment.place == "last":
        warn_of_unmatched(request.session.fragment.model, config.digest())
    check_tags(tagged_operations(nodes), config, resolution)
    wanted = request.constraints(table, resolution)
    notes.extend(without_effect(table, config, resolution))
    return resolution, wanted
