"""A copy between two events in one call: copy.c, compiled when graphoffload is installed where there is a C compiler.

Where it was not (no compiler, no headers of Python, a checkout that nobody installed) the same calls are made one by one from
Python. In a real step Python's caches are cold, and each of those calls costs about as much again as the driver's work.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from graphoffload.log import log

Copy = Callable[..., int]
"""(target, source, nbytes, kind, compute, side, issued, done, *after) -> CUDA error code; all are numbers and addresses."""

_SOURCE = Path(__file__).with_name("copy.c")


@functools.cache
def compiled() -> Any:
    """The module that copy.c is; None where it was not compiled or is of another source, which the log says at DEBUG."""
    try:
        module = importlib.import_module(f"{__package__}._copy")
    except ImportError as error:
        log.debug("copies are issued from Python, call by call: %s; install graphoffload where there is a C compiler", error)
        return None
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()
    if digest != module.SOURCE_DIGEST:
        log.debug("copies are issued from Python, call by call: %s is not of this source; install it again", module.__file__)
        return None
    return module


def copy_by(module: Any, record: int, wait: int, copy: int) -> Copy:
    """The compiled copy of `module`, which from now on calls the functions at these addresses."""
    module.use(record, wait, copy)
    return cast("Copy", module.copy)
