"""The joint timeline in terms of what the runtime can do: it acts where an op of a compiled graph runs, and nowhere else.

    forward of a call    start | .. produced_at | offload x | .. last_forward_use | release x | ..
    backward of a call   start | .. reload x | .. wait x | first use of x | ..

A compiled variant has these ops for what any call of it offloads. An event takes place at its op, for a candidate that stays
in this call as well. Every event says two things of the whole step, not of its own candidate:

    settle      forward: how many copies, in the order in which they are issued, compute has waited for after it
    prefetch    backward: which copies back are started there, of this call or of one whose backward runs later

A release is planned where its copy is done. It takes place at the next event, or at the one before if the memory is needed. A
copy that is covered before its own `release` ran is free right after that. What no event covers is settled when backward
starts. A reload starts at the last event at or before the moment at which it is needed, or at its own op if that is earlier.
All calls of a variant have that op at the same step: the one at which reloads start least too early, in seconds over all calls.

Events at one step have the same count, so their order does not matter. So a copy is settled at a later step than the one it is
issued at. At one step of backward, reloads come before waits, each in the order of the program's candidates.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

from graphoffload.planner.problem import Program
from graphoffload.planner.simulator import Scheduled
from graphoffload.planner.step.facts import StepFacts
from graphoffload.planner.step.joint import Joined
from graphoffload.planner.step.replay import Moments

Event = tuple[str, str]
"""("start", ""), or what an op does and the candidate (name in its variant's program) that it is for."""
ReloadSteps = Mapping[tuple[int, int], Mapping[str, int]]
"""By (graph, variant) and candidate, the step of the variant's own backward before which its reload op stands."""
_KINDS = {"start": 0, "offload": 1, "release": 2, "reload": 1, "wait": 2}


@dataclass(frozen=True, slots=True)
class CallSchedule:
    """What one call does.

    Attributes:
        offloads: candidates, by their name in the variant's program, that this call copies. All others stay.
        settle: for each event of its forward, how many of the step's copies compute has waited for after it, and whose sources
            are free from then on.
        prefetch: for the events of its backward at which copies back start, the (call, candidate name) of each, in order. Every
            copy of the step is in exactly one of these lists, the ones that start at their own reload op included.
        reload_at: step of the variant's backward before which each of its reload ops stands.
    """

    offloads: tuple[str, ...]
    settle: Mapping[Event, int]
    prefetch: Mapping[Event, tuple[tuple[int, str], ...]]
    reload_at: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """The schedule of every call, the places of reload ops, and the same as moments of the joint program."""

    calls: tuple[CallSchedule, ...]
    reload_steps: ReloadSteps
    moments: Moments


@dataclass(frozen=True, slots=True)
class _At:
    """An event where it takes place in the joint program: after so many steps of its half. `order` settles ties."""

    position: int
    order: tuple[int, int, int]
    call: int
    event: Event


def schedule_step(
    facts: StepFacts, chosen: Sequence[int], joined: Joined, planned: Sequence[Scheduled], early: Container[int] = ()
) -> StepSchedule:
    """Releases at the first event at or after where they are planned, reloads at the last at or before.

    Args:
        planned: each transfer of the joint timeline.
        early: candidates that are released at the last event before instead. Compute waits there for their copies.
    """
    offloaded = _offloaded(facts, joined, planned)
    ops = _ops(facts, chosen, offloaded)
    settle, copies, release, counts = _settled(facts, chosen, joined, ops, planned, early)
    reload_steps = _reload_steps(facts, chosen, joined, ops, planned)
    prefetch, reloads = _prefetched(facts, chosen, joined, reload_steps, planned)
    calls = tuple(
        CallSchedule(
            offloads=tuple(offloaded[call]),
            settle=MappingProxyType(settle[call]),
            prefetch=MappingProxyType({event: tuple(started) for event, started in prefetch[call].items()}),
            reload_at=reload_steps[fact.graph, chosen[call]],
        )
        for call, fact in enumerate(facts.calls)
    )
    stays = _stays(facts, chosen, joined, ops, copies)
    return StepSchedule(calls, reload_steps, Moments(copies, counts, release, reloads, drains(facts, chosen, joined), stays))


def _stays(
    facts: StepFacts,
    chosen: Sequence[int],
    joined: Joined,
    ops: Mapping[tuple[int, int], Sequence[int]],
    copies: Sequence[int],
) -> tuple[int, ...]:
    """Candidates with ops that their call does not copy."""
    copied = set(copies)
    named = ((at, ops[facts.calls[call].graph, chosen[call]], index) for at, (call, index) in enumerate(joined.of))
    return tuple(at for at, indices, index in named if at not in copied and index in indices)


def drains(facts: StepFacts, chosen: Sequence[int], joined: Joined) -> tuple[int, ...]:
    """Where each call's backward ends, in order, if the code after it copies as well."""
    if not facts.copies_between:
        return ()
    ends = (len(facts.variant(call, chosen[call]).program.backward) for call in range(len(facts.calls)))
    return tuple(sorted(start + end for start, end in zip(joined.backward_start, ends, strict=True)))


def _offloaded(facts: StepFacts, joined: Joined, planned: Sequence[Scheduled]) -> list[list[str]]:
    """Names that each call offloads, in the order of its program."""
    found: list[list[str]] = [[] for _ in facts.calls]
    for index in sorted(item.candidate for item in planned):
        call = joined.of[index][0]
        found[call].append(_own_name(joined, index))
    return found


def _own_name(joined: Joined, index: int) -> str:
    return joined.program.candidates[index].name.removeprefix(f"call {joined.of[index][0]}: ")


def _ops(facts: StepFacts, chosen: Sequence[int], offloaded: Sequence[Sequence[str]]) -> dict[tuple[int, int], list[int]]:
    """By (graph, variant), candidates that any of its calls offloads, as indices of its program."""
    names: dict[tuple[int, int], set[str]] = {}
    for call, fact in enumerate(facts.calls):
        names.setdefault((fact.graph, chosen[call]), set()).update(offloaded[call])
    return {
        key: [k for k, candidate in enumerate(facts.graphs[key[0]][key[1]].program.candidates) if candidate.name in wanted]
        for key, wanted in names.items()
    }


def _forward_events(
    facts: StepFacts, chosen: Sequence[int], joined: Joined, ops: Mapping[tuple[int, int], Sequence[int]]
) -> list[_At]:
    found: list[_At] = []
    for call, fact in enumerate(facts.calls):
        begin, program = joined.forward_start[call], facts.variant(call, chosen[call]).program
        found.append(_At(begin, (call, 0, 0), call, ("start", "")))
        for index in ops[fact.graph, chosen[call]]:
            candidate = program.candidates[index]
            for kind, step in (("offload", candidate.produced_at), ("release", candidate.last_forward_use)):
                found.append(_At(begin + step + 1, (call, _KINDS[kind], index), call, (kind, candidate.name)))
    return sorted(found, key=lambda at: (at.position, at.order))


def _settled(
    facts: StepFacts,
    chosen: Sequence[int],
    joined: Joined,
    ops: Mapping[tuple[int, int], Sequence[int]],
    planned: Sequence[Scheduled],
    early: Container[int],
) -> tuple[list[dict[Event, int]], tuple[int, ...], dict[int, int | None], tuple[tuple[int, int], ...]]:
    """Counts by call and event, copies in order, the step after which each source is free, and counts by position."""
    events = _forward_events(facts, chosen, joined, ops)
    positions = [at.position for at in events]
    order = sorted(planned, key=lambda item: (item.offload_at, item.candidate))
    covered: dict[int, int] = {}
    for rank, item in enumerate(order):
        if item.release_at is None:
            continue
        place = bisect_left(positions, max(item.release_at, item.offload_at + 1) + 1)
        if item.candidate in early and positions[place : place + 1] != [item.release_at + 1]:
            place -= positions[place - 1] > item.offload_at + 1
        if place < len(positions):
            covered[positions[place]] = rank + 1
    at_most = dict(zip(sorted(covered), accumulate((covered[p] for p in sorted(covered)), max), strict=True))
    counts: list[tuple[int, int]] = []
    settle: list[dict[Event, int]] = [{} for _ in facts.calls]
    count = 0
    for at in events:
        if at.position in at_most and at_most[at.position] > count:
            count = at_most[at.position]
            counts.append((at.position, count))
        settle[at.call][at.event] = count
    copies = tuple(item.candidate for item in order)
    return settle, copies, _released(joined, copies, counts), tuple(counts)


def _released(joined: Joined, copies: Sequence[int], counts: Sequence[tuple[int, int]]) -> dict[int, int | None]:
    """The step after which the source of each copy is free, by the counts that compute has waited for by position."""
    release: dict[int, int | None] = {}
    reached = 0
    for rank, index in enumerate(copies):
        while reached < len(counts) and counts[reached][1] <= rank:
            reached += 1
        last_use = int(joined.program.candidates[index].last_forward_use)
        release[index] = max(counts[reached][0] - 1, last_use) if reached < len(counts) else None
    return release


def _reload_steps(
    facts: StepFacts,
    chosen: Sequence[int],
    joined: Joined,
    ops: Mapping[tuple[int, int], Sequence[int]],
    planned: Sequence[Scheduled],
) -> dict[tuple[int, int], Mapping[str, int]]:
    """The place of every reload op: a step of the variant's backward, at or before the one at which its wait stands."""
    wanted: dict[tuple[int, int, int], list[int]] = {}
    for item in planned:
        call, index = joined.of[item.candidate]
        local = item.reload_at - joined.backward_start[call]
        if local >= 0:
            wanted.setdefault((facts.calls[call].graph, chosen[call], index), []).append(local)
    found: dict[tuple[int, int], Mapping[str, int]] = {}
    for (graph, variant), indices in ops.items():
        program = facts.graphs[graph][variant].program
        sums = list(accumulate((step.time_s for step in program.backward), initial=0.0))
        fixed = sorted({0, *(_wait_step(program, index) for index in indices)})
        steps: dict[str, int] = {}
        for index in indices:
            latest, places = _wait_step(program, index), wanted.get((graph, variant, index), [])
            places = [min(place, latest) for place in places]
            choices = sorted(set(places), reverse=True) or [latest]
            steps[program.candidates[index].name] = min(choices, key=lambda at: _too_early_s(at, places, fixed, sums))
        found[graph, variant] = MappingProxyType(steps)
    return found


def _too_early_s(at: int, places: Sequence[int], fixed: Sequence[int], sums: Sequence[float]) -> float:
    """Seconds by which reloads that are wanted at `places` start early, if the op is at `at` and other events at `fixed`."""
    starts = (at if place >= at else fixed[bisect_right(fixed, place) - 1] for place in places)
    return sum(sums[place] - sums[start] for place, start in zip(places, starts, strict=True))


def _wait_step(program: Program, index: int) -> int:
    """The step of the program's backward before which a wait takes effect: no kernel is interrupted for it."""
    use = program.candidates[index].backward_uses[0]
    return program.reload_steps[use] if program.reload_steps else use


def _backward_events(facts: StepFacts, chosen: Sequence[int], joined: Joined, reload_steps: ReloadSteps) -> list[_At]:
    events: list[_At] = []
    for call, fact in enumerate(facts.calls):
        begin, program = joined.backward_start[call], facts.variant(call, chosen[call]).program
        events.append(_At(begin, (-call, 0, 0), call, ("start", "")))
        ops = reload_steps[fact.graph, chosen[call]]
        for index, candidate in enumerate(program.candidates):
            if candidate.name not in ops:
                continue
            for kind, step in (("reload", ops[candidate.name]), ("wait", _wait_step(program, index))):
                events.append(_At(begin + step, (-call, _KINDS[kind], index), call, (kind, candidate.name)))
    return sorted(events, key=lambda at: (at.position, at.order))


def _prefetched(
    facts: StepFacts, chosen: Sequence[int], joined: Joined, reload_steps: ReloadSteps, planned: Sequence[Scheduled]
) -> tuple[list[dict[Event, list[tuple[int, str]]]], tuple[tuple[int, int], ...]]:
    """What is started at which event, by call; and (position, candidate) of all, in order."""
    events = _backward_events(facts, chosen, joined, reload_steps)
    positions = [at.position for at in events]
    places = {(at.call, at.event): place for place, at in enumerate(events)}
    started: dict[int, list[int]] = {}
    for item in sorted(planned, key=lambda item: (item.wait_at, item.candidate)):
        call, name = joined.of[item.candidate][0], _own_name(joined, item.candidate)
        own = places[call, ("reload", name)]
        place = own if positions[own] <= item.reload_at else max(0, bisect_right(positions, item.reload_at) - 1)
        started.setdefault(place, []).append(item.candidate)
    prefetch: list[dict[Event, list[tuple[int, str]]]] = [{} for _ in facts.calls]
    reloads: list[tuple[int, int]] = []
    for place in sorted(started):
        at = events[place]
        prefetch[at.call][at.event] = [(joined.of[k][0], _own_name(joined, k)) for k in started[place]]
        reloads += [(at.position, k) for k in started[place]]
    return prefetch, tuple(reloads)


def moments_of(
    facts: StepFacts, chosen: Sequence[int], joined: Joined, calls: Sequence[CallSchedule], reload_steps: ReloadSteps
) -> Moments:
    """When what happens in a program of one's own, by the schedule of its calls: the inverse of `schedule_step`.

    Raises:
        KeyError: the schedule names what the program does not have.
    """
    of = {(call, _own_name(joined, index)): index for index, (call, _) in enumerate(joined.of)}
    candidates = joined.program.candidates
    offloaded = [of[at, name] for at, call in enumerate(calls) for name in call.offloads]
    copies = tuple(sorted(offloaded, key=lambda index: (candidates[index].produced_at, index)))
    counts: list[tuple[int, int]] = []
    ops = _ops(facts, chosen, [call.offloads for call in calls])
    for event in _forward_events(facts, chosen, joined, ops):
        count = calls[event.call].settle[event.event]
        if count > (counts[-1][1] if counts else 0):
            counts.append((event.position, count))
    reloads = [
        (event.position, of[item])
        for event in _backward_events(facts, chosen, joined, reload_steps)
        for item in calls[event.call].prefetch.get(event.event, ())
    ]
    if sorted(index for _, index in reloads) != sorted(copies):
        raise KeyError("a copy that does not come back")
    released = _released(joined, copies, counts)
    stays = _stays(facts, chosen, joined, ops, copies)
    return Moments(copies, tuple(counts), released, tuple(reloads), drains(facts, chosen, joined), stays)
