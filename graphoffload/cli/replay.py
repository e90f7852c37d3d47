"""Plan a step again from its dump, on any machine: the same plan, or one for another budget.

    GRAPHOFFLOAD_DUMP_DIR=dumps python train.py
    python -m graphoffload replay dumps/step.1f2e3d4c.problem.json
    python -m graphoffload replay dumps/step.1f2e3d4c.problem.json --device-budget 16GB --host-budget 64GiB

A step of several graphs leaves a `*.problem.json` each time that it is planned. Where several ranks have one plan, each leaves
what it measured, and the one that plans for all a `*.together.problem.json`. It has what the plan follows from: the time and
the memory of each graph's variants, the calls in their order, what was allocated outside them, and the eager work between them.
The same is there as text (`*.problem.txt`). Neither has code, names of files or values of tensors.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace
from pathlib import Path

from graphoffload.cli.output import DONE, CommandError, print_lines
from graphoffload.errors import ConfigError
from graphoffload.facts.goals import UNMEASURABLE, MeetBudget, WithinSlowdown
from graphoffload.hardware.measurement import resolve_hardware
from graphoffload.patience import Patience
from graphoffload.planner.step.facts import StepProblem
from graphoffload.planner.step.flight import plan_flight
from graphoffload.planner.step.stored import from_json
from graphoffload.report.step_line import line_of_step, slow_host
from graphoffload.report.step_table import problem_table
from graphoffload.units import parse_size


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("file", type=Path, metavar="FILE", help="a *.problem.json of a dump folder")
    goal = parser.add_mutually_exclusive_group()
    goal.add_argument("--device-budget", metavar="SIZE", help="another budget, of all that is allocated on the device")
    goal.add_argument("--max-slowdown", metavar="SHARE", help="a slowdown instead of a budget, such as 0.02")
    parser.add_argument("--reserve", metavar="SIZE", help="to leave free of the budget")
    parser.add_argument("--host-budget", metavar="SIZE", help="page-locked memory, or none for no limit")
    parser.add_argument("--hardware", metavar="NAME", help="another device's link to the host, by its profile; kernels stay")


def start(args: argparse.Namespace) -> int:
    """Print the step's line, what it was planned with, and what each call does; returns the exit status."""
    problem = _changed(_read(args.file), args)
    facts = problem.facts
    solution = plan_flight(replace(problem, patience=Patience("step")))
    graphs = Counter(f"graph {call.graph}" for call in facts.calls)
    budget = problem.goal.device_budget_bytes if isinstance(problem.goal, MeetBudget) else None
    whole = problem.hardware.memory_bytes if problem.hardware.source != "cpu" else None
    line = line_of_step(solution, graphs, problem.reserve_bytes - problem.taken_bytes, budget, whole)
    print_lines("; ".join(filter(None, (line, slow_host(facts)))), "", problem_table(problem, solution).rstrip())
    return DONE


def _read(path: Path) -> StepProblem:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{path} cannot be read ({error}). Give a *.problem.json of a dump folder.") from None
    try:
        return from_json(text)
    except ConfigError as error:
        raise CommandError(f"{path}: {error}") from None


def _changed(problem: StepProblem, args: argparse.Namespace) -> StepProblem:
    """The problem with what was given on the command line."""
    if args.device_budget is not None:
        goal = MeetBudget(parse_size(args.device_budget, field="--device-budget"))
        problem = replace(problem, goal=goal, or_least=False)
    if args.max_slowdown is not None:
        try:
            share = float(args.max_slowdown)
        except ValueError:
            share = -1.0
        if not 0.0 <= share < float("inf"):
            raise CommandError(f"--max-slowdown {args.max_slowdown}: give a share of the step's time, such as 0.02.")
        problem = replace(problem, goal=WithinSlowdown(max(share, UNMEASURABLE), asked=share), or_least=False)
    if args.reserve is not None:
        problem = replace(problem, reserve_bytes=parse_size(args.reserve, field="--reserve"), taken_bytes=0)
    if args.host_budget is not None:
        limit = None if args.host_budget == "none" else parse_size(args.host_budget, field="--host-budget")
        problem = replace(problem, host_budget_bytes=limit)
    if args.hardware is not None:
        if args.hardware == "measure":
            raise CommandError("--hardware measure: give a named profile; the dump has the one that was measured.")
        before, named = problem.hardware, resolve_hardware(args.hardware)
        hardware = replace(named, links_shared_by=before.links_shared_by, host_s_per_copy=before.host_s_per_copy)
        problem = replace(problem, hardware=hardware)
    return problem
