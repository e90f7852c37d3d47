"""A copy between two events in one call: copy.c, compiled once on this machine where it has a C compiler.

Triton needs one as well, so where Inductor writes kernels for a GPU there is one. Elsewhere the same calls are made one by one
from Python. In a real step Python's caches are cold, and each of those calls costs about as much again as the driver's work.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import secrets
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from graphoffload.folders import cache_dir
from graphoffload.log import log

Copy = Callable[..., int]
"""(target, source, nbytes, kind, compute, side, issued, done, *after) -> CUDA error code; all are numbers and addresses."""

MOST_AFTER = 8
_NAME = "graphoffload_copy"
_SOURCE = Path(__file__).with_name("copy.c")
_PATIENCE_S = 60.0


@functools.cache
def compiled() -> Any:
    """The module that copy.c is; None where it cannot be compiled or loaded, which the log says at DEBUG."""
    try:
        return _load(_built())
    except (OSError, subprocess.SubprocessError, ImportError) as error:
        log.debug("copies are issued from Python, call by call: %s", error)
        return None


def copy_by(record: int, wait: int, copy: int) -> Copy | None:
    """The compiled copy, which calls the functions at these addresses; None where there is no compiled one."""
    module = compiled()
    if module is None:
        return None
    module.use(record, wait, copy)
    return cast("Copy", module.copy)


def _built() -> Path:
    """The compiled library, by what it was made of and for.

    Raises:
        OSError, SubprocessError: there is no compiler, or it refuses.
    """
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    name = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    library = cache_dir() / "native" / f"copy-{name}{suffix}"
    if library.exists():
        return library
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", ""), "cc", "gcc", "clang"))), None)
    if compiler is None:
        raise FileNotFoundError("no C compiler was found")
    library.parent.mkdir(parents=True, exist_ok=True)
    aside = library.with_name(f".{secrets.token_hex(4)}{suffix}")
    include = sysconfig.get_paths()["include"]
    try:
        subprocess.run(
            [compiler, "-O2", "-shared", "-fPIC", f"-I{include}", str(_SOURCE), "-o", str(aside)],
            check=True, capture_output=True, timeout=_PATIENCE_S,
        )  # fmt: skip
        os.replace(aside, library)
    finally:
        aside.unlink(missing_ok=True)
    return library


def _load(library: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(library))
    spec = importlib.util.spec_from_file_location(_NAME, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
