"""From constraints and limits to one action for every saved activation, each with its reason.

every constraint given    nothing to plan: the constraints, as far as the host's memory allows
a slowdown given          the planner, for the most memory within it
a budget, or "auto"       keep all if that fits; the planner if it does not
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from graphoffload.compiler.constraints import Constraint
from graphoffload.compiler.request import GraphAnalysis
from graphoffload.facts.goals import UNMEASURABLE, Goal, KeepIfFits, MeetBudget, WithinSlowdown
from graphoffload.facts.limits import Limits
from graphoffload.facts.plan import Action
from graphoffload.facts.refusals import Refusal, refusal_of
from graphoffload.facts.remedies import host_full, nothing_offloaded
from graphoffload.facts.saved_tensors import SavedTable
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.log import log
from graphoffload.monitor.shared_budget import is_one_of_many
from graphoffload.options.config import OffloadConfig
from graphoffload.planner.hint import saved_within
from graphoffload.planner.problem import Candidate, Program
from graphoffload.planner.reasons import NO_CHOICE
from graphoffload.planner.simulator import Timeline, simulate
from graphoffload.planner.solver import Solution, least_of, like, solve
from graphoffload.units import format_bytes

_NO_GAIN = "recomputing it would not pay"
_FOR_THE_NEXT = (
    "runs downstream of other graphs: copies are left to the next one, and the tensors of a forward's last graph stay on the "
    "device; both as far as max_inflight_bytes allows (None: what the largest graph offloads, up to a quarter of all)"
)
_CHEAP = 0.25  # recomputation that takes less than this share of the copy's time
_HINT = 0.01  # the slowdown that a hint suggests, if it saves at least this share of the peak:
_WORTH = 0.02


@dataclass(frozen=True, slots=True)
class Decided:
    """Actions and reasons in the order of the table; `warnings` are texts for the user, `notes` go into the plan.

    `planned`: by the planner, for a goal; else every action was requested or everything is kept. `release_late`: sources are
    released at the end of forward, whatever the timeline says: graphs before this one keep the link busy.
    """

    actions: tuple[Action, ...]
    reasons: tuple[str, ...]
    keep_timeline: Timeline
    lower_bound_s: float | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    max_inflight_bytes: int | None = None
    lower_bound_peak_bytes: int | None = None
    hint: str = ""
    planned: bool = False
    release_late: bool = False


def decide_actions(analysis: GraphAnalysis, program: Program, goal: Goal) -> Decided:
    """One action for each saved activation of `program`, which is that of `analysis`.

    Raises:
        BudgetError: no plan meets the budget of `goal`.
    """
    table, wanted, hardware = analysis.table, analysis.wanted, analysis.hardware
    config, limits = analysis.request.config, analysis.request.limits
    budget = goal.device_budget_bytes
    keep = simulate(program, ["keep"] * len(program.candidates), hardware)
    warnings = [constraint.warning for constraint in wanted if constraint.warning]
    inflight = config.max_inflight_bytes if isinstance(config.max_inflight_bytes, int) else None
    warnings += _nothing_offloaded(wanted, table, config)
    if goal.explicit:
        wanted = _without_advice(wanted)
    limit = "given" if config.host_budget != "auto" else "memlock" if limits.host_locked else "auto"
    wanted, too_much = _within_host(wanted, table, limits.host_budget_bytes, limit)
    warnings += too_much
    free, program = program, _constrained(program, wanted)
    fits = budget is not None and _fits(program, hardware, budget - limits.reserve_bytes)
    if all(constraint.action is not None for constraint in wanted) and (
        budget is None or fits or all(constraint.binding for constraint in wanted)
    ):
        if config.max_inflight_bytes is None:
            inflight = _window_bytes(program, hardware)
        asked = _as_asked(wanted, "", keep, warnings, inflight)
        return replace(asked, notes=(_FOR_THE_NEXT,)) if is_one_of_many(config, limits) else asked
    if isinstance(goal, KeepIfFits) and budget is None:
        return _as_asked(wanted, "nothing to fit: no device budget on a CPU", keep, warnings, inflight)
    if fits and limits.shared:
        offered = _offload_the_rest(program, wanted, hardware)
        rest, too_much = _within_host(offered, table, limits.host_budget_bytes, limit)
        note = "device_budget is shared with the graphs before this one: from the third step on, what fits of it is not copied"
        return replace(_as_asked(rest, "", keep, [*warnings, *too_much], inflight), notes=(note,), release_late=True)
    if fits:
        kept = _as_asked(wanted, f"fits in {goal}", keep, warnings, inflight)
        return replace(kept, hint=_hint(program, hardware, limits))
    wanted = _without_advice(wanted)
    solution, reasons = _solve(analysis, _constrained(free, wanted), wanted, goal, thorough=analysis.thorough)
    log.debug("the best plan was proposed by %s", solution.solver)
    return Decided(
        actions=solution.actions,
        reasons=reasons,
        keep_timeline=keep,
        lower_bound_s=solution.lower_bound_s,
        lower_bound_peak_bytes=solution.lower_bound_peak_bytes,
        warnings=tuple(warnings),
        max_inflight_bytes=solution.max_inflight_bytes,
        planned=True,
    )


def decide_again(analysis: GraphAnalysis, first: Decided, program: Program, wanted: Sequence[Constraint]) -> Decided:
    """Keep or offload, anew, for what is saved once others are recomputed: only now is it known what that does to memory.

    Args:
        first: the decision about recomputation; a slowdown is relative to its time with everything kept.
        program: the instance after partitioning again. wanted: a constraint for each of its candidates.

    Raises:
        BudgetError: with this recomputation no plan fits.
    """
    wanted = _without_advice(wanted)
    program, goal = _constrained(program, wanted), analysis.request.goal
    if isinstance(goal, WithinSlowdown):
        compute_s = simulate(program, program.keep_actions(), analysis.hardware).time_s
        goal = WithinSlowdown(max(0.0, goal.allowed(first.keep_timeline.time_s, compute_s)))
    wanted = tuple(
        constraint if constraint.action or constraint.why_not_recompute else replace(constraint, why_not_recompute=_NO_GAIN)
        for constraint in wanted
    )
    solution, reasons = _solve(analysis, program, wanted, goal, thorough=False)
    return replace(first, actions=solution.actions, reasons=reasons, max_inflight_bytes=solution.max_inflight_bytes)


def _solve(
    analysis: GraphAnalysis, program: Program, wanted: Sequence[Constraint], goal: Goal, *, thorough: bool
) -> tuple[Solution, tuple[str, ...]]:
    """The planner's solution for what nobody decided, and the reason for each of its actions."""
    solved = goal if isinstance(goal, WithinSlowdown) else MeetBudget(goal.device_budget_bytes or 0)
    window = analysis.request.config.max_inflight_bytes
    least = least_of(analysis.least, program, analysis.hardware)
    solution = solve(
        program,
        analysis.hardware,
        solved,
        host_budget_bytes=analysis.request.limits.host_budget_bytes,
        max_inflight_bytes=window if isinstance(window, int) else None,
        patience=analysis.patience,
        least=least,
        descend=thorough,
        like=None if analysis.outputs_stay else like(analysis.least, least.program),
    )
    return solution, tuple(map(_reason, wanted, solution.actions, solution.reasons))


def _reason(constraint: Constraint, action: Action, planners: str) -> str:
    """The planner's reason if it decided; if it had no choice, the reason for that."""
    if constraint.action == action:
        return constraint.reason
    if constraint.action:
        return f"{constraint.reason} asks to {constraint.action}: {constraint.why_not_recompute or 'impossible here'}"
    if planners != NO_CHOICE:
        return planners
    return f"{constraint.why_not_offload or 'cannot be offloaded'}; {constraint.why_not_recompute or 'cannot be recomputed'}"


def table_again(original: SavedTable, actions: Mapping[str, Action], table: SavedTable) -> SavedTable:
    """The activations that are saved once others are recomputed, with what was known of each before.

    Args:
        actions: decided for the tensors of `original`, by name. table: as partitioned again.
    """
    before = {tensor.name: tensor for tensor in original.tensors}
    tensors = []
    for tensor in table.tensors:
        why = before[tensor.name].why_not_recompute if tensor.name in before else "saved because others are recomputed"
        if actions.get(tensor.name) == "recompute":
            why = Refusal.SAVED_ALL_THE_SAME.because()
        tensors.append(replace(tensor, recomputable=not why, why_not_recompute=why))
    return SavedTable(tuple(tensors))


def actions_again(
    actions: Mapping[str, Action], reasons: Mapping[str, str], table: SavedTable
) -> tuple[dict[str, Action], dict[str, str]]:
    """Actions for `table` (of table_again), and reasons for all tensors, once the chosen ones are recomputed.

    A tensor that is saved nevertheless is kept. A tensor that is not saved any more, without a decision, is recomputed from
    others.
    """
    last: dict[str, Action] = {}
    words = dict(reasons)
    for tensor in table.tensors:
        action = last[tensor.name] = actions.get(tensor.name, "keep")
        why = tensor.why_not_recompute if action == "recompute" else "" if tensor.eligible else tensor.why_not
        if action == "recompute" or (action == "offload" and why):
            last[tensor.name], words[tensor.name] = "keep", why
    for name in actions:
        if name not in last and actions[name] != "recompute":
            words[name] = "torch's partitioner computes it again, with others"
    return last, words


def saved_all_the_same(table: SavedTable, actions: Mapping[str, Action]) -> list[str]:
    """Notes on tensors that were to be recomputed and are in `table` (of table_again) nevertheless, with their final action."""
    became = {"offload": "offloaded"}
    return [
        f"{tensor.name} ({format_bytes(tensor.nbytes)}) of module {tensor.module or 'unknown'!r} could not be recomputed and "
        f"is {became.get(actions[tensor.name], 'kept')}: torch's partitioner saves it"
        for tensor in table.tensors
        if refusal_of(tensor.why_not_recompute) is Refusal.SAVED_ALL_THE_SAME
    ]


def without_recomputation(wanted: Sequence[Constraint], names: Collection[str] | None = None) -> tuple[Constraint, ...]:
    """The same constraints without recomputation that no user requested (of `names`; None: all): partitioning again can take
    more memory than it saves."""
    return tuple(
        replace(
            constraint,
            allowed=tuple(action for action in constraint.allowed if action != "recompute"),
            why_not_recompute=constraint.why_not_recompute or _NO_GAIN,
        )
        if constraint.action is None and (names is None or constraint.name in names)
        else constraint
        for constraint in wanted
    )


def _hint(program: Program, hardware: HardwareProfile, limits: Limits) -> str:
    """A hint about the memory that one percent of the step would save; "" if it is little, or not known at once."""
    saved = saved_within(program, hardware, _HINT, host_budget_bytes=limits.host_budget_bytes)
    worth = simulate(program, program.keep_actions(), hardware).peak_bytes * _WORTH
    return f"max_slowdown={_HINT:g} would save {format_bytes(saved)}" if saved and saved >= worth else ""


def _fits(program: Program, hardware: HardwareProfile, limit_bytes: int) -> bool:
    """Whether nothing needs to change for a peak of at most this."""
    return simulate(program, program.keep_actions(), hardware).peak_bytes <= limit_bytes


def _window_bytes(program: Program, hardware: HardwareProfile) -> int | None:
    """The window of outstanding copies for given actions: the least memory among windows that cost no time.

    If the link is the limit, compute waits for it with or without a window; with one it waits earlier, and memory falls.
    """
    actions = program.keep_actions()
    copied = sum(c.nbytes for c, action in zip(program.candidates, actions, strict=True) if action == "offload")
    best_window, best = None, simulate(program, actions, hardware)
    limit_s = best.time_s * (1.0 + UNMEASURABLE)
    for halvings in range(1, 8):
        window = copied >> halvings
        found = simulate(program, actions, hardware, max_inflight_bytes=window)
        if found.time_s <= limit_s and found.peak_bytes < best.peak_bytes:
            best_window, best = window, found
    return best_window


def _nothing_offloaded(wanted: Sequence[Constraint], table: SavedTable, config: OffloadConfig) -> list[str]:
    """A warning if a policy asks to offload everything, offloads nothing and keeps something."""
    kept = [
        (constraint.why_not_offload or "it cannot be offloaded", tensor.planned_bytes)
        for constraint, tensor in zip(wanted, table.tensors, strict=True)
        if constraint.action == "keep"
    ]
    if config.policy != "offload" or not kept or any(constraint.action == "offload" for constraint in wanted):
        return []
    return [nothing_offloaded(kept, len(table))]


def _without_advice(wanted: Sequence[Constraint]) -> tuple[Constraint, ...]:
    """Constraints for a planner with a goal: it may overrule those that do not bind. MUST_SAVE leaves it the host."""
    return tuple(constraint if constraint.binding else replace(constraint, action=None) for constraint in wanted)


def _constrained(program: Program, wanted: Sequence[Constraint]) -> Program:
    """The instance with each candidate's actions reduced to those that its constraint allows."""
    return replace(program, candidates=tuple(map(_constrain, program.candidates, wanted)))


def _constrain(candidate: Candidate, constraint: Constraint) -> Candidate:
    action = constraint.action
    if action == "recompute" and candidate.recompute is None:
        action = "keep"
    if action == "offload" and not candidate.can_offload:
        action = "keep"
    return replace(
        candidate,
        fixed=action,
        can_offload=candidate.can_offload and (constraint.may_offload or action == "offload"),
        recompute=candidate.recompute if constraint.may_recompute or action == "recompute" else None,
    )


def _as_asked(wanted: Sequence[Constraint], reason: str, keep: Timeline, warnings: list[str], inflight: int | None) -> Decided:
    """The requested actions; undecided activations are kept, for `reason`."""
    actions: tuple[Action, ...] = tuple(constraint.action or "keep" for constraint in wanted)
    reasons = tuple(constraint.reason if constraint.action else reason for constraint in wanted)
    return Decided(actions, reasons, keep, warnings=tuple(warnings), max_inflight_bytes=inflight)


def _offload_the_rest(program: Program, wanted: Sequence[Constraint], hardware: HardwareProfile) -> list[Constraint]:
    """Offload undecided activations, since the other graphs may need the memory; the runtime keeps those that fit.

    A row of such graphs cannot copy more than the link carries while they compute. The rest is recomputed if that is cheap.
    """
    again = _cheaper_than_the_link(program, wanted, hardware)
    reasons: dict[Action, str] = {
        "offload": "the budget is shared by several graphs: goes, or stays where it fits",
        "recompute": "the budget is shared by several graphs, which together would copy more than the link carries",
    }
    result = []
    for number, constraint in enumerate(wanted):
        if constraint.action is None:
            action: Action = "recompute" if number in again else "offload" if constraint.may_offload else "keep"
            why_kept = f"{constraint.why_not_offload or 'cannot be offloaded'}; alone it fits"
            constraint = replace(constraint, action=action, reason=reasons.get(action, why_kept))
        result.append(constraint)
    return result


def _cheaper_than_the_link(program: Program, wanted: Sequence[Constraint], hardware: HardwareProfile) -> set[int]:
    """Candidates to recompute, the least time per byte first, until the link carries the others during forward."""
    carries = sum(step.time_s for step in program.forward) * hardware.copy_rate_bytes_per_s("d2h")
    offered = sum(
        c.nbytes
        for c, constraint in zip(program.candidates, wanted, strict=True)
        if constraint.action is None and c.can_offload
    )
    prices = {
        number: c.recompute.time_s / c.nbytes
        for number, (c, constraint) in enumerate(zip(program.candidates, wanted, strict=True))
        if constraint.action is None and c.recompute is not None and c.nbytes
    }
    chosen: set[int] = set()
    most = _CHEAP / hardware.copy_rate_bytes_per_s("d2h")
    for number in sorted(prices, key=lambda number: prices[number]):
        if offered <= carries or prices[number] > most:
            break
        chosen.add(number)
        offered -= program.candidates[number].nbytes * program.candidates[number].can_offload
    return chosen


def _within_host(
    wanted: Sequence[Constraint], table: SavedTable, budget: int | None, limit: str
) -> tuple[tuple[Constraint, ...], list[str]]:
    """The requested offloads, earliest produced first, until host memory is used up; the others are kept."""
    if budget is None:
        return tuple(wanted), []
    used, refused, result = 0, 0, []
    for constraint, tensor in zip(wanted, table.tensors, strict=True):
        nbytes = tensor.planned_bytes
        if constraint.action == "offload" and used + nbytes > budget:
            refused += nbytes
            constraint = replace(
                constraint, action="keep", reason=f"host memory: {format_bytes(budget)} are used up by what is produced earlier"
            )
        elif constraint.action == "offload":
            used += nbytes
        result.append(constraint)
    if not refused:
        return tuple(result), []
    return tuple(result), [host_full(refused, used, budget, limit)]
