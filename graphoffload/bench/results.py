"""Result files: what one run of the bench found, small enough to be kept beside the page that shows it.

    docs/results/2026-11-22-d9c92da-h200/llama4k.json           date, commit and GPU of the run, and what was measured

A run writes every sample of every step to its --out folder. A result file holds what is said of it: how and where it was run,
and one row a variant with medians, intervals, predictions and the way in which it failed. Fields of a "steps" row:

    variant, status         as given (variants.py); "ok", or what went wrong
    steps, step_ms, spread_ms, host_ms, compile_s    measured steps, medians, half the distance between quartiles, first step
    keep_ms                 median of the keep-all steps that alternated with them
    ratio, ratio_low, ratio_high    step_ms / keep_ms with its 95 % bootstrap interval
    peak_bytes, predicted_peak_bytes    of a step, over what is allocated between steps
    total_bytes             the peak with what a process that trains this model alone has allocated between steps
    predicted_ms, predicted_ratio, bound_ratio    the plan's time, its ratio to keep-all's, the least that any plan has
    gradient_error, twin_error    of the whole gradient: against keep-all's, against the same graphs with synchronous copies
    copied_bytes, offloaded_bytes, recomputed_bytes, pinned_bytes
    said                    lines of graphoffload while this variant, and those that took turns with it, compiled and ran

Other kinds have rows of their own: "longest" (examples/longest.py) and "op-cost" (op_cost.py).
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import re
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from graphoffload.bench.measure import Row
from graphoffload.cache_files import write_whole
from graphoffload.errors import ConfigError
from graphoffload.units import format_bytes

FORMAT = 1
KINDS = ("steps", "longest", "op-cost")
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Result:
    """One result file.

    Attributes:
        subject: what was measured, as tables ask for it: a model with its changed sizes, such as "vit,layers=12".
        date: when the run began, ISO 8601. commit: of this project, with "+" where the tree had changes.
        source: "measured", or where the numbers were copied from when the run left no file.
        facts: what holds for all rows, such as the model's sizes and the gradient error of eager and of a repeated step.
        path: where it was read from; not part of the file.
    """

    subject: str
    kind: str
    date: str
    device: str
    torch: str
    commit: str
    command: str
    rows: tuple[dict[str, Any], ...]
    facts: dict[str, Any] = field(default_factory=dict)
    source: str = "measured"
    path: Path | None = None

    @property
    def folder(self) -> str:
        """Where a file of this run belongs: date, commit and GPU."""
        return f"{self.date[:10]}-{self.commit}-{gpu_name(self.device)}"

    def to_json(self) -> str:
        """The file's text."""
        content = {"format": FORMAT, **asdict(self)}
        del content["path"]
        head = {name: value for name, value in content.items() if name != "rows"}
        lines = ",\n  ".join(json.dumps(row) for row in self.rows)  # one row a line: a diff shows which changed
        return json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n  {lines}\n ]\n}}\n'

    @classmethod
    def read(cls, path: Path) -> Result:
        """A result file.

        Raises:
            ConfigError: it is none, or of another format.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            number = content.pop("format")
            if number != FORMAT or content["kind"] not in KINDS:
                raise ValueError(f"format {number}, kind {content['kind']!r}")
            return cls(**{**content, "rows": tuple(content["rows"])}, path=path)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"{path} is no result file of format {FORMAT} ({type(error).__name__}: {error}). "
                "Write one with: python -m graphoffload bench export DIR --into docs/results"
            ) from error


# How and where


def circumstances(command: str, commit: str = "", device: str = "cuda") -> dict[str, Any]:
    """What a run on that type of device notes of itself when it begins: date, device, torch, commit, command."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "date": now.isoformat(timespec="seconds").replace("+00:00", "Z"),
        "device": device_name() if device == "cuda" else device,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "version": package_version(),
        "commit": commit or commit_of(Path(__file__).resolve().parent),
        "command": command,
    }


def device_name() -> str:
    """The current GPU and its memory, or "cpu"."""
    if not torch.cuda.is_available():
        return "cpu"
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{properties.name}, {format_bytes(properties.total_memory)}"


def gpu_name(device: str) -> str:
    """A device's name as part of a folder's: "h200" for "NVIDIA H200, 139.8 GiB"."""
    words = re.findall(r"[a-z0-9]+", device.partition(",")[0].lower())
    return "-".join(word for word in words if word not in ("nvidia", "geforce")) or "cpu"


def package_version() -> str:
    """The installed version of this package."""
    try:
        return importlib.metadata.version("graphoffload")
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN


def commit_of(folder: Path) -> str:
    """Short hash of the checkout that holds `folder`, "+" behind it where tracked files differ; "unknown" outside of one."""
    try:
        found = [
            subprocess.run(["git", "-C", folder, *command], capture_output=True, text=True, timeout=30, check=True).stdout
            for command in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        ]
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    return found[0].strip() + ("+" if found[1].strip() else "")


def subject_of(model: str, sizes: Mapping[str, int | str], *, tiny: bool = False) -> str:
    """A model with the sizes that were changed, optimizer and precision among them, in the order of their names."""
    return ",".join([model, *(f"{name}={sizes[name]}" for name in sorted(sizes)), *["tiny"] * tiny])


# From a run's own files


def export(folder: Path, into: Path, commit: str = "") -> list[Path]:
    """Write a result file for every run that left its samples under `folder`; returns their paths.

    Files go to into/DATE-COMMIT-GPU/SUBJECT.json; several runs of one subject are numbered.

    Raises:
        ConfigError: there is no run under `folder`.
    """
    found = [result for path in sorted(folder.rglob("*.json")) if (result := _result_in(path)) is not None]
    if not found:
        raise ConfigError(f"{folder} holds no run; give the folder that a run of the bench had for its --out.")
    written: list[Path] = []
    for result in found:
        here = replace(result, commit=commit) if commit else result
        stem = re.sub(r"[^a-z0-9]+", "-", here.subject.lower()).strip("-")
        numbered = (into / here.folder / f"{stem}{f'-{number}' if number > 1 else ''}.json" for number in range(1, 10**6))
        path = next(path for path in numbered if path not in written)
        written.append(write_whole(path, here.to_json()))
    return written


def _result_in(path: Path) -> Result | None:
    """What a JSON file of a run's folder says; None where it is of something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
        return None
    if content.get("format") == FORMAT:
        return Result.read(path)
    return of_run(content) if "subject" in content else None


def of_run(content: dict[str, Any]) -> Result:
    """The result of what a Runner wrote: the first keep-all row, then every variant."""
    rows = [Row.from_dict(row) for row in content["rows"]]
    base = content.get("baseline", "keep-all")
    ends = (" before", " after")
    others = [row for row in rows if not row.variant.endswith(ends)]
    in_turns = next((row.baseline for row in others if row.baseline), None)
    shown = [replace(row, variant=row.variant.removesuffix(ends[0])) for row in rows if row.variant.endswith(ends[0])]
    shown = [replace(row, samples=in_turns) if row.variant == base and in_turns else row for row in shown]
    names = ("sizes", "tokens", "eager_noise", "repeat_noise", "python", "version", "block", "baseline", "table")
    return Result(
        subject=content["subject"],
        kind="steps",
        rows=tuple(row_record(row, base) for row in (*shown, *others)),
        facts={name: content[name] for name in names if content.get(name) is not None},
        **{name: content[name] for name in ("date", "device", "torch", "commit", "command")},
    )


def row_record(row: Row, baseline: str = "keep-all") -> dict[str, Any]:
    """One variant as a result file has it; `baseline` is the one that the others' ratios are to."""
    plans = row.ours.get("plans") or []
    low, high = row.ratio_interval or (None, None)
    predictions = predictions_of(plans)
    bounds = [plan["lower_bound_slowdown"] for plan in plans]
    predicted = [plan["predicted_slowdown"] for plan in plans]
    is_keep = row.variant == baseline and bool(row.samples)
    return {
        "variant": row.variant,
        "status": row.status,
        "steps": len(row.samples),
        "step_ms": row.step_ms,
        "spread_ms": row.spread_ms,
        "host_ms": row.host_ms,
        "compile_s": row.compile_s,
        "keep_ms": statistics.median(s.step_ms for s in row.baseline) if row.baseline else None,
        "ratio": 1.0 if is_keep else row.ratio,
        "ratio_low": None if is_keep else low,
        "ratio_high": None if is_keep else high,
        "peak_bytes": row.peak_bytes,
        "total_bytes": row.total_bytes,
        "predicted_peak_bytes": row.predicted_peak_bytes,
        "predicted_ms": sum(prediction["predicted_time_s"] for prediction in predictions) * 1e3 or None,
        "predicted_ratio": 1.0 + predicted[0] if len(predictions) == 1 and predicted[0] is not None else None,
        "bound_ratio": 1.0 + max(bounds) if bounds and None not in bounds else None,
        "gradient_error": row.gradient_error,
        "twin_error": row.ours.get("twin_error"),
        "copied_bytes": row.ours.get("per_step", {}).get("d2h_bytes"),
        "offloaded_bytes": sum(plan["offloaded_bytes"] for plan in plans),
        "recomputed_bytes": sum(plan["recomputed_bytes"] for plan in plans),
        "pinned_bytes": row.pinned_bytes,
        **({"said": row.ours["said"]} if row.ours.get("said") else {}),
    }


def predictions_of(plans: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One of each graph that is planned alone, and one of each step: the variants of its graphs have it in common."""
    found = [plan["prediction"] for plan in plans if not plan.get("variant")]
    for plan in plans:
        if plan.get("variant") and plan["prediction"] not in found:
            found.append(plan["prediction"])
    return found


# What is there


def load(folder: Path) -> list[Result]:
    """Every result file under `folder`, the newest run first.

    Raises:
        ConfigError: there is none, or one that cannot be read.
    """
    found = [Result.read(path) for path in sorted(folder.glob("*/*.json"))]
    if not found:
        raise ConfigError(f"{folder} holds no result file; runs are written there by: python -m graphoffload bench export")
    return sorted(found, key=lambda result: (result.date, str(result.path)), reverse=True)


def newest_rows(results: Iterable[Result], subject: str, kind: str = "steps") -> list[tuple[dict[str, Any], Result]]:
    """Each variant of a subject as its newest run measured it, with the file that says so; `results` are newest first.

    A newer run that failed to measure a variant does not hide an older one that did.
    """
    rows: dict[str, tuple[dict[str, Any], Result]] = {}
    for result in results:
        if result.subject != subject or result.kind != kind:
            continue
        for row in result.rows:
            name = row["variant"]
            if name not in rows or (rows[name][0].get("ratio") is None and row.get("ratio") is not None):
                rows[name] = row, result
    return list(rows.values())
