"""Change nothing when it fits: where everything is kept, Inductor writes the code that it writes for plain torch.compile."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import graphoffload
from graphoffload.testing.attention import HIDDEN, Blocks


class ChunkedLoss(nn.Module):
    """Logits of one chunk at a time. Too small for fusions that share less than 1 %; test_fusion.py has one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for chunk in x.chunk(4):
            total = total + torch.logsumexp(self.head(chunk), -1).mean()
        return total


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Dropout(0.1), nn.Linear(256, 64))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.MaxPool2d(2))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (8, 64)),
    "blocks": (lambda: Blocks(2), (2, 16, HIDDEN)),
    "convolutions": (convolutions, (2, 3, 16, 16)),
    "chunked loss": (ChunkedLoss, (64, 64)),
}


pytestmark = pytest.mark.usefixtures("kernels_that_do_nothing")  # what is compared is code


def code(build: Callable[[], nn.Module], shape: tuple[int, ...], **options: Any) -> list[str]:
    """What Inductor writes for forward and backward, without the running number of the graph."""
    torch.compiler.reset()
    torch.manual_seed(0)
    compiled: Any = torch.compile(build(), dynamic=False, **options)
    x = torch.randn(shape)
    _, written = run_and_get_code(lambda: compiled(x).square().mean().backward())
    return [re.sub(r"AOT ID: \['\d+_", "AOT ID: ['_", text) for text in written]


@functools.cache
def plain_code(model: str) -> list[str]:
    """That of plain torch.compile."""
    return code(*MODELS[model], backend="inductor")


@pytest.mark.parametrize(
    "asked", [{}, {"policy": "keep"}, {"device_budget": "1GiB", "hardware": "h200-sxm", "reserve": 0}], ids=str
)
@pytest.mark.parametrize("model", MODELS)
def test_what_keeps_everything_is_plain_torch_s_code(model: str, asked: dict[str, Any]) -> None:
    plain = plain_code(model)
    assert len(plain) == 2
    assert code(*MODELS[model], backend=graphoffload.OffloadBackend(**asked)) == plain
    assert not graphoffload.last_plans()[-1].changes_anything


def test_what_offloads_is_other_code() -> None:
    """The comparison can fail."""
    assert code(*MODELS["mlp"], backend=graphoffload.OffloadBackend(policy="offload", min_tensor_bytes=0)) != plain_code("mlp")


def test_fusions_that_are_left_out_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """Two chunks that share eight numbers: Inductor alone makes one kernel of both, and holds both."""

    def chunks(x: Tensor, y: Tensor, shared: Tensor, w: Tensor) -> Tensor:
        return ((x.exp() * shared).flatten(1) @ w).sum() + ((y.exp() * shared).flatten(1) @ w).sum()

    shapes = ((64, 512, 8), (64, 512, 8), (8,), (4096, 16))
    values = [torch.randn(shape, requires_grad=True) for shape in shapes]
    with caplog.at_level("INFO", logger="graphoffload"):
        compiled: Any = torch.compile(chunks, backend=graphoffload.OffloadBackend(), dynamic=False)
        compiled(*values).backward()
    assert "share less than 1 % of their data" in caplog.text
