"""From constraints and limits to one action for every saved activation, each with its reason.

every constraint given          nothing to plan: the constraints, as far as the host's memory goes
a slowdown given          the planner, for the most memory it buys
a budget, or "auto"       keep all where that fits; the planner where it does not
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from graphoffload.compiler.constraints import Constraint
from graphoffload.facts.limits import Limits
from graphoffload.facts.plan import Action
from graphoffload.facts.remedies import host_full, nothing_offloaded
from graphoffload.facts.saved_tensors import SavedTable
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.monitor.shared_budget import is_one_of_many
from graphoffload.options.config import OffloadConfig
from graphoffload.planner.goals import Goal, MeetBudget, WithinSlowdown
from graphoffload.planner.hint import saved_within
from graphoffload.planner.problem import Candidate, Program
from graphoffload.planner.reasons import NO_CHOICE
from graphoffload.planner.simulator import Timeline, simulate
from graphoffload.planner.solver import Solution, solve
from graphoffload.units import format_bytes

UNMEASURABLE = 0.005
"""Share of a step below which its time does not repeat: what costs less is free."""
_NO_GAIN = "recomputing it would not pay"
_SAVED_ALL_THE_SAME = "torch's partitioner saves it, though it was to be recomputed"
_FOR_THE_NEXT = (
    "runs behind other graphs: copies are left to the next one, and where this one is the last of a forward its tensors stay; "
    "both as far as max_inflight_bytes allows (None: what the largest graph offloads, up to a quarter of all)"
)
_CHEAP = 0.25  # recomputation that takes less than this share of the copy's time
_HINT = 0.01  # the slowdown that a hint speaks of, where it saves at least this share of the peak:
_WORTH = 0.02


@dataclass(frozen=True, slots=True)
class Decided:
    """Actions and reasons in the order of the table; `warnings` are texts for the user, `notes` go into the plan.

    `planned`: by the planner, for a goal; else every action was asked for or everything is kept. `release_late`: sources are
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


def with_noise(config: OffloadConfig) -> OffloadConfig:
    """A slowdown that nobody could measure counts as none: max_slowdown=0.0 allows that much."""
    if config.max_slowdown is None or config.max_slowdown >= UNMEASURABLE:
        return config
    return replace(config, max_slowdown=UNMEASURABLE)


def decide_actions(
    program: Program,
    table: SavedTable,
    wanted: Sequence[Constraint],
    config: OffloadConfig,
    limits: Limits,
    hardware: HardwareProfile,
) -> Decided:
    """One action for each saved activation.

    Raises:
        BudgetError: no plan fits `limits.device_budget_bytes`.
    """
    keep = simulate(program, ["keep"] * len(program.candidates), hardware)
    warnings = [constraint.warning for constraint in wanted if constraint.warning]
    inflight = config.max_inflight_bytes if isinstance(config.max_inflight_bytes, int) else None
    warnings += _nothing_offloaded(wanted, table, config)
    if limits.explicit:
        wanted = _without_advice(wanted)
    limit = "given" if config.host_budget != "auto" else "memlock" if limits.host_locked else "auto"
    wanted, too_much = _within_host(wanted, table, limits.host_budget_bytes, limit)
    warnings += too_much
    free, program = program, _constrained(program, wanted)
    if all(constraint.action is not None for constraint in wanted) and (
        limits.device_budget_bytes is None
        or all(constraint.binding for constraint in wanted)
        or _fits(program, hardware, limits)
    ):
        if config.max_inflight_bytes is None:
            inflight = _window_bytes(program, hardware)
        asked = _as_asked(wanted, "", keep, warnings, inflight)
        return replace(asked, notes=(_FOR_THE_NEXT,)) if is_one_of_many(config, limits) else asked
    budget = limits.device_budget_bytes
    if config.max_slowdown is None and budget is None:
        return _as_asked(wanted, "nothing to fit: no device budget on a CPU", keep, warnings, inflight)
    if config.max_slowdown is None and limits.shared and _fits(program, hardware, limits):
        offered = _offload_the_rest(program, wanted, hardware)
        rest, too_much = _within_host(offered, table, limits.host_budget_bytes, limit)
        note = "device_budget is shared with the graphs before this one: from the third step on, what fits of it is not copied"
        return replace(_as_asked(rest, "", keep, [*warnings, *too_much], inflight), notes=(note,), release_late=True)
    if config.max_slowdown is None and _fits(program, hardware, limits):
        kept = _as_asked(wanted, f"fits in {format_bytes(budget)}", keep, warnings, inflight)
        return replace(kept, hint=_hint(program, hardware, limits))
    goal = MeetBudget(budget or 0) if config.max_slowdown is None else WithinSlowdown(config.max_slowdown)
    wanted = _without_advice(wanted)
    solution, reasons = _solve(_constrained(free, wanted), wanted, goal, config, limits, hardware)
    return Decided(
        actions=solution.actions,
        reasons=reasons,
        keep_timeline=keep,
        lower_bound_s=solution.lower_bound_s,
        lower_bound_peak_bytes=solution.lower_bound_peak_bytes,
        notes=(f"planned by {solution.solver}",),
        warnings=tuple(warnings),
        max_inflight_bytes=solution.max_inflight_bytes,
        planned=True,
    )


def decide_again(
    first: Decided,
    program: Program,
    wanted: Sequence[Constraint],
    config: OffloadConfig,
    limits: Limits,
    hardware: HardwareProfile,
) -> Decided:
    """Keep or offload, anew, for what is saved once others are recomputed: only now is it known what that does to memory.

    Args:
        first: what decided the recomputation; its time with everything kept is what a slowdown is relative to.
        program: the instance after partitioning again. wanted: a constraint for each of its candidates.

    Raises:
        BudgetError: with this recomputation no plan fits.
    """
    wanted = _without_advice(wanted)
    program = _constrained(program, wanted)
    goal: Goal = MeetBudget(limits.device_budget_bytes or 0)
    if config.max_slowdown is not None:
        compute_s = simulate(program, program.keep_actions(), hardware).time_s
        limit_s = (1.0 + config.max_slowdown) * first.keep_timeline.time_s
        goal = WithinSlowdown(max(0.0, limit_s / compute_s - 1.0))
    wanted = tuple(
        constraint if constraint.action or constraint.why_not_recompute else replace(constraint, why_not_recompute=_NO_GAIN)
        for constraint in wanted
    )
    solution, reasons = _solve(program, wanted, goal, config, limits, hardware)
    return replace(first, actions=solution.actions, reasons=reasons, max_inflight_bytes=solution.max_inflight_bytes)


def _solve(
    program: Program, wanted: Sequence[Constraint], goal: Goal, config: OffloadConfig, limits: Limits, hardware: HardwareProfile
) -> tuple[Solution, tuple[str, ...]]:
    """The planner's solution for what nobody decided, and the reason for each of its actions."""
    inflight = config.max_inflight_bytes if isinstance(config.max_inflight_bytes, int) else None
    given = {"host_budget_bytes": limits.host_budget_bytes, "max_inflight_bytes": inflight}
    solution = solve(program, hardware, goal, **given, patience=limits.patience)
    return solution, tuple(map(_reason, wanted, solution.actions, solution.reasons))


def _reason(constraint: Constraint, action: Action, planners: str) -> str:
    """The planner's reason, where it was asked; where it had no choice, what took it."""
    if constraint.action == action:
        return constraint.reason
    if constraint.action:
        return f"{constraint.reason} asks to {constraint.action}: {constraint.why_not_recompute or 'impossible here'}"
    if planners != NO_CHOICE:
        return planners
    return f"{constraint.why_not_offload or 'cannot be offloaded'}; {constraint.why_not_recompute or 'cannot be recomputed'}"


def table_again(original: SavedTable, actions: Mapping[str, Action], table: SavedTable) -> SavedTable:
    """What is saved once others are recomputed, with what is known of each tensor from before.

    Args:
        actions: decided for the tensors of `original`, by name. table: as partitioned again.
    """
    before = {tensor.name: tensor for tensor in original.tensors}
    tensors = []
    for tensor in table.tensors:
        why = before[tensor.name].why_not_recompute if tensor.name in before else "saved because others are recomputed"
        if actions.get(tensor.name) == "recompute":
            why = _SAVED_ALL_THE_SAME
        tensors.append(replace(tensor, recomputable=not why, why_not_recompute=why))
    return SavedTable(tuple(tensors))


def actions_again(
    actions: Mapping[str, Action], reasons: Mapping[str, str], table: SavedTable
) -> tuple[dict[str, Action], dict[str, str]]:
    """Actions for `table` (of table_again), and reasons for all tensors, once those decided to be are recomputed.

    What is saved after all is kept. What is not saved any more, though nobody chose that, is computed again from the others.
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
    """Notes on what was to be recomputed and is in `table` (of table_again) after all: what became of each in the end."""
    became = {"offload": "offloaded"}
    return [
        f"{tensor.name} ({format_bytes(tensor.nbytes)}) of module {tensor.module or 'unknown'!r} could not be recomputed and "
        f"is {became.get(actions[tensor.name], 'kept')}: torch's partitioner saves it"
        for tensor in table.tensors
        if tensor.why_not_recompute == _SAVED_ALL_THE_SAME
    ]


def without_recomputation(wanted: Sequence[Constraint], names: Collection[str] | None = None) -> tuple[Constraint, ...]:
    """The same constraints without recomputation that nobody asked for (of `names`; None: all): partitioning again can
    take more memory than it saves."""
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
    """What one percent of the step would buy; "" when that is not much, or not known at once."""
    saved = saved_within(program, hardware, _HINT, host_budget_bytes=limits.host_budget_bytes)
    worth = simulate(program, program.keep_actions(), hardware).peak_bytes * _WORTH
    return f"max_slowdown={_HINT:g} would save {format_bytes(saved)}" if saved and saved >= worth else ""


def _fits(program: Program, hardware: HardwareProfile, limits: Limits) -> bool:
    """Whether nothing needs to change for the budget, with the reserve left free."""
    assert limits.device_budget_bytes is not None
    peak_bytes = simulate(program, program.keep_actions(), hardware).peak_bytes
    return peak_bytes + limits.reserve_bytes <= limits.device_budget_bytes


def _window_bytes(program: Program, hardware: HardwareProfile) -> int | None:
    """The window of outstanding copies for actions that are given: the least memory among those that cost no time.

    Where the link is what limits, compute waits for it with or without a window; with one it waits earlier, and memory falls.
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
    """A policy that asks to offload everything, offloads nothing and keeps something says so."""
    kept = [
        (constraint.why_not_offload or "it cannot be offloaded", tensor.planned_bytes)
        for constraint, tensor in zip(wanted, table.tensors, strict=True)
        if constraint.action == "keep"
    ]
    if config.policy != "offload" or not kept or any(constraint.action == "offload" for constraint in wanted):
        return []
    return [nothing_offloaded(kept, len(table))]


def _without_advice(wanted: Sequence[Constraint]) -> tuple[Constraint, ...]:
    """Constraints for a planner that has a number to meet: it may overrule what does not bind. MUST_SAVE leaves it the host."""
    return tuple(constraint if constraint.binding else replace(constraint, action=None) for constraint in wanted)


def _constrained(program: Program, wanted: Sequence[Constraint]) -> Program:
    """The instance with each candidate's choices cut down to what is asked for it."""
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
    """What was asked for; for `reason` what nobody decided is kept."""
    actions: tuple[Action, ...] = tuple(constraint.action or "keep" for constraint in wanted)
    reasons = tuple(constraint.reason if constraint.action else reason for constraint in wanted)
    return Decided(actions, reasons, keep, warnings=tuple(warnings), max_inflight_bytes=inflight)


def _offload_the_rest(program: Program, wanted: Sequence[Constraint], hardware: HardwareProfile) -> list[Constraint]:
    """What nobody decided goes, for the other graphs may need the memory; the runtime lets stay what fits.

    A row of such graphs cannot copy more than the link carries while they compute: the rest is recomputed where that is cheap.
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
    """Candidates to recompute, the cheapest by the byte first, until the link carries the others during forward."""
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
    """Offloads asked for, earliest produced first, until the host's memory is used up; the others are kept."""
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
