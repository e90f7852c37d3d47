"""The whole zoo with copies delayed, compute lagging and freed memory overwritten: equal to the bit, each time."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gpu import races
from gpu.races import (
    AFTER,
    ALL,
    BEFORE,
    RANDOM,
    SEEDS,
    Disturbance,
    disturbances,
    disturbed,
    found_differences,
    found_far_apart,
    offloads_blocks,
    twin,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

import graphoffload
from graphoffload.bench import measure
from graphoffload.bench.models import Workload, build
from graphoffload.bench.variants import Eligible, apply, parse
from graphoffload.runtime import registry, twin_copies
from graphoffload.testing import ZOO, compile_case, whole_gradient_error

REPEATS = 20
INDUCTOR = (
    "attention", "gqa", "fused_qkv_unbind", "three_blocks", "attention_bf16", "conv_net", "channels_last", "norms",
    "embedding_loss", "dynamic_batch", "transposes", "double_use", "in_place", "saved_output", "graph_break", "checkpoint",
)  # fmt: skip
LAYER_MS = 30.0
"""Longer than a layer of the 4k Llama takes, forward or backward."""


def config(inner: str) -> graphoffload.OffloadConfig:
    """All that may go; no checksums, for they synchronise; a small window, so that memory is released early."""
    return graphoffload.OffloadConfig(policy="offload", inner=inner, min_tensor_bytes=0, max_inflight_bytes="64KiB")


def check_case(name: str, inner: str) -> None:
    case = ZOO[name]
    registry.forget()
    module = compile_case(case, graphoffload.OffloadBackend(config(inner)), races.DEVICE)
    reference = twin(case, module)
    blocks, noise = offloads_blocks(), 0.0
    for again in [twin(case, module) for _ in range(3)]:
        if found_differences(again, reference):  # max_pool's backward, for one, adds in any order
            noise = max(noise, 1e-6, *(whole_gradient_error(a, b) for a, b in zip(again, reference, strict=True)))
    assert noise <= 1e-3, "the twin does not repeat itself: nothing can be shown"
    for disturbance in ALL:
        for repeat in range(REPEATS // len(SEEDS)):
            results, copies = disturbed(case, module, disturbance, seed=repeat)
            assert not case.offloads or copies > 0 or (repeat % 2 and not blocks)
            found = found_far_apart(results, reference, noise) if noise else found_differences(results, reference)
            assert not found, f"{disturbance.name}, repeat {repeat}:\n" + "\n".join(found)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", ZOO)
def test_zoo(name: str) -> None:
    """Every operation as it is written."""
    check_case(name, "aot_eager")


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", INDUCTOR)
def test_zoo_under_inductor(name: str) -> None:
    """Inductor reuses memory, reorders, and chooses layouts of its own."""
    check_case(name, "inductor")


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("window", ["16KiB", "1MiB"])
def test_blocks_compiled_one_by_one(inner: str, window: str) -> None:
    """Copies outlive their graph, and reloads start in the backward of the graph behind."""
    case = ZOO["three_blocks"]
    options = dataclasses.replace(config(inner), hardware=races.SLOW_LINK, max_inflight_bytes=window)
    module = races.compile_blocks(case, graphoffload.OffloadBackend(options))
    reference = twin(case, module)
    graphoffload.reset_stats()
    for disturbance in ALL:
        for repeat in range(REPEATS // len(SEEDS)):
            results, copies = disturbed(case, module, disturbance, seed=repeat)
            assert copies > 0
            found = found_differences(results, reference)
            assert not found, f"{disturbance.name}, repeat {repeat}:\n" + "\n".join(found)
    stats = graphoffload.stats()
    assert stats["prefetch_hits"] > 0
    assert stats["deferred"] > 0


def _draw_batch(workload: Workload, seed: int) -> None:
    ids = workload.batch["input_ids"]
    generator = torch.Generator().manual_seed(seed)
    ids.copy_(torch.randint(0, workload.sizes["vocab"], ids.shape, generator=generator))


@pytest.mark.slow
@pytest.mark.usefixtures("deterministic")
@sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)
def test_llama_under_inductor() -> None:
    """The 4k Llama with more than 5 GB offloaded, every copy delayed by longer than a layer, 20 steps."""
    if torch.cuda.get_device_properties(0).total_memory < 70 * 2**30:
        pytest.skip("needs 70 GiB of device memory")
    torch.use_deterministic_algorithms(True)  # with warn_only, attention's backward still adds in any order
    workload = build("llama4k", "cuda")
    measure.materialise_gradients(workload.module)
    session = measure.Session(workload, apply(parse("offload:5.8GB"), workload, Eligible()))
    measure.warm_up(session, 2)
    references, noise = [], 0.0
    for seed in (0, 1):
        _draw_batch(workload, seed)
        with twin_copies():
            session.step()
        references.append(session.gradients())
        with twin_copies():
            session.step()
        noise = max(noise, session.check(references[-1], 0.0).error)
    assert noise <= 1e-3, "the twin does not repeat itself: nothing can be shown"
    before = graphoffload.stats()["d2h_bytes"]
    modes = (
        Disturbance(BEFORE.name, before_ms=LAYER_MS),
        Disturbance(AFTER.name, after_ms=LAYER_MS),
        Disturbance(RANDOM.name, before_ms=LAYER_MS, after_ms=LAYER_MS, random=True),
    )
    for step in range(REPEATS):
        _draw_batch(workload, step % 2)
        with disturbances(modes[step % len(modes)], seed=step, blocks=1) as (delays, overwriter):
            session.step()
        error = session.check(references[step % 2], 0.0).error
        assert error <= 5 * noise, f"step {step}, {modes[step % len(modes)].name}: {error:.3g} from the twin"
        assert delays.copies > 0
        assert overwriter.filled > 0
    assert (graphoffload.stats()["d2h_bytes"] - before) / REPEATS >= 5e9
    session.close()
    measure.tidy()
