"""Copies of a running step are timed on the device; a plan for a faster link than there is is made again."""

from __future__ import annotations

import gc
import re

import pytest
import torch
from gpu.test_step_races import DEVICE, Model, step

import graphoffload
from graphoffload.compiler import step_host
from graphoffload.hardware.measurement import resolve_hardware


@pytest.mark.parametrize("link", [1.0, 6.0])
def test_a_plan_for_another_link(
    link: float, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a link six times too fast in the profile, the step is planned again, and the line has the true rates."""
    monkeypatch.setattr(step_host, "_IDLE", 2.0)  # a slow host would have the copies taken out of the plan
    torch.manual_seed(0)
    torch._dynamo.reset()
    gc.collect()  # what another test left would go while this one trains, and give its plan more room
    measured = resolve_hardware("measure", DEVICE)
    model = Model().to(DEVICE)
    kept = [step(model, seed) for seed in range(2)]
    torch.cuda.reset_peak_memory_stats()
    step(model, 0)
    most = torch.cuda.max_memory_allocated()
    model.zero_grad()
    outside = torch.cuda.memory_allocated()
    budget = outside + int(0.55 * (most - outside))
    for layer in model.layers:
        backend = graphoffload.OffloadBackend(
            inner="aot_eager", device_budget=budget, reserve=0, hardware=measured.scaled(link=link)
        )
        layer.compile(backend=backend, dynamic=False)
    for count in range(24):
        found = step(model, count % 2)
        torch.cuda.synchronize()
        for one, other in zip(found, kept[count % 2], strict=True):
            assert torch.allclose(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))
    lines = [line for line in capfd.readouterr().err.splitlines() if "copies ran at" in line]
    print(measured.d2h_bytes_per_s, measured.h2d_bytes_per_s, lines)
    if link > 1.0:
        assert len(lines) == 1
        found = re.search(r"copies ran at ([\d.]+) GB/s to the host and ([\d.]+) back", lines[0])
        assert found is not None
        to_host, back = map(float, found.groups())
        assert to_host == pytest.approx(measured.d2h_bytes_per_s / 1e9, rel=0.3)
        assert back == pytest.approx(measured.h2d_bytes_per_s / 1e9, rel=0.3)
