"""The longest sequence that trains on one GPU of a given size, and how fast: keep-all, checkpointing, rivals, graphoffload.

    python examples/longest.py --tiny                               # a CPU: one length for each method, shows that it runs
    python examples/longest.py --model llama4k --gib 24 --predict   # a CPU: where to begin, from plans alone
    python examples/longest.py --model llama4k --gib 24 --guess keep=8192,checkpoint=40960,auto=57344 --out out.json
    python examples/longest.py --gib 24 --methods tiled/hf-checkpoint-offload,auto,tiled:32768/auto   # MLPs in slices of tokens
    python examples/longest.py --model llama3-8b-lora --size bits=4 --gib 24 --methods hf-checkpoint-offload,auto    # QLoRA

A search begins at the length that a plan made on the meta device predicts (see `foresee`), or at --guess, and goes up or down
from there until a length that trains and the next --grain that does not are both seen. Each attempt is a fresh model, batch 1,
in a process held to --gib of device memory; one fails that runs out of it, or whose plan says that it cannot fit. A method is
a variant of the bench (`bench --list`), or auto: graphoffload with the whole of that memory. One that fails otherwise, because
its package is not installed for example, is a row with the reason.

All methods train the same thing: no sequence is packed, so attention is causal without a mask of (tokens, tokens), which
Transformers gives a model compiled whole (docs/training.md); and the loss is taken --loss-chunk tokens at a time.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import graphoffload
from graphoffload.bench import measure, results, tiled
from graphoffload.bench.models import MODELS, Workload, build, lengthened
from graphoffload.bench.variants import Eligible, apply, layers_of, parse, wrap_blocks
from graphoffload.errors import BudgetError, GraphOffloadError, HostMemoryError, LargeSlowdownWarning

GIB = 80.0  # of device memory, where nothing else is said
MARGIN = 0.02  # of the device, left by plans of one graph with device_budget="auto"
STEPS_TO_PLAN = 3  # where blocks are compiled one by one: two are recorded, the third is planned
ANY_TIME = 1e6  # max_slowdown of a plan that is to be small at any price


@dataclass(frozen=True)
class Tried:
    """One length under one method. `tokens_per_s` is None when it did not fit; `why` says what failed."""

    method: str
    tokens: int
    tokens_per_s: float | None
    step_ms: float | None = None
    steps: int = 0
    peak_bytes: int | None = None
    why: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Foreseen:
    """What plans say of one method: its longest sequence, and the peak and step time there."""

    method: str
    tokens: int
    peak_bytes: int
    step_s: float


class OutOfTime(Exception):
    """The next length would not be done within the method's time, or the call's."""


class Broken(Exception):
    """A method failed for another reason than its length."""


# What is trained


def workload_of(tokens: int, device: str, given: argparse.Namespace) -> Workload:
    """The model with one sequence of this length."""
    workload = build(given.model, device, {**given.size, "tokens": tokens, "batch": 1}, tiny=given.tiny)
    return lengthened(workload, given.loss_chunk) if workload.hugging_face else workload


# What plans say before anything runs


def foresee(method: str, tokens: int, given: argparse.Namespace) -> Foreseen:
    """Peak and step time at one length, traced on the meta device; for graphoffload the least peak that any plan has.

    Peaks count gradients, which live between steps. Times are a rough guide: a plan of least peak takes longer than one for a
    budget.
    """
    workload = workload_of(tokens, "meta", given)
    variant = parse(method)
    if variant.tile:
        tiled.tile_mlps(layers_of(workload), variant.tile)
    if variant.kind == "checkpoint":
        wrap_blocks(workload, selective=False)
    options: dict[str, Any] = {"max_slowdown": ANY_TIME} if variant.ours else {"policy": "keep"}
    if variant.ours and given.host_gib:
        options["host_budget"] = f"{given.host_gib}GiB"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LargeSlowdownWarning)
        config = graphoffload.OffloadConfig(hardware=given.hardware, reserve=0, **options)
        report = graphoffload.explain(workload.module, config)(**workload.batch, **workload.constants)
    gradients = sum(p.numel() * p.element_size() for p in workload.module.parameters() if p.requires_grad)
    step_s = sum(plan.prediction.predicted_time_s for plan in report.plans)
    return Foreseen(method, tokens, report.predicted_peak_bytes + gradients, step_s)


def cross(peak: Callable[[int], int], cap: int, *, first: int, grain: int, limit: int, looks: int = 4) -> int:
    """The multiple of `grain` in [grain, limit] at which `peak` meets `cap`, by the secant method in at most `looks` calls.

    The second length is where bytes in proportion to tokens would meet it. A peak is linear only where the same moment of the
    step is the highest and host memory lasts, so lines are read between the two lengths whose peaks are nearest the cap.
    """
    known = {first: peak(first)}
    place = _fitted(first * cap / known[first], grain, limit)
    place = place if place != first else first + grain
    while place not in known and len(known) < looks:
        known[place] = peak(place)
        near, far = sorted(known, key=lambda tokens: abs(known[tokens] - cap))[:2]
        slope = (known[near] - known[far]) / (near - far)
        if slope <= 0:
            return near
        place = _fitted(near + (cap - known[near]) / slope, grain, limit)
    return place


def _fitted(tokens: float, grain: int, limit: int) -> int:
    return max(grain, int(min(tokens, limit)) // grain * grain)


def guessed(method: str, given: argparse.Namespace) -> int:
    """Where to begin: as given, or from plans; --start where nothing can be planned."""
    if method in given.guess:
        return int(given.guess[method])
    variant = parse(method)
    if given.tiny or variant.per_block or variant.kind not in ("keep", "checkpoint", "auto"):
        return int(given.start)
    seen: dict[int, Foreseen] = {}

    def peak(tokens: int) -> int:
        if tokens not in seen:
            seen[tokens] = foresee(method, tokens, given)
            planned = f"{seen[tokens].peak_bytes / 1e9:.1f} GB, {seen[tokens].step_s:.1f} s a step"
            print(f"  {method}: {tokens} tokens: planned {planned}", flush=True)
        return seen[tokens].peak_bytes

    cap = int(given.gib * 2**30 * (1 - (MARGIN if variant.ours else 0)))
    try:
        tokens = cross(peak, cap, first=given.start, grain=given.grain, limit=given.longest)
    except (GraphOffloadError, RuntimeError) as error:  # packed weights of bitsandbytes are not traced without their data
        print(f"  {method}: no plan ({str(error).splitlines()[0][:200]}); begins at {given.start}", flush=True)
        return int(given.start)
    print(f"  {method}: begins at {tokens} tokens", flush=True)
    return tokens


# What is measured


def attempt(method: str, tokens: int, given: argparse.Namespace) -> Tried:
    """Train a few steps at this length: fewer than --steps once they have taken --attempt-s."""
    torch._dynamo.reset()
    measure.tidy()
    began = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    session = None
    try:
        hold_to(None)  # a base that is packed into four bits is made in bfloat16 first
        workload = workload_of(tokens, device, given)
        measure.tidy()
        hold_to(given.gib)
        measure.materialise_gradients(workload.module)
        variant = parse(variant_of(method, device, given))
        session = measure.Session(workload, apply(variant, workload, Eligible()))
        for _ in range(STEPS_TO_PLAN if variant.per_block and variant.ours else 1):
            _said(session.step())  # compiles; what does not fit fails here
        warm = time.perf_counter()
        samples = [_said(session.step())]
        while len(samples) <= given.steps and time.perf_counter() - warm < given.attempt_s:
            samples.append(_said(session.step()))
        samples = samples[1:] or samples  # the first warms up, unless one step takes all the time
        step_ms = statistics.median(sample.step_ms for sample in samples)
        peaks = [sample.static_bytes + sample.peak_bytes for sample in samples if sample.static_bytes and sample.peak_bytes]
        took = time.perf_counter() - began
        return Tried(method, tokens, tokens / step_ms * 1e3, step_ms, len(samples), max(peaks, default=None), seconds=took)
    except Exception as error:
        why = _out_of_room(error)
        if not why:
            lines = str(error).strip().splitlines() or [""]
            raise Broken(f"{type(error).__name__}: {lines[0][:400]}") from error
        return Tried(method, tokens, None, why=why, seconds=time.perf_counter() - began)
    finally:
        if session is not None:
            session.close()
        measure.tidy()


def _said(sample: measure.Sample) -> measure.Sample:
    """Print a step that took a second or more: it is all that shows for minutes, and that is known of a search cut off."""
    if sample.step_ms >= 1e3:
        peak = (sample.static_bytes or 0) + (sample.peak_bytes or 0)
        print(f"    a step of {sample.step_ms / 1e3:.1f} s" + (f", peak {peak / 1e9:.1f} GB" if peak else ""), flush=True)
    return sample


def hold_to(gib: float | None) -> None:
    """Let this process allocate so much of the GPU; None: all of it."""
    if torch.cuda.is_available():
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if gib is None else min(gib * 2**30 / whole, 1.0))


def variant_of(method: str, device: str, given: argparse.Namespace) -> str:
    """The method's name with its options, as variants.parse reads it; what stands before a slash stays."""
    *before, name = method.split("/")
    if name != "auto" or device != "cuda":
        return method
    budget = "auto+reserve=0"  # "auto" sees what hold_to allows; nothing has an optimizer here
    return "/".join((*before, f"{budget}+host_budget={given.host_gib}GiB" if given.host_gib else budget))


def _out_of_room(error: BaseException | None) -> str:
    """What an attempt ran out of, as the first of an error's causes that says so does; "" where it is another error."""
    while error is not None:
        text = str(error)
        known = isinstance(error, (torch.cuda.OutOfMemoryError, BudgetError, HostMemoryError))
        if known or "out of memory" in text.lower() or "BudgetError" in text:  # Dynamo wraps what a backend raises
            lines = text.splitlines() or [""]
            line = next((line for line in lines if "BudgetError" in line or "memory" in line), lines[0])
            return f"{type(error).__name__}: {line.strip()[:400]}"
        error = error.__cause__ or error.__context__
    return ""


def longest(fits: Callable[[int], bool], *, guess: int, limit: int, grain: int) -> int:
    """The largest multiple of `grain` up to `limit` that fits, assuming that what is shorter fits as well; 0 when none does.

    Begins at `guess`, goes up or down by a grain, then by twice as much each time, until the answer lies between; then
    bisects. A guess that is right or a grain too low takes two or three calls of `fits`, one a grain too high two.
    """
    low, high = 0, limit // grain * grain + grain  # nothing always fits; what is above the limit is not asked for
    top, place = high - grain, _fitted(guess, grain, limit)
    first = place
    while high - low > grain:
        if fits(place):
            low = place
        else:
            high = place
        if low and high <= top:
            place = (low + high) // 2 // grain * grain
        elif low:
            place = min(low + max(grain, low - first), top)
        else:
            place = max(high - max(grain, first - high), grain)
    return low


def search(method: str, given: argparse.Namespace, note: Callable[[Tried], None]) -> None:
    """Try lengths of one method until its longest is known; each is noted when it is done. Stops early past --limit-s."""
    guess = guessed(method, given)
    ends, slowest = min(time.perf_counter() + given.limit_s, given.ends), 0.0

    def fits(tokens: int) -> bool:
        nonlocal slowest
        if time.perf_counter() + slowest > ends:
            raise OutOfTime(tokens)
        try:
            tried = attempt(method, tokens, given)
        except Broken as error:
            note(Tried(method, tokens, None, why=str(error)))
            raise
        slowest = max(slowest, tried.seconds)
        note(tried)
        return tried.tokens_per_s is not None

    try:
        longest(fits, guess=guess, limit=given.longest, grain=given.grain)
    except OutOfTime as stop:
        print(f"  {method}: out of time, {stop} tokens were not tried", flush=True)
    except Broken as error:
        traceback.print_exception(error.__cause__)


# What is shown


def row(method: str, attempts: Sequence[Tried]) -> str:
    """One method's line of the table, from all attempts of a call."""
    own = [tried for tried in attempts if tried.method == method]
    best = max((tried for tried in own if tried.tokens_per_s), key=lambda tried: tried.tokens, default=None)
    missed = min((tried for tried in own if not tried.tokens_per_s), key=lambda tried: tried.tokens, default=None)
    beyond = f"{missed.tokens}: {missed.why}" if missed else "-"
    if best is None:
        return f"{method:<16}{0:>9}{'-':>11}{'-':>11}{'-':>7}{'-':>9}  {beyond}"
    peak = f"{best.peak_bytes / 1e9:.1f}" if best.peak_bytes else "-"
    speed = f"{best.tokens_per_s or 0:>11.0f}{best.step_ms or 0:>11.0f}{best.steps:>7}"
    return f"{method:<16}{best.tokens:>9}{speed}{peak:>9}  {beyond}"


def result_of(given: argparse.Namespace, noted: dict[str, Any], attempts: Sequence[Tried]) -> results.Result:
    """The result file of a call: every attempt so far."""
    facts = {"gib": given.gib, "host_gib": given.host_gib, "loss_chunk": given.loss_chunk, "sizes": given.size}
    names = ("date", "device", "torch", "commit", "command")
    rows = tuple(asdict(tried) for tried in attempts)
    changed = {**given.size, **({"gib": f"{given.gib:g}"} if given.gib != GIB else {})}
    subject = results.subject_of(f"longest-{given.model}", changed, tiny=given.tiny)
    return results.Result(subject=subject, kind="longest", rows=rows, facts=facts, **{name: noted[name] for name in names})


def _guess(text: str) -> dict[str, int]:
    pairs = (part.split("=") for part in text.split(",") if part)
    return {method: int(tokens) for method, tokens in pairs}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sequences = sorted(name for name, spec in MODELS.items() if "tokens" in spec.real and "chunk" not in spec.real)
    parser.add_argument("--model", choices=sequences, default="llama4k")
    parser.add_argument("--size", nargs="*", default=[], metavar="NAME=N", help="change single sizes of the model")
    parser.add_argument("--methods", default="keep,checkpoint,auto", help="variants, by commas; auto is graphoffload")
    parser.add_argument("--gib", type=float, default=GIB, help="device memory that the process may use")
    parser.add_argument("--host-gib", type=float, default=0.0, help="host memory for graphoffload; 0: what it finds")
    parser.add_argument("--guess", type=_guess, default={}, metavar="METHOD=TOKENS,...", help="where to begin")
    parser.add_argument("--predict", action="store_true", help="print where each method would begin, and stop")
    parser.add_argument("--hardware", default="h200-sxm", help="profile that plans are made for before anything runs")
    parser.add_argument("--start", type=int, default=65536, help="first length planned; tried where nothing can be planned")
    parser.add_argument("--longest", type=int, default=2**19)
    parser.add_argument("--grain", type=int, default=8192)
    parser.add_argument("--loss-chunk", type=int, default=8192, help="tokens, a divisor of lengths; 0: the model's own loss")
    parser.add_argument("--steps", type=int, default=3, help="measured, after two more")
    parser.add_argument("--attempt-s", type=float, default=30.0, help="no further step is begun past these; one is timed")
    parser.add_argument("--limit-s", type=float, default=1200.0, help="for one method")
    parser.add_argument("--wall-s", type=float, default=float("inf"), help="for the call: nothing begins that would end later")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, one length")
    parser.add_argument("--out", type=Path, default=None, help="result file (JSON), written after each attempt")
    parser.add_argument("--commit", default="", help="what the result file says was measured (default: this checkout's)")
    given = parser.parse_args(argv)
    given.ends = time.perf_counter() + given.wall_s
    given.size = {name: int(value) for name, value in (size.split("=") for size in given.size)}
    if given.tiny:
        given.start = given.longest = given.grain = 64
        given.steps, given.loss_chunk = min(given.steps, 2), min(given.loss_chunk, 1024)
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """Search for each method and print the table."""
    given = arguments(argv)
    methods, attempts = given.methods.split(","), []
    noted = results.circumstances(shlex.join(["python", *sys.argv]), given.commit)
    if given.predict:
        for method in methods:
            guessed(method, given)
        return 0

    def note(tried: Tried) -> None:
        attempts.append(tried)
        found = f"{tried.tokens_per_s:.0f} tokens/s" if tried.tokens_per_s else f"does not fit ({tried.why})"
        print(f"  {tried.method}: {tried.tokens} tokens: {found} [{tried.seconds:.0f} s]", flush=True)
        if given.out is not None:
            given.out.write_text(result_of(given, noted, attempts).to_json())

    with measure.many_variants():
        for method in methods:
            print(f"{given.model}, {method}:", flush=True)
            search(method, given, note)
    cap = f"{given.gib:g} GiB" if torch.cuda.is_available() else "a CPU, not capped"
    print(f"\nlongest sequence of {given.model}, batch 1, on {cap}")
    print(f"{'method':<16}{'tokens':>9}{'tokens/s':>11}{'step ms':>11}{'steps':>7}{'peak GB':>9}  the next that does not fit")
    for method in methods:
        print(row(method, attempts))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
