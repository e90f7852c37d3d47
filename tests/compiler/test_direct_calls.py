"""Inductor's Python calls the ops' functions themselves; where no such Python is written, torch.ops is called as before."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

import graphoffload
from graphoffload.compiler import inner_compile
from graphoffload.runtime import ops
from graphoffload.testing import ZOO, Result, assert_equal_bits, compiled, observe, run_step

CASE = ZOO["attention"]
OPS = ("offload", "release", "reload", "wait")


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Direct calls by op."""
    found: Counter[str] = Counter()

    def counting(name: str) -> Any:
        kernel = getattr(ops.KERNELS, name)

        def run(*arguments: Any) -> Any:
            found[name] += 1
            return kernel(*arguments)

        return run

    with contextlib.ExitStack() as stack:
        for name in OPS:
            stack.enter_context(mock.patch.object(ops.KERNELS, name, counting(name)))
        yield found


def step(inner: str = "inductor", *, dynamic: bool | None = None) -> tuple[Result, Counter[str], int]:
    """One step under `policy="offload"`: what came out, direct calls by op, and how many tensors went."""
    torch._dynamo.reset()
    config = graphoffload.OffloadConfig(policy="offload", inner=inner, min_tensor_bytes=0, verify="checksum")
    module = compiled(CASE.fresh("cpu"), graphoffload.OffloadBackend(config), dynamic=dynamic)
    with (
        inductor_config.patch(fx_graph_cache=False),  # not all caches: the same kernels need not be compiled again
        functorch_config.patch(enable_autograd_cache=False),
        observe() as seen,
        counted() as calls,
    ):
        result = run_step(module, CASE.example("cpu", seed=0))
    return result, calls, seen.counters["offloads"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_each_transfer_is_four_direct_calls(dynamic: bool) -> None:
    """Not one goes through torch.ops, sizes known while compiling or not; the bits are those of the dispatcher's ops."""
    direct, calls, count = step(dynamic=dynamic)
    assert count > 3
    assert calls == dict.fromkeys(OPS, count)
    with mock.patch.object(inner_compile, "direct_calls", contextlib.nullcontext):
        through_torch, none, same = step(dynamic=dynamic)
    assert (none, same) == ({}, count)
    assert_equal_bits(direct, through_torch)


def test_a_graph_that_is_interpreted_goes_through_torch() -> None:
    """Nothing writes Python there."""
    _, calls, count = step("aot_eager")
    assert (calls, count > 3) == ({}, True)


@pytest.mark.long
def test_generated_cpp_goes_through_torch() -> None:
    """It cannot call a Python function by its name."""
    with inductor_config.patch(cpp_wrapper=True):
        in_cpp, calls, count = step()
    assert (calls, count > 3) == ({}, True)
    assert_equal_bits(in_cpp, step()[0])
