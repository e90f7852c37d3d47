"""Write the tables and figures of a page from result files, so that no number on it is typed by hand.

    python -m graphoffload bench page docs/benchmarks.md            tables, from the result files in docs/results
    python -m graphoffload bench page docs/benchmarks.md --draw     figures as well (needs matplotlib)
    python -m graphoffload bench page docs/benchmarks.md --check    write nothing; status 1 if something would change

A page has blocks between `<!-- results: VIEW ... -->` and `<!-- /results -->`. A view writes each block from the newest run of
each variant:

    steps SUBJECT [PATTERN ...]       a model's variants, largest peak first; "over:*" names all budgets
    pick SUBJECT@VARIANT ...          single rows of several models
    peers SUBJECT ...                 full checkpointing and graphoffload at its peak, one model a row
    prediction SUBJECT ...            budgets kept, predicted against measured peaks and times
    longest SUBJECT ...               the longest sequences that train
    op-cost SUBJECT[@PATTERN] ...     host time of the four ops
    figure SUBJECT PATH TITLE         a picture at PATH of all rows of a model
    training FILE                     measured training steps of several graphs, all runs of a file (training.py)
    published NAME [GPU]              a table of `bench table`, with the figures that others published for its rows; GPU: on
                                      devices with this in their name, such as H100

Every row links its result file. A new run replaces only the rows that it measured: add its folder and run the command.
Patterns have * and ? as in a shell; write ? for a space in a name. A SUBJECT is a model with the sizes that were changed, in
the order of their names, such as longllama,batch=4,tokens=4096.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graphoffload.bench import catalogue, training
from graphoffload.bench.figure import draw, points_of
from graphoffload.bench.process import Process
from graphoffload.bench.results import Result, load, newest_rows
from graphoffload.bench.run_options import baseline_row
from graphoffload.bench.table import gb, number
from graphoffload.errors import ConfigError
from graphoffload.units import parse_size

_BLOCK = re.compile(r"^<!-- results: (?P<view>.+?) -->\n.*?^<!-- /results -->$", re.M | re.S)
Rows = list[tuple[dict[str, Any], Result]]


@dataclass(frozen=True)
class Source:
    """The input of a view: results, newest first, the page's folder, which links are relative to, and the folder of results."""

    results: Sequence[Result]
    folder: Path
    kept: Path

    def rows(self, subject: str, *patterns: str, kind: str = "steps") -> Rows:
        """A subject's newest rows in the order of `patterns`; all of them without patterns.

        Raises:
            ConfigError: no result file has such a row.
        """
        found = newest_rows(self.results, subject, kind)
        if patterns:
            names = [name for text in patterns for name in fnmatch.filter([row["variant"] for row, _ in found], _escaped(text))]
            by_name = {row["variant"]: (row, result) for row, result in found}
            found = [by_name[name] for name in dict.fromkeys(names)]
        if not found:
            asked = f"{subject} ({', '.join(patterns)})" if patterns else subject
            there = sorted({result.subject for result in self.results if result.kind == kind})
            raise ConfigError(f"no result file has a {kind} row of {asked}; there are: {', '.join(there)}")
        return found

    def link(self, result: Result) -> str:
        """A short link to a result file: the commit, and whether its numbers were copied from a log."""
        assert result.path is not None
        text = result.commit + ("" if result.source == "measured" else ", copied")
        return f"[{text}]({self.target(result.path)})"

    def target(self, path: Path) -> str:
        """A file as a link of the page names it."""
        return Path(os.path.relpath(path, self.folder)).as_posix()

    def caption(self, rows: Rows) -> list[str]:
        """The device and sizes of the newest of some rows, and two gradient errors for comparison."""
        newest = max((result for _, result in rows), key=lambda result: result.date)
        sizes = ", ".join(f"{name} {size}" for name, size in newest.facts.get("sizes", {}).items())
        said = [f"{newest.subject}{f' ({sizes})' if sizes else ''}; {newest.device}, torch {newest.torch}."]
        noise, repeat = newest.facts.get("eager_noise"), newest.facts.get("repeat_noise")
        if noise is not None and repeat is not None:
            said.append(f"Eager's gradient is {noise:.2g} from keep-all's; two keep-all steps are {repeat:.2g} apart.")
        return [" ".join(said), ""]


def _escaped(pattern: str) -> str:
    return pattern.replace("[", "[[]")  # options in JSON have brackets; only * and ? are meant


# Cells


def _ratio(row: dict[str, Any], of: str = "") -> str:
    """`of`: the baseline, where it is not the column's."""
    if row.get("ratio") is None:
        return str(row["status"])
    low, high = row.get("ratio_low"), row.get("ratio_high")
    text: str = f"{row['ratio']:.4f}" + (f" [{low:.4f}-{high:.4f}]" if low is not None and high is not None else "")
    text += f" of {of}" if of else ""
    return text if row["status"] == "ok" else f"{text}, {row['status']}"


def _table(header: Sequence[str], lines: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """Markdown; the first `left` columns and the last are aligned to the left."""
    rules = ["---" if i < left or i == len(header) - 1 else "--:" for i in range(len(header))]
    return [f"| {' | '.join(cells)} |" for cells in (header, rules, *lines)]


# Views


def steps(source: Source, subject: str, *patterns: str) -> list[str]:
    """One model's variants."""
    rows = source.rows(subject, *patterns)
    return [*source.caption(rows), *_rows_table(source, sorted(rows, key=lambda row: -(row[0].get("peak_bytes") or 0)), "")]


def pick(source: Source, *places: str) -> list[str]:
    """Single rows, each named with its model."""
    rows: Rows = []
    for place in places:
        subject, _, pattern = place.partition("@")
        rows += source.rows(subject, pattern or "*")
    return _rows_table(source, rows, "model")


def _rows_table(source: Source, rows: Rows, subject: str) -> list[str]:
    header = ["variant", "peak GB", "predicted GB", "steps", "step ms", "predicted ms", "x keep-all [95 %]", "bound",
              "gradient error", "file"]  # fmt: skip
    lines = []
    for row, result in rows:
        cells = [
            f"`{row['variant']}`", gb(row.get("peak_bytes")), gb(row.get("predicted_peak_bytes")),
            number(row.get("steps"), "d"), number(row.get("step_ms"), ".1f"), number(row.get("predicted_ms"), ".1f"),
            _ratio(row), number(row.get("bound_ratio"), ".4f"), number(row.get("gradient_error"), ".2g"), source.link(result),
        ]  # fmt: skip
        lines.append([result.subject, *cells] if subject else cells)
    return _table([subject, *header] if subject else header, lines, left=2 if subject else 1)


def peers(source: Source, *subjects: str) -> list[str]:
    """Full checkpointing, and graphoffload with checkpointing's measured peak as its budget."""
    lines = []
    for subject in subjects:
        (other, from_other), *_ = source.rows(subject, "checkpoint")
        peak = other.get("peak_bytes") or 0
        ours, from_ours = min(source.rows(subject, "over:*"), key=lambda row: abs(_budget(*row) - peak))
        keep = ours.get("keep_ms") or other.get("keep_ms")
        files = map(source.link, _unique(from_other, from_ours))
        lines.append([
            subject, number(keep, ".1f"), _ratio(other), gb(other.get("peak_bytes")), f"**{_ratio(ours)}**",
            gb(ours.get("peak_bytes")), gb(ours.get("predicted_peak_bytes")), " ".join(files),
        ])  # fmt: skip
    header = ("model", "keep-all ms", "checkpointing, compiled", "GB", "graphoffload", "GB", "predicted GB", "file")
    return _table(header, lines)


def _unique(*results: Result) -> list[Result]:
    return list({result.path: result for result in results}.values())


def _budget(row: dict[str, Any], result: Result) -> int:
    """What a row was given: a size, or another variant's peak in the same run."""
    given = row["variant"].partition(":")[2].partition("+")[0]
    if of := re.fullmatch(r"peak\((.*)\)", given):
        return int(next(other["peak_bytes"] for other in result.rows if other["variant"] == of[1]))
    return parse_size(given, field="over")


def prediction(source: Source, *subjects: str) -> list[str]:
    """Predicted against measured peaks and times, over all budgets and slowdowns of each model."""
    lines = []
    for subject in subjects:
        rows = [row for row in source.rows(subject, "over:*", "slowdown:*") if row[0].get("ratio") is not None]
        budgets = [row for row in rows if row[0]["variant"].startswith("over:") and row[0].get("peak_bytes")]
        kept = sum(row["peak_bytes"] <= 1.0005 * _budget(row, result) for row, result in budgets)
        planned = [row for row, _ in rows if _has(row, "peak_bytes", "predicted_peak_bytes")]
        off = [row["peak_bytes"] - row["predicted_peak_bytes"] for row in planned]
        times = [row["predicted_ms"] / row["step_ms"] - 1 for row, _ in rows if _has(row, "predicted_ms", "step_ms")]
        lines.append([
            subject, f"{kept} of {len(budgets)}",
            f"{statistics.median(map(abs, off)) / 1e6:.2f}" if off else "-",
            f"{min(off) / 1e6:+.1f} to {max(off) / 1e6:+.1f}" if off else "-",
            f"{min(times):+.1%} to {max(times):+.1%}".replace("%", " %") if times else "-",
            " ".join(map(source.link, _unique(*(result for _, result in rows)))),
        ])  # fmt: skip
    header = ("model", "budgets kept", "peak off by MB, median", "least to most", "predicted time off by", "file")
    return _table(header, lines)


def _has(row: dict[str, Any], *names: str) -> bool:
    return all(row.get(name) is not None for name in names)


_METHODS = {
    "keep": "keep-all", "checkpoint": "full checkpointing", "auto": "**graphoffload**",
    "per-block/auto": "**graphoffload**, blocks", "hf-checkpoint-offload": "checkpoints, inputs on the host",
    "tiled/hf-checkpoint-offload": "the same, MLPs tiled by hand",
}  # fmt: skip


def longest(source: Source, *subjects: str) -> list[str]:
    """For each method the longest sequence that trained in any run, and the shortest longer one that did not; and how fast it
    is at the longest of other methods, where that was measured."""
    lines = []
    for subject in subjects:
        tried = [(row, result) for result in source.results if result.subject == subject for row in result.rows]
        if not tried:
            raise ConfigError(f"no result file has a longest row of {subject}")
        found, name = [], subject.removeprefix("longest-")
        trained = [(row, result) for row, result in tried if row["tokens_per_s"]]
        tops = {row["method"]: row["tokens"] for row, _ in sorted(trained, key=lambda row: row[0]["tokens"])}
        for row, result in trained:
            if row["tokens"] not in tops.values():
                continue
            missed = [other for other, _ in tried if other["method"] == row["method"] and not other["tokens_per_s"]]
            beyond = min((other for other in missed if other["tokens"] > row["tokens"]),
                         key=lambda other: other["tokens"], default=None)  # fmt: skip
            longer = f"{beyond['tokens']:,}: {_briefly(beyond['why'])}" if beyond else "not tried"
            found.append([
                name, _METHODS.get(row["method"], row["method"]), f"{row['tokens']:,}", f"{row['tokens_per_s']:,.0f}",
                f"{row['step_ms'] / 1e3:.1f}", f"{row['steps']}", f"{(row['peak_bytes'] or 0) / 1e9:.1f}",
                longer if row["tokens"] == tops[row["method"]] else "longer ones do", source.link(result),
            ])  # fmt: skip
        for row, result in tried:
            if row["method"] not in tops:
                tops[row["method"]] = 0
                nothing = [name, _METHODS.get(row["method"], row["method"]), "0", *["-"] * 4]
                found.append([*nothing, f"{row['tokens']:,}: {_briefly(row['why'])}", source.link(result)])
        for who, tokens in catalogue.PUBLISHED_LENGTHS.get(subject, {}).items():
            found.append([name, f"published: {who}", f"{tokens:,}", *["-"] * 5, catalogue.LENGTHS_FROM])
        lines += sorted(found, key=lambda cells: int(cells[2].replace(",", "")))
    header = ("model", "method", "tokens", "tokens/s", "step s", "steps", "peak GB", "does not train", "file")
    return _table(header, lines, left=2)


def _briefly(why: str) -> str:
    """A reason without what torch says of its pools."""
    return "out of memory" if "CUDA out of memory" in why else why


def op_cost(source: Source, *subjects: str) -> list[str]:
    """Microseconds of host time."""
    names = ("offload_us", "release_us", "reload_us", "wait_us", "median_us", "mean_us")
    lines = [
        [row["variant"], *(number(row.get(name), ".1f") for name in names), source.link(result)]
        for subject, _, pattern in (text.partition("@") for text in subjects)
        for row, result in source.rows(subject, pattern or "*", kind="op-cost")
    ]
    return _table(("us, medians", "offload", "release", "reload", "wait", "all: median", "mean", "file"), lines)


def _drawn(source: Source, subject: str) -> Rows:
    """The rows of a figure: the model as one graph."""
    return [row for row in source.rows(subject) if not row[0]["variant"].startswith("per-block/")]


def figure(source: Source, subject: str, path: str, *title: str) -> list[str]:
    """A picture, and the files that its points are from."""
    rows = _drawn(source, subject)
    files = ", ".join(map(source.link, _unique(*(result for row, result in rows if points_of([row])))))
    return [f"![step time against peak memory: {' '.join(title)}]({path})", f"Points: {files}."]


def trained(source: Source, file: str) -> list[str]:
    """Every run of a file of training steps."""
    content = training.read(source.kept / file)
    header, lines = training.table(content, source.target(source.kept / file))
    return [training.caption(content), "", *_table(header, lines)]


def published(source: Source, name: str, gpu: str = "") -> list[str]:
    """A named table: every subject of it that was measured, the rows of all its processes in their order, failures included.
    Of what variants are compared with, those after the first are shown where it failed, or where one took its place.

    gpu: of devices with this in their name.

    Raises:
        ConfigError: the table is not known, or no result file has any of it.
    """
    table, source = catalogue.find(name), replace(source, results=[one for one in source.results if gpu in one.device])
    processes: dict[str, list[Process]] = {}
    for process in table.parsed():
        processes.setdefault(process.subject, []).append(process)
    present = [subject for subject in processes if newest_rows(source.results, subject)]
    found = {subject: {row["variant"]: (row, result) for row, result in source.rows(subject)} for subject in present}
    measured = [one for one in present if any(found[one].keys() & {*process.variants} for process in processes[one])]
    if not measured:
        raise ConfigError(f"no result file has a row of the table {name}; run: python -m graphoffload bench table {name}")
    lines = [f"{table.about}. Published: {table.source}.", ""]
    for subject in measured:
        asked = (found[subject].get(name) for process in processes[subject] for name in process.variants)
        bases = {one[1].facts.get("baseline") for one in asked if one is not None}
        names: list[str] = []
        for process in processes[subject]:
            first, *others = (baseline_row(name) for name in process.baselines)
            stood = first in found[subject] and found[subject][first][0]["status"] == "ok"
            names += [first, *process.variants, *(name for name in others if name in bases or not stood)]
        rows = [found[subject][name] for name in dict.fromkeys(names) if name in found[subject]]
        lines += [*source.caption(rows), *_published_table(source, processes[subject][0], table, rows), ""]
    return lines[:-1]


def _published_table(source: Source, process: Process, table: catalogue.Table, rows: Rows) -> list[str]:
    bases = [result.facts.get("baseline", "keep-all") for _, result in rows]
    usual = bases[0]
    header = ["variant", "in all GB", "peak GB", "predicted GB", "steps", "step ms", f"x {usual} [95 %]",
              "published", "gradient error", "file"]  # fmt: skip
    lines = []
    for (row, result), base in zip(rows, bases, strict=True):
        figure = table.figure(process, row["variant"])
        said = [number(figure.ratio, ".3f")] * (figure.ratio is not None) + [figure.said] * bool(figure.said)
        lines.append([
            f"`{row['variant']}`", gb(row.get("total_bytes")), gb(row.get("peak_bytes")), gb(row.get("predicted_peak_bytes")),
            number(row.get("steps"), "d"), number(row.get("step_ms"), ".1f"),
            _ratio(row, "" if base == usual else base), "; ".join(said) or "-",
            number(row.get("gradient_error"), ".2g"), source.link(result),
        ])  # fmt: skip
    return _table(header, lines)


VIEWS: dict[str, Callable[..., list[str]]] = {
    "steps": steps, "pick": pick, "peers": peers, "prediction": prediction, "longest": longest, "op-cost": op_cost,
    "figure": figure, "training": trained, "published": published,
}  # fmt: skip


# The page


def written(text: str, source: Source) -> str:
    """The page with every block as its view makes it now.

    Raises:
        ConfigError: there is no block, a view is unknown, or no result file has what it asks for.
    """

    def block(match: re.Match[str]) -> str:
        name, *given = match["view"].split()
        if name not in VIEWS:
            raise ConfigError(f"<!-- results: {match['view']} -->: no view {name!r}; there are: {', '.join(VIEWS)}")
        lines = VIEWS[name](source, *given)
        return "\n".join((f"<!-- results: {match['view']} -->", *lines, "<!-- /results -->"))

    found, count = _BLOCK.subn(block, text)
    if not count:
        raise ConfigError("the page has no <!-- results: VIEW ... --> ... <!-- /results --> block to write")
    return found


def redraw(text: str, source: Source) -> list[Path]:
    """Draw every figure of the page anew; returns those that could be drawn."""
    drawn = []
    for match in _BLOCK.finditer(text):
        name, *given = match["view"].split()
        if name == "figure":
            subject, path, *title = given
            if draw([row for row, _ in _drawn(source, subject)], " ".join(title), source.folder / path):
                drawn.append(source.folder / path)
    return drawn


def arguments(parser: argparse.ArgumentParser) -> None:
    """The tool's options."""
    parser.add_argument("page", type=Path, metavar="PAGE.md")
    parser.add_argument("--results", type=Path, default=None, metavar="DIR", help='default: "results" beside the page')
    parser.add_argument("--draw", action="store_true", help="draw the figures anew as well")
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 where something would change")


def start(given: argparse.Namespace) -> int:
    """Write the page where it changes."""
    folder = given.page.parent
    kept = given.results or folder / "results"
    source = Source(load(kept), folder, kept)
    try:
        before = given.page.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{given.page}: {error.strerror or error}") from None
    after = written(before, source)
    if given.check:
        print(f"{given.page} is {'what' if after == before else 'NOT what'} its result files say")
        return int(after != before)
    for path in redraw(after, source) if given.draw else ():
        print(f"drew {path}")
    if after != before:
        given.page.write_text(after, encoding="utf-8")
    print(f"{given.page}: {'written' if after != before else 'unchanged'}")
    return 0
