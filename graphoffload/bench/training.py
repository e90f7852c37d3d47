"""Files of measured training steps, several graphs each, and their table: one row a variant, failures included.

    docs/results/step-llama8-blocks.json        notes of one subject, from any script that trains and takes the time

Such a file has date, device, torch, subject, command, gradients (how they were compared), and `runs`, each with its commit,
`what` was run, and rows. A row may have more than the table reads:

    name                        the variant; plain torch where "keep" is a word of it
    ms, s, tokens_per_s         the time of a step, or the speed
    failed                      the error's text, where the variant did not train
    peak_GB, predicted_GB       measured and planned, both as the subject says: in all, or over what is allocated between steps
    slowdown, bound             of the plan, as fractions of keep-all's predicted time
    worst_grad                  as `gradients` says
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from graphoffload.bench.table import number
from graphoffload.errors import ConfigError

_NAMES = ("date", "device", "torch", "subject", "command", "gradients", "runs")
Cell = Callable[[dict[str, Any], float | None], str]


def read(path: Path) -> dict[str, Any]:
    """A file of training steps.

    Raises:
        ConfigError: it is none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        missing = [name for name in _NAMES if name not in content]
        if missing or not all(run["commit"] and run["what"] and run["rows"] for run in content["runs"]):
            raise ValueError(f"without {', '.join(missing)}" if missing else "a run without commit, what or rows")
        if not all(row["name"] for run in content["runs"] for row in run["rows"]):
            raise ValueError("a row without a name")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is no file of training steps ({type(error).__name__}: {error}).") from error
    found: dict[str, Any] = content
    return found


def caption(content: dict[str, Any]) -> str:
    """What was measured, where and how."""
    where = f"{content['device']}, torch {content['torch']}, {content['date']}"
    said = [content["subject"], where, content["command"].replace("tokens_per_s", "tokens/s")]
    if any(row.get("worst_grad") is not None for run in content["runs"] for row in run["rows"]):
        said.append(content["gradients"].replace("worst_grad", "worst gradient error"))
    return ". ".join(text[0].upper() + text[1:] for text in said) + "."


def table(content: dict[str, Any], file: str) -> tuple[list[str], list[list[str]]]:
    """Header and cells of all runs in their order; `file` is the link of the file.

    Columns without a number are left out.
    """
    columns: list[list[str]] = [[title] for title in _COLUMNS]
    for run in content["runs"]:
        keep = keep_ms(run)
        for index, row in enumerate(run["rows"]):
            for column, cell in zip(columns, _COLUMNS.values(), strict=True):
                column.append(cell(row, keep))
            columns[-1][-1] = f"[{run['commit']}]({file})" + ("" if index else f": {run['what']}")
    shown = [column for column in columns if any(_is_measured(text) for text in column[1:])]
    header, *lines = map(list, zip(*shown, strict=True))
    return header, lines


def keep_ms(run: dict[str, Any]) -> float | None:
    """The mean of a run's steps in plain torch; None where there is none."""
    times = [time for row in run["rows"] if is_keep(row) and (time := step_ms(row)) is not None]
    return statistics.mean(times) if times else None


def is_keep(row: dict[str, Any]) -> bool:
    """Whether a row is of plain torch, which keeps all."""
    return "keep" in row["name"].split()


def step_ms(row: dict[str, Any]) -> float | None:
    """Milliseconds of a step."""
    time: float | None = row["s"] * 1e3 if row.get("s") is not None else row.get("ms")
    return time


def _speed(value: float | None, form: str, row: dict[str, Any]) -> str:
    return _failure(row) if row.get("failed") else number(value, form)


def _failure(row: dict[str, Any]) -> str:
    error = re.search(r"\w*Error", row["failed"])
    return f"FAILED: {error[0] if error else row['failed'][:60]}"


def _is_measured(text: str) -> bool:
    return text != "-" and not text.startswith("FAILED")


def _as_precise(value: float | None) -> str:
    return "-" if value is None else f"{round(value, 3):g}"  # a prediction that was read from a line has fewer digits


def _times_keep(row: dict[str, Any], keep: float | None) -> str:
    time = step_ms(row)
    return "-" if keep is None or time is None else f"{time / keep:.3f}"


def _ratio(slowdown: float | None) -> str:
    return "-" if slowdown is None else f"{1 + slowdown:.3f}"


_COLUMNS: dict[str, Cell] = {
    "variant": lambda row, keep: f"`{row['name']}`",
    "peak GB": lambda row, keep: number(row.get("peak_GB"), ".3f"),
    "predicted GB": lambda row, keep: _as_precise(row.get("predicted_GB")),
    "step ms": lambda row, keep: _speed(step_ms(row), ".1f", row),
    "tokens/s": lambda row, keep: _speed(row.get("tokens_per_s"), ",.0f", row),
    "x keep": _times_keep,
    "predicted": lambda row, keep: _ratio(row.get("slowdown")),
    "bound": lambda row, keep: _ratio(row.get("bound")),
    "worst gradient error": lambda row, keep: number(row.get("worst_grad"), ".2g"),
    "commit": lambda row, keep: "",
}
