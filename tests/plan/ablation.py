"""What each strategy of the solver is worth: every recorded Program is solved for several goals with all of them and without
each one.

    python -m tests.plan.ablation FILE [model ...]      # solves, and writes a result file; about an hour for all models
    python -m tests.plan.ablation page docs/results/planner-ablation.json       # writes its table into docs/plan.md

A figure is, in points: for a budget, the slowdown; for a slowdown, the peak as a share of keep-all's. A strategy stays where
leaving it out costs 0.1 points or a plan somewhere. A search that starts elsewhere ends elsewhere: so leaving a strategy out
also gains in some cases, and the table counts those as well.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from graphoffload.errors import BudgetError
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.planner import search, solver
from graphoffload.planner.goals import Goal, MeetBudget, WithinSlowdown
from graphoffload.planner.problem import Program
from graphoffload.planner.simulator import simulate
from graphoffload.planner.solver import least_budget_bytes, solve
from graphoffload.planner.strategies import exact, local_search
from tests.plan import recordings

WORTH = 0.1
"""Points from which a difference counts."""
BUDGETS = (0.0, 0.3, 0.7)
"""Shares of the way from the least peak to keep-all's."""
SLOWDOWNS = (0.01, 0.1)
SLOW_LINK = 0.3
HOST_SHARE = 0.15
"""Host budget, as a share of all candidates' bytes."""
PAGE = Path(__file__).parents[2] / "docs" / "plan.md"
BEGIN, END = "<!-- ablation: begin -->", "<!-- ablation: end -->"


@dataclass(frozen=True)
class Case:
    """One goal of one recorded Program."""

    program: str
    hardware: HardwareProfile
    goal: Goal
    host_budget_bytes: int | None
    text: str


@dataclass(frozen=True)
class Outcome:
    """Points and seconds of one solve; no points: no plan was found."""

    points: float | None
    bound: float | None
    seconds: float


@dataclass(frozen=True)
class Strategy:
    """What is put in place of which attribute; it is worth a run only where `watched` was called."""

    name: str
    module: Any
    attribute: str
    replacement: Any
    watched: tuple[Any, str]


def _without(name: str) -> Strategy:
    left = {other: value for other, value in search._STARTS.items() if other != name}
    return Strategy(name, search, "_STARTS", left, (search, "_proposals"))


def _nothing(*_: Any, **__: Any) -> Iterator[Any]:
    yield from ()


def _same(_: Any, start: Any, **__: Any) -> Any:
    return start


def _keep_all(evaluator: Any) -> Any:
    return evaluator.propose(evaluator.keep, "keep")


def strategies() -> list[Strategy]:
    """All that can be left out."""

    def call(name: str, attribute: str, replacement: Any, module: Any = search) -> Strategy:
        return Strategy(name, module, attribute, replacement, (module, attribute))

    def constant(name: str, attribute: str, value: Any, used_by: str, module: Any = search) -> Strategy:
        return Strategy(name, module, attribute, value, (search if used_by == "windows" else module, used_by))

    return [
        *(_without(name) for name in search._STARTS),
        Strategy("exact", search, "search_exactly", lambda evaluator: (None, False), (exact, "_assignments")),
        call("greedy, halving", "_halving", _nothing),
        call("LP aimed lower", "_aiming_lower", _nothing),
        call("where lost", "where_lost", _nothing, solver),
        constant("where lost: lower budgets", "_LOWER", (1.0,), "where_lost"),
        call("from below", "_from_below", _nothing, solver),
        constant("from below: tighter budgets", "_RUNGS", 0, "_from_below", solver),
        call("all offloaded", "all_offloaded", _keep_all),
        constant("several starts", "_TURNS", 1, "_improved"),
        call("local search", "improve", _same),
        call("local search: shares of groups", "_folded_moves", _nothing, local_search),
        constant("local search: more than one of a group", "_SHARES", (1_000_000,), "_folded_moves", local_search),
        call("local search: exchanges", "_exchanges", _nothing, local_search),
        call("local search: what is waited for", "without_stalled", _nothing, local_search),
        constant("windows", "_WINDOWS", (), "windows", local_search),
        constant("windows: five of seven", "_WINDOWS", (0.33, 0.0), "windows", local_search),
    ]


def run(case: Case) -> Outcome:
    """One solve."""
    program, begin = recordings.load(case.program), time.process_time()
    try:
        found = solve(program, case.hardware, case.goal, host_budget_bytes=case.host_budget_bytes)
    except BudgetError:
        return Outcome(None, None, time.process_time() - begin)
    seconds = time.process_time() - begin
    keep = simulate(program, program.keep_actions(), case.hardware)
    if isinstance(case.goal, MeetBudget):
        bound_s = found.lower_bound_s or keep.time_s
        return Outcome(100 * found.timeline.slowdown, 100 * (bound_s / keep.time_s - 1.0), seconds)
    bound_bytes = found.lower_bound_peak_bytes or 0
    return Outcome(100 * found.timeline.peak_bytes / keep.peak_bytes, 100 * bound_bytes / keep.peak_bytes, seconds)


def cases_of(name: str) -> Iterator[Case]:
    """Goals of one Program: on the hardware that it was recorded for, on a slow link, and with little host memory."""
    program, hardware = recordings.load(name), recordings.hardware_of(name)
    slow = hardware.scaled(link=SLOW_LINK)
    yield from _budgets(name, program, hardware, None, BUDGETS, "")
    yield from (Case(name, hardware, WithinSlowdown(limit), None, f"slowdown {limit:.0%}") for limit in SLOWDOWNS)
    yield from _budgets(name, program, slow, None, (0.1, 0.4), "slow link, ")
    host_bytes = int(HOST_SHARE * sum(candidate.nbytes for candidate in program.candidates))
    yield from _budgets(name, program, hardware, host_bytes, (0.1,), "little host memory, ")


def _budgets(
    name: str, program: Program, hardware: HardwareProfile, host: int | None, shares: tuple[float, ...], text: str
) -> Iterator[Case]:
    least = least_budget_bytes(program, hardware, host_budget_bytes=host).timeline.peak_bytes
    keep = simulate(program, program.keep_actions(), hardware).peak_bytes
    for share in shares if keep > least else ():
        budget = MeetBudget(int(least + share * (keep - least)) + program.reserve_bytes)
        yield Case(name, hardware, budget, host, f"{text}budget {share:.0%}")


def _noting(key: tuple[Any, str], used: set[tuple[Any, str]]) -> Callable[..., Any]:
    """The function of that module and name, which notes that it was called."""
    function = getattr(*key)

    def noting(*given: Any, **named: Any) -> Any:
        used.add(key)
        return function(*given, **named)

    return noting


def without_each(case: Case, every: list[Strategy], report: Callable[[str], None]) -> dict[str, Any]:
    """The outcome with all strategies, and without each one that was used."""
    used: set[tuple[Any, str]] = set()
    with contextlib.ExitStack() as stack:
        for key in {item.watched: None for item in every}:
            stack.enter_context(mock.patch.object(*key, _noting(key, used)))
        full = run(case)
    left_out: dict[str, Outcome] = {}
    for item in every:
        if item.watched in used:
            with mock.patch.object(item.module, item.attribute, item.replacement):
                left_out[item.name] = run(case)
    spent = full.seconds + sum(found.seconds for found in left_out.values())
    report(f"{case.program}: {case.text}: {full.points} ({spent:.1f} s)")
    return {
        "program": case.program,
        "hardware": case.hardware.name,
        "goal": case.text,
        "points": full.points,
        "bound": full.bound,
        "seconds": round(full.seconds, 3),
        "without": {name: found.points for name, found in left_out.items()},
        "seconds_without": {name: round(found.seconds, 3) for name, found in left_out.items()},
    }


def table(results: list[dict[str, Any]]) -> str:
    """The rows of docs/plan.md."""
    lines = [
        "| left out | cases that use it | worse by 0.1 points | no plan | worst | better by 0.1 points | mean | time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(name for item in results for name in item["without"]):
        used = [item for item in results if name in item["without"]]
        pairs = [(item["without"][name], item["points"]) for item in used]
        lost = [without - points for without, points in pairs if without is not None and points is not None]
        none = sum(without is None and points is not None for without, points in pairs)
        worse, better = sum(d >= WORTH for d in lost), sum(d <= -WORTH for d in lost)
        spent = sum(item["seconds_without"][name] for item in used) / max(1e-9, sum(item["seconds"] for item in used))
        mean = sum(lost) / max(1, len(lost))
        cells = f"{worse} | {none} | {max(lost, default=0.0):+.2f} | {better} | {mean:+.3f} | x {spent:.2f}"
        lines.append(f"| {name} | {len(used)} | {cells} |")
    return "\n".join(lines)


def main(path: Path, names: list[str]) -> None:
    """Solve everything and write the result file, after each model."""
    every, results = strategies(), []
    for name in names or recordings.names():
        results += [without_each(case, every, lambda line: print(line, flush=True)) for case in cases_of(name)]
        path.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


def write_page(path: Path) -> None:
    """The table of a result file into docs/plan.md."""
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{table(json.loads(path.read_text()))}\n{END}{after}")


if __name__ == "__main__":
    if sys.argv[1] == "page":
        write_page(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]), sys.argv[2:])
