"""The bench of several GPUs: names, models that are where they belong, rows of failures, and the file that is written."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from graphoffload.bench import parallel, rank, ranks, training
from graphoffload.bench.parallel import Stage, llama
from graphoffload.cli.command_line import main
from graphoffload.errors import ConfigError
from graphoffload.hardware.measurement import cache_path, keep
from graphoffload.hardware.profile import PROFILES

META = torch.device("meta")


@pytest.mark.parametrize("name", ["keep:1GB", "checkpoint:1GB", "theirs", "ours:much", "ours:-1GB"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ConfigError):
        ranks._check(name)


@pytest.mark.parametrize("name", [*ranks.DEFAULT, "unshared", "unshared:8GB", "unshared:halfway"])
def test_names_that_are_known(name: str) -> None:
    ranks._check(name)


def test_a_link_that_one_process_has_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its profile, whatever ranks have measured together; without one nothing is planned, and the error says what to run."""
    monkeypatch.setenv("GRAPHOFFLOAD_CACHE_DIR", str(tmp_path))
    alone = PROFILES["h200-sxm"]
    keep(cache_path("A GPU", str(torch.__version__), 4), alone.scaled(link=0.5))
    with pytest.raises(ConfigError, match="graphoffload hardware"):
        rank._of_one_rank("A GPU")
    keep(cache_path("A GPU", str(torch.__version__)), alone)
    assert rank._of_one_rank("A GPU") == alone


def test_more_ranks_than_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ranks", "fsdp2", "--ranks", "99", "--out", str(tmp_path)]) != 0
    assert "--tiny runs on a CPU" in capsys.readouterr().err
    assert main(["bench", "ranks", "fsdp2", "--tiny", "--trace", "--out", str(tmp_path)]) != 0
    assert "--trace profiles GPUs" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["model", "first stage", "last stage"])
def test_models_are_made_on_their_device(part: str) -> None:
    """Parameters and buffers; on a CPU, and moved by nobody, all but FSDP would fail, and that would take minutes."""
    stages: dict[str, Any] = {"first stage": 0, "last stage": 1}
    model = llama(parallel.TINY, META) if part == "model" else Stage(parallel.TINY, META, stages[part], 2)
    tensors = [*model.parameters(), *model.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    words = parallel.TINY["vocab"] * parallel.TINY["dim"]
    assert sum(parameter.numel() == words for parameter in model.parameters()) == (2 if part == "model" else 1)


def test_one_row_of_all_ranks() -> None:
    """The slowest time of each step, the highest peak; each rank's own beside them."""
    found = [
        {"peak_GB": 3.0, "times_s": [0.1, 0.3], "compile_s": 1.0, "loss": None, "worst_grad": None, "predicted_GB": 3.1},
        {"peak_GB": 2.0, "times_s": [0.2, 0.1], "compile_s": 2.0, "loss": 5.0, "worst_grad": 0.1, "predicted_GB": 2.1},
    ]
    row = rank._joined("ours", found)
    assert row["ms"] == pytest.approx(250.0)
    assert (row["peak_GB"], row["predicted_GB"], row["worst_grad"]) == (3.0, 3.1, 0.1)
    assert row["peak_GBs"] == [3.0, 2.0]
    assert "bound" not in row


@pytest.mark.parametrize("way", parallel.WAYS)
def test_every_way_has_sizes_and_words(way: str) -> None:
    assert parallel.REAL[way].keys() == parallel.TINY.keys()
    assert parallel.WAYS[way].__doc__
    assert f"    {way} " in (parallel.__doc__ or "")


@pytest.mark.long
def test_a_variant_that_fails_is_a_row(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The variants after it run in new processes, after a keep that is no row; the file is one of training steps."""
    given = ["--tiny", "--ranks", "1", "--size", "layers=1", "--steps", "1", "--settled", "4", "--out", str(tmp_path)]
    assert main(["bench", "ranks", "alone", "--variants", "keep", "ours:1KiB", "ours", *given]) == 1
    content = training.read(tmp_path / "ranks-alone.json")
    rows = content["runs"][0]["rows"]
    assert [row["name"] for row in rows] == ["keep", "ours:1KiB", "ours"]
    assert "BudgetError" in rows[1]["failed"]
    assert rows[2]["ms"] > 0
    assert rows[2]["worst_grad"] == 0.0
    assert [len(row["settled_s"][0]) for row in (rows[0], rows[2])] == [rank.PLAIN_SETTLED, 4]
    assert not list(tmp_path.glob("*.failed-*"))
    assert json.dumps("ours")[1:-1] in capfd.readouterr().out


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
@pytest.mark.parametrize("after_s", [0.0, 5.0])
def test_ranks_end_with_the_tool(after_s: float, tmp_path: Path) -> None:
    """One that lives on holds a GPU, and slows down whatever is measured next. At once: their imports are not done."""
    command = [sys.executable, "-m", "graphoffload", "bench", "ranks", "alone", "--tiny", "--ranks", "2", "--variants", "keep"]
    tool = subprocess.Popen([*command, "--steps", "1000000", "--out", str(tmp_path)])

    def living() -> list[str]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                found.append(path.read_bytes().replace(b"\0", b" ").decode())
        return [line for line in found if str(tmp_path) in line]

    deadline = time.monotonic() + 120.0
    while len(living()) < 4 and time.monotonic() < deadline:  # the tool, its launcher, and a process for each rank
        time.sleep(0.2)
    assert len(living()) == 4
    time.sleep(after_s)
    tool.terminate()
    tool.wait(30.0)
    deadline = time.monotonic() + 30.0
    while living() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert living() == []
