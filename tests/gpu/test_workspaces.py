"""What cuBLAS allocates in the first step is in the first plan: a workspace for each thread that multiplies matrices."""

from __future__ import annotations

import gc
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphoffload import OffloadBackend
from graphoffload.errors import BudgetExceededWarning

LAYERS, WIDTH, ROWS, STEPS = 8, 1024, 4096, 12


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x.square().mean()


def test_a_budget_is_kept_by_the_first_graph_of_a_process() -> None:
    torch._dynamo.reset()
    gc.collect()
    model, x = Layers().to("cuda"), torch.randn(ROWS, WIDTH, device="cuda")
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    budget = before + 224 * 2**20  # gradients take 32 MiB, workspaces up to 64, and what is kept 16 MiB each, 256 in all
    backend = OffloadBackend(device_budget=budget, reserve=0, hardware="h200-sxm", inner="aot_eager")
    run = torch.compile(model, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetExceededWarning)
        for count in range(STEPS):
            run(x).backward()
            model.zero_grad()
            torch.cuda.synchronize()
            if count == 1:
                torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() <= budget
    assert torch.cuda.memory_allocated() > before, "nothing but workspaces is left"
