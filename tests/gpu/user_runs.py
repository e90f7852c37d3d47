"""A user's loop is trained three times from one seed: twice under plain torch.compile, and once under graphoffload.

    plain, plain      how far two plain runs differ; what a step takes: static bytes between steps, and the peak
    graphoffload      device_budget = static + share * (plain peak - static), and no other option

Wrong are: losses or norms of gradients too far from the plain ones, a peak above the budget after the plan has settled, a
BudgetError, and nothing planned. On a CPU no memory is counted: losses and norms alone are compared, of a plan for a slowdown.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import graphoffload
from graphoffload.bench import together
from graphoffload.bench.packages import NotMeasurable, needed
from graphoffload.errors import BudgetError, BudgetExceededWarning, GraphOffloadWarning
from graphoffload.facts.plan import Plan
from graphoffload.runtime import registry
from graphoffload.units import format_bytes

STEPS, TIMED = 12, 5
WARM, SETTLED = 3, 8
"""Steps before peaks count: of plain runs, and of planned ones."""
LOSSES, NORMS, TIMES_NOISE = 2e-3, 5e-2, 3.0
"""Losses and norms of gradients may differ by this share, or by a multiple of what two plain runs differ by."""
SLACK_BYTES, LEFT_BYTES = 2 * 2**20, 2**20
SKIPPED = 77
"""Exit status where a package is missing."""
HEADER = (
    f"| {'case':<10} | {'share':>5} | {'static':>9} | {'plain':>9} | {'budget':>9} | {'predicted':>9} | {'taken':>9} "
    f"| {'plain ms':>8} | {'planned':>8} | {'slowdown':>8} | {'loss':>7} | {'noise':>7} | {'norm':>7} | warnings |"
)


@dataclass
class Loop:
    """What a user has built: modules to compile, and one training step, which gives its loss and the norm of its gradients.

    between: comes after each step, and is not timed with it.
    """

    parts: Sequence[nn.Module]
    step: Callable[[int], tuple[float, float]]
    between: Callable[[int], None] = lambda number: None

    def compile(self, **how: Any) -> None:
        """Each part in place."""
        for part in self.parts:
            part.compile(**how)


@dataclass(frozen=True)
class Case:
    """How to build a loop (in small, if the second argument says so), how much of its memory is left, what it needs, and how
    many of its steps are compared: where training is chaotic, plain runs differ from each other as well later on."""

    build: Callable[[torch.device, bool], Loop]
    share: float = 0.7
    needs: tuple[str, ...] = ()
    compared: int = STEPS


@dataclass
class Trained:
    """What one training saw. left_bytes: allocated before it, by whatever ran before; uncut_bytes: of the peak, no tensor's."""

    left_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    static_bytes: int = 0
    peak_bytes: int = 0
    uncut_bytes: int = 0

    @property
    def step_s(self) -> float:
        """Median of the last steps."""
        return statistics.median(self.seconds[-TIMED:])


@dataclass
class Verdict:
    """One row, what is wrong, if anything is, what warnings said, and the row's figures in bytes, seconds and shares."""

    row: str
    wrong: list[str]
    said: Sequence[str] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)


def fresh(device: torch.device) -> None:
    """Nothing compiled, nothing allocated, no peak."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def allocated(device: torch.device, *, peak: bool = False) -> int:
    """Bytes now, or at the peak; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated())


def uncut(device: torch.device) -> int:
    """Bytes of the peak in ends of blocks that torch's allocator did not cut off; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    stats = torch.cuda.memory_stats()
    return int(stats["allocated_bytes.all.peak"] - stats["requested_bytes.all.peak"])


def train(
    case: Case, device: torch.device, tiny: bool, how: Mapping[str, Any], *, since: int, folder: Path | None = None
) -> Trained:
    """All steps from the same seed; the peak is that of steps from `since` on. The last ones run alone: all else that is named
    in `folder` stands still."""
    fresh(device)
    found = Trained(left_bytes=allocated(device))
    torch.manual_seed(0)
    with device:
        loop = case.build(device, tiny)
    loop.compile(**how)
    with contextlib.ExitStack() as until:
        for number in range(STEPS):
            if number == since and device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            if number == STEPS - TIMED and folder is not None:
                until.enter_context(together.alone(folder))
            one_step(loop, number, device, found)
    found.static_bytes, found.peak_bytes = allocated(device), allocated(device, peak=True)
    found.uncut_bytes = uncut(device)
    return found


def one_step(loop: Loop, number: int, device: torch.device, found: Trained) -> None:
    """A step and what comes after it; `found` gets its time and what it gave."""
    began = time.perf_counter()
    loss, norm = loop.step(number)
    if device.type == "cuda":
        torch.cuda.synchronize()
    found.seconds.append(time.perf_counter() - began)
    found.losses.append(loss)
    found.norms.append(norm)
    loop.between(number)


def apart(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest difference as a share of what was expected; equal infinities do not differ."""
    shares = (0.0 if a == b else abs(a - b) / max(abs(b), 1e-12) for a, b in zip(found, expected, strict=True))
    return max(shares, key=lambda share: share if share == share else float("inf"))  # NaN is the largest


def planned() -> tuple[Plan, ...]:
    """Plans whose figures hold: those of a step of several graphs, and of graphs that were planned alone."""
    plans = graphoffload.last_plans()
    return tuple(plan for plan in plans if not plan.part) or plans


def budget_of(plain: Trained, share: float) -> int:
    """What is allocated between steps, and a share of what a step takes above it."""
    return plain.static_bytes + int(share * (plain.peak_bytes - plain.static_bytes))


def ways(device: torch.device) -> tuple[dict[str, Any], dict[str, Any]]:
    """How to compile: plain, and graphoffload without a budget. Nothing beside a budget on a GPU; without Inductor on a CPU."""
    if device.type == "cuda":
        return {}, {"backend": "graphoffload", "options": {}}
    options = {"inner": "aot_eager", "hardware": "h100-sxm", "min_tensor_bytes": 1, "max_slowdown": 0.5}
    return {"backend": "aot_eager"}, {"backend": "graphoffload", "options": options}


def compare(
    name: str, case: Case, device: torch.device, *, tiny: bool, share: float, folder: Path | None = None
) -> Verdict:
    """Train a loop three times and say what differs. folder: train.

    Raises:
        whatever the loop raises, but a BudgetError, which is a verdict.
    """
    plainly, ours = ways(device)
    plain = train(case, device, tiny, plainly, since=WARM, folder=folder)
    again = train(case, device, tiny, plainly, since=WARM, folder=folder)
    budget = budget_of(plain, share)
    if device.type == "cuda":
        ours["options"]["device_budget"] = budget
    registry.forget()
    found, refused = Trained(), ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = train(case, device, tiny, ours, since=SETTLED, folder=folder)
        except Exception as error:
            cause = getattr(error, "inner_exception", error)  # torch wraps what is raised while it compiles
            if not isinstance(cause, BudgetError):
                raise
            refused = f"BudgetError at {format_bytes(budget)} (least {format_bytes(cause.least_bytes or 0)}): {cause}"
    said = [item for item in caught if issubclass(item.category, GraphOffloadWarning)]
    row = f"| {name:<10} | {share:>5.2f} | {format_bytes(plain.static_bytes):>9} | {format_bytes(plain.peak_bytes):>9} "
    for trained in (plain, again, found):
        del trained.losses[case.compared :], trained.norms[case.compared :]
    figures = {
        "share": share,
        "static_bytes": plain.static_bytes,
        "plain_bytes": plain.peak_bytes,
        "budget_bytes": budget,
        "plain_s": plain.step_s,
        "plain_again_s": again.step_s,
    }
    if refused:
        return Verdict(f"{row}| {format_bytes(budget):>9} | refused |", [refused], (), figures)
    figures |= {
        "predicted_bytes": predicted_bytes(),
        "peak_bytes": found.peak_bytes,
        "uncut_bytes": found.uncut_bytes,
        "predicted_slowdown": predicted_slowdown(),
        "step_s": found.step_s,
        "loss_error": apart(found.losses, plain.losses),
        "loss_noise": apart(again.losses, plain.losses),
        "norm_error": apart(found.norms, plain.norms),
        "norm_noise": apart(again.norms, plain.norms),
        "plans": [plan.summary for plan in planned()],
    }
    row += columns(figures, said, found.left_bytes - plain.left_bytes)
    wrong = [*numbers_apart(plain, again, found), *nothing_planned()]
    if device.type == "cuda":
        wrong += above(budget, found, said)
    return Verdict(row, wrong, [f"{item.category.__name__}: {item.message}" for item in said], figures)


def columns(figures: Mapping[str, Any], said: Sequence[warnings.WarningMessage], left: int) -> str:
    """The rest of a row; bytes that another training left allocated are named after it."""
    budget, predicted, taken = (format_bytes(figures[f"{name}_bytes"]) for name in ("budget", "predicted", "peak"))
    counts = Counter(item.category.__name__ for item in said)
    names = ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
    return (
        f"| {budget:>9} | {predicted:>9} | {taken:>9} | {figures['plain_s'] * 1e3:>8.1f} "
        f"| {figures['predicted_slowdown']:>+8.1%} | {figures['step_s'] / figures['plain_s'] - 1:>+8.1%} "
        f"| {figures['loss_error']:>7.1e} | {figures['loss_noise']:>7.1e} | {figures['norm_error']:>7.1e} | {names} |"
        + (f" {format_bytes(left)} were left by plain training" if left > LEFT_BYTES else "")
    )


def predicted_bytes() -> int:
    """The largest predicted peak, with what it reserves."""
    predictions = [plan.prediction for plan in planned()]
    return max((p.with_reserve(p.predicted_peak_bytes) for p in predictions), default=0)


def predicted_slowdown() -> float:
    """The largest predicted slowdown of forward and backward. Where the host is the limit, steps take longer than predicted."""
    return max((plan.prediction.predicted_slowdown for plan in planned()), default=0.0)


def numbers_apart(plain: Trained, again: Trained, found: Trained) -> list[str]:
    """Losses and norms that no rounding explains."""
    wrong = []
    for what, at_least in (("losses", LOSSES), ("norms", NORMS)):
        ours, theirs, others = (getattr(trained, what) for trained in (found, plain, again))
        differ, allowed = apart(ours, theirs), max(TIMES_NOISE * apart(others, theirs), at_least)
        if not differ <= allowed:
            rows = zip(ours, theirs, others, strict=True)
            listed = "\n".join(f"    {a:.6g} plain {b:.6g} plain again {c:.6g}" for a, b, c in rows)
            wrong.append(f"{what} differ by {differ:.2g} of the plain ones, {allowed:.2g} are allowed:\n{listed}")
    return wrong


def nothing_planned() -> list[str]:
    """A comparison with a model that was never planned says nothing."""
    if any(plan.changes_anything for plan in planned()):
        return []
    return [f"no plan changes anything; there are {len(graphoffload.last_plans())} plans"]


def above(budget: int, found: Trained, said: Sequence[warnings.WarningMessage]) -> list[str]:
    """Why the peak is too high, in numbers, and whether a warning says so."""
    excess = found.peak_bytes - budget
    if excess <= SLACK_BYTES:
        return []
    texts = [str(item.message) for item in said if issubclass(item.category, BudgetExceededWarning)]
    warned = f"warned {len(texts)} times: {' / '.join(texts)}" if texts else "and nothing warned of it"
    return [
        f"asked {budget} B, taken {found.peak_bytes} B, predicted {predicted_bytes()} B: "
        f"{format_bytes(excess)} above the budget, {warned}"
    ]


def main(cases: Mapping[str, Case]) -> None:
    """The command line: one case, its row, and an exit status."""
    parser = argparse.ArgumentParser(description="A training loop as users write it, under graphoffload and without.")
    parser.add_argument("case", choices=cases)
    parser.add_argument("share", nargs="?", type=float, help="of a step's memory above what is allocated between steps")
    parser.add_argument("--tiny", action="store_true", help="the same loop in small")
    parser.add_argument("--device", default="cuda", type=torch.device)
    parser.add_argument("--store", type=Path, help="a file of results, to which this case is added (user_page.py)")
    parser.add_argument("--commit", default="", help="what the results are of")
    parser.add_argument("--beside-others", action="store_true", help="other work runs on this GPU: times are no result")
    parser.add_argument("--folder", type=Path, help="of all that run on this GPU: who measures time stops the others")
    given = parser.parse_args()
    here = Path(__file__).resolve().parent  # its kernels.py is not the package of that name, which Transformers looks for
    sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != here]
    case = cases[given.case]
    try:
        for package in case.needs:
            needed(package, package)
    except NotMeasurable as missing:
        print(f"SKIPPED: {given.case} {missing}")
        sys.exit(SKIPPED)
    share = case.share if given.share is None else given.share
    with contextlib.ExitStack() as until:
        if given.folder is not None:
            given.folder.mkdir(parents=True, exist_ok=True)
            until.enter_context(together.named(given.folder))
        verdict = compare(given.case, case, given.device, tiny=given.tiny, share=share, folder=given.folder)
    print(HEADER, verdict.row, *(f"WRONG: {line}" for line in verdict.wrong), *verdict.said, sep="\n")
    if given.store is not None:
        about = {
            "commit": given.commit,
            "date": time.strftime("%Y-%m-%d"),
            "device": torch.cuda.get_device_name() if given.device.type == "cuda" else given.device.type,
            "torch": torch.__version__,
            "beside_others": given.beside_others,
        }
        results = json.loads(given.store.read_text()) if given.store.exists() else {}
        results[given.case] = {**about, **verdict.figures, "wrong": verdict.wrong, "warnings": list(verdict.said)}
        given.store.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    sys.exit(1 if verdict.wrong else 0)
