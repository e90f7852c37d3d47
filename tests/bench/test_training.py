"""Files of measured training steps, their table, and that the pages of docs are what their files say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from graphoffload.bench import page, training
from graphoffload.cli.command_line import main
from graphoffload.errors import ConfigError
from tests.bench.test_results import PAGE, README, ROOT

STEPS = ROOT / "docs" / "steps.md"
NAMES = ("four-gpus", "kinds", "kinds-h100", "nets", "ranks", "trainers")
PAGES = (STEPS, *(ROOT / "docs" / f"steps-{name}.md" for name in NAMES))
FILES = sorted((ROOT / "docs" / "results").glob("step-*.json"))
MOST_LINES = 160
BLOCK = re.compile(r"^<!-- results: .+?^<!-- /results -->$", re.M | re.S)

# The page


@pytest.mark.parametrize("steps", PAGES, ids=lambda path: path.stem)
def test_page_is_what_its_files_say(steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To accept new files: python -m graphoffload bench page docs/steps.md"""
    assert main(["bench", "page", str(steps), "--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("steps", PAGES, ids=lambda path: path.stem)
def test_page_is_short_and_its_links_lead_somewhere(steps: Path) -> None:
    text = steps.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    links = set(re.findall(r"\]\(([^)#]+)[)#]", text))
    assert len(links) > len(BLOCK.findall(text)) + 1
    assert not {link for link in links if not (steps.parent / link).exists()}
    assert f"({steps.name})" in (PAGE if steps == STEPS else STEPS).read_text()


def test_every_file_has_one_table() -> None:
    shown = [name for page in PAGES for name in re.findall(r"^<!-- results: training (\S+) -->$", page.read_text(), re.M)]
    assert len(FILES) >= 6
    assert sorted(shown) == [path.name for path in FILES]


def test_figures_of_the_text_are_of_the_tables() -> None:
    """Those with a point or a comma, on the pages and in the README; a figure may have fewer digits than its table."""
    text = "\n".join(page.read_text() for page in PAGES)
    said = re.search(r"^Several graphs are planned as one step \(.+?\.\n(?=\[)", README.read_text(), re.M | re.S)
    assert said is not None
    figure = re.compile(r"(?<![\w.-])\d[\d,]*\.\d+|(?<![\w.-])\d+,\d{3}\b")
    there = [float(number.replace(",", "")) for block in BLOCK.findall(text) for number in re.findall(r"\d[\d,]*\.?\d*", block)]
    for prose in (BLOCK.sub("", text), said[0]):
        figures = [number.replace(",", "") for number in figure.findall(prose)]
        assert len(figures) >= 5
        for number in figures:
            digits = len(number.partition(".")[2])
            assert any(f"{value:.{digits}f}" == number for value in there), f"{number} is in no table"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_predictions_are_those_of_the_plans_line(path: Path) -> None:
    """The fields of a row say what the last line of its plan said, to the digits of the line; of several ranks the slowest."""
    content = training.read(path)
    ranks = re.match(r"(\d+) x ", content["device"])
    for run in content["runs"]:
        for row in run["rows"]:
            lines = row.get("lines") or [row.get("line", "")]
            found = [re.search(r"slowdown ([+-][\d.]+) %(?: \(bound ([+-][\d.]+) %\))?", line) for line in lines]
            plans = [match for match in found if match]
            last = plans[-int(ranks[1] if ranks else 1) :]
            if last:
                assert row["slowdown"] * 100 == pytest.approx(max(float(match[1]) for match in last), abs=0.051), row["name"]
                bounds = [float(match[2]) for match in last if match[2]]
                assert len(bounds) == (len(last) if "bound" in row else 0), row["name"]
                assert not bounds or row["bound"] * 100 == pytest.approx(max(bounds), abs=0.051), row["name"]


# The table


def content(**changed: Any) -> dict[str, Any]:
    """Two runs: times with a plan and a failure, and speeds."""
    rows = [
        {"name": "keep", "ms": 100.0, "peak_GB": 4.0},
        {"name": "ours:2", "ms": 112.2, "peak_GB": 1.99949, "predicted_GB": 2.04, "slowdown": 0.1, "bound": 0.05},
        {"name": "ac", "failed": "torch.OutOfMemoryError: tried to allocate", "slowdown": None},
        {"name": "whole keep", "s": 0.104, "peak_GB": 4.0},
    ]
    runs = [{"commit": "abc1234", "what": "a budget", "rows": rows}, {"commit": "def5678", "what": "alone", "rows": rows[1:2]}]
    made = {
        "date": "2026-11-23", "device": "a GPU", "torch": "2.11.0", "subject": "small", "command": "tokens_per_s: median",
        "gradients": "worst_grad: none", "runs": runs,
    }  # fmt: skip
    return {**made, **changed}


def test_rows_of_a_file() -> None:
    """The ratio is to the mean of the keeps of the same run; a failure is a row; what nothing was measured for is no column."""
    header, lines = training.table(content(), "results/a.json")
    assert header == ["variant", "peak GB", "predicted GB", "step ms", "x keep", "predicted", "bound", "commit"]
    link = "[abc1234](results/a.json)"
    assert lines == [
        ["`keep`", "4.000", "-", "100.0", "0.980", "-", "-", f"{link}: a budget"],
        ["`ours:2`", "1.999", "2.04", "112.2", "1.100", "1.100", "1.050", link],
        ["`ac`", "-", "-", "FAILED: OutOfMemoryError", "-", "-", "-", link],
        ["`whole keep`", "4.000", "-", "104.0", "1.020", "-", "-", link],
        ["`ours:2`", "1.999", "2.04", "112.2", "-", "1.100", "1.050", "[def5678](results/a.json): alone"],
    ]


def test_speeds_and_gradients_of_a_file() -> None:
    """A failure stands in the column that was measured; captions name columns, not fields."""
    rows = [
        {"name": "whole", "tokens_per_s": 11056, "peak_GB": 144.339475456, "worst_grad": 0.0304},
        {"name": "keep", "failed": "killed"},
    ]
    made = content(runs=[{"commit": "abc1234", "what": "both", "rows": rows}])
    header, lines = training.table(made, "a.json")
    assert header == ["variant", "peak GB", "tokens/s", "worst gradient error", "commit"]
    assert lines[0] == ["`whole`", "144.339", "11,056", "0.03", "[abc1234](a.json): both"]
    assert lines[1] == ["`keep`", "-", "FAILED: killed", "-", "[abc1234](a.json)"]
    assert training.caption(made) == "Small. A GPU, torch 2.11.0, 2026-11-23. Tokens/s: median. Worst gradient error: none."
    assert training.caption(content()) == "Small. A GPU, torch 2.11.0, 2026-11-23. Tokens/s: median."


def test_a_page_has_the_table(tmp_path: Path) -> None:
    """Written where the block is, linked from the page's folder; --check sees a file that has changed."""
    kept = tmp_path / "docs" / "results"
    kept.mkdir(parents=True)
    (kept / "a.json").write_text(json.dumps(content()))
    source = page.Source([], tmp_path, kept)
    text = "# P\n\n<!-- results: training a.json -->\nold\n<!-- /results -->\n"
    written = page.written(text, source)
    assert "| `ours:2` | 1.999 | 2.04 | 112.2 | 1.100 | 1.100 | 1.050 | [abc1234](docs/results/a.json) |" in written
    assert "old" not in written
    assert page.written(written, source) == written
    (kept / "a.json").write_text(json.dumps(content(subject="another")))
    assert page.written(written, source) != written


# What goes wrong


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "a.json is no file of training steps (FileNotFoundError"),
        ("{", "a.json is no file of training steps (JSONDecodeError"),
        ("[]", "without date, device, torch"),
        (json.dumps({**content(), "runs": [{"commit": "a", "what": "", "rows": []}]}), "a run without commit, what or rows"),
        (json.dumps({**content(), "runs": [{"rows": []}]}), "KeyError: 'commit'"),
        (json.dumps({**content(), "runs": [{"commit": "a", "what": "b", "rows": [{"name": ""}]}]}), "a row without a name"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        page.written("<!-- results: training a.json -->\n<!-- /results -->", page.Source([], tmp_path, tmp_path))
