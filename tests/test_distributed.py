"""Two processes train together (gloo on the CPU): gradients are keep-all's, host memory is shared, caches stay whole.

Plans are made per rank; DDP and FSDP2 see compiled blocks as any other modules.
"""

from __future__ import annotations

import json
import os
import socket
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import graphoffload
from graphoffload import limits
from graphoffload.config import OffloadConfig
from graphoffload.errors import PerRankPlanWarning
from graphoffload.hardware import PROFILES, cached
from graphoffload.runtime import registry
from graphoffload.saved import Decision, Plan

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch is built without torch.distributed or gloo", allow_module_level=True)

RANKS = 2
WIDTH = 32
WAYS = ("ddp", "ddp_whole", "fsdp2")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def parallel(how: str, backend: Any) -> nn.Module:
    """The model wrapped and compiled: DDP per block, DDP as a whole (torch splits it by buckets), or FSDP2 per block."""
    torch.manual_seed(0)
    model: nn.Module = Stack()
    if how == "ddp_whole":
        model = DistributedDataParallel(model, bucket_cap_mb=0.05)  # type: ignore[arg-type]
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


def gradients(model: nn.Module) -> list[Tensor]:
    """Of two microbatches, other ones on each rank, accumulated; whole tensors where they are sharded."""
    for microbatch in range(2):
        x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(10 * microbatch + dist.get_rank()))
        model(x).square().mean().backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]


def in_a_group(rank: int, port: int) -> None:
    """What torchrun sets up."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    dist._DEFAULT_FIRST_BUCKET_BYTES = 2**14  # so that a model this small has several buckets
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)


def train(rank: int, port: int, folder: str, inner: str) -> None:
    """One rank, all ways in one process, since starting it takes longest; what was seen goes to a file."""
    in_a_group(rank, port)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen: dict[str, Any] = {how: compared(how, inner) for how in WAYS}
    seen["host_budget"] = limits.resolve_limits(OffloadConfig(), []).host_budget_bytes
    seen["warnings"] = [str(item.message) for item in caught if issubclass(item.category, PerRankPlanWarning)]
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def compared(how: str, inner: str) -> dict[str, Any]:
    """Keep-all's gradients and ours, and what our run did."""
    torch._dynamo.reset()
    kept = gradients(parallel(how, graphoffload.OffloadBackend(policy="keep", inner=inner)))
    torch._dynamo.reset()
    registry.forget()
    graphoffload.runtime.reset_stats()
    ours = gradients(parallel(how, graphoffload.OffloadBackend(policy="offload", min_tensor_bytes=0, inner=inner)))
    sizes = [float(grad.norm()) for grad in kept]
    return {
        "count": len(ours),
        "smallest": min(sizes),
        "error": max(float((a - b).norm()) / size for a, b, size in zip(ours, kept, sizes, strict=True)),
        "equal": all(map(torch.equal, ours, kept)),
        "offloads": graphoffload.stats()["offloads"],
        "reloads": graphoffload.stats()["reloads"],
        "graphs": sum(bool(plan.transfers) for plan in graphoffload.last_plans()),
        "in_use": graphoffload.host_memory().in_use_bytes,
    }


def spawned(function: Any, folder: Path, *arguments: Any) -> list[dict[str, Any]]:
    """What each rank wrote to its file."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(function, args=(port, str(folder), *arguments), nprocs=RANKS)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_gradients_are_those_of_keep_all(tmp_path: Path, inner: str) -> None:
    """On both ranks, every gradient; under Inductor to rounding, for it fuses what is kept otherwise than what is copied."""
    found = spawned(train, tmp_path, inner)
    for rank, seen in enumerate(found):
        for how in WAYS:
            run = seen[how]
            assert run["count"] == 18
            assert run["smallest"] > 0
            assert run["equal"] if inner == "aot_eager" else run["error"] < 1e-5, (how, run)
            assert run["offloads"] == run["reloads"] >= 2 * 3
            assert run["graphs"] >= (2 if how == "ddp_whole" else 1)
            assert run["in_use"] == 0
        assert len(seen["warnings"]) == 1
        assert f"rank {rank} of 2 plans for itself" in seen["warnings"][0]
    alone = limits.resolve_limits(OffloadConfig(), []).host_budget_bytes
    assert [seen["host_budget"] for seen in found] == [alone // 2] * 2


def write_and_read(rank: int, port: int, folder: str) -> None:
    """Both ranks write plans and profiles under the same names and read them again, many times."""
    os.environ["GRAPHOFFLOAD_CACHE_DIR"] = folder
    in_a_group(rank, port)
    broken = measured = 0

    def measure() -> Any:
        nonlocal measured
        measured += 1
        return PROFILES["h200-sxm"]

    for round in range(100):
        plan = Plan(key=f"key{round}", graph="g" * (1 + 2000 * rank), decisions=(Decision("t", "keep", "why" * 500),))
        dist.barrier()
        registry._write(plan, f"key{round}")
        read = registry.stored(f"key{round}")
        broken += read is None or read.decisions != plan.decisions or len(read.graph) not in (1, 2001)
        if round % 10 == 0:
            broken += cached(Path(folder) / f"profile{round}.json", measure) != PROFILES["h200-sxm"]
    Path(folder, f"{rank}.json").write_text(json.dumps({"broken": broken, "measured": measured}))
    dist.destroy_process_group()


def test_caches_used_by_two_processes_at_once(tmp_path: Path) -> None:
    """A reader gets one of the two plans, whole; a profile is measured by one process, and the other waits for it."""
    found = spawned(write_and_read, tmp_path)
    assert [seen["broken"] for seen in found] == [0, 0]
    assert sum(seen["measured"] for seen in found) == 10
    assert not list(tmp_path.rglob("*.tmp"))
