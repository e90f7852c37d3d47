"""Variants of a graph: the one that a recipe describes, as a trial; and all that a step's plan may choose from, as numbers.

    keep ──▶ light ──▶ third ──▶ two thirds ──▶ smallest      recompute more and more: what costs least time a byte comes first
    keep ──▶ third of light ──▶ two thirds of light ──▶ light ──▶ smallest              where nearly everything is cheap
    keep ──▶ lightest ──▶ light                           where some of what is cheap costs far less than the rest of it
        smallest ──▶ third of blocks ──▶ two thirds of blocks ──▶ blocks                 where whole blocks save clearly less
    light in slices ──▶ smallest in slices                                where MLPs hold much (slices.py)

A family has at most nine members, nested but for the last three, and two in slices. Each is partitioned for real, since memory
follows the kernels that the compiler makes of what is computed again. What is left is kept or offloaded, call by call; the plan
of the step says which (planner/step). A share of blocks is the last ones of a graph; the others compute again what is light.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from graphoffload.analysis.program import Instance
from graphoffload.analysis.saved_values import GraphPair, saved_placeholders
from graphoffload.analysis.storages import example_storage_nbytes, fake, storage_id
from graphoffload.compiler.constraints import Constraint
from graphoffload.compiler.decide import Decided
from graphoffload.compiler.request import GraphAnalysis
from graphoffload.compiler.trial import Trial, excess_of, instance_of, keep_all, partition_again
from graphoffload.errors import PlanError
from graphoffload.facts.plan import Action
from graphoffload.facts.recipe import EVERYTHING_KEPT, IN_BLOCKS, SMALLEST, Recipe
from graphoffload.facts.refusals import Refusal, refusal_of
from graphoffload.facts.saved_tensors import INPUT
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.planner.problem import Candidate, Program
from graphoffload.planner.simulator import Timeline, simulate
from graphoffload.planner.step.facts import Variant

InBlocks = Callable[..., GraphAnalysis | None]
_CHEAP = 0.2
"""The lightest variant computes again what takes less than this share of the time of its copy."""
_SHARES = (("third", 1 / 3), ("two thirds", 2 / 3))
"""The next ones also compute again these shares of the other bytes."""
_LEFT, _CLEARLY = 0.02, 0.97
"""A graph is tried as one block where the smallest variant saves more than this share of keep-all's bytes, besides inputs.
Blocks are a variant where they save, or have at their peak, at most this share of what the smallest does."""
_BEND = 0.02
"""Of the time that copies of what is cheap take: what calls of keep and of light, mixed, may cost above the prices themselves.
Where it is more, there is the lightest variant, at the price where the difference is largest."""
_IN_SLICES = ("light", SMALLEST.name)
_FEW = 0.1
"""Of the bytes that may be computed again: if fewer are not cheap, there are variants lighter than the lightest instead."""


def recipe_trial(analysis: GraphAnalysis, recipe: Recipe) -> Trial:
    """The graph as `recipe` says, where neither the user nor a safety rule says otherwise."""
    instance = instance_of(analysis)
    keep = keep_all(instance, analysis)
    original, reason = analysis.table, f"variant {recipe.name!r} of this graph"
    first = _first_actions(analysis, recipe)
    reasons = dict.fromkeys(first, reason)
    if "recompute" in first.values():
        first, reasons = partition_again(analysis, first, reasons)
        instance = instance_of(analysis)
    actions = dict(zip((tensor.name for tensor in analysis.table.tensors), _last_actions(analysis, recipe, first), strict=True))
    chosen = tuple(actions.values())
    timeline = _placed(instance.program, simulate(instance.program, chosen, analysis.hardware), dict(recipe.reload_steps))
    decided = Decided(chosen, tuple(reasons.get(name, reason) for name in actions), keep)
    excess = excess_of(analysis.request, decided, timeline)
    return Trial(analysis, original, actions, reasons, decided, instance, timeline, excess)


def _follows(analysis: GraphAnalysis, constraint: Constraint) -> bool:
    """Whether what somebody asked for decides: advice does not where a number was given."""
    return constraint.action is not None and (constraint.binding or not analysis.request.goal.explicit)


def _first_actions(analysis: GraphAnalysis, recipe: Recipe) -> dict[str, Action]:
    """What is computed again, and what the user decided; everything else is kept until the graph is partitioned with it."""
    actions: dict[str, Action] = {}
    for constraint in analysis.wanted:
        name, action = constraint.name, constraint.action
        possible = not analysis.chains[name].why_not and bool(analysis.chains[name].nodes)
        if _follows(analysis, constraint) and action is not None:
            actions[name] = action if action != "recompute" or possible else "keep"
        else:
            wanted = recipe.recomputes is None or name in recipe.recomputes
            actions[name] = "recompute" if wanted and possible and constraint.may_recompute else "keep"
    return actions


def _last_actions(analysis: GraphAnalysis, recipe: Recipe, first: Mapping[str, Action]) -> list[Action]:
    """Keep or offload, for what is saved in the end. Without host memory, all that may be offloaded is nothing."""
    request = analysis.request
    host = request.limits.host_budget_bytes != 0
    wanted = request.constraints(analysis.table, analysis.resolution)
    actions: list[Action] = []
    for constraint, tensor in zip(wanted, analysis.table.tensors, strict=True):
        asked = constraint.action if _follows(analysis, constraint) else None
        if asked is None and (host if recipe.offloads is None else tensor.name in recipe.offloads):
            asked = "offload"
        may = tensor.eligible and (constraint.may_offload or constraint.action == "offload")
        actions.append("offload" if asked == "offload" and may else "keep")
    return actions


def _placed(program: Program, timeline: Timeline, reload_steps: Mapping[str, int]) -> Timeline:
    """The timeline with the ops where a step's plan wants them.

    Releases come as early as they may, since the runtime waits later, and reloads before the steps that the recipe names.
    """
    schedule = []
    for item in timeline.schedule:
        candidate = program.candidates[item.candidate]
        reload_at = min(reload_steps.get(candidate.name, item.reload_at), item.wait_at)
        schedule.append(replace(item, release_at=int(candidate.last_forward_use), reload_at=reload_at))
    return replace(timeline, schedule=tuple(schedule))


def variants_of(
    analysis: GraphAnalysis,
    in_blocks: InBlocks,
    given: Sequence[Recipe] | None = None,
) -> tuple[tuple[Variant, ...], tuple[Recipe, ...], Program, tuple[int, ...]]:
    """The family of a graph, least recomputation first; the recipe of each; keep-all with its recompute chains, whose LP
    relaxation bounds every choice but that of whole blocks; and the bytes of each variant's activations that are inputs.

    Args:
        in_blocks: makes the analysis of the same graph with a `share` of its blocks computed again whole, or the graph as one
            block if it is to be `whole`; None where it has no blocks, or somebody has decided.
        given: the recipes of another rank's family, which has these variants and no others; None: they are found here.
    """
    keep = instance_of(analysis)
    slices = analysis.request.session.slices
    found = _recipes(analysis, keep, slices) if given is None else given
    family, seen, least_bytes = list[_Member](), set(), 0
    for recipe in (recipe for recipe in found if not recipe.blocks):
        member = _member(analysis, recipe)
        if member.recipe.recomputes in seen and given is None:
            continue
        seen.add(member.recipe.recomputes)
        family.append(member)
        least_bytes = member.saved_bytes
    whole = least_bytes - family[-1].input_bytes > _LEFT * analysis.table.saved_bytes
    if given is not None:
        family += [_given_share(analysis, in_blocks, recipe, whole) for recipe in given if recipe.blocks]
    elif not slices:
        family += _in_shares(analysis, in_blocks, family, whole)
    variants, recipes = tuple(each.variant for each in family), tuple(each.recipe for each in family)
    bound = _of_one_call(analysis.pair, _with_chains(analysis, keep))
    return variants, recipes, bound, tuple(each.input_bytes for each in family)


@dataclass(frozen=True, slots=True)
class _Member:
    """A variant, its recipe, the bytes of all activations that it saves, and those of inputs."""

    variant: Variant
    recipe: Recipe
    saved_bytes: int
    input_bytes: int


def _member(analysis: GraphAnalysis, recipe: Recipe) -> _Member:
    again = replace(analysis, notes=[*analysis.notes])
    first = _first_actions(again, recipe)
    recomputes = frozenset(name for name, action in first.items() if action == "recompute")
    if recomputes:
        first, _ = partition_again(again, first, dict.fromkeys(first, ""))
    program = _of_one_call(again.pair, _with_choices(again, instance_of(again), recipe, first))
    inputs, slices = _saved_input_bytes(again), analysis.request.session.slices
    returned = (t for t in again.table.tensors if refusal_of(t.why_not) is Refusal.SHARES_WITH_OUTPUT)
    outputs = tuple(tensor.example_bytes for tensor in returned)
    bounded = not slices and not recipe.blocks
    variant = Variant(recipe.name, recomputes, program, inputs, outputs, bounded=bounded, slices=slices)
    recipe = replace(recipe, recomputes=recomputes, offloads=frozenset())
    return _Member(variant, recipe, again.table.saved_bytes, _input_bytes(again))


def _in_shares(
    analysis: GraphAnalysis, in_blocks: InBlocks, family: Sequence[_Member], whole: bool
) -> list[_Member]:
    """Shares of the blocks computed again whole, then all of them; nothing where all are not clearly less than the smallest."""
    blocks = in_blocks(analysis, whole=whole)
    if blocks is None:
        return []
    every = _of_blocks(analysis, blocks, IN_BLOCKS)
    if not is_less(every.variant, family[-1].variant, analysis.hardware):
        return []
    light = [member.recipe.recomputes for member in family if member.recipe.name.endswith("light")] or [frozenset()]
    several = len(set(blocks.request.blocks.values())) > len(_SHARES)
    recipes = [Recipe(f"{name} of blocks", recomputes=light[-1], blocks=share) for name, share in _SHARES if several]
    return [*(_given_share(analysis, in_blocks, recipe, whole) for recipe in recipes), every]


def _given_share(analysis: GraphAnalysis, in_blocks: InBlocks, recipe: Recipe, whole: bool) -> _Member:
    blocks = in_blocks(analysis, whole=whole, share=recipe.blocks)
    if blocks is None:
        name = analysis.request.session.name
        raise PlanError(f"Another rank computes blocks of {name} again, and this rank finds none in it.")
    return _of_blocks(analysis, blocks, recipe)


def _of_blocks(analysis: GraphAnalysis, blocks: GraphAnalysis, recipe: Recipe) -> _Member:
    """The variant of a graph with blocks, by the names of the graph as it is."""
    member = _member(blocks, recipe)
    inside = {tensor.name for tensor in analysis.table.tensors} - {tensor.name for tensor in blocks.table.tensors}
    return replace(member, variant=replace(member.variant, recomputes=member.variant.recomputes | inside))


def is_less(one: Variant, other: Variant, hardware: HardwareProfile) -> bool:
    """Whether one variant saves clearly less than another one, or has a clearly lower peak, with everything kept."""
    saved = [sum(candidate.nbytes for candidate in variant.program.candidates) for variant in (one, other)]
    peaks = [simulate(v.program, v.program.keep_actions(), hardware).peak_bytes for v in (one, other)]
    return saved[0] <= _CLEARLY * saved[1] or peaks[0] <= _CLEARLY * peaks[1]


def _input_bytes(analysis: GraphAnalysis) -> int:
    return sum(tensor.planned_bytes for tensor in analysis.table.tensors if tensor.op == INPUT)


def _recipes(analysis: GraphAnalysis, keep: Instance, slices: int) -> list[Recipe]:
    """Those of a family; of a graph in slices two, as a plan has it for the little that it holds at once."""
    between = _between(analysis, keep)
    if not slices:
        return [EVERYTHING_KEPT, *between, SMALLEST]
    return [recipe.in_slices(slices) for recipe in (*between, SMALLEST) if recipe.name in _IN_SLICES]


def _between(analysis: GraphAnalysis, keep: Instance) -> list[Recipe]:
    """Recipes between the two ends, cheapest first."""
    rate = analysis.hardware.copy_rate_bytes_per_s("d2h")
    prices = {
        candidate.name: candidate.recompute.time_s * rate / candidate.nbytes
        for candidate in keep.program.candidates
        if candidate.recompute is not None and candidate.nbytes
    }
    sizes = {candidate.name: candidate.nbytes for candidate in keep.program.candidates}
    order = sorted(prices, key=lambda name: (prices[name], -sizes[name]))
    cuts = _cuts([prices[name] for name in order], [sizes[name] for name in order])
    return [Recipe(name, recomputes=frozenset(order[:count])) for name, count in cuts]


def _cuts(prices: Sequence[float], sizes: Sequence[int]) -> list[tuple[str, int]]:
    """How many of an order, cheapest first, each recipe between the two ends computes again: what is cheap, and shares of the
    bytes of the rest. Where nearly everything is cheap, there is no rest to share, and shares of what is cheap come before all
    of it. A price is a share of the time of the copy.
    """
    sums = list(accumulate(sizes, initial=0))
    cheap = sum(price <= _CHEAP for price in prices)
    costs = list(accumulate((price * size for price, size in zip(prices, sizes, strict=True)), initial=0.0))
    bends = [costs[cheap] * sums[count] / max(1, sums[cheap]) - costs[count] for count in range(cheap + 1)]
    lightest = bends.index(max(bends))
    of_cheap = [(f"{name} of light", _cut(sums, 0, cheap, share)) for name, share in _SHARES]
    of_rest = [(name, _cut(sums, cheap, len(prices), share)) for name, share in _SHARES]
    few = sums[-1] - sums[cheap] < _FEW * sums[-1]
    cuts = [
        *([("lightest", lightest)] if bends[lightest] > _BEND * sums[cheap] else []),
        *(of_cheap if few else ()),
        ("light", cheap),
        *(() if few else of_rest),
    ]
    return sorted(cuts, key=lambda cut: cut[1])


def _cut(sums: Sequence[int], first: int, last: int, share: float) -> int:
    """Where, between two places of an order, the bytes so far are nearest to a share of those between them."""
    wanted = sums[first] + share * (sums[last] - sums[first])
    return min(range(first, last + 1), key=lambda count: abs(sums[count] - wanted))


def _with_choices(analysis: GraphAnalysis, instance: Instance, recipe: Recipe, first: Mapping[str, Action]) -> Program:
    """The program of one variant: what is saved is kept or offloaded."""
    may = _last_actions(analysis, replace(recipe, offloads=None), first)
    must = _last_actions(analysis, replace(recipe, offloads=frozenset()), first)

    def chosen(candidate: Candidate, may: Action, must: Action) -> Candidate:
        fixed: Action | None = "offload" if must == "offload" else None
        return replace(candidate, recompute=None, can_offload=may == "offload", fixed=fixed)

    return replace(instance.program, candidates=tuple(map(chosen, instance.program.candidates, may, must)))


def _with_chains(analysis: GraphAnalysis, keep: Instance) -> Program:
    """Keep-all's program with everything that any variant may do."""
    offloads = _last_actions(analysis, SMALLEST, {})
    recomputes = _first_actions(analysis, SMALLEST)

    def chosen(candidate: Candidate, offload: Action) -> Candidate:
        recompute = candidate.recompute if recomputes[candidate.name] == "recompute" else None
        return replace(candidate, recompute=recompute, can_offload=offload == "offload")

    return replace(keep.program, candidates=tuple(map(chosen, keep.program.candidates, offloads)))


def _of_one_call(pair: GraphPair, program: Program) -> Program:
    """The program of a call among others: what outlives its forward or its backward is outside of it from then on, and so are
    the gradients that backward is given."""
    given = {node.name for node in pair.backward.graph.find_nodes(op="placeholder") if str(node.target).startswith("tangents")}
    forward = len(program.forward)
    buffers = tuple(
        replace(buffer, last=min(buffer.last, forward - 1)) if buffer.first < forward else buffer
        for buffer in program.buffers
        if not (buffer.name in given and buffer.first == forward)
    )
    return replace(program, buffers=buffers, static_bytes=0, reserve_bytes=0)


def _saved_input_bytes(analysis: GraphAnalysis) -> int:
    """Bytes of the graph's inputs, without parameters and what counts as an activation, that its backward reads."""
    forward = analysis.pair.forward.graph.find_nodes(op="placeholder")
    ours = {tensor.name for tensor in analysis.table.tensors}
    inputs = {storage_id(value): node.name for node in forward if (value := fake(node)) is not None and node.name not in ours}
    found: dict[int, int] = {}
    for node, _ in saved_placeholders(analysis.pair):
        value = fake(node)
        if value is not None and inputs.get(storage_id(value), "") not in ("", *analysis.request.parameters):
            found[storage_id(value)] = example_storage_nbytes(value)
    return sum(found.values())


def is_small(analysis: GraphAnalysis, room_bytes: int | None) -> bool:
    """Whether even many calls of a graph that keeps everything are sure to leave most of the memory free."""
    return room_bytes is None or analysis.table.saved_bytes * _MANY_CALLS <= room_bytes * _LITTLE


_MANY_CALLS, _LITTLE = 64, 0.25
