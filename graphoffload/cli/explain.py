"""Plan a model's training step without running it, and print the plan of every graph.

The function returns (model, args), (model, args, kwargs) or (model, kwargs); the model is called as in training, so what
it returns should be the loss, or whatever backward starts from.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from graphoffload.api.introspect import explain
from graphoffload.cli.fields import add_fields, config_of
from graphoffload.cli.output import DONE, CommandError, print_lines
from graphoffload.cli.scripts import built
from graphoffload.compiler.link import hardware_of
from graphoffload.compiler.optimizer_state import NAMES
from graphoffload.errors import BudgetError, GraphOffloadError
from graphoffload.options.config import OffloadConfig, parse_text
from graphoffload.report.offload_report import OffloadReport
from graphoffload.report.page.html import require_plotly
from graphoffload.units import format_bytes


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("script", metavar="SCRIPT.py[:FUNCTION]", help='the function is "build" where none is named')
    parser.add_argument("--out", metavar="DIR", help="write the report as text and JSON, pictures and traces there")
    parser.add_argument(
        "--html", metavar="FILE", help="write the report as one page for a browser, which needs no network there"
    )
    budgets = "other budgets to plan for, such as 8GiB 12GiB 80%%; a slider on the page goes through them"
    parser.add_argument("--what-if", metavar="BUDGET", nargs="+", default=[], help=budgets)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--meta", action="store_true", help="call the function on the meta device: no memory is taken")
    known = f"count the state of {', '.join(NAMES)}, which training makes; without it the report says what it leaves out"
    parser.add_argument("--optimizer", metavar="NAME", help=known)
    add_fields(parser, [field.name for field in dataclasses.fields(OffloadConfig)])


def start(args: argparse.Namespace) -> int:
    """Print the report and write what was asked for; returns the exit status."""
    config = config_of(args)
    folder = _folder(args.out)
    others = _what_if(args, config)
    model, inputs, named = built(args.script, meta=args.meta)
    chosen = {} if args.optimizer is None else {"optimizer": args.optimizer}
    report = _report(model, inputs, named, config, chosen)
    print_lines(report.to_json() if args.json else report)
    wrote: list[Path] = []
    if args.html is not None:
        wrote.append(_page(args.html, report, others, lambda other: _report(model, inputs, named, other, chosen)))
    if not args.json:
        print_lines(*_no_gpu(config))
    if folder is not None:
        wrote += _write(folder, report)
    if wrote and not args.json:
        print_lines("", *(f"wrote {path}" for path in wrote))
    return DONE


def _what_if(args: argparse.Namespace, config: OffloadConfig) -> dict[str, OffloadConfig]:
    """The configurations of other budgets by their texts; refuses a page that cannot be drawn, before anything is planned."""
    if args.what_if and args.html is None:
        raise CommandError("--what-if compares budgets on the page, and no page was asked for. Add --html FILE.")
    if args.html is not None:
        require_plotly("--html")
        if Path(args.html).expanduser().is_dir():
            raise CommandError(f"--html {args.html} is a folder. Name a file, such as {Path(args.html) / 'plan.html'}.")
        _folder(str(Path(args.html).expanduser().parent), "--html")
    return {
        text: config.with_options(device_budget=parse_text("device_budget", text), max_slowdown=None) for text in args.what_if
    }


def _page(
    path: str, report: OffloadReport, others: dict[str, OffloadConfig], plan: Callable[[OffloadConfig], OffloadReport]
) -> Path:
    """Plan for the other budgets and write the page. A budget that no plan meets is a note on it."""
    found, missed = [], []
    for text, config in others.items():
        try:
            found.append(plan(config))
        except BudgetError as error:
            least = "" if error.least_bytes is None else f"; the least is {format_bytes(error.least_bytes)}"
            missed.append(f"no plan meets a budget of {text}{least}")
    return dataclasses.replace(report, notes=(*report.notes, *missed)).save_html(path, others=found)


def _folder(out: str | None, option: str = "--out") -> Path | None:
    """The folder for what is written, made before anything is planned."""
    if out is None:
        return None
    folder = Path(out).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"{option} {out}: {error.strerror or error}. Name a folder that can be made and written.") from None
    return folder


def _write(folder: Path, report: OffloadReport) -> list[Path]:
    """The report as text and as JSON, and its pictures."""
    written = []
    for name, text in (("report.txt", f"{report}\n"), ("report.json", report.to_json())):
        try:
            (folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise CommandError(f"{folder / name} cannot be written: {error.strerror or error}.") from None
        written.append(folder / name)
    return [*written, *report.save_pictures(folder)]


def _report(
    model: Any, inputs: tuple[Any, ...], named: dict[str, Any], config: OffloadConfig, chosen: dict[str, Any]
) -> OffloadReport:
    """What explain() says; what torch complains about while it traces becomes one complaint."""
    try:
        report = explain(model, config, **chosen)(*inputs, **named)
    except GraphOffloadError:
        raise
    except Exception as error:  # the model is anyone's code
        raise CommandError(
            f"tracing {type(model).__name__} with these inputs failed: {type(error).__name__}: {error}\n{_cause(error)}"
        ) from error
    if not report.plans:
        raise CommandError(
            f"nothing to plan: no graph of {type(model).__name__} needs a gradient. Are its parameters frozen, or is it called "
            "under torch.no_grad? In training, what it returns must depend on a parameter that requires a gradient."
        )
    return report


def _cause(error: Exception) -> str:
    """What to do about a model that cannot be traced."""
    if type(error).__name__ in ("DataDependentOutputException", "GuardOnDataDependentSymNode", "UserError"):
        return (
            "The model looks at a tensor's value (.item(), a branch on it, a mask as an index); nothing is computed here. "
            "Plan it where it runs: graphoffload.last_plans() after a step."
        )
    return "Does the same call run in eager, on the CPU? If it does, torch.compile cannot trace this model."


def _no_gpu(config: OffloadConfig) -> list[str]:
    """What to do where no GPU was planned for."""
    if torch.cuda.is_available() or config.reserve != "auto" or hardware_of(config.hardware).source != "cpu":
        return []
    return ["", "No GPU here and none named: times are a CPU's. --hardware h200-sxm plans for that GPU."]
