"""Where copies start and end: the plan's positions, and the order in the code that Inductor generates from them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

import graphoffload
from graphoffload.facts.plan import Plan
from graphoffload.hardware.profile import PROFILES

LAYERS = 6
# A layer's product takes 0.67 ms, the copy of an activation 0.27 ms on this link, two a layer: they hide. On half of it they
# queue.
LINK = replace(PROFILES["h200-sxm"], matmul_flops_per_s=(("float32", 1e11),), d2h_bytes_per_s=1.95e9, h2d_bytes_per_s=1.95e9)


class Net(nn.Module):
    """Equal layers with one saved activation each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sin(layer(x))
        return x


def run(**options: Any) -> tuple[Plan, list[str], list[torch.Tensor]]:
    """The plan, the generated code of forward and backward, and the gradients of one step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net()
    config = graphoffload.OffloadConfig(min_tensor_bytes=0, **{"policy": "offload", **options})
    net.compile(backend=graphoffload.OffloadBackend(config))
    x = torch.randn(512, 256)

    def step() -> None:
        net(x).sum().backward()

    _, code = run_and_get_code(step)
    return graphoffload.last_plans()[-1], code, [p.grad for p in net.parameters() if p.grad is not None]


def ops(code: list[str]) -> list[str]:
    """Our ops and the matrix products of all generated code, in order."""
    found = re.findall(r"graphoffload_kernels\.(offload|release|reload|wait)\(|extern_kernels\.(mm)\(", "\n".join(code))
    return [ours or "mm" for ours, _ in found] if found else []


def between(order: list[str], first: str, second: str) -> int:
    """Matrix products between the first `first` and the `second` after it."""
    start = order.index(first)
    return order[start : order.index(second, start)].count("mm")


def test_copies_have_compute_to_hide_behind() -> None:
    """In the code that runs, products stand between offload and release and between reload and wait."""
    _, code, _ = run(hardware=LINK)
    order = ops(code)
    assert {"offload", "release", "reload", "wait", "mm"} <= set(order)
    assert between(order, "offload", "release") >= 1
    forward = order[: order.index("reload")]
    assert forward.count("offload") == forward.count("release") >= LAYERS - 1


def test_half_the_bandwidth_moves_releases_and_reloads() -> None:
    """Positions come from the link: on a slower one releases stand later and reloads earlier, in the generated code too."""
    fast, fast_code, fast_grads = run(hardware=LINK)
    slow, slow_code, slow_grads = run(hardware=LINK.scaled(link=0.5))
    assert [t.tensor for t in fast.transfers] == [t.tensor for t in slow.transfers]
    assert [t.release_after for t in fast.transfers] != [t.release_after for t in slow.transfers]
    assert [t.reload_before for t in fast.transfers] != [t.reload_before for t in slow.transfers]
    assert ops(fast_code) != ops(slow_code)
    assert all(torch.equal(a, b) for a, b in zip(fast_grads, slow_grads, strict=True))


def test_a_window_bounds_what_is_outstanding() -> None:
    """max_inflight_bytes is kept at run time: never more than the window plus one tensor offloaded and not released."""
    graphoffload.reset_stats()
    window = 2 * 512 * 256 * 4
    run(hardware=LINK, max_inflight_bytes=window)
    assert 0 < graphoffload.stats()["inflight_peak_bytes"] <= window + 512 * 256 * 4


def test_reloads_of_one_place_queue_by_need() -> None:
    """One H2D stream serves reloads in the order they are issued: what is waited for first is issued first."""
    _, code, _ = run(hardware=LINK.scaled(link=1e-3))
    backward = code[-1]
    issued = re.findall(r"graphoffload_kernels\.reload\([^,]+, '[^']+', (\d+)", backward)
    waited = re.findall(r"graphoffload_kernels\.wait\([^,]+, [^,]+, '[^']+', (\d+)", backward)
    assert len(issued) == len(waited) >= LAYERS
    assert issued == waited
