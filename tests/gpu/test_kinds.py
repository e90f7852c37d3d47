"""Precisions and kinds of training that only a GPU has: right beside keep-all, and to the bit with copies delayed."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu import races
from gpu.races import ALL, RANDOM, disturbances, disturbed, found_differences, found_far_apart, offloads_blocks, twin
from net.attentions import documents, flash, flexible, offsets
from net.precisions import Linear8, quantized
from net.small import VOCABULARY, Decoder
from net.step import Taken, take, whole_error
from net.table import everything
from torch import Tensor, nn

import graphoffload
from graphoffload.runtime import registry, twin_copies
from graphoffload.testing import Case, case_steps, compile_case, draw_ints, whole_gradient_error
from graphoffload.testing.compare import own_copy

try:
    from gpu.kernels import SwiGlu
except ImportError:  # no Triton
    SwiGlu = None  # type: ignore[assignment, misc]

WIDTH, LENGTH = 128, 256
LENGTHS = (100, 60, 96)


def config(inner: str) -> graphoffload.OffloadConfig:
    """All that may go, without checksums, which would synchronise; a small window releases memory early."""
    return graphoffload.OffloadConfig(policy="offload", inner=inner, min_tensor_bytes=0, max_inflight_bytes="64KiB")


class Given(nn.Module):
    """A decoder whose forward takes by position what tells tokens apart."""

    def __init__(self, model: nn.Module, *names: str, **fixed: Any) -> None:
        super().__init__()
        self.model, self.names, self.fixed = model, names, fixed

    def forward(self, input_ids: Tensor, *where: Any) -> Tensor:
        loss: Tensor = self.model(input_ids, **dict(zip(self.names, where, strict=True)), **self.fixed)["loss"]
        return loss


@functools.cache
def block_mask(device: str) -> Any:
    """Causal within documents."""
    from torch.nn.attention.flex_attention import create_block_mask

    document = documents(LENGTHS).to(device)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document[query] == document[key])

    return create_block_mask(visible, None, None, LENGTH, LENGTH, device=device)


def varlen(q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor, longest: int) -> Tensor:
    """Attention over packed sequences of one row by torch's own function."""
    from torch.nn.attention.varlen import varlen_attn

    packed = (part[0].transpose(0, 1) for part in (q, k, v))
    found = varlen_attn(*packed, cu_seqlens, cu_seqlens, longest, longest, **VARLEN_CAUSAL)
    return found.transpose(0, 1)[None]


VARLEN_CAUSAL: dict[str, Any] = {}


class Fused(nn.Module):
    """An MLP with the fused SwiGLU, between norms."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.RMSNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down, self.head = nn.Linear(2 * WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for _ in range(2):
            y = self.norm(x)
            x = x + self.down(SwiGlu.apply(self.gate(y), self.up(y)))
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1).float(), input_ids[:, 1:].flatten())


def batch_of(rows: int, *where: Callable[[str], Any]) -> Callable[..., tuple[Any, ...]]:
    """Token ids that depend on the seed, and what tells them apart, which does not."""

    def inputs(device: Any, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
        ids = draw_ints(rows, LENGTH, high=VOCABULARY, device=device, seed=seed)
        return (ids, *(make(str(device)) for make in where))

    return inputs


def cu_seqlens(device: str) -> Tensor:
    """Where packed sequences begin and end, as kernels want it."""
    return offsets(LENGTHS).to(device=device, dtype=torch.int32)


def decoder(**fields: Any) -> nn.Module:
    return Decoder(width=WIDTH, **fields)


def case(name: str, build: Callable[[], nn.Module], inputs: Any, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Case:
    """A case of the zoo; the output is its loss."""

    def made(device: Any, kind: torch.dtype) -> nn.Module:
        return build().to(device=device, dtype=kind)

    return Case(name=name, build=made, inputs=inputs, dtype=dtype, loss=lambda output: output, **more)


CASES = {
    made.name: made
    for made in (
        case("fp8", lambda: Given(decoder(make=Linear8)), batch_of(2)),
        case("fp8_float32", lambda: Given(decoder(make=Linear8)), batch_of(2), torch.float32),
        case("fp8_autocast", lambda: Given(decoder(make=Linear8)), batch_of(2), torch.float32, autocast=torch.bfloat16),
        case("autocast_bf16", lambda: Given(decoder()), batch_of(2), torch.float32, autocast=torch.bfloat16),
        case("autocast_fp16", lambda: Given(decoder()), batch_of(2), torch.float32, autocast=torch.float16),
        case("qlora", lambda: Given(quantized(function=False, width=WIDTH)), batch_of(2)),
        case("qlora_function", lambda: Given(quantized(function=True, width=WIDTH)), batch_of(2)),
        case("flex", lambda: Given(decoder(attend=flexible), "block_mask"), batch_of(2, block_mask)),
        case(
            "varlen_flash",
            lambda: Given(decoder(attend=flash), "cu_seqlens", longest=max(LENGTHS)),
            batch_of(1, cu_seqlens),
        ),
        case(
            "varlen_attn",
            lambda: Given(decoder(attend=varlen), "cu_seqlens", longest=max(LENGTHS)),
            batch_of(1, cu_seqlens),
        ),
        case("triton", Fused, batch_of(2)),
        case("triton_float32", Fused, batch_of(2), torch.float32),
    )
}
NEAR = {"fp8": 0.15, "fp8_float32": 0.15, "fp8_autocast": 0.15, "triton_float32": 1e-3}
"""How far rounding alone may take gradients from those of plain torch.compile, which fuses other operations; else 0.05."""


def needed(name: str, inner: str) -> None:
    """Skip what this torch or this machine lacks."""
    if name.startswith("triton"):
        pytest.importorskip("triton")
    if name.startswith("fp8") and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("products in float8 need compute capability 8.9")
    if name == "varlen_attn":
        module = pytest.importorskip("torch.nn.attention.varlen")
        known = inspect.signature(module.varlen_attn).parameters
        VARLEN_CAUSAL.clear()
        VARLEN_CAUSAL.update({"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)})
    if name == "flex" and inner != "inductor":
        pytest.skip("FlexAttention is compiled by Inductor alone")


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", CASES)
def test_kind(name: str, inner: str) -> None:
    """Gradients are keep-all's but for rounding; with copies delayed they are the twin's, to the bit."""
    needed(name, inner)
    kind = CASES[name]
    plain = case_steps(kind, compile_case(kind, inner, races.DEVICE), races.DEVICE, seeds=races.SEEDS)
    registry.forget()
    module = compile_case(kind, graphoffload.OffloadBackend(config(inner)), races.DEVICE)
    graphoffload.reset_stats()
    reference = twin(kind, module)
    counted = graphoffload.stats()
    assert counted["offloads"] > 0
    assert counted["offloads"] == counted["reloads"] + counted["dropped"]
    for got, expected in zip(reference, plain, strict=True):
        assert whole_gradient_error(got, expected) <= NEAR.get(name, 0.05)
    again = [twin(kind, module) for _ in range(3)]
    noise = max(whole_gradient_error(a, b) for steps in again for a, b in zip(steps, reference, strict=True))
    noise = max(noise, 1e-6) if any(found_differences(steps, reference) for steps in again) else 0.0
    assert noise <= 0.01, "the twin does not repeat itself: nothing can be shown"
    blocks = offloads_blocks()
    for disturbance in ALL:
        for repeat in range(2):
            results, copies = disturbed(kind, module, disturbance, seed=repeat)
            assert copies > 0 or (repeat % 2 and not blocks)
            found = found_far_apart(results, reference, noise) if noise else found_differences(results, reference)
            assert not found, f"{disturbance.name}, repeat {repeat}:\n" + "\n".join(found)


def test_float8_moves_one_byte_an_element() -> None:
    """The bytes that are copied are those of the saved tensors, some of which have one byte an element."""
    needed("fp8", "aot_eager")
    kind = CASES["fp8"]
    registry.forget()
    module = compile_case(kind, graphoffload.OffloadBackend(config("aot_eager")), races.DEVICE)
    graphoffload.reset_stats()
    case_steps(kind, module, races.DEVICE, seeds=(0,))
    [plan] = registry.last_plans()
    small = [tensor for tensor in plan.saved.tensors if "float8" in str(tensor.dtype)]
    assert small
    assert graphoffload.stats()["d2h_bytes"] == plan.offloaded_bytes


def taken_apart(got: Taken, expected: Taken) -> list[str]:
    """Names of what differs in any bit."""
    mine = got.named()
    return [name for name, value in expected.named().items() if not torch.equal(mine[name], value)]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["grpo", "dpo", "value-head", "accumulation", "loss-fused"])
def test_step_of_several_calls(name: str, inner: str) -> None:
    """Updates, a reference model, two backwards of one graph, microbatches: keep-all's, and the twin's with copies delayed."""
    architecture = everything()[name]
    model, inputs = architecture.fresh(races.DEVICE)
    model.compile(backend=inner)
    plain = take(model, inputs)
    torch._dynamo.reset()
    model, inputs = architecture.fresh(races.DEVICE)
    model.compile(backend=graphoffload.OffloadBackend(config(inner)))
    graphoffload.reset_stats()
    with twin_copies():
        reference = take(model, inputs)
    assert graphoffload.stats()["offloads"] > 0
    assert whole_error(reference, plain) <= 1e-3
    noise = 0.0
    for _ in range(3):
        with twin_copies():
            again = take(model, inputs)
        if taken_apart(again, reference):
            noise = max(noise, 1e-6, whole_error(again, reference))
    assert noise <= 1e-3, "the twin does not repeat itself: nothing can be shown"
    for disturbance in ALL:
        for repeat in range(4):
            with disturbances(disturbance, seed=repeat):
                found = take(model, inputs)
                torch.cuda.synchronize()
            assert whole_error(found, reference) <= 5 * noise if noise else not taken_apart(found, reference), disturbance.name


@dataclasses.dataclass(frozen=True)
class Trained:
    """Losses by step, and the parameters afterwards."""

    losses: list[float]
    parameters: dict[str, Tensor]

    def error(self, other: Trained) -> float:
        """|p - q| / |q| over all parameters."""
        apart = sum(float((self.parameters[n].double() - q.double()).square().sum()) for n, q in other.parameters.items())
        return float((apart / sum(float(q.double().square().sum()) for q in other.parameters.values())) ** 0.5)


def trained(module: nn.Module, start: dict[str, Tensor], steps: int = 8) -> Trained:
    """Steps of fused AdamW under autocast, from the same parameters."""
    module.load_state_dict(start)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    losses = []
    for step in range(steps):
        ids = draw_ints(2, LENGTH, high=VOCABULARY, device=races.DEVICE, seed=step)
        with torch.autocast(races.DEVICE, dtype=torch.bfloat16):
            loss = module(ids)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    after = {name: own_copy(parameter) for name, parameter in module.named_parameters()}
    return Trained([float(loss) for loss in losses], after)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_autocast_with_fused_adamw(inner: str) -> None:
    """Eight steps: losses and parameters are keep-all's but for rounding, and the twin's with copies delayed."""
    kind = CASES["autocast_bf16"]
    start = {name: own_copy(value) for name, value in kind.fresh(races.DEVICE).state_dict().items()}
    plain = trained(compile_case(kind, inner, races.DEVICE), start)
    module = compile_case(kind, graphoffload.OffloadBackend(config(inner)), races.DEVICE)
    graphoffload.reset_stats()
    with twin_copies():
        reference = trained(module, start)
        again = trained(module, start)
    assert graphoffload.stats()["offloads"] > 0
    assert reference.losses == pytest.approx(plain.losses, rel=2e-2)
    assert plain.losses[0] == pytest.approx(reference.losses[0], rel=1e-3)
    noise = again.error(reference)
    assert noise <= 1e-2, "the twin does not repeat itself: nothing can be shown"
    for disturbance in (*ALL, RANDOM):
        for seed in (0, 1):
            with disturbances(disturbance, seed=seed) as (delays, _):
                found = trained(module, start)
                torch.cuda.synchronize()
            assert delays.copies > 0 or seed % 2
            assert found.error(reference) <= 5 * noise, disturbance.name
            assert noise or found.losses == reference.losses, disturbance.name


def test_liger() -> None:
    """Liger's kernels on a Llama, where the package is installed."""
    liger = pytest.importorskip("liger_kernel.transformers")
    model, inputs = everything()["llama"].fresh(races.DEVICE)
    liger.apply_liger_kernel_to_llama(model=model)
    plain = take(model, inputs)
    model.compile(backend=graphoffload.OffloadBackend(config("inductor")))
    assert whole_error(take(model, inputs), plain) <= 1e-2
    assert graphoffload.stats()["offloads"] > 0
