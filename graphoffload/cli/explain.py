"""Plan a model's training step without running it, and print the plan of every graph.

The function returns (model, args), (model, args, kwargs) or (model, kwargs); the model is called as in training, so what
it returns should be the loss, or whatever backward starts from.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch

from graphoffload.api.introspect import explain
from graphoffload.cli.fields import add_fields, config_of
from graphoffload.cli.output import DONE, CommandError, print_lines
from graphoffload.cli.scripts import built
from graphoffload.compiler.link import hardware_of
from graphoffload.compiler.optimizer_state import NAMES
from graphoffload.errors import GraphOffloadError
from graphoffload.options.config import OffloadConfig
from graphoffload.report.offload_report import OffloadReport


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("script", metavar="SCRIPT.py[:FUNCTION]", help='the function is "build" where none is named')
    parser.add_argument("--out", metavar="DIR", help="write the report as text and JSON, pictures and traces there")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--meta", action="store_true", help="call the function on the meta device: no memory is taken")
    known = f"count the state of {', '.join(NAMES)}, which training makes; without it the report says what it leaves out"
    parser.add_argument("--optimizer", metavar="NAME", help=known)
    add_fields(parser, [field.name for field in dataclasses.fields(OffloadConfig)])


def start(args: argparse.Namespace) -> int:
    """Print the report and write what was asked for; returns the exit status."""
    config = config_of(args)
    folder = _folder(args.out)
    model, inputs, named = built(args.script, meta=args.meta)
    chosen = {} if args.optimizer is None else {"optimizer": args.optimizer}
    report = _report(model, inputs, named, config, chosen)
    print_lines(report.to_json() if args.json else report)
    if not args.json:
        print_lines(*_no_gpu(config))
    if folder is not None:
        written = _write(folder, report)
        if not args.json:
            print_lines("", *(f"wrote {path}" for path in written))
    return DONE


def _folder(out: str | None) -> Path | None:
    """The folder for what is written, made before anything is planned."""
    if out is None:
        return None
    folder = Path(out).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--out {out}: {error.strerror or error}. Name a folder that can be made and written.") from None
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
