"""Half a minute that says whether offloading works on this GPU: two layers of 4096, keep-all and a quarter offloaded, in turn.

    python -m graphoffload bench check

Memory freed against bytes copied, copies beside kernels, the step's time, the host's time for each op, and gradients.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass

import torch

from graphoffload.bench import measure
from graphoffload.bench.measure import Row, Session
from graphoffload.bench.models import build
from graphoffload.bench.overlap import Timeline, profile
from graphoffload.bench.variants import Eligible, apply, parse
from graphoffload.runtime import stats, twin_copies

SIZES = {"layers": 2, "tokens": 16384}
SHARE = 0.25
"""Of the eligible bytes: what overlaps with forward, with room to spare."""
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
    torch.compiler.reset()
    options = "+min_tensor_bytes=0" if tiny else ""
    sessions = []
    for name in ("keep", f"offload:all+offload_fraction={SHARE}{options}"):
        workload = build("stack32k", device, {} if tiny else SIZES, tiny=tiny)
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
    row, before = Row("a quarter offloaded"), stats()
    measure.in_turns([(row, ours)], keep, reference, steps=STEPS, block=5)
    after = stats()
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


def lines_of(found: Measured) -> list[str]:
    """For people."""
    row = found.row
    low, high = row.ratio_interval or (float("nan"), float("nan"))
    freed = found.keep_peak_bytes - (row.peak_bytes or 0)
    host_ms, keep_ms = (statistics.median(s.host_ms for s in samples) for samples in (row.samples, row.baseline))
    said = [f"step: x{row.ratio:.4f} [{low:.4f}-{high:.4f}] of keep-all's, {SHARE:.0%} of the saved bytes offloaded"]
    if row.peak_bytes is not None:
        said.append(f"memory: the peak falls by {freed / 1e9:.3f} GB for {found.copied_bytes / 1e9:.3f} GB copied each way")
    if found.timeline is not None:
        said += found.timeline.lines()
    said.append(f"host: {(host_ms - keep_ms) * 1e3 / max(found.ops, 1):.1f} us an op, {found.ops} ops a step")
    said.append(
        f"gradients: {row.gradient_error:.2g} from keep-all's (two of its own steps {found.repeat_error:.2g}, eager "
        f"{found.eager_error:.2g}), {found.twin_error:.2g} from the same graphs with synchronous copies"
    )
    return said


def arguments(parser: argparse.ArgumentParser) -> None:
    """The tool's options."""
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, where memory and overlap are not measured")


def start(given: argparse.Namespace) -> int:
    """Measure and print; 1 where a gradient is off by more than rounding."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = measure_midsize(device, tiny=given.tiny or device == "cpu")
    print("\n".join(lines_of(found)))
    rounding = max(1e-3, found.eager_error)
    is_right = found.row.gradient_error is not None and found.row.gradient_error <= rounding
    if not is_right or found.twin_error > max(1e-6, 2 * found.repeat_error):
        print(f"WRONG GRADIENTS: more than rounding ({rounding:.2g}) makes of them")
        return 1
    return 0
