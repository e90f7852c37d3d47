"""Where a step's memory and time go, beside what was predicted: for the day on which a prediction is off.

    python -m graphoffload bench where --model llama4k --variants ours-keep over:11.5GB --out DIR

For each variant: the blocks alive at the measured peak with the generated line that allocated each; the storages alive at the
predicted peak; kernels by measured time; graph operations by predicted time. The generated code is copied to DIR.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import linecache
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from graphoffload.bench import measure, variants
from graphoffload.bench.models import MODELS, build
from graphoffload.bench.options import size_change
from graphoffload.compiler import trial as trials
from graphoffload.errors import ConfigError
from graphoffload.planner.problem import Program
from graphoffload.planner.simulator import Timeline
from graphoffload.runtime import trace_stalls
from graphoffload.torch_internals import allocator, inductor
from graphoffload.torch_internals.patching import replaced

Planned = tuple[Program, list[str], Timeline]


@contextlib.contextmanager
def watch_plans() -> Iterator[list[Planned]]:
    """The program, the actions and the timeline of everything that is scheduled meanwhile."""
    found: list[Planned] = []
    schedule = trials._schedule

    def noting(work: Any, instance: Any, actions: dict[str, Any], decided: Any) -> Timeline:
        timeline = schedule(work, instance, actions, decided)
        found.append((instance.program, [actions[tensor.name] for tensor in work.table.tensors], timeline))
        return timeline

    with replaced(trials, _schedule=noting):
        yield found


def predicted_live(planned: Planned) -> list[tuple[int, str]]:
    """Bytes and name of what is alive at the predicted peak, static bytes left out."""
    program, actions, timeline = planned
    at, steps = timeline.peak_step, len(program.forward)
    live = [(b.nbytes, f"buffer {b.name} [{b.first}, {b.last}]") for b in program.buffers if b.first <= at <= b.last]
    moved = {item.candidate: item for item in timeline.schedule}
    for index, (candidate, action) in enumerate(zip(program.candidates, actions, strict=True)):
        last = steps + candidate.backward_uses[-1] if candidate.backward_uses else candidate.last_forward_use
        over = candidate.overwritten_at if action == "keep" else None
        spans = [(int(candidate.produced_at), last if over is None else steps + over - 1)]
        if action == "offload" and index in moved:
            item = moved[index]
            out = steps - 1 if item.release_at is None else item.release_at
            spans = [(candidate.produced_at, out), (steps + item.reload_at, last)]
        if any(first <= at <= end for first, end in spans):
            live.append((candidate.nbytes, f"{action} {candidate.name} {spans}"))
    return sorted(live, reverse=True)


def live_at_peak(session: measure.Session) -> tuple[int, list[tuple[int, str]], int]:
    """Peak over the bytes before the step, what was alive there, and which change of the allocator's that was."""
    session.step()
    if not allocator.start(frames=True):
        raise ConfigError("What the allocator does is recorded by somebody else already, or this torch cannot record it.")
    try:
        session.step()
    finally:
        changes = allocator.stop(torch.cuda.current_device())
    live: dict[int, allocator.Change] = {}
    total = peak = at = 0
    best: list[allocator.Change] = []
    for number, change in enumerate(changes):
        if change.nbytes > 0:
            live[change.address] = change
            total += change.nbytes
            if total > peak:
                peak, at, best = total, number, list(live.values())
        elif change.address in live:
            total -= live.pop(change.address).nbytes
    return peak, sorted(((change.nbytes, _line(change.frames)) for change in best), reverse=True), at


def _line(frames: Sequence[Mapping[str, Any]]) -> str:
    for frame in frames:
        if "torchinductor" in frame["filename"] or "/inductor" in frame["filename"]:
            text = linecache.getline(frame["filename"], frame["line"]).strip()
            return f"{Path(frame['filename']).stem[:8]}:{frame['line']} {text[:150]}"
    return " < ".join(f"{Path(f['filename']).name}:{f['line']} {f['name']}" for f in frames[:4]) or "no frames"


def kernels(session: measure.Session) -> list[tuple[float, int, str]]:
    """Milliseconds, count and name of the kernels of one step, longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        session.step()
    rows = [(e.device_time_total / 1e3, e.count, e.key) for e in profiler.key_averages()]
    return sorted(rows, reverse=True)


def show(title: str, rows: list[tuple[Any, ...]], limit: int) -> None:
    """The longest rows of a list, counted where they repeat."""
    print(f"  {title}")
    for row in rows[:limit]:
        print("    " + "  ".join(f"{part:.3f}" if isinstance(part, float) else str(part) for part in row))


def run(model: str, name: str, sizes: dict[str, int], out: Path | None, limit: int) -> None:
    """Everything about one variant."""
    torch.compiler.reset()
    with watch_plans() as found:
        workload = build(model, "cuda", sizes)
        measure.materialise_gradients(workload.module)
        session = measure.Session(workload, variants.apply(variants.parse(name), workload, variants.Eligible()))
        measure.warm_up(session, 2)
    peak, live, at = live_at_peak(session)
    sample = session.step()
    print(f"\n{model} {name}: measured peak {peak / 1e9:.3f} GB (max_memory_allocated {(sample.peak_bytes or 0) / 1e9:.3f}), "
          f"event {at}, {sample.step_ms:.1f} ms")  # fmt: skip
    show("alive at the measured peak (bytes, allocated by)", live, limit)
    if found:
        _show_prediction(found[-1], limit)
    with trace_stalls() as stalls:
        session.step()
    print(f"  stalls: {stalls.release_ms:.1f} ms in forward, {stalls.wait_ms:.1f} ms in backward")
    show("stalls, ms", sorted(((ms, name) for name, ms in stalls.by_tensor_ms.items()), reverse=True), 12)
    show("ready before needed, ms", sorted((ms, name) for name, ms in stalls.early_ms.items()), 40)
    show("kernels, ms", [row for row in kernels(session) if row[0] > 0.2], 60)
    session.close()
    measure.tidy()
    if out is not None:
        for path in inductor.written_code():
            if "def call(" in path.read_text():
                shutil.copy(path, out / f"{path.stem[:12]}.py.txt")


def _show_prediction(planned: Planned, limit: int) -> None:
    program, _, timeline = planned
    static = program.static_bytes
    print(f"  predicted peak {(timeline.peak_bytes - static) / 1e9:.3f} GB over static {static / 1e9:.3f} GB at "
          f"{timeline.peak_step} of {len(program.forward)} + {len(program.backward)} "
          f"({program.step_name(timeline.peak_step)}), {timeline.time_s * 1e3:.1f} ms")  # fmt: skip
    show("alive at the predicted peak", predicted_live(planned), limit)
    by_op: dict[str, list[float]] = collections.defaultdict(list)
    for step in (*program.forward, *program.backward):
        by_op[step.name.rstrip("0123456789_")].append(step.time_s * 1e3)
    rows = sorted(((sum(times), len(times), name) for name, times in by_op.items()), reverse=True)
    show("predicted ms by operation", [row for row in rows if row[0] > 0.2], 40)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The tool's options."""
    parser.add_argument("--model", nargs="+", choices=sorted(MODELS), default=["llama4k"])
    parser.add_argument("--variants", nargs="+", default=["ours-keep"])
    parser.add_argument("--size", nargs="*", type=size_change, default=[], metavar="NAME=N", help="change sizes of the model")
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--out", type=Path, default=None, help="folder for the generated code")


def start(given: argparse.Namespace) -> int:
    """One variant after another.

    Raises:
        ConfigError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise ConfigError("where reads the allocator and the kernels of a GPU, and there is none here.")
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "8")
    for model in given.model:
        for name in given.variants:
            run(model, name, dict(given.size), given.out, given.rows)
    return 0
