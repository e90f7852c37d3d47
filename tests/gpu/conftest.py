"""Tests of what only a GPU has: streams, overlap, real memory. Without one, each is skipped and says so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS starts: deterministic products

import torch

from graphoffload.bench.midsize import Measured, measure_midsize

HERE = Path(__file__).resolve().parent
ANYWHERE = ("test_reader_of_traces", "test_seeds_alternate")
"""Tests that need no GPU."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip this folder where there is no GPU, but for the tests of its tools."""
    for item in items:
        if HERE not in Path(item.path).parents:
            continue
        if item.name in ANYWHERE:
            item.own_markers[:] = [mark for mark in item.own_markers if mark.name not in ("gpu", "skip")]
        elif not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU: streams and device memory are real only there"))


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Kernels that give the same bits each time, and new memory that starts as NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture(scope="session")
def measured() -> Measured:
    """Two layers of the real width, keep-all and a quarter offloaded: measured once for all tests."""
    return measure_midsize("cuda")
