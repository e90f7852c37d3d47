"""From the arguments to one command, and from its errors to one line and an exit status."""

from __future__ import annotations

import argparse
import difflib
import inspect
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any, NoReturn

from graphoffload import bench
from graphoffload.bench.cli import add_tools, completed
from graphoffload.cli import estimate, explain, hardware, replay, run
from graphoffload.cli.output import DONE, FAILED, OVER_BUDGET, CommandError
from graphoffload.errors import BudgetError, GraphOffloadError
from graphoffload.log import log

COMMANDS: dict[str, tuple[ModuleType, str]] = {
    "hardware": (hardware, "what a GPU and its link can do"),
    "explain": (explain, "plan a model without training"),
    "estimate": (estimate, "what training a model takes on GPUs that are not here"),
    "replay": (replay, "plan a step again from its dump"),
    "run": (run, "a script or a command as it is, planned"),
}
_LOUD = ("bench", "run")  # the commands that are told each compile


def main(argv: Sequence[str] | None = None, description: str = "") -> int:
    """Run one command; returns the exit status."""
    try:
        args = _arguments(argv, description)
        with nullcontext() if args.command in _LOUD else _quiet():
            return int(args.run(args))
    except BudgetError as error:
        _complain(error)
        return OVER_BUDGET
    except GraphOffloadError as error:
        _complain(error)
        return FAILED
    except BrokenPipeError:  # `| head` has seen enough
        sys.stderr.close()
        return DONE


def _complain(error: Exception) -> None:
    sys.stderr.write(f"error: {error}\n")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the one line after each compile, which the report repeats, unless logging was set up."""
    before = log.level
    if before == logging.NOTSET:
        log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(before)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """As every other complaint, with status 1: 2 is for budgets."""
        raise CommandError(f"{message}. See: {self.prog} --help")


def _arguments(argv: Sequence[str] | None, description: str) -> argparse.Namespace:
    """What was asked, or a complaint that names the nearest option there is."""
    argv = completed(sys.argv[1:] if argv is None else argv)
    args, unknown = _parser(description).parse_known_args(argv)
    args.argv = argv
    if not unknown:
        return args
    command = f"{args.command} {args.tool}" if args.command == "bench" else args.command
    close = difflib.get_close_matches(unknown[0].partition("=")[0], args.known, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise CommandError(f"{unknown[0]} is no argument of {command}.{hint} See: python -m graphoffload {command} --help")


def _parser(description: str) -> argparse.ArgumentParser:
    shape: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = _Parser(prog="python -m graphoffload", description=description, **shape)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=inspect.cleandoc(module.__doc__ or ""), **shape)
        module.arguments(command)
        command.set_defaults(run=module.start, known=re.findall(r"--[\w-]+", command.format_help()))
    add_tools(commands.add_parser("bench", help="measure steps on this machine", description=bench.__doc__, **shape), shape)
    return parser
