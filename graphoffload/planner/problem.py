"""The instance that is planned: times, bytes and uses by step, without tensors or graphs.

    global step    0 .......... F-1 | F ............. F+B-1
    program order  forward[0..F-1]  | backward[0..B-1]

Steps are graph nodes in the order in which their kernels run, which is not the order of the graph. The objective is time and
the limit is memory at every step, as in Checkmate (Jain et al., MLSys 2020). Offloading is the third action, as in Capuchin
(Peng et al., ASPLOS 2020) and POFO (Beaumont et al., NeurIPS 2021). Checkmate may recompute a value several times; here a
recomputed candidate is computed once, before its first use.

A candidate is one storage that backward may need. Each action gives it another life (= on the device):

    keep       produced_at ==================================== last backward use
    offload    produced_at ==== release          reload ======= last backward use
    recompute  produced_at == last forward use       first use = last backward use

A kernel of the backward may write its result over a kept candidate that it alone reads (`overwritten_at`). The life then ends
right before that kernel, unless a recompute chain reads the candidate as well. A reloaded candidate is never written over: its
wait is an operation that changes it, and Inductor gives away no such buffer.

A candidate need not have backward uses of its own: a block's input that only recompute chains read is one as well. It
costs nothing until a chain reads it. Then it is kept, offloaded or recomputed itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from graphoffload.errors import PlanError
from graphoffload.facts.plan import Action

StepIndex = NewType("StepIndex", int)
"""Index of a step in the order in which the forward or the backward runs. It is no position in a graph (GraphPosition)."""


@dataclass(frozen=True, slots=True)
class Step:
    """One graph node where it runs. `workspace_bytes` live only while it runs, its own candidate outputs not included."""

    name: str
    time_s: float
    workspace_bytes: int = 0

    def __post_init__(self) -> None:
        """Here and not in Program, since a step is made once and is part of hundreds of joint programs."""
        if not (0.0 <= self.time_s < float("inf")) or self.workspace_bytes < 0:
            raise PlanError(
                f"step {self.name!r}: {self.time_s} s and {self.workspace_bytes} B must be finite and at least 0."
            )


@dataclass(frozen=True, slots=True)
class Buffer:
    """Device memory that is no candidate. `first` and `last` are global steps, both inclusive."""

    name: str
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Recompute:
    """The cost of producing a candidate again. `reads` are indices of the candidates that the chain starts from.

    Those must be resident. `temp_bytes` are the chain's intermediates, live only while it runs.
    """

    time_s: float
    reads: tuple[int, ...] = ()
    temp_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """One storage with a choice. `backward_uses` are steps of the backward, sorted; `group` folds repeated layers.

    `overwritten_at`: the first backward step of the kernel that alone reads it and writes its result over it; None: no kernel.
    """

    name: str
    nbytes: int
    produced_at: StepIndex
    last_forward_use: StepIndex
    backward_uses: tuple[StepIndex, ...]
    can_offload: bool = True
    recompute: Recompute | None = None
    fixed: Action | None = None
    group: str = ""
    overwritten_at: StepIndex | None = None

    @property
    def actions(self) -> tuple[Action, ...]:
        """What may happen to it, cheapest to explain first."""
        if self.fixed is not None:
            return (self.fixed,)
        allowed: list[Action] = ["keep"]
        if self.can_offload:
            allowed.append("offload")
        if self.recompute is not None:
            allowed.append("recompute")
        return tuple(allowed)


@dataclass(frozen=True, slots=True)
class Program:
    """One forward and its backward.

    Attributes:
        static_bytes: live throughout. reserve_bytes: come off every budget.
        reload_steps: for each backward step, the step before which a reload for it really runs at the latest. It is an earlier
            one inside a kernel of several steps, which nothing can interrupt. Empty: the step itself.
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    buffers: tuple[Buffer, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    static_bytes: int = 0
    reserve_bytes: int = 0
    reload_steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse an instance that cannot be meant: a wrong index here would be a wrong plan later."""
        steps = len(self.forward) + len(self.backward)
        for buffer in self.buffers:
            if not 0 <= buffer.first <= buffer.last < steps or buffer.nbytes < 0:
                span = f"{buffer.nbytes} B over [{buffer.first}, {buffer.last}]"
                raise PlanError(f"buffer {buffer.name!r}: {span} of {steps} steps.")
        issued = self.reload_steps
        if issued and (len(issued) != len(self.backward) or any(not 0 <= at <= step for step, at in enumerate(issued))):
            count = f"{len(issued)} reload_steps of {len(self.backward)} backward steps"
            raise PlanError(f"{count}: there must be one each, none after its step.")
        for index in range(len(self.candidates)):
            self._check_candidate(index)

    def _check_candidate(self, index: int) -> None:
        candidate = self.candidates[index]
        if not 0 <= candidate.produced_at <= candidate.last_forward_use < len(self.forward) or candidate.nbytes < 0:
            raise PlanError(
                f"candidate {candidate.name!r}: {candidate.nbytes} B produced at {candidate.produced_at}, last used at "
                f"{candidate.last_forward_use} of {len(self.forward)} forward steps."
            )
        uses = candidate.backward_uses
        if list(uses) != sorted(uses) or (uses and not 0 <= uses[0] <= uses[-1] < len(self.backward)):
            raise PlanError(
                f"candidate {candidate.name!r}: uses {uses} are unsorted or outside {len(self.backward)} backward steps."
            )
        over = candidate.overwritten_at
        if over is not None and not (uses and uses[0] <= over <= uses[-1]):
            raise PlanError(f"candidate {candidate.name!r}: overwritten at {over}, which is not within its uses {uses}.")
        possible = {"keep": True, "offload": candidate.can_offload, "recompute": candidate.recompute is not None}
        if candidate.fixed is not None and not possible[candidate.fixed]:
            raise PlanError(f"candidate {candidate.name!r} is fixed to {candidate.fixed!r}, which it cannot do.")
        for read in candidate.recompute.reads if candidate.recompute else ():
            known = 0 <= read < len(self.candidates)
            if not known or (self.candidates[read].produced_at, read) >= (candidate.produced_at, index):
                raise PlanError(f"candidate {candidate.name!r} reads candidate {read}, which is not produced before it.")

    def keep_actions(self) -> list[Action]:
        """Keep all, except what is fixed otherwise."""
        return [candidate.fixed or "keep" for candidate in self.candidates]

    def step_name(self, index: int) -> str:
        """Name of a global step; "end of forward" and "end of backward" for the indices after the last."""
        if index < len(self.forward):
            return self.forward[index].name
        index -= len(self.forward)
        return self.backward[index].name if index < len(self.backward) else "end of backward"
