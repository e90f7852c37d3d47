"""Races made visible: copies delayed on their streams, compute that lags behind the host, freed memory overwritten.

A missing wait goes unseen while copies are fast, while the host is slow, and while freed memory still holds what it held. Here
none of this is so. Consecutive steps have different inputs, so that stale memory of the step before is wrong as well.

    reference = twin(case, module)                    the same compiled graphs with synchronous copies
    found = disturbed(case, module, BEFORE)           must be equal to the bit

Where a hook is active a copy is issued call by call. So that the compiled copy (streams/native.py), which plain training uses,
is seen as well, every other seed delays that one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from graphoffload.hardware.profile import HardwareProfile
from graphoffload.runtime import copy_hook, registry, release_hook, twin_copies
from graphoffload.runtime.streams.copy_streams import streams_of
from graphoffload.runtime.streams.memcpy import KINDS
from graphoffload.testing import Case, Result, case_steps, differences, whole_gradient_error

DEVICE = "cuda"
SLOW_LINK = HardwareProfile(
    name="slow link", source="datasheet", memory_bytes=2**34, d2h_bytes_per_s=1e8, h2d_bytes_per_s=1e8,
    matmul_flops_per_s=(("float32", 1e13),),
)  # fmt: skip
"""Planned for this, copies take longer than their graph: releases stand at its end, reloads at its start."""
SEEDS = (0, 1, 2, 3)
CYCLES_PER_MS = 2_000_000  # at 2 GHz; a slower clock only delays longer


@dataclass(frozen=True)
class Disturbance:
    """Milliseconds of spinning before and after every copy (fixed, or up to that), and compute's lag behind the host."""

    name: str
    before_ms: float = 0.0
    after_ms: float = 0.0
    random: bool = False
    lag_ms: float = 0.0


BEFORE = Disturbance("spin before copies", before_ms=1.0)
AFTER = Disturbance("spin after copies", after_ms=1.0)
RANDOM = Disturbance("random spins", before_ms=2.0, after_ms=1.0, random=True)
LAG = Disturbance("compute lags behind the host", lag_ms=20.0)
ALL = (BEFORE, AFTER, RANDOM, LAG)


def spin(milliseconds: float) -> None:
    """Keep the current stream busy."""
    if milliseconds > 0:
        torch.cuda._sleep(int(milliseconds * CYCLES_PER_MS))


class Delays:
    """A copy hook that spins; counts the copies it saw."""

    def __init__(self, disturbance: Disturbance, seed: int = 0) -> None:
        self.disturbance, self.draw, self.copies = disturbance, random.Random(seed), 0

    def __call__(self, direction: str, when: str, name: str) -> None:
        self.copies += when == "before"
        most = self.disturbance.before_ms if when == "before" else self.disturbance.after_ms
        spin(self.draw.uniform(0.0, most) if self.disturbance.random else most)


class Overwriter:
    """A release hook that overwrites freed memory with NaN (all bits set).

    The source that is being released is still referenced by the graph's code, so each call overwrites the blocks freed since
    the earlier ones: it takes blocks of those sizes from the allocator, which hands out the freed ones first, and fills them.
    """

    def __init__(self, blocks: int = 4) -> None:
        self.blocks, self.sizes, self.filled = blocks, set[int](), 0

    def __call__(self, source: Tensor, name: str) -> None:
        self.overwrite(source.device)
        self.sizes.add(source.untyped_storage().nbytes())

    def overwrite(self, device: torch.device | str) -> None:
        """Fill `blocks` free blocks of each size seen."""
        for nbytes in self.sizes:
            taken = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(self.blocks)]
            for block in taken:
                block.fill_(0xFF)
                self.filled += 1


def with_compiled_copies() -> Any:
    """The side streams of the current device, which copy by one compiled call."""
    streams = streams_of(torch.device(DEVICE, torch.cuda.current_device()))
    assert streams is not None
    assert streams._whole is not None, "there is no compiled copy: install graphoffload where there is a C compiler"
    return streams


@contextlib.contextmanager
def compiled_copy_hook(delays: Delays) -> Iterator[None]:
    """`delays` beside the copies that are one compiled call: before and after the whole of it, on its side stream."""
    streams = with_compiled_copies()
    original, side = streams._whole, {KINDS["d2h"]: ("d2h", streams.d2h), KINDS["h2d"]: ("h2d", streams.h2d)}

    def whole(target: int, source: int, nbytes: int, kind: int, *streams_and_events: int) -> int:
        direction, stream = side[kind]
        with torch.cuda.stream(stream):
            delays(direction, "before", "")
            code = original(target, source, nbytes, kind, *streams_and_events)
            delays(direction, "after", "")
        return code

    with mock.patch.object(streams, "_whole", whole):
        yield


@contextlib.contextmanager
def disturbances(disturbance: Disturbance, *, seed: int = 0, blocks: int = 4) -> Iterator[tuple[Delays, Overwriter]]:
    """Delays and overwriting switched on; of compiled copies, on a GPU, where the seed is odd."""
    delays, overwriter = Delays(disturbance, seed), Overwriter(blocks)
    compiled = seed % 2 == 1 and torch.cuda.is_available()
    with compiled_copy_hook(delays) if compiled else copy_hook(delays), release_hook(overwriter):
        yield delays, overwriter


def offloads_blocks() -> bool:
    """Whether anything was offloaded that is one block of memory: what is not is never copied by one compiled call."""
    layouts = [layout for plan in registry.last_plans() for layout in registry.run_plan(plan.key).layouts.values()]
    return any(layout.dense and layout.nbytes for layout in layouts)


def _lagging(case: Case, lag_ms: float, overwriter: Overwriter | None) -> Case:
    """The case with compute made late before forward and before backward, and memory overwritten between the two."""

    def inputs(device: Any, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
        made = case.inputs(device, dtype, seed)
        spin(lag_ms)
        return made

    def loss(output: Any) -> Tensor:
        if overwriter is not None:
            overwriter.overwrite(DEVICE)
        spin(lag_ms)
        return case.loss(output)

    return dataclasses.replace(case, inputs=inputs, loss=loss)


def compile_blocks(case: Case, backend: Any) -> torch.nn.Module:
    """A fresh module of the case whose layers are compiled one by one: every layer is a graph of its own."""
    torch._dynamo.reset()
    module = case.fresh(DEVICE)
    for layer in module.get_submodule("layers").children():
        layer.compile(backend=backend)
    return module


def twin(case: Case, module: torch.nn.Module) -> list[Result]:
    """Steps of the same compiled module with synchronous copies."""
    with twin_copies():
        return case_steps(case, module, DEVICE, seeds=SEEDS)


def disturbed(case: Case, module: torch.nn.Module, disturbance: Disturbance, *, seed: int = 0) -> tuple[list[Result], int]:
    """Steps under a disturbance, and how many copies it delayed."""
    with disturbances(disturbance, seed=seed) as (delays, overwriter):
        results = case_steps(_lagging(case, disturbance.lag_ms, overwriter), module, DEVICE, seeds=SEEDS)
        torch.cuda.synchronize()
    return results, delays.copies


def found_differences(results: list[Result], reference: list[Result]) -> list[str]:
    """What differs, with the seed."""
    return [
        f"seed {seed}: {line}"
        for seed, got, expected in zip(SEEDS, results, reference, strict=True)
        for line in differences(got, expected)
    ]


def found_far_apart(results: list[Result], reference: list[Result], noise: float) -> list[str]:
    """Gradients further apart than 5 x the twin from itself: where a kernel adds in any order, bits say nothing."""
    errors = [whole_gradient_error(got, expected) for got, expected in zip(results, reference, strict=True)]
    return [f"seed {seed}: off by {error:.3g}" for seed, error in zip(SEEDS, errors, strict=True) if not error <= 5 * noise]
