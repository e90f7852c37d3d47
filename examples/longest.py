"""The longest sequence that trains on one GPU of a given size, and how fast: keep-all, full checkpointing, graphoffload.

    python examples/longest.py --tiny                               # a CPU: one length for each method, shows that it runs
    python examples/longest.py --model llama4k --gib 80             # on a GPU; the process is held to that much memory
    python examples/longest.py --model qwen --gib 80 --methods keep,checkpoint,auto --longest 131072

Lengths are doubled until one fails, then bisected in steps of --grain tokens, each with a fresh model and batch 1. A length
that fails is one that runs out of memory, or (for graphoffload) one whose plan says that it cannot fit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the measuring tools are the tests' own

from gpu import measure  # noqa: E402
from gpu.models import MODELS, build  # noqa: E402
from gpu.variants import Eligible, apply, parse  # noqa: E402

from graphoffload.errors import BudgetError, HostMemoryError  # noqa: E402


@dataclass(frozen=True)
class Tried:
    """One length under one method. `tokens_per_s` is None when it did not fit; `why` says what failed."""

    method: str
    tokens: int
    tokens_per_s: float | None
    step_ms: float | None = None
    peak_bytes: int | None = None
    why: str = ""
    seconds: float = 0.0


def attempt(model: str, method: str, tokens: int, given: argparse.Namespace) -> Tried:
    """Train a few steps at this length."""
    torch._dynamo.reset()
    measure.tidy()
    began = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    session = None
    try:
        workload = build(model, device, tiny=given.tiny, tokens=tokens, batch=1)
        measure.materialise_gradients(workload.module)
        name = f"auto:{given.gib}GiB+reserve=0" if method == "auto" and device == "cuda" else method
        session = measure.Session(workload, apply(parse(name), workload, Eligible()))
        measure.warm_up(session, 2)
        samples = [session.step() for _ in range(given.steps)]
        step_ms = statistics.median(sample.step_ms for sample in samples)
        peaks = [sample.static_bytes + sample.peak_bytes for sample in samples if sample.static_bytes and sample.peak_bytes]
        return Tried(
            method, tokens, tokens / step_ms * 1e3, step_ms, max(peaks, default=None), seconds=time.perf_counter() - began
        )
    except Exception as error:
        if not _out_of_room(error):
            raise
        return Tried(method, tokens, None, why=f"{type(error).__name__}", seconds=time.perf_counter() - began)
    finally:
        if session is not None:
            session.close()
        measure.tidy()


def _out_of_room(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, (torch.cuda.OutOfMemoryError, BudgetError, HostMemoryError)):
            return True
        if "out of memory" in str(error).lower() or "BudgetError" in str(error):  # Dynamo wraps what a backend raises
            return True
        error = error.__cause__ or error.__context__
    return False


def longest(fits: Callable[[int], bool], *, start: int, limit: int, grain: int) -> int:
    """The largest multiple of `grain` up to `limit` that fits, assuming that what is shorter fits as well; 0 when none does.

    Doubles from `start`, then bisects.
    """
    low, high = 0, start
    while high <= limit and fits(high):
        low, high = high, high * 2
    if high > limit:
        if low == limit or fits(limit):
            return limit
        high = limit
    while high - low > grain:
        middle = (low + high) // 2 // grain * grain
        if middle <= low:
            break
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def search(method: str, given: argparse.Namespace) -> Tried:
    """The longest length for one method, with its speed. Past --limit-s nothing longer is tried."""
    best = Tried(method, 0, None, why="nothing fits")
    began = time.perf_counter()

    def fits(tokens: int) -> bool:
        nonlocal best
        if time.perf_counter() - began > given.limit_s:
            print(f"  {method}: out of time, {tokens} was not tried", flush=True)
            return False
        tried = attempt(given.model, method, tokens, given)
        found = f"{tried.tokens_per_s:.0f} tokens/s" if tried.tokens_per_s else f"does not fit ({tried.why})"
        print(f"  {method}: {tokens} tokens: {found} [{tried.seconds:.0f} s]", flush=True)
        if tried.tokens_per_s and tokens > best.tokens:
            best = tried
        return tried.tokens_per_s is not None

    longest(fits, start=given.start, limit=given.longest, grain=given.grain)
    return best


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sequences = sorted(name for name, spec in MODELS.items() if "tokens" in spec.real)
    parser.add_argument("--model", choices=sequences, default="llama4k")
    parser.add_argument("--methods", default="keep,checkpoint,auto", help="variants, separated by commas; auto is graphoffload")
    parser.add_argument("--gib", type=float, default=80.0, help="device memory that the process may use")
    parser.add_argument("--start", type=int, default=8192)
    parser.add_argument("--longest", type=int, default=2**18)
    parser.add_argument("--grain", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=1200.0, help="for one method")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, one length")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    given = parser.parse_args(argv)
    if given.tiny:
        given.start = given.longest = given.grain = 64
        given.steps = min(given.steps, 2)
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """Search for each method and print the table."""
    given = arguments(argv)
    if torch.cuda.is_available():
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(given.gib * 2**30 / whole, 1.0))
    results = []
    with measure.many_variants():
        for method in given.methods.split(","):
            print(f"{given.model}, {method}:", flush=True)
            results.append(search(method, given))
            if given.out is not None:
                given.out.write_text(json.dumps([asdict(result) for result in results], indent=1))
    cap = f"{given.gib:g} GiB" if torch.cuda.is_available() else "a CPU, not capped"
    print(f"\nlongest sequence of {given.model}, batch 1, on {cap}")
    print(f"{'method':<16}{'tokens':>9}{'tokens/s':>11}{'step ms':>11}{'peak GB':>9}")
    for result in results:
        speed = f"{result.tokens_per_s:.0f}" if result.tokens_per_s else result.why
        step = f"{result.step_ms:.0f}" if result.step_ms else "-"
        peak = f"{result.peak_bytes / 1e9:.1f}" if result.peak_bytes else "-"
        print(f"{result.method:<16}{result.tokens:>9}{speed:>11}{step:>11}{peak:>9}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
