"""One measurement that several tests look at: two layers of the real width, keep-all and a quarter offloaded, in turn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gpu import measure
from gpu.measure import Row, Session
from gpu.models import build
from gpu.overlap import Timeline, profile
from gpu.variants import Eligible, apply, parse

import graphoffload
from graphoffload.runtime import twin_copies

SIZES = {"layers": 2, "tokens": 16384}
SHARE = 0.25
"""Of the eligible bytes: what hides behind forward, with room to spare."""
STEPS = 20


@dataclass
class Measured:
    """What came out. `ops` is the number of graphoffload's ops in a step; `timeline` is None without a GPU.

    Gradient errors: `repeat_error` of two keep-all steps, `eager_error` of eager, both against keep-all; `twin_error` of ours
    against the same graphs with synchronous copies.
    """

    row: Row
    timeline: Timeline | None
    keep_peak_bytes: int
    copied_bytes: int
    ops: int
    repeat_error: float
    eager_error: float
    twin_error: float


def measure_midsize(device: str, *, tiny: bool = False) -> Measured:
    """Half a minute to compile each side, 100 ms a step."""
    torch._dynamo.reset()
    options = "+min_tensor_bytes=0" if tiny else ""
    sessions = []
    for name in ("keep", f"offload:all+offload_fraction={SHARE}{options}"):
        workload = build("stack32k", device, tiny=tiny, **({} if tiny else SIZES))
        measure.materialise_gradients(workload.module)
        sessions.append(Session(workload, apply(parse(name), workload, Eligible())))
        measure.warm_up(sessions[-1])
    keep, ours = sessions
    peak = max(s.peak_bytes or 0 for s in [keep.step() for _ in range(3)])
    reference = keep.gradients()
    keep.step()
    repeat_error = keep.check(reference, 0.0).error
    with torch.compiler.set_stance("force_eager"):
        keep.step()
    eager_error = keep.check(reference, 0.0).error
    measure.tidy()
    row, before = Row("a quarter offloaded"), graphoffload.stats()
    measure.in_turns([(row, ours)], keep, reference, steps=STEPS, block=5)
    after = graphoffload.stats()
    found = ours.gradients()
    with twin_copies():
        ours.step()
    twin_error = ours.check(found, 0.0).error
    result = Measured(
        row=row,
        timeline=profile(ours.step) if device == "cuda" else None,
        keep_peak_bytes=peak,
        copied_bytes=(after["d2h_bytes"] - before["d2h_bytes"]) // STEPS,
        ops=4 * (after["offloads"] - before["offloads"]) // STEPS,
        repeat_error=repeat_error,
        eager_error=eager_error,
        twin_error=twin_error,
    )
    for session in sessions:
        session.close()
    measure.tidy()
    return result
