"""Two processes train together, on the CPU (gloo) or on two GPUs (NCCL), and write down what each of them saw.

    found = spawned(train, folder, CPU, "aot_eager")        what each rank saw, by case
    for case in CASES: check_case(found, case, CPU, "aot_eager")

A case is a way of training (DDP per block, DDP as a whole, FSDP2) and a run of it: "plain"; "delayed", with copies delayed and
freed memory overwritten on rank 1 alone; "across", delayed and with copies that reach from graph to graph. Each is compared
with keep-all in the same processes. A rank writes to its file after every case: what breaks later hides nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import socket
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpu.races import RANDOM, disturbances
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import graphoffload
from graphoffload.bench.overlap import profile
from graphoffload.compiler import device_limits as limits
from graphoffload.compiler import link
from graphoffload.errors import GraphOffloadWarning, PerRankPlanWarning
from graphoffload.hardware import host_memory
from graphoffload.hardware import measurement as hardware
from graphoffload.options.config import OffloadConfig
from graphoffload.runtime import registry
from graphoffload.runtime.pinned.pool import POOL, HostPool

RANKS = 2
DELAYED_RANK = 1
LAYERS = 3
PARAMETERS = 6 * LAYERS
STEPS = 3
MICROBATCHES = 2
LEARNT = 3
"""Forwards after which the order of graphs is known, one to compile among them."""
WINDOW = "256MiB"
"""For copies from graph to graph: all of a model this small. A quarter, as by default, is less than one of its tensors."""
AHEAD_CYCLES = 1_200_000_000
PROFILES = 4
"""More than half a second: under a profiler a slow host takes 0.2 s to launch FSDP2's forward and backward."""
WAYS = ("ddp", "ddp_whole", "fsdp2")
ACROSS = ("ddp", "fsdp2")
CASES = (*((how, run) for how in WAYS for run in ("plain", "delayed")), *((how, "across") for how in ACROSS))
LINK_BYTES_PER_S = 50e9
"""Of rank 0 where the link is made up; the other rank has half of it."""
TOGETHER_S = 0.1
"""Ranks that measure together begin to copy within this: a third of the time that they copy for."""
BEGAN: dict[str, float] = {}
"""When this process began to copy, by phase."""
ROUNDING = 1e-5
"""float32, fused otherwise; the gradients of a wrong activation are off by 1e-2 and more."""


@dataclass(frozen=True)
class Place:
    """Where the ranks run, the model's size there, and the seconds after which they are taken to hang."""

    device: str
    width: int
    tokens: int
    limit_s: float

    @property
    def scale(self) -> int:
        """Parameters relative to the smallest model."""
        return (self.width // 32) ** 2

    @property
    def least_bytes(self) -> int:
        """What one run offloads at least: of every block what comes out of its first product."""
        return STEPS * MICROBATCHES * LAYERS * self.tokens * 4 * self.width * 4


CPU = Place("cpu", 32, 64, 600.0)
GPUS = Place("cuda", 1024, 2048, 120.0)
"""Saved tensors of 8 and 32 MiB; on an H200 a block's copies take longer than its products, so that they outlive its graph."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def parallel(how: str, backend: Any, place: Place) -> nn.Module:
    """The model wrapped and compiled: DDP per block, DDP as a whole (torch splits it by buckets), or FSDP2 per block."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.device(place.device):
        model: nn.Module = Stack(place.width)
    if how == "ddp_whole":
        model = DistributedDataParallel(model, bucket_cap_mb=0.05 * place.scale)  # type: ignore[arg-type]
        model.compile(backend=backend)
        return model
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend=backend)
    if how == "ddp":
        return DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(model)
    return model


def offloading(inner: str, **options: Any) -> graphoffload.OffloadBackend:
    """All that may go, however small."""
    return graphoffload.OffloadBackend(policy="offload", min_tensor_bytes=0, inner=inner, **options)


def accumulate(model: nn.Module, place: Place, seed: int) -> None:
    """Forward and backward of one microbatch, another one on each rank."""
    generator = torch.Generator().manual_seed(RANKS * seed + dist.get_rank())
    x = torch.randn(place.tokens, place.width, generator=generator, pin_memory=place.device == "cuda").to(place.device)
    model(x).square().mean().backward()


def gradients(model: nn.Module, place: Place) -> list[Tensor]:
    """Of all steps of SGD, each of two microbatches accumulated; whole tensors where they are sharded.

    The parameters are in the end what they were.
    """
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)
    found: list[Tensor] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for microbatch in range(MICROBATCHES):
            accumulate(model, place, MICROBATCHES * step + microbatch)
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found += [(grad.full_tensor() if hasattr(grad, "full_tensor") else grad).detach().clone() for grad in grads]
        optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), before, strict=True):
            parameter.copy_(value)
    return found


def compared(model: nn.Module, kept: list[Tensor], place: Place, *, disturb: bool) -> dict[str, Any]:
    """How far our gradients are from keep-all's, and what moved meanwhile; under disturbances on one of the ranks, if asked."""
    graphoffload.reset_stats()
    began = time.perf_counter()
    disturbed = disturb and dist.get_rank() == DELAYED_RANK
    with disturbances(RANDOM, seed=1) if disturbed else contextlib.nullcontext((None, None)) as (delays, overwriter):
        ours = gradients(model, place)
    sizes = [float(grad.norm()) for grad in kept]
    errors = [float((a - b).norm()) / size for a, b, size in zip(ours, kept, sizes, strict=True)]
    return {
        "count": len(ours),
        "smallest": min(sizes),
        "error": max(errors),
        "equal": all(map(torch.equal, ours, kept)),
        "sum": sum(float(grad.double().sum()) for grad in ours),
        "graphs": sum(bool(plan.transfers) for plan in graphoffload.last_plans()),
        "in_use": graphoffload.host_memory().in_use_bytes,
        "copies_delayed": delays.copies if delays is not None else 0,
        "blocks_overwritten": overwriter.filled if overwriter is not None else 0,
        "seconds": round(time.perf_counter() - began, 2),
        **graphoffload.stats(),
    }


def beside_compute(model: nn.Module, place: Place) -> dict[str, float]:
    """Milliseconds of a microbatch profiled on a GPU in which copies ran, and of these beside kernels other than NCCL's.

    The device waits until the host has launched all of it: kernels of 0.1 ms that an interpreter launches a millisecond apart
    have nothing beside them, whatever the order on the streams. Of each direction the best of some microbatches: where a rank
    waits in a collective for the other, its copies have no compute beside them.
    """

    def launched_ahead() -> None:
        torch.cuda._sleep(AHEAD_CYCLES)
        accumulate(model, place, 0)

    for _ in range(LEARNT):
        accumulate(model, place, 0)
    timelines = [profile(launched_ahead) for _ in range(PROFILES)]
    d2h = max((each.d2h for each in timelines), key=lambda lane: lane.overlap_with_compute_ms)
    h2d = max((each.h2d for each in timelines), key=lambda lane: lane.overlap_with_compute_ms)
    return {
        "d2h_ms": d2h.busy_ms,
        "d2h_beside_ms": d2h.overlap_with_compute_ms,
        "h2d_ms": h2d.busy_ms,
        "h2d_beside_ms": h2d.overlap_with_compute_ms,
        "pageable": sum(each.d2h.pageable + each.h2d.pageable for each in timelines),
    }


def in_a_group(rank: int, port: int, place: Place) -> None:
    """What torchrun sets up. Kernels are deterministic; new memory starts as NaN."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank),
        # NVLink multicast stays off: on a host whose GPUs are shared it is not a test's to use.
        NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1",
        CUBLAS_WORKSPACE_CONFIG=":4096:8",
    )  # fmt: skip
    torch.set_num_threads(1)
    dist._DEFAULT_FIRST_BUCKET_BYTES = 2**14 * place.scale  # so that a model this small has several buckets
    group: dict[str, Any] = {"backend": "gloo"}
    if place.device == "cuda":
        torch.cuda.set_device(rank)
        torch.use_deterministic_algorithms(True, warn_only=True)
        group = {"backend": "nccl", "device_id": torch.device("cuda", rank)}
    dist.init_process_group(rank=rank, world_size=RANKS, timeout=datetime.timedelta(seconds=place.limit_s), **group)


def train(rank: int, port: int, folder: str, place: Place, inner: str) -> None:
    """One rank, all cases in one process, since starting it takes longest; what was seen goes to a file."""
    os.environ.update(GRAPHOFFLOAD_CACHE_DIR=f"{folder}/cache")
    in_a_group(rank, port, place)
    kept: dict[str, list[Tensor]] = {}
    seen: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for key, value in cases(folder, place, inner, kept):
            ours = [item for item in caught if issubclass(item.category, GraphOffloadWarning)]
            seen["ranks_warnings"] = [str(item.message) for item in ours if item.category is PerRankPlanWarning]
            seen["warnings"] = [str(item.message) for item in ours if item.category is not PerRankPlanWarning]
            seen[key] = value
            Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def cases(folder: str, place: Place, inner: str, kept: dict[str, list[Tensor]]) -> Iterator[tuple[str, Any]]:
    """(name, what was seen), one after the other; `kept` holds keep-all's gradients by way."""
    os.environ["GRAPHOFFLOAD_ACROSS_GRAPHS"] = "0"
    ram = host_memory.for_this_process()  # what is available differs from moment to moment
    with counted_measurements(place) as measured, mock.patch.object(host_memory, "for_this_process", return_value=ram):
        yield "hardware", asked_at_once(place)
        for how in WAYS:
            kept[how] = gradients(parallel(how, graphoffload.OffloadBackend(policy="keep", inner=inner), place), place)
            registry.forget()
            model = parallel(how, offloading(inner), place)
            yield f"{how} plain", compared(model, kept[how], place, disturb=False)
            yield f"{how} delayed", compared(model, kept[how], place, disturb=True)
            if place.device == "cuda" and inner == "aot_eager" and how not in ACROSS:
                yield f"{how} beside compute", beside_compute(model, place)
            yield "host_budget", host_budgets()
            files = sorted(path.name for path in Path(folder).rglob("hardware-*.json"))
            yield "profiles", {"measured": len(measured), "files": files}
        os.environ["GRAPHOFFLOAD_ACROSS_GRAPHS"] = "1"
        for how in ACROSS:
            registry.forget()
            model = parallel(how, offloading(inner), place)
            yield f"{how} across", compared(model, kept[how], place, disturb=True)
            if place.device == "cuda" and inner == "aot_eager":
                model = parallel(how, offloading(inner, max_inflight_bytes=WINDOW), place)
                yield f"{how} beside compute", beside_compute(model, place)


def host_budgets() -> dict[str, int | None]:
    """host_budget="auto" of this rank, of a process that is alone, both before they hold any, and what the runtime holds to."""
    with mock.patch.object(limits, "POOL", HostPool()):
        divided = limits.resolve_limits(OffloadConfig(hardware="cpu"), []).host_budget_bytes
        with mock.patch.dict(os.environ):
            del os.environ["LOCAL_WORLD_SIZE"]
            counted = limits.resolve_limits(OffloadConfig(hardware="cpu"), []).host_budget_bytes
            with mock.patch.object(limits, "local_ranks", return_value=1):
                alone = limits.resolve_limits(OffloadConfig(hardware="cpu"), []).host_budget_bytes
    return {"divided": divided, "counted": counted, "alone": alone, "runtime": POOL.budget_bytes}


@contextlib.contextmanager
def counted_measurements(place: Place) -> Iterator[list[int]]:
    """Device indices that this process measured the hardware of. Without a GPU it "measures" a made-up profile."""
    measured: list[int] = []
    measure = hardware._measure

    def counted(module: Any, index: int, start: hardware.Start | None = None) -> hardware.HardwareProfile:
        measured.append(index)

        def begin(phase: str) -> None:
            assert start is not None
            start(phase)
            BEGAN[phase] = time.monotonic()  # one clock for all processes of a host

        watched = None if start is None else begin
        if place.device == "cuda":
            return measure(module, index, watched)
        for phase in hardware.PHASES if watched is not None else ():
            watched(phase)
            time.sleep(0.1)
        rate = LINK_BYTES_PER_S / (1 + dist.get_rank())
        return dataclasses.replace(hardware.PROFILES["h200-sxm"], name="a device", d2h_bytes_per_s=rate)

    with mock.patch.object(hardware, "_measure", counted):
        yield measured


def asked_at_once(place: Place) -> dict[str, Any]:
    """The profile of this rank's device, asked for by both ranks, rank 0 half a second after the other; then once more."""
    without = mock.patch.object(torch.cuda, "get_device_name", return_value="a device")
    device = f"cuda:{dist.get_rank()}"
    with without if place.device == "cpu" else contextlib.nullcontext():
        time.sleep(0.0 if dist.get_rank() else 0.5)
        link.measure_with_ranks("measure", device)
        link.measure_with_ranks("measure", device)
        profile = link.hardware_of("measure", device)
        alone = hardware.cache_path(torch.cuda.get_device_name(dist.get_rank()), str(torch.__version__))
    return {
        "profile": profile.to_json(), "source": profile.source, "ranks": profile.measured_by_ranks, "began": BEGAN,
        "d2h": profile.d2h_bytes_per_s, "both": profile.both_ways_bytes_per_s, "alone": alone.exists(),
    }  # fmt: skip


def spawned(function: Any, folder: Path, place: Place, *arguments: Any, method: str = "spawn") -> list[dict[str, Any]]:
    """What each rank wrote to its file. `method`: of multiprocessing; forked processes begin with torch imported.

    Raises:
        Exception: that of the first rank to fail, or a TimeoutError; what the ranks had written until then can be `read`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = mp.start_processes(
        function, args=(port, str(folder), place, *arguments), nprocs=RANKS, join=False, start_method=method
    )
    deadline = time.monotonic() + place.limit_s
    try:
        while not started.join(timeout=max(0.0, deadline - time.monotonic()), grace_period=2.0):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{function.__name__} on {RANKS} x {place.device} took more than {place.limit_s:.0f} s")
    finally:
        for process in started.processes:
            if process.is_alive():
                process.kill()
    return read(folder)


def read(folder: Path) -> list[dict[str, Any]]:
    """What each rank has written so far."""
    files = [folder / f"{rank}.json" for rank in range(RANKS)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


def check_case(found: list[dict[str, Any]], case: tuple[str, str], place: Place, inner: str) -> None:
    """Every rank's gradients of every step are keep-all's: to the bit, under Inductor to rounding; and all of it was copied."""
    how, run = case
    for rank, seen in enumerate(found):
        got = seen[f"{how} {run}"]
        said = f"rank {rank}, {how} {run}: {got}"
        assert got["count"] == STEPS * PARAMETERS, said
        assert got["smallest"] > 0, said
        assert got["equal"] if inner == "aot_eager" else got["error"] < ROUNDING, said
        assert got["reloads"] == got["waits"] >= STEPS * MICROBATCHES * LAYERS, said
        assert got["offloads"] == got["releases"] == got["reloads"] - got["stays"], said
        assert (got["stays"] > 0) == (run == "across" and place.device == "cuda"), said  # of the last block, needed at once
        assert got["h2d_bytes"] >= got["d2h_bytes"] >= place.least_bytes - got["stayed_bytes"], said
        assert got["graphs"] >= (2 if how == "ddp_whole" else 1), said
        assert got["in_use"] == 0, said
        disturbed = run != "plain" and rank == DELAYED_RANK
        assert (got["blocks_overwritten"] > 0) == disturbed, said
        copies = got["offloads"] + got["reloads"] - got["stays"]
        assert (got["copies_delayed"] >= copies) == (disturbed and place.device == "cuda"), said
        if run != "across" or place.device == "cuda":  # without streams nothing is left to the next graph
            assert (got["deferred"] > 0) == (run == "across"), said
    assert len({seen[f"{how} {run}"]["sum"] for seen in found}) == 1, f"{how} {run}: the ranks have other gradients: {found}"


def check_surroundings(found: list[dict[str, Any]]) -> None:
    """No warning: the ranks have told each other what they have. Host memory is shared between them, also where nothing but the
    ranks themselves says how many they are."""
    for seen in found:
        assert seen["ranks_warnings"] == []
        assert seen["warnings"] == []
        budget = seen["host_budget"]
        assert budget["divided"] == budget["counted"] == budget["alone"] // RANKS, budget
        # The runtime's is of an earlier moment, and other processes take and free memory meanwhile.
        assert 0 < 0.9 * budget["divided"] < budget["runtime"] < 0.9 * budget["alone"], budget


def check_profile(found: list[dict[str, Any]], place: Place) -> None:
    """Both ranks measured, copying at the same time; both plan with the slowest figures, kept on disk for two ranks alone."""
    assert [seen["profiles"]["measured"] for seen in found] == [1] * RANKS, found
    assert len({seen["hardware"]["profile"] for seen in found}) == 1, found
    for seen in found:
        assert seen["hardware"]["source"] == "measured"
        assert seen["hardware"]["ranks"] == RANKS
        assert not seen["hardware"]["alone"]
        (file,) = seen["profiles"]["files"]
        assert file.endswith(f"-{RANKS}-ranks.json"), file
        if place.device == "cpu":
            assert seen["hardware"]["d2h"] == LINK_BYTES_PER_S / RANKS
        else:
            assert seen["hardware"]["both"] > max(1e9, 0.5 * seen["hardware"]["d2h"]), seen["hardware"]
    for phase in hardware.PHASES:
        began = [seen["hardware"]["began"][phase] for seen in found]
        assert max(began) - min(began) < TOGETHER_S, (phase, began)
