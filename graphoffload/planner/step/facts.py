"""What is known of one training step: its calls of compiled graphs, what runs between them, and how each graph can be compiled.

    forward    | gap | f0 | gap | f1 | ... | fN | gap (the loss) |
    backward   | bN | gap | ... | b1 | gap | b0 |
    outside    ~~~~~~~ parameters, gradients, optimizer state, what eager code holds: bytes at the start of each call ~~~~~~~

A graph has a few *variants*, each compiled with another set of recomputed activations. Each variant has its own Program, made
after torch partitioned the graph with that recomputation, so its candidates are only kept or offloaded. The variants of a
graph give the same gradients. A call runs one of them.

Bytes outside are measured: what the allocator held when a call started, less what our graphs had saved by then. They contain
the inputs that the variant that ran saves for its backward. Another variant's saved inputs change them by the difference. They
contain what a graph returns, too, until its caller lets go of it; a variant that saves it keeps it until its backward ends.
Wrong when: memory outside rises and falls between two measurements other than in the peak that a gap has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from graphoffload.errors import PlanError
from graphoffload.facts.goals import Goal
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.patience import Patience
from graphoffload.planner.problem import Program


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compile a graph.

    Attributes:
        recomputes: names of the activations of the keep-all graph that its backward computes again.
        program: one call alone. Every buffer ends in the forward or backward that it begins in; static_bytes is 0.
        saved_input_bytes: activations among the graph's inputs that its backward reads. They are its caller's memory, and this
            variant keeps them alive until its backward ends.
        saved_outputs: bytes of each activation that it saves and that the graph returns as well.
        reason: why the graph has this variant.
        bounded: whether all that it does is among what the graph's bound allows.
        slices: of the tokens, in which its MLPs are computed; 0: all at once.
    """

    name: str
    recomputes: frozenset[str]
    program: Program
    saved_input_bytes: int = 0
    saved_outputs: tuple[int, ...] = ()
    reason: str = ""
    bounded: bool = True
    slices: int = 0

    def __post_init__(self) -> None:
        """Refuse a program that is more than one call."""
        forward_steps = len(self.program.forward)
        if self.program.static_bytes or self.program.reserve_bytes:
            held = f"{self.program.static_bytes} static and {self.program.reserve_bytes} reserved bytes"
            raise PlanError(f"variant {self.name!r}: its program has {held}; one call alone has none.")
        for buffer in self.program.buffers:
            if buffer.first < forward_steps <= buffer.last:
                raise PlanError(
                    f"variant {self.name!r}: buffer {buffer.name!r} begins in the forward and ends in the backward."
                )


@dataclass(frozen=True, slots=True)
class Gap:
    """Eager work between two calls. `outside_peak_bytes` is the most memory outside the compiled graphs during it."""

    time_s: float = 0.0
    outside_peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Dropped:
    """Memory of a call's output that nobody held any more at a moment before its backward ended, in the run that was measured.

    Attributes:
        moment: the forwards of all calls count from 0, the backwards from there on in the order in which they run.
        in_gap: whether the highest memory of the gap right before it may have come after it was let go.
    """

    nbytes: int
    moment: int
    in_gap: bool = False


@dataclass(frozen=True, slots=True)
class CallFacts:
    """One call of a compiled graph.

    Attributes:
        graph: index into `StepFacts.graphs`.
        forward_outside_bytes: allocated when its forward starts, other than what compiled graphs saved: parameters, gradients,
            optimizer state, inputs. backward_outside_bytes: the same when its backward starts.
        ran: the variant that ran when this was measured. The bytes outside contain its saved inputs.
        held, held_bytes: its inputs, activations by name, that others hold until its backward: they stay on the device.
        dropped: its outputs that were let go before its backward: the variant that ran does not save them.
        before_forward: from the forward of the call before. before_backward: from the backward of the call after; for the last
            call, from its own forward: the loss.
    """

    graph: int
    forward_outside_bytes: int
    backward_outside_bytes: int
    ran: int = 0
    before_forward: Gap = Gap()
    before_backward: Gap = Gap()
    held: tuple[str, ...] = ()
    held_bytes: int = 0
    dropped: tuple[Dropped, ...] = ()


@dataclass(frozen=True, slots=True)
class Beside:
    """A microbatch beside `others`, which had run their forward and not their backward: bytes outside, as in CallFacts, when
    the forward (or the backward) of each call started."""

    others: int
    outside_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepFacts:
    """A training step.

    Attributes:
        graphs: the variants of each, from the least recomputation (nothing) to the most.
        calls: in the order of their forwards. Backwards run in reverse.
        base_bytes: no call of a graph ever runs with fewer bytes outside.
        bounds: for each graph, the keep-all Program with the chains of what can be recomputed. Empty: not known, and there is
            no lower bound.
        in_flight: microbatches at a time: the step is one's, and others have run their forward when its forward begins. What
            they saved is in no bytes outside. beside_forward, beside_backward: what was seen of each microbatch of a step;
            gradients come between the first and the last. Empty: all run beside all others.
        host_s: what the host took to issue the calls, in the run that was measured; 0.0: not known.
        copies_between: code between the backwards of two calls copies to the device on the compute stream. Such a copy waits
            for all reloads that have started, and compute waits for it (decision 38).
        copy_rates: bytes a second to the host and back that copies of this step reached, where a plan had them faster.
        host_s_per_copy: beside what the hardware's profile has, as it does.
    """

    graphs: tuple[tuple[Variant, ...], ...]
    calls: tuple[CallFacts, ...]
    base_bytes: int = 0
    bounds: tuple[Program, ...] = ()
    in_flight: int = 1
    beside_forward: tuple[Beside, ...] = ()
    beside_backward: tuple[Beside, ...] = ()
    host_s: float = 0.0
    copies_between: bool = False
    copy_rates: tuple[float, float] | None = None
    host_s_per_copy: float = 0.0

    def __post_init__(self) -> None:
        """Refuse indices that point at nothing."""
        if any(not variants for variants in self.graphs):
            raise PlanError("a graph of the step has no variant; each needs at least the one that keeps everything.")
        for index, call in enumerate(self.calls):
            if not 0 <= call.graph < len(self.graphs):
                raise PlanError(f"call {index}: graph {call.graph} of {len(self.graphs)}.")
            if not 0 <= call.ran < len(self.graphs[call.graph]):
                raise PlanError(f"call {index}: variant {call.ran} of {len(self.graphs[call.graph])} ran.")
        if self.bounds and len(self.bounds) != len(self.graphs):
            raise PlanError(f"{len(self.bounds)} bounds for {len(self.graphs)} graphs; give one each or none.")

    @property
    def least_peak_bytes(self) -> int:
        """No plan has a smaller peak: memory outside at its highest, less all inputs that other variants might not save."""
        held = [
            max(call.forward_outside_bytes, call.backward_outside_bytes, gap.outside_peak_bytes)
            for call in self.calls
            for gap in (call.before_forward, call.before_backward)
        ]
        saved = sum(self.variant(index, call.ran).saved_input_bytes for index, call in enumerate(self.calls))
        return max(self.base_bytes, max(held, default=0) - saved)

    @property
    def ran_s(self) -> float:
        """The time of the kernels of the run that was measured."""
        programs = (self.variant(index, call.ran).program for index, call in enumerate(self.calls))
        return sum(step.time_s for program in programs for step in (*program.forward, *program.backward))

    def variant(self, call: int, chosen: int) -> Variant:
        """The variant `chosen` of the graph that a call runs."""
        return self.graphs[self.calls[call].graph][chosen]


def shifted(facts: StepFacts, nbytes: int) -> StepFacts:
    """The same step with this much more outside, throughout; less if negative."""
    if not nbytes:
        return facts

    def beside(found: tuple[Beside, ...]) -> tuple[Beside, ...]:
        return tuple(Beside(one.others, tuple(max(0, each + nbytes) for each in one.outside_bytes)) for one in found)

    calls = tuple(_moved(call, nbytes, nbytes) for call in facts.calls)
    return replace(
        facts,
        calls=calls,
        base_bytes=max(0, facts.base_bytes + nbytes),
        beside_forward=beside(facts.beside_forward),
        beside_backward=beside(facts.beside_backward),
    )


def _moved(call: CallFacts, forward_bytes: int, backward_bytes: int) -> CallFacts:
    """A call with so much more outside in its forward and its backward, and in the gaps before them."""

    def gap(gap: Gap, nbytes: int) -> Gap:
        return replace(gap, outside_peak_bytes=max(0, gap.outside_peak_bytes + nbytes)) if gap.outside_peak_bytes else gap

    return replace(
        call,
        forward_outside_bytes=max(0, call.forward_outside_bytes + forward_bytes),
        backward_outside_bytes=max(0, call.backward_outside_bytes + backward_bytes),
        before_forward=gap(call.before_forward, forward_bytes),
        before_backward=gap(call.before_backward, backward_bytes),
    )


def beside(facts: StepFacts, kept_bytes: int) -> StepFacts:
    """The step of one microbatch beside others that keep so much each: at each call the most of what was seen."""

    def most(found: tuple[Beside, ...], call: int, outside_bytes: int) -> int:
        seen = [one.outside_bytes[call] + one.others * kept_bytes for one in found]
        return max(seen, default=outside_bytes + (facts.in_flight - 1) * kept_bytes) - outside_bytes

    calls = tuple(
        _moved(
            call,
            most(facts.beside_forward, at, call.forward_outside_bytes),
            most(facts.beside_backward, at, call.backward_outside_bytes),
        )
        for at, call in enumerate(facts.calls)
    )
    base = min((min(call.forward_outside_bytes, call.backward_outside_bytes) for call in calls), default=facts.base_bytes)
    return replace(facts, calls=calls, base_bytes=base, in_flight=1, beside_forward=(), beside_backward=())


@dataclass(frozen=True, slots=True)
class StepProblem:
    """A step and what its plan is for: what `plan_step` solves.

    Attributes:
        goal: KeepIfFits without bytes keeps everything; with bytes it is as MeetBudget.
        reserve_bytes: come off a budget; taken_bytes: of them, what is left free since a step took more than predicted.
        host_budget_bytes: of offloaded tensors at one time; None: as many as there are.
        patience: the clock of planning; None: as long as it takes.
        or_least: where no plan is within the budget, the one that takes least is the solution.
    """

    facts: StepFacts
    hardware: HardwareProfile
    goal: Goal
    reserve_bytes: int = 0
    host_budget_bytes: int | None = None
    patience: Patience | None = None
    or_least: bool = False
    taken_bytes: int = 0
