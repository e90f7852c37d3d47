"""What a dump has of a step, and planning it again with `python -m graphoffload replay`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from graphoffload.api.introspect import explain
from graphoffload.cli.command_line import main
from graphoffload.cli.output import DONE, FAILED, OVER_BUDGET
from graphoffload.errors import BudgetError
from graphoffload.facts.goals import MeetBudget
from graphoffload.planner.step.stored import from_json, to_json
from graphoffload.report import dump
from graphoffload.report.offload_report import OffloadReport
from graphoffload.units import format_bytes

WIDTH, BLOCKS = 64, 4


class Blocks(nn.Module):
    """Compiled one by one."""

    def __init__(self) -> None:
        super().__init__()
        made = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS)]
        self.blocks = nn.ModuleList(made)
        for block in self.blocks:
            block.compile()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def planned(folder: Path, **options: object) -> OffloadReport:
    torch._dynamo.reset()
    return explain(Blocks(), hardware="h200-sxm", min_tensor_bytes=1, dump_dir=folder, **options)(torch.randn(512, WIDTH))


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> tuple[OffloadReport, Path]:
    """The report of a step between its least peak and keep-all's, and the dump of its problem."""
    keep = planned(tmp_path_factory.mktemp("keep"))
    folder = tmp_path_factory.mktemp("dump")
    report = planned(folder, device_budget=int(0.8 * keep.keep_peak_bytes))
    (path,) = folder.glob("step.*.problem.json")
    return report, path


def test_the_text_has_the_line_and_every_call(dumped: tuple[OffloadReport, Path]) -> None:
    report, path = dumped
    text = path.with_suffix("").with_suffix(".problem.txt").read_text()
    assert f"offloads {format_bytes(report.offloaded_bytes)}" in text.splitlines()[0]
    assert f"step: {BLOCKS} calls, 2 different graphs" in text
    rows = text[text.index(" call graph") :].splitlines()[1:]
    assert [int(row.split()[0]) for row in rows] == list(range(BLOCKS))


def test_it_is_planned_again_alike(dumped: tuple[OffloadReport, Path], capsys: pytest.CaptureFixture[str]) -> None:
    report, path = dumped
    assert main(["replay", str(path)]) == DONE
    line, *_ = capsys.readouterr().out.splitlines()
    assert f"offloads {format_bytes(report.offloaded_bytes)}" in line
    assert f"predicted peak {format_bytes(report.predicted_peak_bytes)}" in line
    assert f"slowdown {report.predicted_slowdown:+.1%}".replace("%", " %") in line


def test_with_other_goals(dumped: tuple[OffloadReport, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """More memory keeps everything; less than the least is refused with the least."""
    report, path = dumped
    assert main(["replay", str(path), "--device-budget", str(2 * report.keep_peak_bytes)]) == DONE
    assert "kept all" in capsys.readouterr().out
    assert main(["replay", str(path), "--max-slowdown", "0.5", "--reserve", "1KiB"]) == DONE
    assert "goal: max_slowdown=0.5; reserve: 1.00 KiB" in capsys.readouterr().out
    assert main(["replay", str(path), "--device-budget", "1KiB"]) == OVER_BUDGET
    assert "The least feasible one found is" in capsys.readouterr().err


def test_a_slow_link_and_a_small_host_cost_more(
    dumped: tuple[OffloadReport, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(dumped[1])
    slowdowns = []
    for more in ([], ["--hardware", "l40s"], ["--host-budget", "4KiB"], ["--host-budget", "none"]):
        assert main(["replay", path, *more]) == DONE
        line, *_ = capsys.readouterr().out.splitlines()
        slowdowns.append(float(line.partition("slowdown ")[2].partition(" %")[0]))
    own, slow, small, unlimited = slowdowns
    assert own < min(slow, small)
    assert unlimited == own


def test_a_plan_that_takes_least_is_for_the_budget_it_was_asked_for(
    dumped: tuple[OffloadReport, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step that was planned again goes on by the least plan where nothing fits; another budget is met or refused."""
    problem = from_json(dumped[1].read_text())
    path = tmp_path / "least.problem.json"
    path.write_text(to_json(replace(problem, goal=MeetBudget(1024), or_least=True, reserve_bytes=512, taken_bytes=512)))
    assert main(["replay", str(path)]) == DONE
    line, *_ = capsys.readouterr().out.splitlines()
    assert "of 1.00 KiB" in line
    assert "reserved" not in line, "nothing was asked to be left free"
    assert main(["replay", str(path), "--device-budget", "2KiB"]) == OVER_BUDGET


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.json"], "nowhere.json cannot be read"),
        (["{text}"], "no problem of a step"),
        (["{json}", "--max-slowdown", "fast"], "--max-slowdown fast: give a share"),
        (["{json}", "--device-budget", "much"], "--device-budget='much'"),
        (["{json}", "--hardware", "h201"], "unknown"),
        (["{json}", "--hardware", "measure"], "a named profile"),
    ],
)
def test_what_cannot_be_planned_again(
    dumped: tuple[OffloadReport, Path], capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    path = dumped[1]
    names = {"json": path, "text": path.with_suffix("").with_suffix(".problem.txt")}
    assert main(["replay", *(text.format(**names) for text in arguments)]) == FAILED
    assert said in capsys.readouterr().err


def test_a_problem_that_cannot_be_written_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(problem: object) -> str:
        raise TypeError("no number")

    monkeypatch.setattr(dump, "to_json", refuse)
    assert planned(tmp_path).keep_peak_bytes > 0
    (path,) = tmp_path.glob("step.*.problem.json")
    assert "could not be printed: TypeError: no number" in path.read_text()


def test_a_step_without_a_plan_leaves_its_problem(tmp_path: Path) -> None:
    with pytest.raises(BudgetError) as refused:
        planned(tmp_path, device_budget="1KiB")
    (path,) = tmp_path.glob("step.*.problem.json")
    assert from_json(path.read_text()).goal.device_budget_bytes == 1024
    text = path.with_suffix("").with_suffix(".problem.txt").read_text()
    assert str(refused.value.least_bytes) in text.splitlines()[0]
