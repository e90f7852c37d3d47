"""One logger for the package, and the one line after each compile.

`TORCH_LOGS="+graphoffload"` raises the logger to DEBUG and prints every plan's table. Without any logging set up the one line
goes to stderr; `logging.getLogger("graphoffload").setLevel(logging.WARNING)` silences it.
"""

from __future__ import annotations

import logging
import os
import sys

log = logging.getLogger("graphoffload")


def say(line: str) -> None:
    """Tell the user one line: through logging where that is set up for INFO, otherwise on stderr, with the rank of all but the
    first process."""
    if log.level > logging.INFO:
        return
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        log.info("%s", line)
    else:
        show(line)


def show(line: str) -> None:
    """Print a line on stderr, with the rank of all but the first process."""
    rank = os.environ.get("RANK", "0")
    print(f"graphoffload{'' if rank == '0' else f' (rank {rank})'}: {line}", file=sys.stderr)
