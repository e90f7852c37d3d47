"""Packages that a row of the bench needs and that nobody has to install."""

from __future__ import annotations

import importlib
from typing import Any

from graphoffload.errors import ConfigError


class NotMeasurable(ConfigError):
    """A variant that cannot run here: its package is missing, or too old, or the model is not one that it takes."""


def needed(module: str, package: str) -> Any:
    """A module of an installed package.

    Raises:
        NotMeasurable: it is not installed, or its import fails; the message says what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        also = f": {error}" if missing and missing != package.replace("-", "_") else ""
        raise NotMeasurable(f"needs {package} (pip install {package}){also}") from error
    except Exception as error:  # some packages refuse to be imported on a machine without their GPU
        raise NotMeasurable(f"{package} cannot be imported here ({type(error).__name__}: {error})") from error
