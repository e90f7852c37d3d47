"""A step is planned: from what its runs taught, alone, or together with the other ranks that run it.

    alone              facts ──▶ solve ──▶ compile ──▶ the run that begins has the plan
    with other ranks   facts ──▶ told to all (step_ranks.py) ... runs go on as before ... ──▶ decision ──▶ compile

A plan that is made again for what it was made for before costs no compile. Only what breaks the budget, or frees a good part
of it, is a reason.

Python's garbage (garbage.py) is collected before the run that facts are made of and before a plan that was asked for, or that
plan would leave room for it and refuse budgets that can be met. It counts where a step is planned again for what grew: garbage
that comes back in each step is memory that the step needs. What planning itself leaves is collected after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from graphoffload.compiler.device_limits import device_budget_now, map_by_pages_if_tight, resolve_limits
from graphoffload.compiler.dispatch import GRAPHS, Dispatched
from graphoffload.compiler.garbage import collect_garbage, collected, streams_on
from graphoffload.compiler.optimizer_state import unmade_state_bytes
from graphoffload.compiler.override import OVERRIDE, asked_now
from graphoffload.compiler.ranks import StoreFailed, ranks_text
from graphoffload.compiler.rounds import Alone, Decided, Opened, Rounds, Solve
from graphoffload.compiler.step_again import AFTER_ERROR, GOAL_WAS_SET, WARM, Known, why_again
from graphoffload.compiler.step_facts import drop_shared_inputs, facts_of
from graphoffload.compiler.step_host import HostSeen
from graphoffload.compiler.step_plan import Asked, Solved, StepPlan, make_step_plan, problem_of, solution_of, with_families
from graphoffload.compiler.step_ranks import Proposal, is_missed, rounds_of, solved, taken, tell
from graphoffload.errors import BudgetError, BudgetExceededWarning, PlanError, StepNotPlannedWarning, warn
from graphoffload.facts.goals import UNMEASURABLE, Goal, KeepIfFits, MeetBudget, WithinSlowdown
from graphoffload.facts.limits import Limits
from graphoffload.log import log, say
from graphoffload.options.config import OffloadConfig
from graphoffload.planner.step.facts import StepFacts, shifted
from graphoffload.planner.step.parts import without_slices
from graphoffload.planner.step.together import Decision, with_variants
from graphoffload.runtime.pinned.pool import POOL
from graphoffload.runtime.step.calls import StepRun
from graphoffload.torch_internals.dynamo import ShapeGuardError
from graphoffload.units import format_bytes

_RUNS_ON = "The step runs on as it was compiled first, which holds least."
RECORDED = 2
"""Runs of a sequence before it is planned: the first one compiles and warms up."""


def plan_if_due(known: Known, device: torch.device, last: StepRun | None) -> None:
    """Plan the step that begins, if there is a reason: one of this rank's own, or of another one that plans with it."""
    if known.plan is None and known.facts is None and (len(known.runs) < RECORDED or not known.seen_together):
        return
    before, known.rounds = known.rounds, rounds_of(known.rounds, known.sequence, known.in_flight, _graphs)
    lost = known.proposal if known.rounds is not before else None
    if lost is not None:  # the process group is gone or another one, or its store is gone
        known.proposal = None
    if known.rounds is None:
        why = _why(known, device, last) if lost is None else lost.why
        if why is not None:
            _plan(known, device, why)
        return
    why = ""
    try:
        if known.proposal is not None and known.version == OVERRIDE.version:
            _hear(known, device, known.rounds, known.proposal)
            return
        own = _why(known, device, last) if lost is None else lost.why
        asked = known.rounds.asked() if own is None else own
        if asked is None:
            return
        why = asked
        if why == AFTER_ERROR:  # the next run would fail again
            _plan(known, device, why)
        if not known.fixed:
            _propose(known, device, known.rounds, why)
    except StoreFailed:
        proposal, known.proposal = known.proposal, None
        known.rounds.peers.warn_alone([], "plans alone")
        if why != AFTER_ERROR:
            _plan(known, device, why if proposal is None else proposal.why)


def _why(known: Known, device: torch.device, last: StepRun | None) -> str | None:
    """The reason of this rank's own; "" for a first plan, None for none."""
    if known.plan is None:
        return "" if known.facts is None else GOAL_WAS_SET
    return why_again(known, device, last) or _why_slower(known, device, last) or None


def _why_slower(known: Known, device: torch.device, last: StepRun | None) -> str:
    """Whether the copies of the present plan, or the host, are slower than it has them, and that matters."""
    plan, asked = known.plan, known.asked
    if last is None or plan is None or asked is None or known.followed <= WARM:
        return ""
    why = known.link.why_slower(plan, last, lambda: problem_of(_graphs(known.sequence), plan.facts, asked))
    if why or not known.host_counts:
        return why
    return known.host.why_other(plan, lambda price_s: _priced_s(known, device, asked, price_s))


def _priced_s(known: Known, device: torch.device, asked: Asked, price_s: float) -> float | None:
    """What the step would take by a plan for a price of copies, if it were made now; None: no such plan meets the goal."""
    facts, asked = _at_price(_facts_at(known, _allocated_bytes(known, device)), asked, price_s)
    problem = problem_of(_graphs(known.sequence), facts, asked)
    with collected(device):
        try:
            known.host.solved = Solved(problem, solution_of(problem, None))
        except BudgetError:
            return None
    return known.host.solved.solution.timeline.time_s


def _at_price(facts: StepFacts, asked: Asked, price_s: float) -> tuple[StepFacts, Asked]:
    """The same step for a plan with fewer copies, which rounds as one with more does."""
    return replace(without_slices(facts), host_s_per_copy=price_s), replace(asked, or_least=False)


def _allocated_bytes(known: Known, device: torch.device) -> int:
    """What is allocated on the device now, with what will be until the optimizer steps."""
    streams = streams_on(device)
    return (streams.allocated_bytes()[0] if streams is not None else 0) + known.rise.ahead_bytes


def _facts_now(known: Known) -> StepFacts:
    """What was recorded, with what is allocated outside when it is planned, and copies as they are."""
    return _facts_at(known, known.planned_bytes)


def _facts_at(known: Known, allocated_bytes: int) -> StepFacts:
    assert known.facts is not None
    now = shifted(known.facts, allocated_bytes - known.start_bytes)
    return replace(now, in_flight=known.in_flight, copy_rates=known.link.rates)


def _graphs(sequence: Sequence[int]) -> list[Dispatched]:
    """The graphs of a sequence, each once, in the order of their first calls."""
    return [GRAPHS[number] for number in dict.fromkeys(sequence)]


def config_of(graph: Dispatched) -> OffloadConfig:
    """What is asked for now: as it was compiled, or as it was changed since."""
    return asked_now(graph.graph.config)


def _asked(graph: Dispatched, known: Known) -> tuple[Asked, Limits]:
    config = config_of(graph)
    limits = resolve_limits(config, graph.graph.inputs)
    counts = config.reserve == "auto" and graph.device.type == "cuda"
    reserve = unmade_state_bytes(graph.device) if counts else limits.reserve_bytes
    budget = limits.device_budget_bytes
    if not limits.explicit and graph.device.type == "cuda":
        budget = device_budget_now(graph.device, reserve, of_a_step=True)
    goal: Goal = KeepIfFits(budget)
    if config.max_slowdown is not None:
        goal = WithinSlowdown(max(config.max_slowdown, UNMEASURABLE), asked=config.max_slowdown)
    elif limits.explicit and budget is not None:
        goal = MeetBudget(budget)
    host = limits.host_budget_bytes
    if known.inside and host is not None:  # what the run around it has there stays until this one is over
        host = max(0, host - POOL.snapshot().in_use_bytes)
    return Asked(goal, reserve, host, limits.given_bytes, known.taken_bytes + limits.uncut_bytes), limits


def _keep_all_bytes(facts: StepFacts, asked: Asked) -> int:
    """What the step would take with everything kept, at most."""
    saved = sum(sum(c.nbytes for c in facts.graphs[call.graph][0].program.candidates) for call in facts.calls)
    outside = max(
        max(c.forward_outside_bytes, c.backward_outside_bytes, c.before_backward.outside_peak_bytes) for c in facts.calls
    )
    return saved + outside + asked.reserve_bytes


def _found_facts(known: Known, graphs: list[Dispatched], limits: Limits) -> bool:
    """Make facts of what was recorded; False where a graph cannot be traced again."""
    try:
        drop_shared_inputs(known.runs[-1], graphs)
        known.facts = facts_of(known.runs, graphs, limits)
    except (ShapeGuardError, PlanError) as error:
        _give_up(known, error)
        return False
    known.start_bytes = known.flight_bytes if known.flies else known.runs[-1].marks[0].allocated_bytes
    known.runs = []
    return True


def _give_up(known: Known, error: Exception) -> None:
    """A graph of the step cannot be compiled again: it goes on as it was compiled first."""
    known.plan, known.fixed, known.runs = None, True, []
    remedy = " Compile with dynamic=False." if isinstance(error, ShapeGuardError) else ""
    text = f"the step is not planned, and its graphs run as they were compiled first: {str(error).rstrip('.')}.{remedy}"
    warn(StepNotPlannedWarning, text)


def _plan(known: Known, device: torch.device, why: str) -> None:
    """Plan a step from what is known of it; `why` it is planned again."""
    proposal = _prepared(known, device, why)
    if proposal is not None:
        _make(known, device, proposal, None)


def _propose(known: Known, device: torch.device, rounds: Rounds, why: str) -> None:
    """Tell the other ranks what is known of a step, and run on as before until they have decided with this one."""
    known.proposal = None
    with collected(device):
        proposal = _prepared(known, device, why)
    if proposal is None:
        rounds.leave()
        return
    known.proposal = proposal
    tell(rounds, proposal, _graphs(known.sequence))


def _hear(known: Known, device: torch.device, rounds: Rounds, proposal: Proposal) -> None:
    """Do what the other ranks wait for, or what was decided."""
    news = rounds.news()
    if isinstance(news, Opened):
        _propose(known, device, rounds, news.why)
    elif isinstance(news, Solve):
        if news.missing:
            rounds.peers.warn_alone(news.missing, "plans its step without some ranks")
        with collected(device):
            rounds.decide(solved(news, proposal, _graphs(known.sequence), rounds.peers))
    elif isinstance(news, Decided):
        known.proposal = None
        with collected(device):
            _take(known, device, rounds, proposal, news.value)
    elif isinstance(news, Alone):
        known.proposal = None
        rounds.peers.warn_alone(news.missing, "plans its step alone")
        _make(known, device, proposal, None)


def _take(known: Known, device: torch.device, rounds: Rounds, proposal: Proposal, value: Any) -> None:
    """Do what the ranks of a round have decided."""
    graphs, peers = _graphs(known.sequence), rounds.peers
    peers.local = value["local"].get(str(peers.rank), peers.local)
    try:
        decision, facts = taken(value, proposal.facts, graphs)
    except BudgetError as error:
        _refused(known, proposal, error)
        return
    except (ShapeGuardError, PlanError) as error:
        peers.warn_misfit(value["rank"], error)
        decision, facts = None, proposal.facts
    if facts is not proposal.facts:
        assert known.facts is not None
        known.facts = with_variants(known.facts, facts.graphs, facts.bounds)
    before = known.plan
    _make(known, device, replace(proposal, facts=facts), decision, value)
    late = known.plan is not None and peers.rank not in value["ranks"]
    if late and decision is not None and is_missed(known.plan, proposal.asked):
        known.plan = before
        _propose(known, device, rounds, "the plan of the others does not hold for a rank that came later")


def _prepared(known: Known, device: torch.device, why: str) -> Proposal | None:
    """What is to be planned now; None where a graph cannot be traced again."""
    graphs = _graphs(known.sequence)
    may_exceed = bool(why) and GOAL_WAS_SET not in why and known.plan is not None  # what was met once is no error later
    if not may_exceed:
        collect_garbage(device)
    asked, limits = _asked(graphs[0], known)
    if known.facts is None and not _found_facts(known, graphs, limits):
        return None
    assert known.facts is not None
    if known.rounds is not None:  # all ranks choose from the same variants
        for graph in graphs:
            graph.widen()
    known.facts = with_families(known.facts, graphs)
    known.planned_bytes = _allocated_bytes(known, device)
    known.version, known.asked, known.followed = OVERRIDE.version, asked, 0
    known.freed = 0
    facts = _facts_now(known)
    wanted, budget = _keep_all_bytes(facts, asked), asked.goal.device_budget_bytes
    if known.plan is None and map_by_pages_if_tight(device, wanted, budget, of_a_step=True):
        asked, limits = _asked(graphs[0], known)
        known.asked = asked
    return Proposal(asked, facts, config_of(graphs[0]), limits.explicit, why, may_exceed)


def _make(known: Known, device: torch.device, proposal: Proposal, decision: Decision | None, who: Any = None) -> None:
    """Plan and compile what was proposed, or what was decided of it. who: the decision as it was told."""
    with collected(device):
        _make_plan(known, device, proposal, decision, who)


def _make_plan(known: Known, device: torch.device, proposal: Proposal, decision: Decision | None, who: Any) -> None:
    graphs, before, streams = _graphs(known.sequence), known.plan, streams_on(device)
    known.followed = 0
    known.link.begin_plan()
    if decision is None:
        known.host.begin_plan()
    else:  # what all ranks do has no price
        known.host = HostSeen()
    plan = _plan_at_price(known, graphs, proposal) if known.host.price_s else None
    if plan is None:
        asked = replace(proposal.asked, or_least=proposal.may_exceed)
        try:
            plan = make_step_plan(known.sequence, graphs, proposal.facts, asked, decision=decision)
        except BudgetError as error:
            _refused(known, proposal, error)
            return
        except (ShapeGuardError, PlanError) as error:
            if decision is not None and known.rounds is not None and isinstance(error, PlanError):
                known.rounds.peers.warn_misfit(who["rank"], error)
                _make(known, device, proposal, None)
            else:
                _give_up(known, error)
            return
    assert known.facts is not None
    known.plan, known.facts = plan, with_families(known.facts, graphs)
    if streams is not None and (before is None or before.calls != plan.calls):
        streams.empty_cache()  # or blocks of a step that ran otherwise would be cut up, and a loss finds no large ones
    ranks = who["ranks"] if decision is not None else []
    common = f"; one plan for {ranks_text(ranks)}" if len(ranks) > 1 else ""
    line = plan.summary + common + (f"; planned again: {proposal.why}" if proposal.why else "")
    first = known.rounds is None or not ranks or known.rounds.peers.rank == min(ranks)
    (say if first else log.info)(line)
    if proposal.may_exceed:
        _warn_of_excess(plan, proposal.asked, proposal.why)


def _plan_at_price(known: Known, graphs: Sequence[Dispatched], proposal: Proposal) -> StepPlan | None:
    """None: nothing fits, or it is no faster than before, or cannot be compiled. Copies are free from then on."""
    facts, asked = _at_price(proposal.facts, proposal.asked, known.host.price_s)
    solved, known.host.solved = known.host.solved, None
    try:
        plan = make_step_plan(known.sequence, graphs, facts, asked, widens=False, solved=solved)
    except (BudgetError, ShapeGuardError, PlanError) as error:
        log.info("there is no plan with fewer copies any more: %s", error)
    else:
        if known.host.takes(plan):
            return plan
    known.host.give_up()
    return None


def _refused(known: Known, proposal: Proposal, error: BudgetError) -> None:
    """No plan meets the goal: an error where a number was given."""
    known.plan, known.fixed = None, True
    if proposal.explicit:
        known.refused = str(error)
        raise error
    warn(StepNotPlannedWarning, f"{error} {_RUNS_ON}")


def say_what_was_refused(known: Known) -> None:
    """A run starts all the same: somebody caught the error. It is said once more, and that the goal is not kept."""
    refused, known.refused = known.refused, ""
    if refused:
        warn(StepNotPlannedWarning, f"{refused} That error was caught. {_RUNS_ON}")


def _warn_of_excess(plan: StepPlan, asked: Asked, why: str) -> None:
    """Name what is missing where a plan that is made again takes more than its budget."""
    budget = asked.goal.device_budget_bytes
    least_bytes = plan.solution.timeline.peak_bytes + asked.reserve_bytes + asked.taken_bytes
    if budget is None or isinstance(asked.goal, WithinSlowdown) or least_bytes <= budget:
        return
    missing = least_bytes - budget
    given = f"device_budget={format_bytes(asked.budget_bytes)}" if asked.budget_bytes is not None else "what the device has"
    remedy = "Free memory outside" if asked.budget_bytes is None else f"Give {format_bytes(asked.budget_bytes + missing)}"
    warn(
        BudgetExceededWarning,
        f"no plan of the training step meets {given} any more, since {why}. The step goes on by the plan that takes least, "
        f"which needs {format_bytes(least_bytes)}: {format_bytes(missing)} too much. {remedy}, or make the batch or sequence "
        "smaller.",
    )
