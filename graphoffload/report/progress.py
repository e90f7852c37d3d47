"""A bar on a terminal that says what is being done; nothing where stdout is none.

    with progress_bar("bench small", total=3) as bar:
        bar.doing("compiling over:8GB")        ⠹ bench small  ━━━━━━━╸━━━━━━━  1/3  0:00:42  compiling over:8GB
        bar.advance()

Lines printed meanwhile appear above the bar, and the bar is gone when the block ends, so that no table has it in its way.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class Bar:
    """What is shown; without a Progress, nothing."""

    def __init__(self, progress: Progress | None = None, task: TaskID | None = None) -> None:
        self._progress, self._task = progress, task

    def doing(self, text: str) -> None:
        """Say what is being done now."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, doing=text)

    def advance(self, count: int = 1) -> None:
        """So many more are done."""
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, count)


def terminal() -> Console | None:
    """Where a bar is drawn: stdout, if it is a terminal."""
    console = Console(file=sys.stdout)
    return console if console.is_terminal and not console.is_dumb_terminal else None


@contextmanager
def progress_bar(title: str, total: int, console: Console | None = None) -> Iterator[Bar]:
    """A bar for `total` things, on `console` or on this process's terminal."""
    console = console or terminal()
    if console is None:
        yield Bar()
        return
    columns = (
        SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), MofNCompleteColumn(),
        TimeElapsedColumn(), TextColumn("{task.fields[doing]}", markup=False),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        yield Bar(progress, progress.add_task(title, total=total, doing=""))
