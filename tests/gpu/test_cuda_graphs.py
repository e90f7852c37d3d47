"""mode="reduce-overhead" with offloaded activations: captured with their copies, and every gradient is right.

What is compared with is keep-all without CUDA graphs, of the same weights and batches, after every step.
"""

from __future__ import annotations

import copy
import gc
import itertools
import warnings
from typing import Any

import pytest
import torch
from ranks import Block
from torch import Tensor, nn
from torch._dynamo.utils import counters

import graphoffload
from graphoffload.errors import CaptureError, CudaGraphsWarning
from graphoffload.runtime import copy_hook

DEVICE = "cuda"
WIDTH = 256
UP_BYTES = 512 * WIDTH * 4
"""What one of the offloaded tensors has."""
ROUNDING = 1e-5
"""float32 sums in another order; the gradients of a wrong activation are off by 1e-2 and more."""


class Stack(nn.Module):
    def __init__(self, layers: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def batch(seed: int, tokens: int = 512) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, WIDTH, generator=generator).to(DEVICE)


def pair(mode: str | None = "reduce-overhead", *, dynamic: bool | None = None, **fields: Any) -> tuple[nn.Module, nn.Module]:
    """(offloaded with this mode, keep-all without CUDA graphs) of the same weights."""
    torch.manual_seed(0)
    ours = Stack().to(DEVICE)
    return compiled_pair(ours, copy.deepcopy(ours), mode, dynamic=dynamic, **fields)


def compiled_pair(
    ours: nn.Module, kept: nn.Module, mode: str | None = "reduce-overhead", *, dynamic: bool | None = None, **fields: Any
) -> tuple[nn.Module, nn.Module]:
    """The same for two modules."""
    fields = {"policy": {"*.up": "offload"}, "min_tensor_bytes": 0, **fields}
    ours.compile(backend=graphoffload.OffloadBackend(mode=mode, **fields), dynamic=dynamic)
    kept.compile(backend=graphoffload.OffloadBackend(policy="keep"), dynamic=dynamic)
    for parameter in (*ours.parameters(), *kept.parameters()):
        parameter.grad = torch.zeros_like(parameter)  # else it is an output of a CUDA graph, which the next step overwrites
    return ours, kept


def error(ours: nn.Module, kept: nn.Module) -> float:
    """Relative error of the whole gradient as one vector."""
    a = torch.cat([p.grad.double().flatten() for p in ours.parameters() if p.grad is not None])
    b = torch.cat([p.grad.double().flatten() for p in kept.parameters() if p.grad is not None])
    assert len(a) == len(b) > 0
    return float((a - b).norm() / b.norm())


def step(module: nn.Module, *seeds: int, tokens: int = 512) -> list[float]:
    module.zero_grad(set_to_none=False)
    losses = []
    for seed in seeds:
        loss = module(batch(seed, tokens))
        loss.backward()
        losses.append(loss.item())
    return losses


def launches(module: nn.Module, seed: int) -> int:
    """CUDA graphs that one step launches."""
    with torch.profiler.profile() as profile:
        step(module, seed)
        torch.cuda.synchronize()
    return sum("GraphLaunch" in event.name for event in profile.events())


@pytest.fixture(autouse=True)
def afresh() -> None:
    """Models of tests before this one give back the host memory of their CUDA graphs, which tests here count."""
    torch._dynamo.reset()
    gc.collect()
    counters.clear()


def train(ours: nn.Module, kept: nn.Module, steps: int = 20) -> None:
    """SGD on new data each step, compared after every one."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (ours, kept)]
    for seed in range(steps):
        (loss,), (expected,) = step(ours, seed), step(kept, seed)
        assert loss == pytest.approx(expected, rel=1e-5)
        assert error(ours, kept) < ROUNDING, seed
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("mode", ["reduce-overhead", pytest.param("max-autotune", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("error::graphoffload.errors.CudaGraphsWarning")
@torch._inductor.config.patch("test_configs.max_mm_configs", 2)  # of each product: all of them take minutes to compile
def test_twenty_steps(mode: str) -> None:
    """One CUDA graph in forward and one in backward, each with its copies inside."""
    graphoffload.reset_stats()
    ours, kept = pair(mode)
    train(ours, kept)
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert launches(ours, 3) == 2
    assert launches(kept, 3) == 0
    found = graphoffload.stats()
    assert found["captured"] == 4
    assert found["captured_bytes"] == graphoffload.host_memory().in_use_bytes == 4 * UP_BYTES


def test_copies_are_in_the_graph() -> None:
    """Both directions, each tensor once a step: seen by the profiler, as no Python runs."""
    ours, _ = pair()
    for seed in range(4):
        step(ours, seed)
    x = batch(4)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        ours(x).backward()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    assert sum("DtoH" in name for name in names) == sum("HtoD" in name for name in names) == 4, names


@pytest.mark.parametrize("direction", ["d2h", "h2d"])
def test_slow_copies(direction: str) -> None:
    """Copies that take ten times as long as the step, captured so: whoever reads waits for them."""

    def slow(copied: str, when: str, name: str) -> None:
        if copied == direction and when == "before":
            torch.cuda._sleep(20_000_000)

    ours, kept = pair()
    with copy_hook(slow):
        train(ours, kept, steps=8)


def test_host_buffers_go_with_the_compiled_model() -> None:
    """Nothing can replay what nobody can call."""
    torch._dynamo.reset()
    gc.collect()  # models of other tests, which are cycles
    ours, _ = pair()
    for seed in range(3):
        step(ours, seed)
    assert graphoffload.host_memory().in_use_bytes == 4 * UP_BYTES
    del ours
    torch._dynamo.reset()
    gc.collect()
    assert graphoffload.host_memory().in_use_bytes == 0


@torch.library.custom_op("graphoffload_test::uncapturable", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def uncapturable(x: Tensor) -> Tensor:
    """Multiplies by a number that only the host knows, which a CUDA graph cannot do."""
    return x * float(torch.ones(()).item())


uncapturable.register_fake(torch.empty_like)
uncapturable.register_autograd(lambda ctx, grad: uncapturable(grad))


class Uncapturable(Block):
    """A block with an operation that Inductor cuts its CUDA graphs at."""

    def forward(self, x: Tensor) -> Tensor:
        return uncapturable(super().forward(x))


def test_what_something_else_cuts() -> None:
    """The parts between the copies are captured then, it is said, and the copies run in every step."""
    torch.manual_seed(0)
    ours = Stack().to(DEVICE)
    ours.blocks[1] = Uncapturable(WIDTH).to(DEVICE)
    kept = copy.deepcopy(ours)
    ours, kept = compiled_pair(ours, kept)
    with pytest.warns(CudaGraphsWarning, match="captured between its 4 offloads.*something else in it"):
        step(ours, 0)
    step(kept, 0)
    before = graphoffload.stats()
    train(ours, kept)
    assert graphoffload.stats()["d2h_bytes"] - before["d2h_bytes"] == 20 * 4 * UP_BYTES
    assert launches(ours, 3) >= 8, "four parts in forward and four in backward, at least"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3)))[::2])
def test_microbatches_in_flight(order: tuple[int, ...]) -> None:
    """Three forwards, then their backwards in any order: each has host buffers of its own."""
    ours, kept = pair()
    for repeat in range(6):
        seeds = [10 * repeat + i for i in range(3)]
        for module in (ours, kept):
            module.zero_grad(set_to_none=False)
            losses = [module(batch(seed)) for seed in seeds]
            for i in order:
                losses[i].backward()
            del losses
        assert error(ours, kept) < ROUNDING, repeat
        if repeat == 3:
            held = graphoffload.host_memory().in_use_bytes
    assert graphoffload.host_memory().in_use_bytes == held >= 3 * 4 * UP_BYTES, "nothing new is captured any more"


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_new_shape(dynamic: bool) -> None:
    """Shapes that come and go: recompiled, or recorded again under dynamic shapes."""
    ours, kept = pair(dynamic=dynamic)
    for repeat, tokens in enumerate((512, 512, 512, 384, 384, 512, 384, 256, 512, 256)):
        step(ours, repeat, tokens=tokens)
        step(kept, repeat, tokens=tokens)
        assert error(ours, kept) < ROUNDING, (repeat, tokens)


def test_evaluation_and_dropped_forwards_between_steps() -> None:
    """Forwards without a backward and under no_grad, and one that stops: the next gradients are right."""
    ours, kept = pair()
    for seed in range(8):
        with torch.no_grad():
            ours(batch(100 + seed))
        if seed % 2:
            ours(batch(200 + seed))
        step(ours, seed, seed + 50)
        step(kept, seed, seed + 50)
        assert error(ours, kept) < ROUNDING, seed


def test_what_offloads_nothing_is_captured_whole() -> None:
    """policy="keep": one graph launched in forward, one in backward, and no warning."""
    ours, kept = pair(policy="keep")
    with warnings.catch_warnings():
        warnings.simplefilter("error", CudaGraphsWarning)
        for seed in range(4):
            step(ours, seed)
            step(kept, seed)
            assert error(ours, kept) < ROUNDING
    assert launches(ours, 9) == 2


def test_without_partitions() -> None:
    """graph_partition=False: there is nothing to cut."""
    ours, kept = pair(None, **{"graph_partition": False, "triton.cudagraphs": True})
    train(ours, kept, steps=5)
    assert launches(ours, 3) == 2


def test_a_capture_of_ones_own_is_refused() -> None:
    """torch.cuda.graph around an offloading model: an error with the tensor's name, and training goes on."""
    ours, kept = pair(None)
    x = batch(0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(ours, 0)
    torch.cuda.synchronize()
    with (
        pytest.raises(CaptureError, match=r"inside the capture of a CUDA graph.*policy=\"keep\""),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream),
    ):
        ours(x)
    torch.cuda.synchronize()
    step(ours, 1)
    step(kept, 1)
    assert error(ours, kept) < ROUNDING
