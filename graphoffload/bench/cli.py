"""The tools of `python -m graphoffload bench TOOL`; `run`, where none is named.

Each is a module with `arguments(parser)` and `start(given)`; its docstring is the tool's help.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from graphoffload.bench import export, midsize, op_cost, page, plans, ranks, run, soak, tables, together, where

TOOLS: dict[str, tuple[ModuleType, str]] = {
    "run": (run, "variants of one model beside compiled keep-all (where no tool is named)"),
    "table": (tables, "a published table by name, and graphoffload at the memory of each of its rows"),
    "together": (together, "several models or processes at once on one host"),
    "ranks": (ranks, "a Llama spread over several GPUs of this host, by FSDP2, DDP, tensor, context and pipeline parallelism"),
    "check": (midsize, "half a minute on this GPU: memory freed, overlap, gradients, host time"),
    "where": (where, "where a step's memory and time go, beside what was predicted"),
    "op-cost": (op_cost, "host time of the four ops"),
    "soak": (soak, "a long run with failures in between, compared with its synchronous twin"),
    "plans": (plans, "one model planned here and elsewhere, compared"),
    "export": (export, "result files of what a run left"),
    "page": (page, "tables and figures of a page, from result files"),
}


def add_tools(parser: argparse.ArgumentParser, shape: dict[str, Any]) -> None:
    """Make every tool a command of `parser`."""
    tools = parser.add_subparsers(dest="tool", metavar="TOOL", required=True)
    for name, (module, text) in TOOLS.items():
        tool = tools.add_parser(name, help=text, description=module.__doc__, **shape)
        module.arguments(tool)
        tool.set_defaults(run=_started, tool_main=module.start, known=re.findall(r"--[\w-]+", tool.format_usage()))


def completed(argv: Sequence[str]) -> list[str]:
    """A command line with `run` where `bench` names no tool, so that `bench --model llama4k` means it."""
    given = list(argv)
    if given[:1] == ["bench"] and len(given) > 1 and given[1] not in (*TOOLS, "-h", "--help") and given[1].startswith("-"):
        given.insert(1, "run")
    return given


def _started(given: argparse.Namespace) -> int:
    os.environ.setdefault("PYTHONUNBUFFERED", "1")  # for the processes that a tool starts
    given.command_line = shlex.join(["python", "-m", "graphoffload", *given.argv])
    return int(given.tool_main(given))
