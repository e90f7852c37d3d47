"""A step whose plan several ranks have in common: what this rank tells, how it solves for all, and what it takes from them.

    own problem ──tell──▶ rounds.py ──▶ solve for all (one rank) ──▶ decision ──▶ variants, schedule, figures of one's own

A group of one process has none of this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphoffload.compiler import ranks
from graphoffload.compiler.cache_key import structure_key
from graphoffload.compiler.dispatch import Dispatched
from graphoffload.compiler.ranks import Peers, StoreFailed, options_of
from graphoffload.compiler.rounds import Rounds, Solve
from graphoffload.compiler.step_plan import Asked, StepPlan, problem_of, solution_of, with_families
from graphoffload.errors import BudgetError, ConfigError, PlanError
from graphoffload.log import log
from graphoffload.options.config import OffloadConfig
from graphoffload.planner.step.facts import StepFacts
from graphoffload.planner.step.together import Decision, RankFacts, decision_of, facts_of_rank, merged
from graphoffload.report.dump import write_step_dump


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a rank wants a plan for. config: what is asked for now. why: it is planned again; "": for the first time."""

    asked: Asked
    facts: StepFacts
    config: OffloadConfig
    explicit: bool
    why: str
    may_exceed: bool


def rounds_of(
    now: Rounds | None, sequence: Sequence[int], in_flight: int, graphs: Callable[[Sequence[int]], Sequence[Dispatched]]
) -> Rounds | None:
    """The rounds of a step with the other ranks that there are: as they were, or new ones in a new process group. None: there
    are no others, or their store does not answer. graphs: those of a sequence, each once. Stages of a pipeline have plans of
    their own: they hold different numbers of microbatches in flight."""
    peers = ranks.peers()
    if peers is None:
        return None
    if peers.broken:
        peers.warn_alone([], "plans alone")
        return None
    if now is not None and now.peers is peers:
        return now
    return Rounds(peers, peers.named(_structure(sequence, in_flight, graphs(sequence))))


def plans_none() -> None:
    """Tell other ranks, if there are any, that this one runs no step that they could plan with it."""
    peers = ranks.peers()
    if peers is not None and not peers.broken:
        with contextlib.suppress(StoreFailed):
            peers.list("")


def _structure(sequence: Sequence[int], in_flight: int, graphs: Sequence[Dispatched]) -> str:
    """What the ranks know a step by: its graphs, the order of its calls, and how many microbatches are in flight."""
    position = {graph.number: at for at, graph in enumerate(graphs)}
    calls = "-".join(str(position[number]) for number in sequence)
    flight = f":{in_flight}" if in_flight > 1 else ""
    return f"{structure_key(graph.graph.module for graph in graphs)}:{ranks.short(calls)}{flight}"


def tell(rounds: Rounds, proposal: Proposal, graphs: Sequence[Dispatched]) -> None:
    """Tell the others what this rank knows, in the latest round or a new one.

    Raises:
        StoreFailed: the store does not answer.
    """
    config, asked = proposal.config, replace(proposal.asked, or_least=proposal.may_exceed)
    goal = f"device_budget={config.device_budget!r}, max_slowdown={config.max_slowdown!r}"
    facts = facts_of_rank(problem_of(graphs, proposal.facts, asked), divided=ranks.local_ranks() > 0)
    compiled = options_of(graphs[0].graph.config)
    value = {"facts": facts.to_json(), "goal": goal, "options": compiled, "host": ranks.host()}
    rounds.tell(value, proposal.why)


def solved(found: Solve, proposal: Proposal, graphs: Sequence[Dispatched], peers: Peers) -> dict[str, Any]:
    """The decision for all ranks of a round, or why there is none, as they are told."""
    told = [RankFacts.from_json(each["facts"]) for each in found.told.values()]
    hosts = [each["host"] for each in found.told.values()]
    shared = [
        each if each.divided or each.host_bytes is None else replace(each, host_bytes=each.host_bytes // hosts.count(host))
        for each, host in zip(told, hosts, strict=True)
    ]
    local = {str(rank): hosts.count(each["host"]) for rank, each in found.told.items()}
    dump_dir = graphs[0].graph.config.dump_dir
    who: dict[str, Any] = {"rank": peers.rank, "ranks": sorted(found.told), "local": local}
    try:
        problem = merged(problem_of(graphs, proposal.facts, proposal.asked), shared)
        solution = solution_of(problem, dump_dir)
        decision = decision_of(problem, solution, [graph.family.recipes for graph in graphs])
    except BudgetError as error:
        return {**who, "refused": str(error), "least_bytes": error.least_bytes}
    except PlanError as error:
        return {**who, "failed": str(error)}
    if dump_dir:
        with contextlib.suppress(ConfigError):  # the other ranks wait; each rank's own dump says that the folder is no good
            line = f"{ranks.ranks_text(who['ranks'])}, planned by this one"
            write_step_dump(dump_dir, problem, solution, line, together=True)
    log.info("the plan of %s was made here", ranks.ranks_text(who["ranks"]))
    return {**who, "decision": decision.to_json()}


def taken(
    value: Mapping[str, Any], facts: StepFacts, graphs: Sequence[Dispatched]
) -> tuple[Decision | None, StepFacts]:
    """The decision of another rank and the facts of this one, both for the same variants; None: each plans alone.

    Raises:
        BudgetError: no plan meets the budget of every rank. PlanError: the graphs cannot be compiled as decided.
    """
    if "refused" in value:
        error = BudgetError(f"{value['refused']} This holds for {ranks.ranks_text(value['ranks'])}, which have one plan.")
        error.least_bytes = value["least_bytes"]
        raise error
    if "failed" in value:
        log.info("rank %s found no plan for all ranks: %s", value["rank"], value["failed"])
        return None, facts
    decision = Decision.from_json(value["decision"])
    if len(decision.recipes) != len(graphs):
        raise PlanError(f"rank {value['rank']} planned {len(decision.recipes)} graphs, and there are {len(graphs)} here.")
    changed = [graph.take_family(recipes) for graph, recipes in zip(graphs, decision.recipes, strict=True)]
    return decision, with_families(facts, graphs, changed=any(changed))


def is_missed(plan: StepPlan | None, asked: Asked) -> bool:
    """Whether a plan takes more than the budget of this rank."""
    budget = asked.goal.device_budget_bytes
    if plan is None or budget is None:
        return False
    return plan.solution.timeline.peak_bytes + asked.reserve_bytes + asked.taken_bytes > budget
