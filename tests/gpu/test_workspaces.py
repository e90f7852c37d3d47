"""What cuBLAS allocates in the first step counts before it: a workspace for each thread that multiplies matrices."""

from __future__ import annotations

import gc

import torch
from torch import nn

from graphoffload.compiler.device_limits import resolve_limits
from graphoffload.options.config import OffloadConfig

SMALL = 2 * 2**20  # cublasLt has workspaces of 1 MiB


def test_workspaces_are_static_before_the_first_step() -> None:
    model, x = nn.Linear(1024, 1024).to("cuda"), torch.randn(512, 1024, device="cuda")
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    static_bytes = resolve_limits(OffloadConfig(device_budget="1GiB", reserve=0, hardware="h200-sxm"), [x]).static_bytes
    for _ in range(2):
        model(x).square().mean().backward()
        model.zero_grad()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= static_bytes + SMALL
