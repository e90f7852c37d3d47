"""What recomputation costs, as far as a trial has shown it.

    chosen among    a chain's own operations, as the forward ran them: 0.1 ms for a group norm of 256 MiB
    the trial       the graph partitioned again: its kernels read the chain's sources once more, others fuse less: 0.4 ms

The dearer of the two is what runs. A chain that looks free is chosen over a copy that hides, so the choice is made once more
with the price of the trial. Copies must then hide with time to spare: kernels that are shorter in a step than they are alone,
as convolutions are where no products of matrices heat the GPU, leave less time than planned, and compute waits for the rest.
"""

from __future__ import annotations

from dataclasses import replace

from graphoffload.analysis.program import Instance
from graphoffload.compiler.request import GraphAnalysis
from graphoffload.compiler.trial import Trial
from graphoffload.planner.arrays import arrays_of
from graphoffload.planner.problem import Candidate

_DEARER = 1.25
_LINK = 0.8


def at_prices_of(trial: Trial, instance: Instance) -> Instance | None:
    """`instance`, from which `trial` was chosen, with every chain dearer by the factor that its own turned out to be; None if
    they cost about what was estimated."""
    saved = {tensor.name for tensor in trial.analysis.table.tensors}
    again = [one.recompute.time_s for one in instance.program.candidates if one.recompute and one.name not in saved]
    own, then = (arrays_of(of.program, trial.analysis.hardware) for of in (instance, trial.instance))
    estimated_s, taken_s = sum(again), then.compute_s - own.compute_s
    if estimated_s <= 0.0 or taken_s <= _DEARER * estimated_s:
        return None
    candidates = tuple(_dearer(candidate, taken_s / estimated_s) for candidate in instance.program.candidates)
    return replace(instance, program=replace(instance.program, candidates=candidates))


def with_time_to_spare(analysis: GraphAnalysis) -> GraphAnalysis:
    """`analysis` with a link that is a fifth slower."""
    link = ("d2h_bytes_per_s", "h2d_bytes_per_s", "both_ways_bytes_per_s")
    slower = {rate: _LINK * value for rate in link if (value := getattr(analysis.hardware, rate)) is not None}
    return replace(analysis, hardware=replace(analysis.hardware, **slower))


def _dearer(candidate: Candidate, factor: float) -> Candidate:
    if candidate.recompute is None:
        return candidate
    return replace(candidate, recompute=replace(candidate.recompute, time_s=factor * candidate.recompute.time_s))
