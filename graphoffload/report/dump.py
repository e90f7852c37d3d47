"""Dump folders: one graph before and after the passes, as files for a person or a script.

    <graph>.<key>.joint.txt               the joint graph, readable, with shapes
    <graph>.<key>.forward.before.txt      as torch's partitioner made it        (backward likewise)
    <graph>.<key>.forward.after.txt       with our operations                   (backward likewise)
    <graph>.<key>.joint.svg, .before.svg, .after.svg     colored by decision
    <graph>.<key>.plan.json, .plan.txt    the plan, and its table
    <graph>.<key>.html                    lanes, memory and the table as one page, where plotly is installed
    step.<key>.problem.json, .txt         what a step of several graphs was planned with, for `replay`; and as a table
    step.<key>.together.problem.json      the same of several ranks, by the one that plans for all

With several processes every name carries ".rank<N>". A file appears whole or not at all (written under another name, then
renamed), so ranks and compile workers can share a folder. A dump is an aid: a graph that cannot be printed or drawn leaves a
file that says so and never stops the compilation. Only a folder that cannot be written does, since the user asked for it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from graphoffload.cache_files import write_whole
from graphoffload.errors import ConfigError
from graphoffload.facts.plan import Plan
from graphoffload.log import say
from graphoffload.planner.predicted import Predicted
from graphoffload.planner.step.facts import StepProblem
from graphoffload.planner.step.solve import StepSolution
from graphoffload.planner.step.stored import to_json
from graphoffload.report.graph_picture import drawn_nodes, drawn_pair, graph_svg
from graphoffload.report.page.content import content_of, shown_plan
from graphoffload.report.page.html import can_draw, page_html
from graphoffload.report.step_picture import StepPicture, picture_of, trace_json
from graphoffload.report.step_svg import timeline_svg
from graphoffload.report.step_table import problem_table
from graphoffload.report.svg import element, page
from graphoffload.report.table import plan_table

if TYPE_CHECKING:
    from torch.fx import GraphModule


def write_dump(
    folder: str | Path,
    plan: Plan,
    *,
    joint: GraphModule | None = None,
    forward_before: GraphModule | None = None,
    backward_before: GraphModule | None = None,
    forward: GraphModule | None = None,
    backward: GraphModule | None = None,
    predicted: Predicted | None = None,
) -> list[Path]:
    """Write everything given about one graph into `folder`, which is made if needed; graphs are not changed.

    Args:
        folder: as in GRAPHOFFLOAD_DUMP_DIR or dump_dir=.
        plan: decides the colors, and is written as JSON and as its table.
        joint: before partitioning. forward_before, backward_before: as torch's partitioner made them.
        forward, backward: with our operations.
        predicted: the predicted step; drawn, and written as a trace.

    Returns:
        The files written, in a fixed order.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    graphs = {"joint": joint, "forward.before": forward_before, "backward.before": backward_before,
              "forward.after": forward, "backward.after": backward}  # fmt: skip
    pairs = {"joint": (joint, None), "before": (forward_before, backward_before), "after": (forward, backward)}
    texts: dict[str, Callable[[], str]] = {
        f"{name}.txt": partial(_readable, graph) for name, graph in graphs.items() if graph is not None
    }
    texts |= {"plan.json": plan.to_json, "plan.txt": partial(plan_table, plan, compact=False)}
    texts |= {
        f"{name}.svg": partial(_drawing, plan, *pair, f"{plan.graph} {name}")
        for name, pair in pairs.items()
        if pair != (None, None)
    }
    if predicted is not None:
        texts |= _pictures(plan, predicted)
        if can_draw():
            texts["html"] = partial(_page, plan, predicted)
        else:
            _say_no_page()
    return _write_all(Path(folder).expanduser(), _stem(plan), texts, *_asked_by(folder))


def write_step_dump(
    folder: str | Path, problem: StepProblem, solution: StepSolution | None, line: str, *, together: bool = False
) -> list[Path]:
    """Write what a step was planned with into `folder`: as JSON for `python -m graphoffload replay`, and as text.

    Args:
        folder: as in write_dump. solution: None where no plan was found. line: what was said of it. together: it is the
            problem of several ranks.

    Returns:
        The files written.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    content = _or_say_so(partial(to_json, problem))
    kind = "together.problem" if together else "problem"
    texts: dict[str, Callable[[], str]] = {
        f"{kind}.json": lambda: content,
        f"{kind}.txt": lambda: f"{line}\n\n{problem_table(problem, solution)}",
    }
    name = f"step.{hashlib.sha256(content.encode()).hexdigest()[:8]}"
    return _write_all(Path(folder).expanduser(), name, texts, *_asked_by(folder))


def _asked_by(folder: str | Path) -> tuple[str, str]:
    """What names the folder of a dump, and how to have none, for an error message."""
    return f"dump_dir={str(folder)!r}", "unset dump_dir and GRAPHOFFLOAD_DUMP_DIR"


def write_pictures(folder: str | Path, plan: Plan, predicted: Predicted | None) -> list[Path]:
    """Write the picture of the predicted step (SVG) and its trace (JSON, for Perfetto and chrome://tracing) into `folder`.

    Args:
        predicted: None if the plan was made in another process: the picture says so, and there is no trace.

    Returns:
        The files written.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    texts = _pictures(plan, predicted)
    return _write_all(Path(folder).expanduser(), _stem(plan), texts, f"folder {str(folder)!r}", "")


def write_step_pictures(folder: str | Path, name: str, picture: StepPicture) -> list[Path]:
    """Write the picture of a step of several graphs and its trace into `folder`.

    Returns:
        The files written.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    texts: dict[str, Callable[[], str]] = {
        "timeline.svg": partial(timeline_svg, picture), "trace.json": partial(trace_json, picture)
    }  # fmt: skip
    return _write_all(Path(folder).expanduser(), name, texts, f"folder {str(folder)!r}", "")


def _pictures(plan: Plan, predicted: Predicted | None) -> dict[str, Callable[[], str]]:
    def drawn() -> str:
        try:
            return timeline_svg(picture_of(plan, predicted))
        except Exception as error:  # a picture must not stop a compilation either
            return _apology(error)

    texts: dict[str, Callable[[], str]] = {"timeline.svg": drawn}
    return texts if predicted is None else {**texts, "trace.json": lambda: trace_json(picture_of(plan, predicted))}


def _page(plan: Plan, predicted: Predicted) -> str:
    return page_html("graphoffload: one training step", content_of([shown_plan(plan, predicted)], text=plan_table(plan)))


@cache
def _say_no_page() -> None:
    say("dump_dir has no pages, since plotly is not installed: pip install 'graphoffload[html]'")


def _stem(plan: Plan) -> str:
    return f"{_plain(plan.graph) or 'graph'}.{_plain(plan.key)[:8] or 'nokey'}"


def _write_all(folder: Path, name: str, texts: dict[str, Callable[[], str]], what: str, remedy: str) -> list[Path]:
    """Write every text under a name; `what` and `remedy` are for the error message if that fails."""
    stem = f"{name}{_rank_suffix()}"
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            written.append(write_whole(folder / f"{stem}.{name}", _or_say_so(text)))
    except OSError as error:
        raise ConfigError(
            f"{what} cannot be written: {error.strerror or error} (errno {error.errno}); {len(written)} files were. "
            f"Name a folder this process may write to{', or ' + remedy if remedy else ''}."
        ) from error
    return written


def _readable(graph: GraphModule) -> str:
    """The graph's code with shapes; its bare node list if torch cannot print it."""
    try:
        return str(graph.print_readable(print_output=False))
    except Exception as error:  # torch prints user values by repr, which can raise anything
        return f"# print_readable failed ({type(error).__name__}: {error}); the nodes follow\n{graph.graph}\n"


def _or_say_so(make: Callable[[], str]) -> str:
    """The result of `make`, or a line that says why there is none."""
    try:
        return make()
    except Exception as error:  # a dump must not stop a compilation
        return f"# this could not be printed: {type(error).__name__}: {error}\n"


def _drawing(plan: Plan, first: GraphModule | None, second: GraphModule | None, title: str) -> str:
    """SVG of a joint graph (`second` None), of forward and backward together, or of the one that exists."""
    actions: dict[str, str] = {tensor.name: "keep" for tensor in plan.saved.tensors}
    actions |= {decision.name: decision.action for decision in plan.decisions}
    modules = {tensor.name: tensor.module for tensor in plan.saved.tensors if tensor.module}
    try:
        if first is not None and second is not None:
            nodes, edges = drawn_pair(first, second, actions, modules=modules)
        else:
            graph = first if first is not None else second
            assert graph is not None
            nodes, edges = drawn_nodes(graph, actions, side="backward" if first is None else None, modules=modules)
        return graph_svg(nodes, edges, title=title)
    except Exception as error:  # never stop a compilation; the text must stay XML
        return _apology(error)


def _apology(error: Exception) -> str:
    reason = f"this could not be drawn: {type(error).__name__}: {error}"
    return page(1080, 60, [element("text", text=reason, x=12, y=30, fill="#c0392b")])


def _rank_suffix() -> str:
    """ ".rank3" in one of several processes, "" otherwise."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return f".rank{torch.distributed.get_rank()}"
    rank = os.environ.get("RANK", "")
    return f".rank{rank}" if rank.isdecimal() else ""


def _plain(name: str) -> str:
    """`name` with characters replaced that a file name cannot hold."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:80].strip("_")
