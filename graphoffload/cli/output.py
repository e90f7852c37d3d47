"""What commands have in common: exit statuses, complaints, and lines on stdout."""

from __future__ import annotations

import sys

from graphoffload.errors import GraphOffloadError

DONE, FAILED, OVER_BUDGET = 0, 1, 2


class CommandError(GraphOffloadError):
    """The command line cannot be carried out as it is."""


def print_lines(*lines: object) -> None:
    """Print each on a line of its own."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
