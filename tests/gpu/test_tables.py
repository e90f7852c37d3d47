"""What a published table's figures rest on, on a GPU: bytes in all, and weights that an optimizer leaves as they are."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from graphoffload.bench.measure import Session
from graphoffload.bench.models import build
from graphoffload.bench.process import parse_process
from graphoffload.bench.recipe import Recipe
from graphoffload.bench.run_options import Options
from graphoffload.bench.runner import Runner
from graphoffload.bench.variants import Eligible, apply, parse

RECIPE = Recipe("adamw", "cast")
SIZES = {"layers": 4, "vocab": 32000}


def test_what_training_holds_is_what_the_allocator_counts() -> None:
    """Before the first step, and after one with gradients freed, but for workspaces."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    workload = build("llama3-1b", "cuda", SIZES, recipe=RECIPE)
    session = Session(workload, apply(parse("eager"), workload, Eligible()))
    assert 0 <= torch.cuda.memory_allocated() - before - session.own_bytes() < 2**16
    session.step()
    session.clear_gradients()
    assert 0 <= torch.cuda.memory_allocated() - before - session.own_bytes() < 2**27, "cuBLAS's workspaces are not counted"
    session.close()


def test_the_fused_optimizer_leaves_weights_and_gradients_as_they_are() -> None:
    workload = build("llama3-1b", "cuda", SIZES, recipe=RECIPE)
    session = Session(workload, apply(parse("eager"), workload, Eligible()))
    start = [parameter.detach().clone() for parameter in session.parameters]
    session.clear_gradients()
    workload.loss().backward()
    gradients = session.gradients()
    assert session.optimizer is not None
    for _ in range(3):
        session.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(session.parameters, start, strict=True))
    assert session.check(gradients, 0.0).error == 0.0
    session.close()


@pytest.mark.slow
def test_a_budget_in_all_is_kept(tmp_path: Path) -> None:
    """Halfway between what training holds and keep-all's peak; gradients are right."""
    process = parse_process("llama3-1b,layers=4,vocab=32000,optimizer=adamw,precision=cast")
    runner = Runner(process.model, "cuda", process.fill(Options(steps=4, block=2, out=tmp_path, quiet=True)))
    runner.start()
    keep = runner.rows[0]
    assert keep.total_bytes is not None
    assert keep.peak_bytes is not None
    budget = keep.total_bytes - keep.peak_bytes // 3
    row = runner.run(f"total:{budget}")
    runner.close()
    assert row.status == "ok"
    assert row.total_bytes is not None
    assert row.total_bytes <= 1.0005 * budget
