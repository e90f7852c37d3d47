"""Several GPUs of one host: a Llama spread over them (parallel.py), under plain torch, with checkpointed blocks, and planned.

    python -m graphoffload bench ranks fsdp2 tp --ranks 2 --out out/ranks
    python -m graphoffload bench ranks pp --variants keep checkpoint ours:checkpoint keep
    python -m graphoffload bench ranks fsdp2 --tiny                        # gloo, on a CPU: shows that it runs

Variants: keep (plain torch.compile), checkpoint (torch.utils.checkpoint around each block, inside what is compiled; tensor
parallel: around it), ours (no options), ours:SIZE (a device_budget), ours:checkpoint (the peak that checkpointing had on any
rank), and ours:halfway (between that and keep's). A step is forward, backward and AdamW's step. Its time is the slowest rank's,
its peak is everything that a rank has allocated. Gradients of the last step are compared with those of the first keep.

A row also says until when the host issued a step, how often the measured steps asked the system for memory, what host memory
they gave back, and what they copied. A step that asks for memory, or gives it back, is slow for another reason than its plan.

A variant that fails ends the processes of its way, since other ranks may wait in a collective. What is left runs in new ones,
after another keep. Each way becomes OUT/ranks-WAY.json, a file of training steps (training.py), failures included.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from graphoffload.bench import parallel, results
from graphoffload.bench.measure import compare_gradients, recorded_peak_bytes
from graphoffload.bench.observed import forget_plans
from graphoffload.bench.options import add_model_options
from graphoffload.bench.parallel import Compiling, Share
from graphoffload.bench.table import number
from graphoffload.bench.variants import Inductor
from graphoffload.cache_files import write_whole
from graphoffload.compiler.backend import OffloadBackend
from graphoffload.errors import ConfigError
from graphoffload.report.offload_report import OffloadReport
from graphoffload.runtime import host_memory, release_host_memory, stats
from graphoffload.runtime.registry import last_plans
from graphoffload.units import parse_size

DEFAULT = ("keep", "checkpoint", "ours:checkpoint", "ours:halfway", "ours", "keep")
SETTLED = 8
"""Steps before the measured ones: two are recorded, and ranks take a plan two or three runs later than one GPU does."""
PLAIN_SETTLED = 3
_PR_SET_PDEATHSIG = 1
_END_S = 20.0
"""How long a way's processes have to end by themselves once its time is over."""
_WORKER = "_GRAPHOFFLOAD_BENCH_RANKS"
_SAFE = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""NVLink multicast stays off: it is not a benchmark's to use on a host whose GPUs are shared."""
_PLANNED = ("predicted_GB", "slowdown", "bound", "copied_GB", "recomputed_GB")
_AGAIN = "again"
"""The name of a keep that only gives later variants something to compare with."""
Row = dict[str, Any]
Optimizers = list[torch.optim.Optimizer]


def arguments(parser: argparse.ArgumentParser) -> None:
    """The tool's options."""
    parser.add_argument("ways", nargs="+", choices=list(parallel.WAYS), metavar="WAY", help=", ".join(parallel.WAYS))
    parser.add_argument("--ranks", type=int, default=2, help="processes, one a GPU (default: 2)")
    parser.add_argument("--variants", nargs="+", default=list(DEFAULT), metavar="NAME", help="in this order")
    parser.add_argument("--steps", type=int, default=6, help="measured steps (default: 6)")
    parser.add_argument("--settled", type=int, default=SETTLED, help=f"steps of ours before them (default: {SETTLED})")
    parser.add_argument("--limit-s", type=float, default=600.0, help="end a way after so long (default: 600)")
    parser.add_argument("--out", type=Path, default=Path("out/ranks"))
    parser.add_argument("--commit", default="", help="what result files say was measured (default: this checkout's)")
    add_model_options(parser)


def start(given: argparse.Namespace) -> int:
    """Each way in processes of its own; or, where a launcher has started this one, its part of a way."""
    for name in given.variants:
        _check(name)
    if os.environ.get(_WORKER):
        return _work(given)
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
    if kind not in ("keep", "checkpoint", "ours") or (budget and kind != "ours"):
        raise ConfigError(f"unknown variant {name!r}; there are keep, checkpoint, ours, and ours:SIZE, :checkpoint, :halfway")
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
        tried = {row["name"]: row for row in _read(rows)}
        again = ["keep"] if "ms" in tried.get("keep", {}) else []
        _launch(way, [*again, *left], given, deadline - time.monotonic())
        left = given.variants[_count(rows) :]
        if left and time.monotonic() < deadline:
            said = sorted(given.out.glob(f"ranks-{way}.failed-*"))
            text = said[0].read_text() if said else "its processes ended without a word"
            _append(rows, {"name": left.pop(0), "failed": text})
        for path in given.out.glob(f"ranks-{way}.failed-*"):
            path.unlink()
    for name in left:
        _append(rows, {"name": name, "failed": f"not measured within {given.limit_s:.0f} s"})
    found = [row for row in _read(rows) if row["name"] != _AGAIN]
    write_whole(given.out / f"ranks-{way}.json", json.dumps(_content(way, given, facts, found), indent=1) + "\n")
    print(_table(way, found), flush=True)
    return int(any("failed" in row for row in found if row["name"].startswith(("keep", "ours"))))


def _launch(way: str, names: list[str], given: argparse.Namespace, limit_s: float) -> None:
    """Processes for some variants; they write rows as they go."""
    sizes = [f"{name}={size}" for name, size in given.size]
    own = ["--steps", given.steps, "--settled", given.settled, "--out", given.out, *["--tiny"] * given.tiny]
    own += ["--size", *sizes] if sizes else []
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
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _count(path: Path) -> int:
    """Variants that have a row."""
    return sum(row["name"] != _AGAIN for row in _read(path))


def _append(path: Path, row: Row) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


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


# A rank


@dataclass(frozen=True)
class _Step:
    """A measured step. host_seconds: until its last launch. counts: by how much these rose in it."""

    seconds: float
    host_seconds: float
    loss: float | None
    counts: Counter[str]


def _counts(device: torch.device) -> Counter[str]:
    """How often the device's allocator and the pool of host memory have asked the system for memory; bytes that the pool gave
    back, and bytes copied to the host and from it."""
    taken = torch.cuda.memory_stats(device).get("num_device_alloc", 0) if device.type == "cuda" else 0
    host, moved = host_memory(), stats()
    return Counter(
        device=int(taken), host=host.allocations, returned_bytes=host.returned_bytes, d2h_bytes=moved["d2h_bytes"],
        h2d_bytes=moved["h2d_bytes"],
    )  # fmt: skip


class _Rank:
    """One process of a way: its group, its device, and what earlier variants left to compare with."""

    def __init__(self, way: str, given: argparse.Namespace) -> None:
        self.way, self.given = way, given
        self.rows = given.out / f"ranks-{way}.rows"
        local = int(os.environ["LOCAL_RANK"])
        group: Row = {"backend": "gloo"}
        self.device = torch.device("cpu")
        if not given.tiny:
            torch.cuda.set_device(local)
            self.device = torch.device("cuda", local)
            group = {"backend": "nccl", "device_id": self.device}
        dist.init_process_group(timeout=datetime.timedelta(seconds=90), **group)
        self.first = dist.get_rank() == 0
        self.reference: list[Tensor] = []

    def measure(self, name: str) -> Row:
        """Train under a variant; what came of it, over all ranks.

        Raises:
            Exception: what training raised. This process must end then.
        """
        forget_plans()
        sizes = {**(parallel.TINY if self.given.tiny else parallel.REAL[self.way]), **dict(self.given.size)}
        share = parallel.WAYS[self.way](sizes, self.device, self._compiling(name))
        optimizers = _optimizers(share.parameters)
        with share.context():
            steps = list(self._steps(share, optimizers, self.given.settled if name.startswith("ours") else PLAIN_SETTLED))
            peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else self._peak_of_cpu(share, optimizers)
        own: Row = {"peak_GB": peak / 1e9, "times_s": [step.seconds for step in steps], "compile_s": self.begun_s}
        own |= {"loss": steps[-1].loss, "worst_grad": self._error(share)}
        own |= {"host_ms": 1e3 * statistics.median(step.host_seconds for step in steps)}
        own |= {"counts": {field: sum(step.counts[field] for step in steps) for field in _counts(self.device)}}
        if name.startswith("ours"):
            own |= _planned()
        everybody: list[Row] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everybody, own)
        return _joined(name, everybody)

    def _steps(self, share: Share, optimizers: Optimizers, settled: int) -> Iterator[_Step]:
        """The measured steps, after so many others; gradients of the last one stay."""
        for index in range(settled + self.given.steps):
            share.clear_gradients()
            if index == settled and self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            self._wait()
            dist.barrier()
            self._wait()
            before, began = _counts(self.device), time.perf_counter()
            loss = share.run()
            for optimizer in optimizers:
                optimizer.step()
            launched = time.perf_counter()
            self._wait()
            seconds = time.perf_counter() - began
            if index == 0:
                self.begun_s = seconds
            if index >= settled:
                yield _Step(seconds, launched - began, None if loss is None else float(loss), _counts(self.device) - before)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _peak_of_cpu(self, share: Share, optimizers: Optimizers) -> int:
        """What lives between steps, and the most that one more step has allocated besides."""
        share.clear_gradients()
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        between: list[Any] = [*share.parameters, *(value for state in states for value in state.values())]
        static = sum(_local(value).untyped_storage().nbytes() for value in between)

        def step() -> None:
            share.run()
            for optimizer in optimizers:
                optimizer.step()

        return static + recorded_peak_bytes(step)

    def _compiling(self, name: str) -> Compiling:
        kind, _, budget = name.partition(":")
        if kind != "ours":
            return Compiling(Inductor(), checkpointed=kind == "checkpoint")
        options: Row = {"device_budget": f"{self._budget(budget)}B"} if budget else {}
        if self.given.tiny:
            options |= {"hardware": "h200-sxm", "min_tensor_bytes": 1}
        return Compiling(OffloadBackend(**options), options=options)

    def _budget(self, text: str) -> int:
        if text not in ("checkpoint", "halfway"):
            return parse_size(text, field="ours")
        peaks = {row["name"]: int(row["peak_GB"] * 1e9) for row in _read(self.rows) if row.get("peak_GB")}
        if not {"keep", "checkpoint"} <= peaks.keys():
            raise ConfigError(f"ours:{text} needs the peaks of keep and checkpoint, which have none here.")
        return peaks["checkpoint"] if text == "checkpoint" else (peaks["checkpoint"] + peaks["keep"]) // 2

    def _error(self, share: Share) -> float | None:
        found = [_local(parameter.grad) for parameter in share.parameters if parameter.grad is not None]
        if not self.reference:
            self.reference = [gradient.cpu() for gradient in found]
            return None
        error, _, whole = compare_gradients(found, self.reference)
        return error / whole if whole else error


def _work(given: argparse.Namespace) -> int:
    """All variants of a way, one after another, until one fails."""
    (way,) = given.ways
    with contextlib.suppress(OSError, AttributeError):  # ends with its launcher, on Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    rank = _Rank(way, given)
    again = any("ms" in row for row in _read(rank.rows))
    for index, name in enumerate(given.variants):
        try:
            row = rank.measure(name)
        except Exception as error:
            text = f"{type(error).__name__}: {str(error)[:900]}"
            print(f"rank {dist.get_rank()}, {way} {name}: {text}", flush=True)
            (given.out / f"ranks-{way}.failed-{dist.get_rank()}").write_text(text)
            os._exit(1)  # other ranks may wait in a collective, and a group cannot be left alone
        if rank.first:
            _append(rank.rows, {**row, "name": _AGAIN} if again and index == 0 else row)
            print("RES", way, json.dumps({key: value for key, value in row.items() if key != "times_s"}), flush=True)
        torch.compiler.reset()
        gc.collect()
        release_host_memory()
        if rank.device.type == "cuda":
            torch.cuda.empty_cache()
        dist.barrier()
    dist.destroy_process_group()
    return 0


def _optimizers(parameters: list[torch.nn.Parameter]) -> Optimizers:
    """AdamW, fused on a GPU; one for DTensors and one for plain tensors, which torch does not mix in one kernel."""
    kinds = [[p for p in parameters if isinstance(p, DTensor) is kind] for kind in (False, True)]
    return [torch.optim.AdamW(kind, lr=0.0, fused=kind[0].device.type == "cuda") for kind in kinds if kind]


def _planned() -> Row:
    """What this rank's plans predict."""
    report = OffloadReport(plans=tuple(last_plans()))
    bound = report.lower_bound_slowdown
    return {
        "predicted_GB": (report.predicted_peak_bytes + report.reserve_bytes) / 1e9,
        "slowdown": report.predicted_slowdown,
        **({} if bound is None else {"bound": bound}),
        "copied_GB": report.offloaded_bytes / 1e9,
        "recomputed_GB": report.recomputed_bytes / 1e9,
    }


def _joined(name: str, ranks: list[Row]) -> Row:
    """One row of what all ranks found: the slowest time of each step, the highest of everything else."""
    times = [max(step) for step in zip(*(row["times_s"] for row in ranks), strict=True)]
    row: Row = {"name": name, "ms": 1e3 * statistics.median(times)}
    for field in (*_PLANNED, "peak_GB", "worst_grad", "compile_s", "host_ms"):
        found = [own[field] for own in ranks if own.get(field) is not None]
        row |= {field: max(found)} if found else {}
    row |= {f"{field}s": [own[field] for own in ranks] for field in ("peak_GB", "predicted_GB") if field in ranks[0]}
    row |= {"counts": [own.get("counts") for own in ranks]}
    return {**row, "losses": [own["loss"] for own in ranks], "times_s": times}


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of it."""
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach()
