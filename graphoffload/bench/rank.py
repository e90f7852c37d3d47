"""One process of `bench ranks`: it trains its part of a way under one variant after another, and writes rows (ranks.py).

    _Rank.measure    settled steps ──▶ measured steps ──▶ with --trace two more, the second profiled ──▶ a row of all ranks
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
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from graphoffload.bench import overlap, parallel
from graphoffload.bench.measure import compare_gradients, recorded_peak_bytes
from graphoffload.bench.observed import forget_plans
from graphoffload.bench.parallel import Compiling, Share
from graphoffload.bench.variants import Inductor
from graphoffload.compiler import step_link
from graphoffload.compiler.backend import OffloadBackend
from graphoffload.errors import ConfigError
from graphoffload.hardware.measurement import cache_path, kept
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.report.offload_report import OffloadReport
from graphoffload.runtime import host_memory, release_host_memory, stats
from graphoffload.runtime.registry import last_plans
from graphoffload.torch_internals.patching import replaced
from graphoffload.units import parse_size

PLAIN_SETTLED = 3
AGAIN = "again"
"""The name of a keep that only gives later variants something to compare with."""
_PR_SET_PDEATHSIG = 1
_PLANNED = ("predicted_GB", "slowdown", "bound", "copied_GB", "recomputed_GB")
Row = dict[str, Any]
Optimizers = list[torch.optim.Optimizer]


def rows_of(path: Path) -> list[Row]:
    """What was measured so far, in order."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, row: Row) -> None:
    """One more row."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


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
        self.settled_s: list[float] = []

    def measure(self, name: str) -> Row:
        """Train under a variant; what came of it, over all ranks.

        Raises:
            Exception: what training raised. This process must end then.
        """
        forget_plans()
        sizes = {**(parallel.TINY if self.given.tiny else parallel.REAL[self.way]), **dict(self.given.size)}
        share = parallel.WAYS[self.way](sizes, self.device, self._compiling(name))
        optimizers = _optimizers(share.parameters)
        with share.context(), _timed_copies(not name.startswith("unshared")):
            steps = list(self._steps(share, optimizers, self.given.settled if _is_ours(name) else PLAIN_SETTLED))
            peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else self._peak_of_cpu(share, optimizers)
            error = self._error(share)
            if self.given.trace:
                overlap.profile(self._alone(share, optimizers), self._trace_path(name))
        own: Row = {"peak_GB": peak / 1e9, "times_s": [step.seconds for step in steps], "compile_s": self.begun_s}
        own |= {"settled_s": [round(seconds, 3) for seconds in self.settled_s]}
        own |= {"loss": steps[-1].loss, "worst_grad": error}
        own |= {"host_ms": 1e3 * statistics.median(step.host_seconds for step in steps)}
        own |= {"counts": {field: sum(step.counts[field] for step in steps) for field in _counts(self.device)}}
        if _is_ours(name):
            own |= _planned()
        everybody: list[Row] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everybody, own)
        return _joined(name, everybody)

    def _steps(self, share: Share, optimizers: Optimizers, settled: int) -> Iterator[_Step]:
        """The measured steps, after so many others; gradients of the last one stay."""
        self.settled_s = []
        for index in range(settled + self.given.steps):
            share.clear_gradients()
            if index == settled and self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            self._wait()
            dist.barrier()
            self._wait()
            before, began = _counts(self.device), time.perf_counter()
            loss = self._whole(share, optimizers)()
            launched = time.perf_counter()
            self._wait()
            seconds = time.perf_counter() - began
            if index == 0:
                self.begun_s = seconds
            if index < settled:
                self.settled_s.append(seconds)
            else:
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
        return static + recorded_peak_bytes(self._whole(share, optimizers))

    def _whole(self, share: Share, optimizers: Optimizers) -> Callable[[], Tensor | None]:
        """Forward, backward, and what the optimizers do; gives the loss."""

        def step() -> Tensor | None:
            loss = share.run()
            for optimizer in optimizers:
                optimizer.step()
            return loss

        return step

    def _alone(self, share: Share, optimizers: Optimizers) -> Callable[[], None]:
        """A step that begins without gradients, as the measured ones do."""

        def step() -> None:
            share.clear_gradients()
            self._whole(share, optimizers)()

        return step

    def _trace_path(self, name: str) -> Path:
        out: Path = self.given.out
        return out / f"ranks-{self.way}-{name.replace(':', '-')}.rank{dist.get_rank()}.trace.json.gz"

    def _compiling(self, name: str) -> Compiling:
        kind, _, budget = name.partition(":")
        if not _is_ours(name):
            return Compiling(Inductor(), checkpointed=kind == "checkpoint")
        options: Row = {"device_budget": f"{self._budget(budget)}B"} if budget else {}
        if self.given.tiny:
            options |= {"hardware": "h200-sxm", "min_tensor_bytes": 1}
        elif kind == "unshared":
            options |= {"hardware": _of_one_rank(torch.cuda.get_device_name(self.device))}
        return Compiling(OffloadBackend(**options), options=options)

    def _budget(self, text: str) -> int:
        if text not in ("checkpoint", "halfway"):
            return parse_size(text, field="ours")
        peaks = {row["name"]: int(row["peak_GB"] * 1e9) for row in rows_of(self.rows) if row.get("peak_GB")}
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


def work(given: argparse.Namespace) -> int:
    """All variants of a way, one after another, until one fails."""
    (way,) = given.ways
    with contextlib.suppress(OSError, AttributeError):  # ends with its launcher, on Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    rank = _Rank(way, given)
    again = any("ms" in row for row in rows_of(rank.rows))
    for index, name in enumerate(given.variants):
        try:
            row = rank.measure(name)
        except Exception as error:
            text = f"{type(error).__name__}: {str(error)[:900]}"
            print(f"rank {dist.get_rank()}, {way} {name}: {text}", flush=True)
            (given.out / f"ranks-{way}.failed-{dist.get_rank()}").write_text(text)
            os._exit(1)  # other ranks may wait in a collective, and a group cannot be left alone
        if rank.first:
            append(rank.rows, {**row, "name": AGAIN} if again and index == 0 else row)
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


def _is_ours(name: str) -> bool:
    return name.startswith(("ours", "unshared"))


def _of_one_rank(device_name: str) -> HardwareProfile:
    """What one process alone has measured.

    Raises:
        ConfigError: none has.
    """
    profile = kept(cache_path(device_name, str(torch.__version__)))
    if profile is None:
        raise ConfigError("unshared needs a profile of one process alone. Run `python -m graphoffload hardware` before.")
    return profile


def _timed_copies(timed: bool) -> contextlib.AbstractContextManager[Any]:
    """Without it a plan is not made again for copies that are slower than it has them."""
    return contextlib.nullcontext() if timed else replaced(step_link, LOOKS=0)


def _planned() -> Row:
    """What this rank's plans predict, the link that they are for, and host memory; all local ranks have one host."""
    report = OffloadReport(plans=tuple(last_plans()))
    bound = report.lower_bound_slowdown
    held = host_memory()
    return {
        "pinned_GB": held.pinned_bytes / 1e9,
        "host_peak_GB": held.peak_bytes / 1e9,
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
    each = ("peak_GB", "predicted_GB", "pinned_GB", "host_peak_GB")
    row |= {f"{field}s": [own[field] for own in ranks] for field in each if field in ranks[0]}
    row |= {field: [own.get(field) for own in ranks] for field in ("counts", "settled_s")}
    return {**row, "losses": [own["loss"] for own in ranks], "times_s": times}


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of it."""
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach()
