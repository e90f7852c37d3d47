"""A long run as training really is: shapes from buckets, accumulation, evaluation and failures in between, and books kept.

log = run(module, Course(steps=60), "cpu")               real copies
with twin_copies():
    twin = run(module, Course(steps=60), "cpu")          the same graphs, synchronous clones on the device
assert log.losses == twin.losses

python -m graphoffload bench soak --steps 200           the same from a shell
"""

from __future__ import annotations

import argparse
import copy
import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graphoffload.compiler.backend import OffloadBackend
from graphoffload.runtime import host_memory, twin_copies
from graphoffload.runtime.handles import ENTRIES
from graphoffload.torch_internals.patching import replaced


class Injected(RuntimeError):
    """The failure of a step, on purpose."""


@dataclass(frozen=True)
class Course:
    """What is run: steps of `accumulate` microbatches, tokens of each from `buckets`; every `every` steps an evaluation and a
    failure, in turn in forward and in backward."""

    steps: int
    buckets: tuple[int, ...] = (64, 96, 128)
    width: int = 64
    layers: int = 3
    every: int = 10
    accumulate: int = 4
    dtype: torch.dtype = torch.float32


@dataclass
class Log:
    """Losses in order, and after each step: host bytes held and how often memory was taken, device bytes, resident bytes."""

    losses: list[float] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    allocations: list[int] = field(default_factory=list)
    device: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


class Block(nn.Module):
    """Norm, two linears and GELU, dropout, a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))
        return result


class Stack(nn.Module):
    """Blocks, then a loss that has no trivial minimum."""

    def __init__(self, course: Course) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(course.width) for _ in range(course.layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x.float() - y.float()).square().mean()


def build(course: Course, device: str, inner: str) -> nn.Module:
    """The model, compiled in place with everything offloaded that may be; one graph for each bucket."""
    torch.manual_seed(0)
    module = Stack(course).to(device, course.dtype)
    backend = OffloadBackend(policy="offload", min_tensor_bytes=0, inner=inner)
    module.compile(backend=backend, dynamic=False)
    return module


@contextmanager
def failing(calls: int) -> Iterator[None]:
    """The runtime raises when it looks up a handle for the `calls`-th time: in a release, a reload or a wait."""
    left = calls
    find = ENTRIES.find

    def broken(*args: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise Injected("a failure in the middle of a graph")
        return find(*args)

    with replaced(ENTRIES, find=broken):
        yield


def run(module: nn.Module, course: Course, device: str) -> Log:
    """Train from the module's present weights, which are put back afterwards."""
    before = copy.deepcopy(module.state_dict())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    draw, log = random.Random(0), Log()
    for step in range(course.steps):
        failure = ("forward", "backward")[step // course.every % 2] if step % course.every == course.every - 1 else ""
        for microbatch in range(course.accumulate):
            _microbatch(module, course, device, draw, log, failure if microbatch == 1 else "")
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if failure:
            _evaluate(module, course, device, log)
        _keep_books(log, device)
        if step % 100 == 99:
            print(f"step {step + 1}: loss {log.losses[-1]:.4f}, host {log.held[-1]} B, device {log.device[-1]} B", flush=True)
    module.load_state_dict(before)
    module.zero_grad(set_to_none=True)
    return log


def _batch(course: Course, device: str, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    return tuple(  # type: ignore[return-value]
        torch.randn(tokens, course.width, generator=generator, device=device, dtype=course.dtype) for _ in range(2)
    )


def _microbatch(module: nn.Module, course: Course, device: str, draw: random.Random, log: Log, failure: str) -> None:
    seed = draw.randrange(2**31)
    tokens = course.buckets[0] if len(log.losses) == 0 else draw.choice(course.buckets)
    torch.manual_seed(seed)
    batch = _batch(course, device, tokens, seed)
    try:
        if failure == "forward":
            with failing(2):
                module(*batch)
        loss = module(*batch)
        if failure == "backward":
            with failing(3):
                loss.backward()
        loss.backward()
    except Injected:
        log.failed.append(failure)
        return
    log.losses.append(loss.item())


def _evaluate(module: nn.Module, course: Course, device: str, log: Log) -> None:
    module.eval()
    with torch.no_grad():
        log.losses.append(module(*_batch(course, device, course.buckets[0], 1)).item())
    module.train()


def _keep_books(log: Log, device: str) -> None:
    gc.collect(0)
    held = host_memory()
    assert held.in_use_bytes == 0, "between steps no activation is on the host"
    assert len(ENTRIES) == 0
    log.held.append(held.held_bytes)
    log.allocations.append(held.allocations)
    log.device.append(torch.cuda.memory_allocated() if device == "cuda" else 0)
    log.reserved.append(torch.cuda.memory_reserved() if device == "cuda" else 0)
    log.resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096 if Path("/proc").exists() else 0)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The tool's options."""
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--inner", default="aot_eager", help="aot_eager (default) or inductor")


def start(given: argparse.Namespace) -> int:
    """Run it with real and with synchronous copies; 1 where losses differ or memory grows after a third of the steps."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    course = Course(given.steps)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # attention and sums in one order, so that losses can be equal
    try:
        module = build(course, device, given.inner)
        log = run(module, course, device)
        with twin_copies():
            twin = run(module, course, device)
    finally:
        torch.use_deterministic_algorithms(before)
    warm = course.steps // 3
    grown = [name for name in ("held", "allocations", "device") if len(set(getattr(log, name)[warm:])) > 1]
    same = twin.losses == log.losses
    print(f"{course.steps} steps, {len(log.failed)} failures injected; host {log.held[-1]} B, device {log.device[-1]} B")
    print(f"losses {'equal' if same else 'DIFFER FROM'} the twin's; {f'GREW: {grown}' if grown else 'nothing grows'}")
    return 0 if same and not grown else 1
