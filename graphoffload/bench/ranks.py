"""Several GPUs of one host: a Llama spread over them (parallel.py), under plain torch, with checkpointed blocks, and planned.

    python -m graphoffload bench ranks fsdp2 tp --ranks 2 --out out/ranks
    python -m graphoffload bench ranks pp --variants keep checkpoint ours:checkpoint keep
    python -m graphoffload bench ranks fsdp2 --tiny                        # gloo, on a CPU: shows that it runs

Variants: keep (plain torch.compile), checkpoint (torch.utils.checkpoint around each block, inside what is compiled; tensor
parallel: around it), ours (no options), ours:SIZE (a device_budget), ours:checkpoint (the peak that checkpointing had on any
rank), and ours:halfway (between that and keep's). unshared:SIZE is ours, planned for the link that one process has measured
alone (`python -m graphoffload hardware`), and not again where copies are slower. A step is forward, backward and AdamW's step.
Its time is the slowest rank's, its peak is everything that a rank has allocated. Gradients of the last step are compared with
those of the first keep.

A row also says how long each step before the measured ones took, in which ours is planned and compiled; until when the host
issued a step; how often the measured steps asked the system for memory, what host memory they gave back, and what they copied.
A step that asks for memory, or gives it back, is slow for another reason than its plan. --trace leaves a profile of a step of
each variant on each GPU, for Perfetto: OUT/ranks-WAY-VARIANT.rankN.trace.json.gz.

A variant that fails ends the processes of its way, since other ranks may wait in a collective. What is left runs in new ones,
after another keep. Each way becomes OUT/ranks-WAY.json, a file of training steps (training.py), failures included.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch

from graphoffload.bench import parallel, results
from graphoffload.bench.options import add_model_options
from graphoffload.bench.rank import AGAIN, PLAIN_SETTLED, Row, append, rows_of, work
from graphoffload.bench.table import number
from graphoffload.cache_files import write_whole
from graphoffload.errors import ConfigError
from graphoffload.units import parse_size

DEFAULT = ("keep", "checkpoint", "ours:checkpoint", "ours:halfway", "ours", "keep")
SETTLED = 21
"""Steps before the measured ones. Two are recorded, and ranks take a plan two or three runs later than one GPU does. Where
copies are slow, they take another one as much later than the fifth step under the first, and perhaps a third one."""
_END_S = 20.0
"""How long a way's processes have to end by themselves once its time is over."""
_WORKER = "_GRAPHOFFLOAD_BENCH_RANKS"
_SAFE = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""NVLink multicast stays off: it is not a benchmark's to use on a host whose GPUs are shared."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The tool's options."""
    parser.add_argument("ways", nargs="+", choices=list(parallel.WAYS), metavar="WAY", help=", ".join(parallel.WAYS))
    parser.add_argument("--ranks", type=int, default=2, help="processes, one a GPU (default: 2)")
    parser.add_argument("--variants", nargs="+", default=list(DEFAULT), metavar="NAME", help="in this order")
    parser.add_argument("--steps", type=int, default=6, help="measured steps (default: 6)")
    parser.add_argument("--settled", type=int, default=SETTLED, help=f"steps of ours before them (default: {SETTLED})")
    parser.add_argument("--trace", action="store_true", help="profile a step of each variant on each GPU, after those measured")
    parser.add_argument("--limit-s", type=float, default=600.0, help="end a way after so long (default: 600)")
    parser.add_argument("--out", type=Path, default=Path("out/ranks"))
    parser.add_argument("--commit", default="", help="what result files say was measured (default: this checkout's)")
    add_model_options(parser)


def start(given: argparse.Namespace) -> int:
    """Each way in processes of its own; or, where a launcher has started this one, its part of a way."""
    for name in given.variants:
        _check(name)
    if os.environ.get(_WORKER):
        return work(given)
    if given.trace and given.tiny:
        raise ConfigError("--trace profiles GPUs, and --tiny runs on a CPU.")
    if not given.tiny and torch.cuda.device_count() < given.ranks:
        raise ConfigError(f"--ranks {given.ranks}: this machine has {torch.cuda.device_count()} GPUs; --tiny runs on a CPU.")
    given.out.mkdir(parents=True, exist_ok=True)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    try:
        return max([_measured(way, given) for way in given.ways])
    finally:
        signal.signal(signal.SIGTERM, before)


def _check(name: str) -> None:
    kind, _, budget = name.partition(":")
    if kind not in ("keep", "checkpoint", "ours", "unshared") or (budget and kind in ("keep", "checkpoint")):
        known = "keep, checkpoint, ours, unshared, and the last two with :SIZE, :checkpoint or :halfway"
        raise ConfigError(f"unknown variant {name!r}; there are {known}")
    if budget and budget not in ("checkpoint", "halfway"):
        parse_size(budget, field="ours")


# The process that starts others


def _measured(way: str, given: argparse.Namespace) -> int:
    """Run a way's variants until all have a row, or time is over, and write its file."""
    rows = given.out / f"ranks-{way}.rows"
    rows.unlink(missing_ok=True)
    deadline = time.monotonic() + given.limit_s
    facts = results.circumstances(given.command_line, given.commit, "cpu" if given.tiny else "cuda")
    left = list(given.variants)
    while left and time.monotonic() < deadline:
        tried = {row["name"]: row for row in rows_of(rows)}
        again = ["keep"] if "ms" in tried.get("keep", {}) else []
        _launch(way, [*again, *left], given, deadline - time.monotonic())
        left = given.variants[_count(rows) :]
        if left and time.monotonic() < deadline:
            said = sorted(given.out.glob(f"ranks-{way}.failed-*"))
            text = said[0].read_text() if said else "its processes ended without a word"
            append(rows, {"name": left.pop(0), "failed": text})
        for path in given.out.glob(f"ranks-{way}.failed-*"):
            path.unlink()
    for name in left:
        append(rows, {"name": name, "failed": f"not measured within {given.limit_s:.0f} s"})
    found = [row for row in rows_of(rows) if row["name"] != AGAIN]
    write_whole(given.out / f"ranks-{way}.json", json.dumps(_content(way, given, facts, found), indent=1) + "\n")
    print(_table(way, found), flush=True)
    return int(any("failed" in row for row in found if not row["name"].startswith("checkpoint")))


def _launch(way: str, names: list[str], given: argparse.Namespace, limit_s: float) -> None:
    """Processes for some variants; they write rows as they go."""
    sizes = [f"{name}={size}" for name, size in given.size]
    own = ["--steps", given.steps, "--settled", given.settled, "--out", given.out, *["--tiny"] * given.tiny]
    own += [*["--trace"] * given.trace, *(["--size", *sizes] if sizes else [])]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", given.ranks]
    command = [*launcher, "-m", "graphoffload", "bench", "ranks", way, "--variants", *names, *own]
    environment = {"OMP_NUM_THREADS": "4", **os.environ, **_SAFE, _WORKER: "1"}
    process = subprocess.Popen([sys.executable, *map(str, command)], env=environment, start_new_session=True)
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"{way}: ended after --limit-s", flush=True)
        process.terminate()  # torchrun ends its own processes then
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    finally:  # also where this process is ended: ranks that live on would hold the GPUs, and spin in a collective
        if process.poll() is None:
            _end(process.pid)


def _end(pid: int) -> None:
    """End a launcher and all that it started. Ranks ask to end with it (rank.py), but not before they have imported that."""
    with contextlib.suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(pid)
        launcher.suspend()  # it starts nothing more
        for process in [*launcher.children(recursive=True), launcher]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _count(path: Path) -> int:
    """Variants that have a row."""
    return sum(row["name"] != AGAIN for row in rows_of(path))


def _content(way: str, given: argparse.Namespace, facts: Row, rows: list[Row]) -> Row:
    sizes = {**(parallel.TINY if given.tiny else parallel.REAL[way]), **dict(given.size)}
    said = ", ".join(f"{name} {size}" for name, size in sizes.items())
    function = (parallel.WAYS[way].__doc__ or "").strip().rstrip(".")
    return {
        "date": facts["date"][:10],
        "device": f"{given.ranks} x {facts['device']}",
        "torch": facts["torch"],
        "subject": f"a Llama ({said}), {way}: {function}; AdamW; peaks, predictions and budgets in GB in all",
        "command": f"one process a GPU; {given.settled} steps (of keep and checkpoint {PLAIN_SETTLED}), then the median of "
        f"{given.steps}; time of the slowest rank, peak of the fullest; {facts['command']}",
        "gradients": "worst_grad: of the last step's whole gradient on any rank, against the first keep's, in norm",
        "runs": [{"commit": facts["commit"], "what": way, "rows": rows}],
    }


def _table(way: str, rows: list[Row]) -> str:
    keep = next((row["ms"] for row in rows if row["name"] == "keep" and "ms" in row), None)
    lines = [f"{way:18} {'ms':>8} {'x keep':>7} {'peak GB':>8} {'pred GB':>8} {'pred':>6} {'bound':>6} {'grad':>8}"]
    for row in rows:
        if "failed" in row:
            lines.append(f"{row['name']:18} FAILED: {row['failed'][:160]}")
            continue
        ratio = row["ms"] / keep if keep else None
        cells = [number(row["ms"], ".1f"), number(ratio, ".3f")]
        cells += [number(row.get(name), ".3f") for name in ("peak_GB", "predicted_GB")]
        cells += [number(row.get(name), "+.3f") for name in ("slowdown", "bound")] + [number(row.get("worst_grad"), ".2g")]
        widths = (8, 7, 8, 8, 6, 6, 8)
        lines.append(f"{row['name']:18} " + " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))
    return "\n".join(lines)
