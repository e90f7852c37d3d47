"""The plan of a step: solved from its facts, compiled, and given to each call by its index.

facts ──plan_step──▶ solution: variant, actions and events of each call ──compile──▶ StepPlan: compiled code and ids
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from graphoffload.compiler.compile_variant import Compiled, Graph
from graphoffload.compiler.dispatch import Family
from graphoffload.compiler.link import hardware_of
from graphoffload.errors import BudgetError
from graphoffload.facts.goals import Goal
from graphoffload.facts.recipe import Recipe
from graphoffload.log import log
from graphoffload.patience import Patience
from graphoffload.planner.step.facts import StepFacts, StepProblem
from graphoffload.planner.step.fit import choices_of, is_worth
from graphoffload.planner.step.flight import plan_flight
from graphoffload.planner.step.parts import Wider, widened
from graphoffload.planner.step.solve import StepSolution
from graphoffload.planner.step.together import Decision, followed, with_variants
from graphoffload.report.dump import write_step_dump
from graphoffload.report.step_line import line_of_step, slow_host
from graphoffload.runtime import registry
from graphoffload.runtime.pinned.pool import POOL
from graphoffload.runtime.step.call import StepCall
from graphoffload.runtime.step.schedule import Schedule


class GraphOfStep(Protocol):
    """One graph of a step: Dynamo's code calls it (dispatch.Dispatched), or it is only explained."""

    @property
    def number(self) -> int:
        """Which graph it is."""

    @property
    def graph(self) -> Graph:
        """What Dynamo gave."""

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""

    @property
    def family(self) -> Family:
        """The variants that a plan may choose from."""

    def widen(self) -> None:
        """Have variants in slices as well from now on, where these may pay."""

    def fit(self, recomputes: frozenset[str]) -> bool:
        """Have a variant that computes these activations again, from now on; whether there is one."""

    def variant(self, recipe: Recipe) -> Compiled:
        """The graph by a recipe."""


_OF_ONE_RANK = (
    "What follows was measured by this rank. The plan was made for all ranks by one of them, whose *.together.problem.json has "
    "what it was made for; replay of this rank's file plans for this rank alone."
)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What each call of a step runs, by its index. facts: with the variants that it chose from. summary: its line. rates: of
    copies to the host and back that it has."""

    sequence: tuple[int, ...]
    facts: StepFacts
    calls: tuple[tuple[Compiled, Schedule, int], ...]
    solution: StepSolution
    summary: str
    rates: tuple[float, float]

    def call(self, call: StepCall) -> tuple[Compiled, Schedule, int] | None:
        """The variant and the schedule of a call; None if another graph was expected."""
        if call.index < len(self.sequence) and self.sequence[call.index] == call.graph:
            return self.calls[call.index]
        return None


@dataclass(frozen=True, slots=True)
class Asked:
    """What a step is planned for. budget_bytes: as the user gave it; None: what fits. taken_bytes: of the goal's budget, left
    free for ends of blocks, and since a step took more than predicted. or_least: where nothing meets the goal, the plan that
    takes least is as good."""

    goal: Goal
    reserve_bytes: int = 0
    host_budget_bytes: int | None = None
    budget_bytes: int | None = None
    taken_bytes: int = 0
    or_least: bool = False


@dataclass(frozen=True, slots=True)
class Solved:
    """A problem and its solution."""

    problem: StepProblem
    solution: StepSolution

    def answers(self, problem: StepProblem) -> bool:
        """Whether another problem is the same, whatever time it may take, and the host has room for what is copied."""
        host = problem.host_budget_bytes
        fits = host is None or self.solution.timeline.host_bytes <= host
        own, other = (replace(each, patience=None, host_budget_bytes=None) for each in (self.problem, problem))
        return fits and own == other


def problem_of(graphs: Sequence[GraphOfStep], facts: StepFacts, asked: Asked) -> StepProblem:
    """What the planner solves for a step on this device."""
    hardware = hardware_of(graphs[0].graph.config.hardware, str(graphs[0].device))
    if facts.copy_rates is not None:
        hardware = hardware.no_faster(*facts.copy_rates)
    if facts.host_s_per_copy:
        hardware = replace(hardware, host_s_per_copy=hardware.host_s_per_copy + facts.host_s_per_copy)
    reserve = asked.reserve_bytes + asked.taken_bytes
    return StepProblem(
        facts, hardware, asked.goal, reserve, asked.host_budget_bytes, Patience("step"), asked.or_least, asked.taken_bytes
    )


def solution_of(problem: StepProblem, dump_dir: str | None, wider: Wider | None = None) -> StepSolution:
    """The plan of a step. A step that has none leaves its dump, where dumps are asked for.

    Args:
        wider: makes the step with variants in slices as well, where it is needed; None: it has them, or is to have none.

    Raises:
        BudgetError: no plan meets the budget, and the problem does not ask for the least one instead.
    """
    try:
        return plan_flight(problem, wider)
    except BudgetError as error:
        if dump_dir:
            write_step_dump(dump_dir, widened(problem, wider), None, str(error))
        raise


def with_families(facts: StepFacts, graphs: Sequence[GraphOfStep], *, changed: bool = False) -> StepFacts:
    """The same step with the variants that its graphs have now: more, where they were widened, or those of another rank, which
    `changed` says."""
    families = [graph.family for graph in graphs]
    if not changed and [len(family.variants) for family in families] == [len(variants) for variants in facts.graphs]:
        return facts
    return with_variants(facts, [family.variants for family in families], [family.bound for family in families])


def _with_slices(facts: StepFacts, graphs: Sequence[GraphOfStep]) -> StepFacts:
    for graph in graphs:
        graph.widen()
    return with_families(facts, graphs)


def make_step_plan(
    sequence: tuple[int, ...],
    graphs: Sequence[GraphOfStep],
    facts: StepFacts,
    asked: Asked,
    *,
    decision: Decision | None = None,
    runs: bool = True,
    widens: bool = True,
    solved: Solved | None = None,
) -> StepPlan:
    """Plan a step and compile its variants.

    Args:
        graphs: in the order of `facts.graphs`. decision: what all ranks do; None: it is planned here. runs: the plan is to run,
            so that host memory is taken for it; else only shown. widens: where no plan meets the goal, there are variants in
            slices as well; they take long to make. solved: taken where it is of the same problem.

    Raises:
        BudgetError: no plan of the step meets the budget, and the least one is not as good.
        PlanError: the decision names what this step does not have.
        ShapeGuardError: a variant would hold for fewer sizes than its graph is called with.
    """
    begun = time.perf_counter()
    facts = with_families(facts, graphs) if widens else facts
    problem = problem_of(graphs, facts, asked)
    hardware = problem.hardware
    dump_dir = graphs[0].graph.config.dump_dir
    wider = functools.partial(_with_slices, facts, graphs) if widens else None
    if decision is not None:
        solution = followed(problem, decision)
    elif solved is not None and solved.answers(problem):
        solution = solved.solution
    else:
        solution = solution_of(problem, dump_dir, wider)
    if widens:
        problem = replace(problem, facts=with_families(facts, graphs))
    if widens and decision is None:
        problem, solution = fitted(problem, solution, graphs, dump_dir)
    facts = problem.facts
    planned_s = time.perf_counter() - begun
    if runs:
        _prepare_host(solution, graphs)
    calls = _compiled(solution, facts, graphs)
    names = {graph.number: graph.graph.name for graph in graphs}
    called = Counter(names[number] for number in sequence)
    whole = hardware.memory_bytes if hardware.source != "cpu" else None
    line = line_of_step(solution, called, asked.reserve_bytes, asked.budget_bytes, whole)
    hints = dict.fromkeys(compiled.plan.hint for compiled, _, _ in calls if compiled.plan is not None)
    summary = "; ".join(filter(None, (line, slow_host(facts), *hints)))
    plan = StepPlan(sequence, facts, calls, solution, summary, hardware.copy_rates if decision is None else decision.rates)
    if dump_dir:
        write_step_dump(dump_dir, problem, solution, summary if decision is None else f"{summary}\n{_OF_ONE_RANK}")
    _tell(plan, asked.reserve_bytes)
    log.info("the step was planned in %.1f s, and planned and compiled in %.1f s", planned_s, time.perf_counter() - begun)
    return plan


def fitted(
    problem: StepProblem, solution: StepSolution, graphs: Sequence[GraphOfStep], dump_dir: str | None
) -> tuple[StepProblem, StepSolution]:
    """The problem, and its solution with variants made for this step (planner/step/fit.py) where that is clearly faster."""
    made = [graphs[graph].fit(names) for graph, names in choices_of(problem, solution).items()]
    if not any(made):
        return problem, solution
    problem = replace(problem, facts=with_families(problem.facts, graphs))
    found = solution_of(problem, dump_dir)
    return problem, found if is_worth(problem, found, solution) else solution


def _compiled(
    solution: StepSolution, facts: StepFacts, graphs: Sequence[GraphOfStep]
) -> tuple[tuple[Compiled, Schedule, int], ...]:
    """The variant and the schedule of each call: what the solution names, by the ids of what was compiled."""
    offloads: dict[tuple[int, int], set[str]] = {}
    for fact, variant, schedule in zip(facts.calls, solution.chosen, solution.calls, strict=True):
        offloads.setdefault((fact.graph, variant), set()).update(schedule.offloads)
    compiled = {}
    for (graph, variant), names in offloads.items():
        name = facts.graphs[graph][variant].name
        recipe = next(recipe for recipe in graphs[graph].family.recipes if recipe.name == name)
        steps = solution.reload_steps.get((graph, variant), {})
        reload_steps = tuple(sorted((name, step) for name, step in steps.items() if name in names))
        chosen = replace(recipe, offloads=frozenset(names), reload_steps=reload_steps)
        compiled[graph, variant] = graphs[graph].variant(chosen)
    ids = [_ids(compiled[fact.graph, variant]) for fact, variant in zip(facts.calls, solution.chosen, strict=True)]
    calls = []
    for at, (fact, variant, made) in enumerate(zip(facts.calls, solution.chosen, solution.calls, strict=True)):
        own = ids[at]
        schedule_by_id = Schedule(
            goes=frozenset(own[name] for name in made.offloads),
            settle={(kind, own.get(name, -1)): count for (kind, name), count in made.settle.items()},
            prefetch={
                (kind, own.get(name, -1)): tuple((call, ids[call][other]) for call, other in items)
                for (kind, name), items in made.prefetch.items()
            },
        )
        calls.append((compiled[fact.graph, variant], schedule_by_id, variant))
    return tuple(calls)


def _prepare_host(solution: StepSolution, graphs: Sequence[GraphOfStep]) -> None:
    """Take host memory for all copies of the step, in the background, while its variants compile."""
    device = graphs[0].device
    if device.type == "cuda":
        candidates = solution.joined.program.candidates
        actions = (solution.actions[call][index] for call, index in solution.joined.of)
        sizes = [c.nbytes for c, action in zip(candidates, actions, strict=True) if action == "offload"] * solution.in_flight
        POOL.prepare(sizes, pin=True, device=torch.cuda.current_device() if device.index is None else device.index)


def _ids(compiled: Compiled) -> dict[str, int]:
    assert compiled.plan is not None
    return {transfer.tensor: transfer.id for transfer in compiled.plan.transfers}


def _tell(plan: StepPlan, reserve_bytes: int) -> None:
    """The prediction of the step in the plans of its variants: a report of one of them speaks of the step."""
    prediction = plan.solution.prediction(reserve_bytes)
    told = dict.fromkeys(call[0] for call in plan.calls)
    for compiled in told:
        assert compiled.plan is not None
        registry.amend(replace(compiled.plan, prediction=prediction, summary=plan.summary, part=False))
    keys, graphs = {compiled.key for compiled in told}, {compiled.plan.graph for compiled in told if compiled.plan is not None}
    for other in registry.last_plans():  # of an earlier plan of the step: its figures are no longer true
        if other.variant and other.graph in graphs and other.key not in keys and not other.part:
            registry.amend(replace(other, part=True))
