"""join(): the Programs of all calls as one larger Program. The simulator, the solvers and the bound work on it as they are.

    forward    [gap][f0 ......][gap][f1 ......][loss]
    backward   [b1 ......][gap][b0 ......]

    outside    |--- segment ---|--- segment ---|      one buffer a stretch of equal bytes, above `base_bytes`
    candidate  "call 1: mm_12" from f1 to b1          its steps are those of its call, shifted

A gap is one step of its time. It is left out where it takes no time and no more memory than the calls around it.
A variant that saves more inputs than the one that was measured adds the difference from its forward's start to its backward's
end. One that saves fewer takes it off from its forward's end, since the caller holds an input while the forward reads it.
One that saves an output which nobody else held for so long adds it from the moment at which it was let go.
Candidates have the variant's own group or name as group, so that equal ones of equal calls are folded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from graphoffload.errors import PlanError
from graphoffload.planner.problem import Buffer, Candidate, Program, Recompute, Step, StepIndex
from graphoffload.planner.step.facts import CallFacts, Dropped, Gap, StepFacts, Variant

_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class Joined:
    """The Program of a step.

    Attributes:
        of: (call, candidate of that call's variant) for each candidate of the program.
        forward_start: step of the joint forward at which each call's own steps begin. backward_start: the same of the backward.
    """

    program: Program
    of: tuple[tuple[int, int], ...]
    forward_start: tuple[int, ...]
    backward_start: tuple[int, ...]

    def call_at(self, step: int) -> int | None:
        """The call that runs at a step of the program, or the last one before it; None before the first one."""
        forward = len(self.program.forward)
        begun, at = (self.forward_start, step) if step < forward else (self.backward_start, step - forward)
        calls = [call for call, start in enumerate(begun) if start <= at]
        return max(calls, key=lambda call: begun[call], default=None)


OUTSIDE = "outside the graphs"
"""Names of buffers that are memory outside begin with this."""
_MOST_PLACES = 20_000
"""That are remembered at once; then all are made again."""


class Pieces:
    """What joins of the same facts have in common: steps, buffers and candidates of a call at one place. They are most of the
    work of a join, and mixes differ in few calls."""

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[object, Any]] = {}

    def of(self, source: object, place: Hashable, make: Callable[[], _Made]) -> _Made:
        """What is made of a program, or of steps, at a place, as it was made before, or now."""
        key = id(source), place
        if key not in self._made:
            if len(self._made) >= _MOST_PLACES:
                self._made.clear()
            self._made[key] = source, make()  # with its source, so that no other one gets that identity
        made: _Made = self._made[key][1]
        return made


@dataclass(slots=True)
class _Line:
    """The steps of one direction, and the bytes outside along them as (steps up to here, bytes, where)."""

    pieces: Pieces
    steps: list[Step] = field(default_factory=list)
    outside: list[tuple[int, int, str]] = field(default_factory=list)

    def add(self, steps: Sequence[Step], outside_bytes: int, where: str) -> int:
        """Append steps at that level; the position of the first."""
        start = len(self.steps)
        self.steps += steps
        if steps:
            self.outside.append((len(self.steps), outside_bytes, where))
        return start

    def call(self, steps: Sequence[Step], outside_bytes: int, call: int, half: str) -> int:
        """Append a call's steps, named after it; the position of the first."""

        def named() -> list[Step]:
            return [Step(f"call {call}: {step.name}", step.time_s, step.workspace_bytes) for step in steps]

        return self.add(self.pieces.of(steps, call, named), outside_bytes, f"{half} of call {call}")

    def gap(self, gap: Gap, around_bytes: int, change_bytes: int, where: str) -> None:
        """Append a gap unless it takes no time and no more memory than its surroundings."""
        peak_bytes = max(around_bytes, gap.outside_peak_bytes + change_bytes if gap.outside_peak_bytes else 0)
        if gap.time_s > 0.0 or peak_bytes > around_bytes:
            self.add((Step(where, gap.time_s),), peak_bytes, where)


def join(facts: StepFacts, chosen: Sequence[int], pieces: Pieces | None = None) -> Joined:
    """The Program of the step in which each call runs the variant that is chosen for it.

    Args:
        pieces: what joins of the same facts have in common; filled here. None: nothing is remembered.

    Raises:
        PlanError: not one variant a call, or one that its graph does not have.
    """
    if len(chosen) != len(facts.calls):
        raise PlanError(f"{len(chosen)} variants are chosen for {len(facts.calls)} calls; give one each, in order.")
    for call, (fact, index) in enumerate(zip(facts.calls, chosen, strict=True)):
        if not 0 <= index < len(facts.graphs[fact.graph]):
            raise PlanError(f"call {call}: variant {index} of {len(facts.graphs[fact.graph])} is chosen.")
    return join_programs(facts, [facts.variant(call, index) for call, index in enumerate(chosen)], pieces)


def join_programs(facts: StepFacts, variants: Sequence[Variant], pieces: Pieces | None = None) -> Joined:
    """As `join`, of a variant for each call that need not be one of its graph's."""
    pieces = Pieces() if pieces is None else pieces
    forward, backward, outputs = _Line(pieces), _Line(pieces), _Outputs(facts, variants)
    forward_start = _forward(facts, variants, outputs, forward)
    backward_start = _backward(facts, variants, outputs, backward)
    candidates: list[Candidate] = []
    of: list[tuple[int, int]] = []
    buffers = _outside(forward, facts.base_bytes, 0) + _outside(backward, facts.base_bytes, len(forward.steps))
    reload_steps: list[int] = list(range(len(backward.steps)))
    for call, variant in enumerate(variants):
        program, begin, end = variant.program, forward_start[call], backward_start[call]
        for half, start, make in (
            ("forward", begin, _buffers_of_forward),
            ("backward", len(forward.steps) + end, _buffers_of_backward),
        ):
            buffers += pieces.of(program, (half, call, start), partial(make, program, call, start))
        place = call, begin, end, len(candidates)
        candidates += pieces.of(program, place, partial(_candidates, program, facts.calls[call], *place))
        of += [(call, index) for index in range(len(program.candidates))]
        reload_steps[end : end + len(program.reload_steps)] = [end + step for step in program.reload_steps]
    joint = Program(
        forward=tuple(forward.steps),
        backward=tuple(backward.steps),
        buffers=tuple(buffers),
        candidates=tuple(candidates),
        static_bytes=facts.base_bytes,
        reload_steps=tuple(reload_steps) if any(variant.program.reload_steps for variant in variants) else (),
    )
    return Joined(joint, tuple(of), tuple(forward_start), tuple(backward_start))


def _saved_more(facts: StepFacts, variants: Sequence[Variant], call: int) -> int:
    """Bytes of inputs that a call's variant saves more than the one that was measured; negative: fewer. What others hold is
    outside where the variant does not save it."""
    variant, fact = variants[call], facts.calls[call]
    more = variant.saved_input_bytes - facts.variant(call, fact.ran).saved_input_bytes
    if fact.held:
        more += fact.held_bytes - sum(c.nbytes for c in variant.program.candidates if c.name in fact.held)
    return more


class _Outputs:
    """Outputs that calls save and nobody else holds, each from the moment at which it was let go to its call's backward."""

    def __init__(self, facts: StepFacts, variants: Sequence[Variant]) -> None:
        self._found: list[tuple[int, int, Dropped]] = []
        for call, (fact, variant) in enumerate(zip(facts.calls, variants, strict=True)):
            sizes = list(variant.saved_outputs) if fact.dropped else []
            for one in fact.dropped:
                if one.nbytes in sizes:
                    sizes.remove(one.nbytes)
                    self._found.append((one.moment, 2 * len(facts.calls) - 1 - call, one))

    def at(self, moment: int) -> int:
        """Bytes while a call runs."""
        return sum(one.nbytes for first, last, one in self._found if first <= moment <= last)

    def before(self, moment: int) -> int:
        """Bytes in the gap before it."""
        return sum(one.nbytes for first, last, one in self._found if first + (not one.in_gap) <= moment <= last)


def _forward(facts: StepFacts, variants: Sequence[Variant], outputs: _Outputs, line: _Line) -> list[int]:
    """Fill the forward; where each call begins."""
    starts: list[int] = []
    change = around = 0
    for call, fact in enumerate(facts.calls):
        more = _saved_more(facts, variants, call)
        own = max(facts.base_bytes, fact.forward_outside_bytes + change + max(0, more) + outputs.at(call))
        line.gap(fact.before_forward, max(around, own), change + outputs.before(call), f"before forward of call {call}")
        starts.append(line.call(variants[call].program.forward, own, call, "forward"))
        change, around = change + more, own
    if facts.calls:
        last, turn = facts.calls[-1], len(facts.calls)
        around = max(around, facts.base_bytes, last.backward_outside_bytes + change + outputs.at(turn))
        line.gap(last.before_backward, around, change + outputs.before(turn), "between forward and backward")
    return starts


def _backward(facts: StepFacts, variants: Sequence[Variant], outputs: _Outputs, line: _Line) -> list[int]:
    """Fill the backward; where each call begins, by call."""
    starts = [0] * len(facts.calls)
    change = sum(_saved_more(facts, variants, call) for call in range(len(facts.calls)))
    around, moment = 0, len(facts.calls) - 1
    for call in reversed(range(len(facts.calls))):
        fact, moment = facts.calls[call], moment + 1
        own = max(facts.base_bytes, fact.backward_outside_bytes + change + outputs.at(moment))
        if call < len(facts.calls) - 1:
            more = change + outputs.before(moment)
            line.gap(fact.before_backward, max(around, own), more, f"before backward of call {call}")
        starts[call] = line.call(variants[call].program.backward, own, call, "backward")
        change, around = change - _saved_more(facts, variants, call), own
    return starts


def _outside(line: _Line, base_bytes: int, offset: int) -> list[Buffer]:
    """One buffer a stretch of steps with equally many bytes outside."""
    found: list[Buffer] = []
    begin = 0
    for index, (end, nbytes, where) in enumerate(line.outside):
        if index + 1 < len(line.outside) and line.outside[index + 1][1] == nbytes:
            continue
        if nbytes > base_bytes:
            found.append(Buffer(f"{OUTSIDE}, {where}", nbytes - base_bytes, offset + begin, offset + end - 1))
        begin = end
    return found


def _buffers_of_forward(program: Program, call: int, start: int) -> list[Buffer]:
    """The buffers of a call that exist from its forward, which begins at a step."""
    return [_moved(buffer, call, start) for buffer in program.buffers if buffer.first < len(program.forward)]


def _buffers_of_backward(program: Program, call: int, start: int) -> list[Buffer]:
    """The buffers of a call that exist from its backward, which begins at a step of the whole program."""
    steps = len(program.forward)
    return [_moved(buffer, call, start - steps) for buffer in program.buffers if buffer.first >= steps]


def _moved(buffer: Buffer, call: int, shift: int) -> Buffer:
    return Buffer(f"call {call}: {buffer.name}", buffer.nbytes, buffer.first + shift, buffer.last + shift)


def _candidates(program: Program, fact: CallFacts, call: int, begin: int, end: int, first: int) -> list[Candidate]:
    """The candidates of a call. first: how many of the step's are before them."""
    label = f"graph {fact.graph}: "
    return [_shifted(c, call, label, begin, end, first, is_held=c.name in fact.held) for c in program.candidates]


def _shifted(
    candidate: Candidate, call: int, label: str, forward_start: int, backward_start: int, first: int, *, is_held: bool
) -> Candidate:
    """A candidate of a call in the step's program. is_held: others hold its memory, so it can only be kept."""
    chain, over = candidate.recompute, candidate.overwritten_at
    return Candidate(
        name=f"call {call}: {candidate.name}",
        nbytes=candidate.nbytes,
        produced_at=StepIndex(candidate.produced_at + forward_start),
        last_forward_use=StepIndex(candidate.last_forward_use + forward_start),
        backward_uses=tuple(StepIndex(use + backward_start) for use in candidate.backward_uses),
        can_offload=candidate.can_offload and not is_held,
        recompute=Recompute(chain.time_s, tuple(first + k for k in chain.reads), chain.temp_bytes) if chain else None,
        fixed=candidate.fixed,
        group=label + ("held " if is_held else "") + (candidate.group or candidate.name),
        overwritten_at=None if over is None else StepIndex(over + backward_start),
    )
