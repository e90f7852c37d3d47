"""The command line and the pictures where there is a GPU to measure and a step to compile for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import graphoffload
from graphoffload.cli.command_line import main
from graphoffload.report.offload_report import OffloadReport


def test_hardware_measures_this_gpu_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHOFFLOAD_CACHE_DIR", str(tmp_path))
    outputs = []
    for _ in range(2):
        assert main(["hardware"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1], "the second time it is read, not measured"
    assert outputs[0].startswith(f"{torch.cuda.get_device_name()} [measured]\n")
    assert "measured on this device" in outputs[0]
    (path,) = tmp_path.rglob("hardware-*.json")
    assert str(path) in outputs[0].splitlines()[-1]


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(4096) for _ in range(4))
        self.products = torch.nn.ModuleList(torch.nn.Linear(4096, 4096) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, product in zip(self.norms, self.products, strict=True):
            x = x + product(norm(x))
        return x.square().mean()


def test_a_compiled_step_has_the_devices_memory_in_its_line_and_a_picture(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with torch.device("cuda"):
        model, x = Layers().bfloat16(), torch.randn(16384, 4096, dtype=torch.bfloat16)
    model.compile(backend="graphoffload")
    model(x).backward()
    plan = graphoffload.last_plans()[-1]
    assert plan.summary in capfd.readouterr().err
    total = torch.cuda.mem_get_info()[1] / 2**30
    assert f" of {total:.1f} GiB: kept all" in plan.summary
    picture, _ = OffloadReport(plans=(plan,)).save_pictures(tmp_path)
    text = picture.read_text()
    assert f"as predicted for {torch.cuda.get_device_name()}" in text
    assert "budget " in text
