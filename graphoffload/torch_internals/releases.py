"""Which torch this is, and the warning for one that was not tested: 2.11 to 2.15 were."""

from __future__ import annotations

import torch

from graphoffload.errors import GraphOffloadError, UntestedTorchWarning, warn

OLDEST_TESTED = (2, 11)
NEWEST_TESTED = (2, 15)

_checked = False


def torch_version() -> str:
    """The running torch, such as "2.13.0+cpu"."""
    return str(torch.__version__)


def check_torch() -> None:
    """Warn once about a torch that graphoffload was not tested with; refuse one that is too old.

    Raises:
        GraphOffloadError: torch is older than 2.11.
    """
    global _checked
    if _checked:
        return
    release = torch_version().split("+")[0].split(".")
    version = (int(release[0]), int(release[1]))
    if version < OLDEST_TESTED:
        raise GraphOffloadError(
            f"torch {torch_version()} is too old for graphoffload: it needs 2.11 or newer. Install torch>=2.11."
        )
    _checked = True
    if version > NEWEST_TESTED:
        warn(
            UntestedTorchWarning,
            f"graphoffload was tested with torch 2.11 to 2.15; this is {torch_version()}. Plans are verified on every compile, "
            'but what torch changed since is unknown: compare gradients once with verify="checksum" before a long run.',
        )
