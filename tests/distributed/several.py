"""Several processes train a tiny model in one way after another, on the CPU (gloo), and write down what each of them saw.

    found = trained("distributed.tensor_parallel", {"blocks": OFFLOAD}, folder)        by rank, then by "way variant"
    check(found, "blocks offload")

A way is a function of a module: it takes `compiled(module)`, which compiles a module in place, trains, and yields the loss and
the gradients of each step. Each way runs as plain torch first, uncompiled, and then by each variant of options. On a CPU all
copies go through lazy streams, which copy as late as they may, and freed memory is overwritten.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib
import json
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from forked import server
from lazy import lazy_streams
from torch import Tensor, nn

import graphoffload
from graphoffload.errors import GraphOffloadWarning, PerRankPlanWarning
from graphoffload.runtime import registry

Compile: TypeAlias = Callable[[nn.Module], None]
Steps: TypeAlias = Iterator[tuple[float, list[Tensor | None]]]
Found: TypeAlias = list[dict[str, Any]]

LIMIT_S = 400.0
ROUNDING = 1e-5
"""float32, fused otherwise; the gradients of a wrong activation are off by 1e-2 and more."""
BASE: dict[str, Any] = {"min_tensor_bytes": 1, "hardware": "h200-sxm", "reserve": 0}
"""A plan for a GPU that is not there, in which everything may go."""
OFFLOAD = {"offload": {"policy": "offload"}}


def whole(tensor: Tensor) -> Tensor:
    """A copy of a tensor, put together where it is sharded."""
    full = getattr(tensor, "full_tensor", None)
    return (tensor if full is None else full()).detach().clone()


def grads(modules: Iterable[nn.Module]) -> list[Tensor | None]:
    """The gradients of all parameters."""
    return [None if p.grad is None else whole(p.grad) for module in modules for p in module.parameters()]


def trained(
    module: str,
    ways: Mapping[str, Mapping[str, Any]],
    folder: Path,
    *,
    inner: str = "aot_eager",
    ranks: int = 2,
) -> Found:
    """What each rank saw.

    Args:
        module: that defines the ways. ways: variants of options by way; a list has the options of each rank.

    Raises:
        Exception: that of the first rank to fail, or a TimeoutError.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = (port, ranks, str(folder), module, ways, inner)
    server()
    started = mp.start_processes(_rank, args=arguments, nprocs=ranks, join=False, start_method="forkserver")
    deadline = time.monotonic() + LIMIT_S
    try:
        while not started.join(timeout=max(0.0, deadline - time.monotonic()), grace_period=2.0):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{module} on {ranks} processes took more than {LIMIT_S:.0f} s")
    finally:
        for process in started.processes:
            if process.is_alive():
                process.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def _rank(
    rank: int,
    port: int,
    ranks: int,
    folder: str,
    module: str,
    ways: Mapping[str, Mapping[str, Any]],
    inner: str,
) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), RANK=str(rank),
        WORLD_SIZE=str(ranks), GRAPHOFFLOAD_CACHE_DIR=f"{folder}/cache",
    )  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=60))
    seen: dict[str, Any] = {}
    for name, variants in ways.items():
        way = getattr(importlib.import_module(module), name)
        plain = _run(way, None)
        for variant, asked in variants.items():
            options = asked[rank] if isinstance(asked, list) else asked
            alone = isinstance(asked, list) or module.endswith("pipelines")  # whose stages compile one after the other
            os.environ["GRAPHOFFLOAD_ACROSS_RANKS"] = "0" if alone else "1"
            seen[f"{name} {variant}"] = _compared(way, {**BASE, "inner": inner, **options}, plain)
            Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


def _run(way: Callable[[Compile], Steps], backend: Any) -> list[tuple[float, list[Tensor | None]]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    gc.collect()
    return list(way(lambda module: None if backend is None else module.compile(backend=backend)))


def _compared(way: Callable[[Compile], Steps], options: dict[str, Any], plain: list[Any]) -> dict[str, Any]:
    registry.forget()
    graphoffload.reset_stats()
    backend = graphoffload.OffloadBackend(**options)
    with warnings.catch_warnings(record=True) as caught, lazy_streams() as lazy:
        warnings.simplefilter("always")
        began = time.perf_counter()
        ours = _run(way, backend)
    pairs = [
        (one, other)
        for (_, left), (_, right) in zip(ours, plain, strict=True)
        for one, other in zip(left, right, strict=True)
        if one is not None and other is not None
    ]
    losses = [abs(one - other) for (one, _), (other, _) in zip(ours, plain, strict=True)]
    ours_warnings = [item for item in caught if issubclass(item.category, GraphOffloadWarning)]
    with contextlib.suppress(IndexError):
        del ours
    gc.collect()
    plans = graphoffload.last_plans()
    return {
        "count": len(pairs),
        "equal": all(torch.equal(one, other) for one, other in pairs),
        "error": max(float((one - other).norm() / (other.norm() + 1e-12)) for one, other in pairs),
        "loss_error": max(losses),
        "complaints": lazy.complaints[:3],
        "transfers": [len(plan.transfers) for plan in plans],
        "recomputed": [sum(d.action == "recompute" for d in plan.decisions) for plan in plans],
        "variants": sorted({plan.variant for plan in plans}),
        "summaries": sorted({plan.summary for plan in plans if plan.variant}),
        "in_use": graphoffload.host_memory().in_use_bytes,
        "warnings": [f"{w.category.__name__}: {w.message}" for w in ours_warnings if w.category is not PerRankPlanWarning],
        "seconds": round(time.perf_counter() - began, 1),
        **graphoffload.stats(),
    }


def check(found: Found, case: str, *, exact: bool = True, moves: bool = True, beside: str = "") -> None:
    """On every rank the case's losses and gradients are plain torch's, and what was planned was done.

    exact: to the bit. moves: something is offloaded. beside: a case whose rounding is allowed as well, such as keep-all's.
    """
    for rank, seen in enumerate(found):
        got = seen[case]
        said = f"rank {rank}, {case}: {got}"
        assert got["count"] > 0, said
        rounding = max(ROUNDING, seen[beside]["error"]) if beside else ROUNDING
        assert got["equal"] if exact else got["error"] <= rounding, said
        assert got["loss_error"] < ROUNDING, said
        assert got["complaints"] == [], said
        assert got["in_use"] == 0, said
        assert got["reloads"] == got["waits"], said
        if moves:
            assert got["reloads"] > 0, said
            assert sum(got["transfers"]) > 0, said
