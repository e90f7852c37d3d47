"""Whether a trainer's release is one that its integration was tested with."""

from __future__ import annotations

import importlib.metadata
import re

from graphoffload.errors import ConfigError, UntestedTrainerWarning, warn


def check_release(package: str, oldest: str, newest: str) -> str:
    """The installed release of a package; a newer one than was tested is a warning.

    Args:
        oldest, newest: of the releases that were tested, such as "2.5" and "2.6"; `newest` covers all that begin with it.

    Raises:
        ConfigError: the package is not installed, or older.
    """
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"{package} is not installed; this integration needs {package} {oldest} to {newest}.") from None
    if _parts(found) < _parts(oldest):
        raise ConfigError(
            f"{package} {found} is too old: this integration needs {oldest} to {newest}. Install {package}>={oldest}, or use "
            "GRAPHOFFLOAD=1 in the environment, which needs nothing of the trainer."
        )
    known = _parts(newest)
    if _parts(found)[: len(known)] > known:
        warn(
            UntestedTrainerWarning,
            f"{package} {found} is newer than the releases that were tested ({oldest} to {newest}). If its callbacks changed, "
            "figures may be missing in the log; plans and gradients do not depend on it.",
        )
    return found


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
