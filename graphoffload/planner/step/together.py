"""One plan for several ranks: what each of them tells, the problem that is made of it, and the decision that all follow.

    RankFacts of rank 0, 1, ... ──▶ merged(): the slowest kernels, the least room ──▶ plan_step ──▶ Decision ──▶ follow_step
                                             on one rank                                          on every rank

What a rank has left is its *room*: its budget less its reserve, less what is outside the graphs. A rank with 4 GiB more memory
and 2 GiB more outside has 2 GiB more room. So the merged problem has the least budget of all ranks, and at each call as much
outside as the rank with the least room there has beside that budget.

A gap's time is the shortest of all ranks. A rank that comes early to a collective waits there for the others, and measures that
as well; the one that comes last does not. In a recorded run one rank may be late at each call, since it page-locks memory.

One rank solves, and the others take its decision. Plans would differ otherwise: the planner is deterministic, and its input is
not the same, since every rank measures its own kernels, and which activations a variant computes again follows from these
times. A decision names variants by what they compute again, and activations by their names in the graph.

Wrong when: kernels of one rank differ from another's by other factors than their sums do. Then times are off, and no peak is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from graphoffload.errors import PlanError
from graphoffload.facts.goals import Goal, WithinSlowdown
from graphoffload.facts.recipe import Recipe
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.planner.problem import Program
from graphoffload.planner.step.events import CallSchedule
from graphoffload.planner.step.facts import CallFacts, Gap, StepFacts, StepProblem, Variant
from graphoffload.planner.step.flight import follow_flight, offloads_of
from graphoffload.planner.step.solve import StepSolution

_SAME = 1.0 + 1e-9


@dataclass(frozen=True, slots=True)
class Link:
    """What copies take: the part of a hardware profile that ranks of one host share."""

    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    copy_latency_s: float
    compute_slowdown_while_copying: float


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What one rank knows of a step, as numbers.

    Attributes:
        budget_bytes: None where nothing has to fit. reserve_bytes: comes off it. or_least: as StepProblem.
        host_bytes: None: no limit. divided: it is this rank's share of its host's memory, not all of it.
        base_bytes: as StepFacts. outside_bytes: before the forward and before the backward of each call. gaps: (seconds, peak)
            before each of them.
        times_s: of each graph that keeps everything, its forward and its backward.
    """

    budget_bytes: int | None
    reserve_bytes: int
    or_least: bool
    host_bytes: int | None
    divided: bool
    base_bytes: int
    outside_bytes: tuple[tuple[int, int], ...]
    gaps: tuple[tuple[tuple[float, int], tuple[float, int]], ...]
    times_s: tuple[tuple[float, float], ...]
    link: Link

    def to_json(self) -> dict[str, Any]:
        """For another rank."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankFacts:
        """Inverse of to_json."""
        lists = {name: _tuples(data[name]) for name in ("outside_bytes", "gaps", "times_s")}
        return cls(**{**data, **lists, "link": Link(**data["link"])})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


def facts_of_rank(problem: StepProblem, *, divided: bool) -> RankFacts:
    """What a rank tells of its own problem."""
    facts, hardware = problem.facts, problem.hardware
    keep = [variants[0].program for variants in facts.graphs]
    return RankFacts(
        budget_bytes=problem.goal.device_budget_bytes,
        reserve_bytes=problem.reserve_bytes,
        or_least=problem.or_least,
        host_bytes=problem.host_budget_bytes,
        divided=divided,
        base_bytes=facts.base_bytes,
        outside_bytes=tuple((call.forward_outside_bytes, call.backward_outside_bytes) for call in facts.calls),
        gaps=tuple(tuple((g.time_s, g.outside_peak_bytes) for g in _gaps(call)) for call in facts.calls),  # type: ignore[misc]
        times_s=tuple((_sum_s(program.forward), _sum_s(program.backward)) for program in keep),
        link=Link(
            *hardware.copy_rates,
            hardware.copy_latency_s,
            hardware.compute_slowdown_while_copying,
        ),
    )


def _gaps(call: CallFacts) -> tuple[Gap, Gap]:
    return call.before_forward, call.before_backward


def _sum_s(steps: Sequence[Any]) -> float:
    return float(sum(step.time_s for step in steps))


def merged(problem: StepProblem, ranks: Sequence[RankFacts]) -> StepProblem:
    """The problem whose plan holds for every one of these ranks; `problem` is that of one of them, who solves it.

    Raises:
        PlanError: the ranks tell of other numbers of calls or graphs.
    """
    shapes = {(len(rank.outside_bytes), len(rank.times_s)) for rank in ranks}
    if shapes != {(len(problem.facts.calls), len(problem.facts.graphs))}:
        raise PlanError(f"ranks of one step tell of {sorted(shapes)} calls and graphs, which should be the same.")
    rooms = [None if rank.budget_bytes is None else rank.budget_bytes - rank.reserve_bytes for rank in ranks]
    least = min((room for room in rooms if room is not None), default=0)
    more = [0 if room is None else room - least for room in rooms]
    reserve = max(rank.reserve_bytes for rank in ranks)
    hosts = [rank.host_bytes for rank in ranks if rank.host_bytes is not None]
    goal: Goal = problem.goal
    if not isinstance(goal, WithinSlowdown) and any(room is not None for room in rooms):
        goal = replace(goal, device_budget_bytes=least + reserve)
    return replace(
        problem,
        facts=_merged_facts(problem.facts, ranks, more),
        hardware=_slowest(problem.hardware, [rank.link for rank in ranks]),
        goal=goal,
        reserve_bytes=reserve,
        host_budget_bytes=min(hosts) if hosts else None,
        or_least=any(rank.or_least for rank in ranks),
    )


def _merged_facts(facts: StepFacts, ranks: Sequence[RankFacts], more: Sequence[int]) -> StepFacts:
    """more: by how much the budget of each rank is larger than the least."""

    def outside(call: int, half: int) -> int:
        return max(0, *(rank.outside_bytes[call][half] - extra for rank, extra in zip(ranks, more, strict=True)))

    def gap(call: int, half: int) -> Gap:
        told = [(rank.gaps[call][half], extra) for rank, extra in zip(ranks, more, strict=True)]
        peaks = [peak - extra for (_, peak), extra in told if peak]
        return Gap(min(seconds for (seconds, _), _ in told), max(0, *peaks) if peaks else 0)

    calls = tuple(
        replace(
            call,
            forward_outside_bytes=outside(at, 0),
            backward_outside_bytes=outside(at, 1),
            before_forward=gap(at, 0),
            before_backward=gap(at, 1),
        )
        for at, call in enumerate(facts.calls)
    )
    slower = [_slower(variants[0].program, [rank.times_s[at] for rank in ranks]) for at, variants in enumerate(facts.graphs)]
    graphs = tuple(
        tuple(replace(variant, program=_scaled(variant.program, factors)) for variant in variants)
        for variants, factors in zip(facts.graphs, slower, strict=True)
    )
    return replace(
        facts,
        graphs=graphs,
        calls=calls,
        base_bytes=max(0, *(rank.base_bytes - extra for rank, extra in zip(ranks, more, strict=True))),
        bounds=tuple(_scaled(bound, factors) for bound, factors in zip(facts.bounds, slower, strict=True))
        if facts.bounds
        else (),
    )


def _slower(program: Program, times_s: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """By which factors the slowest rank's forward and backward are longer than this program's."""
    own = _sum_s(program.forward), _sum_s(program.backward)
    slowest = [max(each[half] for each in times_s) for half in (0, 1)]
    forward, backward = (slow / mine if mine else 1.0 for slow, mine in zip(slowest, own, strict=True))
    return forward, backward


def _scaled(program: Program, factors: tuple[float, float]) -> Program:
    """The program with times longer by these factors; what is computed again runs in the backward."""
    if max(factors) <= _SAME:
        return program
    forward, backward = (max(1.0, factor) for factor in factors)
    again = {
        at: replace(candidate, recompute=replace(candidate.recompute, time_s=candidate.recompute.time_s * backward))
        for at, candidate in enumerate(program.candidates)
        if candidate.recompute is not None
    }
    return replace(
        program,
        forward=tuple(replace(step, time_s=step.time_s * forward) for step in program.forward),
        backward=tuple(replace(step, time_s=step.time_s * backward) for step in program.backward),
        candidates=tuple(again.get(at, candidate) for at, candidate in enumerate(program.candidates)),
    )


def _slowest(hardware: HardwareProfile, links: Sequence[Link]) -> HardwareProfile:
    rates = min(link.d2h_bytes_per_s for link in links), min(link.h2d_bytes_per_s for link in links)
    return replace(
        hardware.no_faster(*rates),
        copy_latency_s=max(link.copy_latency_s for link in links),
        compute_slowdown_while_copying=max(link.compute_slowdown_while_copying for link in links),
    )


@dataclass(frozen=True, slots=True)
class Decision:
    """What every rank does in a step.

    Attributes:
        recipes: the variants of each graph. chosen: of them, the one of each call.
        offloads: by call, activations that the plan offloads. calls, reload_steps: as StepSolution.
        solver: who proposed it. gaps_s: by call, of the gaps before its forward and its backward, as they were planned with.
        rates: bytes a second of copies to the host and back, likewise.
    """

    recipes: tuple[tuple[Recipe, ...], ...]
    chosen: tuple[int, ...]
    offloads: tuple[tuple[str, ...], ...]
    calls: tuple[CallSchedule, ...]
    reload_steps: Mapping[tuple[int, int], Mapping[str, int]]
    solver: str
    gaps_s: tuple[tuple[float, float], ...]
    rates: tuple[float, float]

    def to_json(self) -> dict[str, Any]:
        """For the other ranks."""
        return {
            "recipes": [[_recipe_to_json(recipe) for recipe in recipes] for recipes in self.recipes],
            "chosen": list(self.chosen),
            "offloads": [list(names) for names in self.offloads],
            "calls": [
                {
                    "offloads": list(call.offloads),
                    "settle": [[*event, count] for event, count in call.settle.items()],
                    "prefetch": [[*event, [list(item) for item in items]] for event, items in call.prefetch.items()],
                }
                for call in self.calls
            ],
            "reload_steps": [[*key, dict(steps)] for key, steps in self.reload_steps.items()],
            "solver": self.solver,
            "gaps_s": [list(both) for both in self.gaps_s],
            "rates": list(self.rates),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Decision:
        """Inverse of to_json."""
        steps = {(graph, variant): MappingProxyType(dict(places)) for graph, variant, places in data["reload_steps"]}
        recipes = tuple(tuple(map(_recipe_from_json, each)) for each in data["recipes"])
        chosen = tuple(data["chosen"])
        empty: Mapping[str, int] = MappingProxyType({})
        calls = tuple(
            CallSchedule(
                offloads=tuple(call["offloads"]),
                settle=MappingProxyType({(kind, name): count for kind, name, count in call["settle"]}),
                prefetch=MappingProxyType({(kind, name): _tuples(items) for kind, name, items in call["prefetch"]}),
                reload_at=empty,
            )
            for call in data["calls"]
        )
        offloads, gaps_s, rates = (_tuples(data[name]) for name in ("offloads", "gaps_s", "rates"))
        return cls(recipes, chosen, offloads, calls, MappingProxyType(steps), data["solver"], gaps_s, rates)


def _recipe_to_json(recipe: Recipe) -> dict[str, Any]:
    recomputes = None if recipe.recomputes is None else sorted(recipe.recomputes)
    return {"name": recipe.name, "recomputes": recomputes, "blocks": recipe.blocks, "slices": recipe.slices}


def _recipe_from_json(data: Mapping[str, Any]) -> Recipe:
    recomputes = None if data["recomputes"] is None else frozenset(data["recomputes"])
    return Recipe(data["name"], recomputes=recomputes, blocks=data["blocks"], slices=data["slices"])


def decision_of(problem: StepProblem, solution: StepSolution, recipes: Sequence[Sequence[Recipe]]) -> Decision:
    """A solution in terms of names, for ranks that have programs of their own."""
    facts = problem.facts
    offloads, rates = offloads_of(facts, solution), problem.hardware.copy_rates
    found = tuple(tuple(each) for each in recipes)
    gaps_s = tuple((call.before_forward.time_s, call.before_backward.time_s) for call in facts.calls)
    return Decision(found, solution.chosen, offloads, solution.calls, solution.reload_steps, solution.solver, gaps_s, rates)


def followed(problem: StepProblem, decision: Decision) -> StepSolution:
    """What a decision comes to on a rank, whose problem this is. Gaps are as long as the ranks agreed.

    Raises:
        PlanError: it names what this rank's step does not have.
    """
    facts = problem.facts
    if len(decision.gaps_s) != len(facts.calls):
        told = f"{len(decision.gaps_s)} calls, and there are {len(facts.calls)} here"
        raise PlanError(f"the plan that another rank made does not fit this step: it has {told}.")
    calls = tuple(_with_gaps(call, *both) for call, both in zip(facts.calls, decision.gaps_s, strict=True))
    problem = replace(problem, facts=replace(facts, calls=calls))
    return follow_flight(
        problem, decision.chosen, decision.calls, decision.reload_steps, decision.offloads, decision.solver
    )


def _with_gaps(call: CallFacts, forward_s: float, backward_s: float) -> CallFacts:
    """The call with gaps of these times; their peaks are its own."""
    before_forward = replace(call.before_forward, time_s=forward_s)
    return replace(call, before_forward=before_forward, before_backward=replace(call.before_backward, time_s=backward_s))


def with_variants(facts: StepFacts, families: Sequence[Sequence[Variant]], bounds: Sequence[Program]) -> StepFacts:
    """The same step with other variants of its graphs, each in its order. What ran is known by its name, or it is the one that
    computes most again."""
    calls = []
    for at, call in enumerate(facts.calls):
        names = [variant.name for variant in families[call.graph]]
        ran = facts.variant(at, call.ran).name
        bounded = [(len(variant.recomputes), index) for index, variant in enumerate(families[call.graph]) if variant.bounded]
        _, most = max(bounded)
        calls.append(replace(call, ran=names.index(ran) if ran in names else most))
    return replace(facts, graphs=tuple(map(tuple, families)), calls=tuple(calls), bounds=tuple(bounds))
