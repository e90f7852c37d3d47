"""A step with a part of its variants, or with more of them.

    all        keep   light   smallest | blocks | light in slices
    chains     keep   light   smallest               looked at first
    at once    keep   light   smallest | blocks      looked at before slices

A variant is known by its name: its number among a part of them is another one than among all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from graphoffload.planner.step.facts import StepFacts, StepProblem, Variant

Wider = Callable[[], StepFacts]
"""Makes a step with variants in slices as well, which takes long."""


def only(facts: StepFacts, wanted: Callable[[Variant], bool]) -> StepFacts:
    """The step with some of its variants. A call that ran another one ran one of these that kept as much of its inputs."""
    graphs = tuple(tuple(filter(wanted, variants)) for variants in facts.graphs)
    calls = []
    for at, call in enumerate(facts.calls):
        ran, variants = facts.variant(at, call.ran), graphs[call.graph]
        if not wanted(ran):
            ran = min(reversed(variants), key=lambda variant: abs(variant.saved_input_bytes - ran.saved_input_bytes))
        calls.append(replace(call, ran=variants.index(ran)))
    return replace(facts, graphs=graphs, calls=tuple(calls))


def without_slices(facts: StepFacts) -> StepFacts:
    """The step with the variants that compute all tokens at once."""
    return only(facts, lambda variant: not variant.slices)


def widened(problem: StepProblem, wider: Wider | None) -> StepProblem:
    """The problem with the variants in slices as well."""
    return problem if wider is None else replace(problem, facts=wider())


def numbers_in(facts: StepFacts, own: StepFacts, chosen: Sequence[int]) -> tuple[int, ...]:
    """The numbers in a step with all variants of those that were chosen, by call, in a step with a part of them, `own`."""
    names = [[variant.name for variant in variants] for variants in facts.graphs]
    return tuple(names[call.graph].index(own.variant(at, chosen[at]).name) for at, call in enumerate(own.calls))
