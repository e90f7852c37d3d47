"""What loops over long rows cost in a fused kernel: norms and losses as they were measured, with what they compute again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from graphoffload.analysis.costs import node_costs
from graphoffload.analysis.fusion import Fusion, fusion_of
from graphoffload.analysis.loops import bytes_again
from graphoffload.analysis.reductions import row_length
from graphoffload.hardware.profile import PROFILES

MEASURED = Path(__file__).parents[2] / "docs" / "results" / "fused-kernels.json"
ROWS = {row["kernel"]: row for row in json.loads(MEASURED.read_text())["rows"]}
COPY = ROWS["copy add one 256 MiB"]
HARDWARE = replace(PROFILES["h200-sxm"], device_bandwidth_bytes_per_s=2 * 2**28 / (1e-3 * COPY["ms"]))
HALF = torch.bfloat16


def rms(x: Tensor) -> Tensor:
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)


def rms_backward(gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    gradient, x = gradient.float() * weight.float(), x.float() * scale
    return (scale * (gradient - x * (gradient * x).mean(-1, keepdim=True))).to(HALF)


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    most = x.float().amax(-1, keepdim=True)
    return most, torch.log(torch.exp(x.float() - most).sum(-1, keepdim=True))


def loss_backward(x: Tensor, target: Tensor, scale: Tensor, most: Tensor, log: Tensor) -> Tensor:
    at = torch.arange(x.shape[-1], device=x.device)
    return ((torch.exp(x.float() - most - log) - (at == target).float()) * scale).to(HALF)


def empty(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.empty(*shape, device="meta", dtype=dtype)


def norm(rows: int, columns: int) -> dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    x, gradient = empty(rows, columns), empty(rows, columns)
    weight, scale = empty(columns), empty(rows, 1, dtype=torch.float32)
    return {
        f"rms forward {rows}x{columns}": (lambda x, w: ((x.float() * rms(x) * w.float()).to(HALF), rms(x)), (x, weight)),
        f"rms backward, stats kept {rows}x{columns}": (rms_backward, (gradient, x, weight, scale)),
        f"rms backward, stats too {rows}x{columns}": (lambda g, x, w: rms_backward(g, x, w, rms(x)), (gradient, x, weight)),
    }


def loss(rows: int, columns: int) -> dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    x, target, scale = empty(rows, columns), empty(rows, 1, dtype=torch.int64), empty((), dtype=torch.float32)  # type: ignore[arg-type]
    row = empty(rows, 1, dtype=torch.float32)
    return {
        f"loss stats {rows}x{columns}": (statistics, (x,)),
        f"loss backward, stats kept {rows}x{columns}": (loss_backward, (x, target, scale, row, row)),
        f"loss backward, both too {rows}x{columns}": (lambda x, *to: loss_backward(x, *to, *statistics(x)), (x, target, scale)),
    }


KERNELS = {
    **norm(65536, 1024), **norm(32768, 2048), **norm(16384, 4096), **norm(8192, 8192), **norm(4096, 16384),
    **loss(16384, 32000), **loss(8192, 128256), **loss(8192, 151936),
}  # fmt: skip


def fused(name: str) -> Fusion:
    function, inputs = KERNELS[name]
    traced = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)
    return fusion_of(traced.graph, fuses=True)


def milliseconds(name: str, hardware: str = "h200-sxm") -> float:
    profile = HARDWARE if hardware == "h200-sxm" else PROFILES[hardware]
    return 1e3 * sum(cost.time_s for cost in node_costs(fused(name), profile))


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_priced_as_it_was_measured(name: str) -> None:
    assert milliseconds(name) == pytest.approx(ROWS[name]["ms"], rel=0.22)


def test_statistics_of_a_loss_are_not_free() -> None:
    """Two loops over a vocabulary, which a count of bytes takes for nothing."""
    kept, again = (milliseconds(f"loss backward, {what} 16384x32000") for what in ("stats kept", "both too"))
    measured = ROWS["loss backward, both too 16384x32000"]["ms"] - ROWS["loss backward, stats kept 16384x32000"]["ms"]
    assert again - kept == pytest.approx(measured, rel=0.1)


def test_rows_in_registers_are_read_once() -> None:
    name = "rms backward, stats too 65536x1024"
    assert milliseconds(name) == pytest.approx(ROWS[name]["ms"], rel=0.05)


def test_a_cpu_reads_from_its_caches() -> None:
    name, fusion = "loss stats 16384x32000", fused("loss stats 16384x32000")
    moved = sum(cost.moved_bytes for cost in node_costs(fusion, PROFILES["cpu"]))
    assert milliseconds(name, "cpu") <= 1.01e3 * (moved / PROFILES["cpu"].device_bandwidth_bytes_per_s + 1e-4)


def test_what_a_loop_reads_first_counts_once() -> None:
    """The first loop of a loss finds the maximum, the second one the sum: each 1.3 times the logits, once of them counted."""
    fusion = fused("loss stats 16384x32000")
    kernel = [node for node in fusion.order if node in fusion.spans and row_length(node) == 32000]
    x = KERNELS["loss stats 16384x32000"][1][0].untyped_storage().nbytes()
    first, last = fusion.spans[kernel[0]]
    sizes = dict.fromkeys(fusion.read_by(kernel[0]), x)
    assert list(bytes_again(fusion.order[first : last + 1], fusion, sizes).values()) == pytest.approx([0.3 * x, 1.3 * x])
