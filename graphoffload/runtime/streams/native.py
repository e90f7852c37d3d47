"""A copy between two events in one call: copy.c, compiled by each process if there is a C compiler.

Triton needs a C compiler as well, so there is one wherever Inductor writes kernels for a GPU. Elsewhere Python makes the same
calls one by one. In a real step Python's caches are cold, and each of those calls costs about as much again as the driver's
work.

Nothing is stored. Compiling takes a fifth of a second, and a library in a folder would have to be trusted and complete.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from graphoffload.log import log

Copy = Callable[..., int]
"""(target, source, nbytes, kind, compute, side, issued, done, *after) -> CUDA error code; all are numbers and addresses."""

_NAME = "graphoffload_copy"
_SOURCE = Path(__file__).with_name("copy.c")
_PATIENCE_S = 20.0


@functools.cache
def compiled() -> Any:
    """The module of copy.c; None if it cannot be compiled or loaded, which the log says at DEBUG."""
    try:
        return build()
    except Exception as error:  # everything works without it, whatever the error is
        said = getattr(error, "stderr", None) or b""
        log.debug("copies are issued from Python, call by call: %s %s", error, said.decode(errors="replace")[-500:])
        return None


def copy_by(module: Any, record: int, wait: int, copy: int) -> Copy:
    """The compiled copy of `module`, which from now on calls the functions at these addresses."""
    module.use(record, wait, copy)
    return cast("Copy", module.copy)


def build() -> Any:
    """Compile copy.c and load it, as a separate module each time.

    Raises:
        OSError, subprocess.SubprocessError: there is no compiler, or it rejects the file.
        ImportError: it cannot be loaded, for example from a folder without execution.
    """
    with tempfile.TemporaryDirectory(prefix="graphoffload-") as folder:
        library = Path(folder, f"{_NAME}{importlib.machinery.EXTENSION_SUFFIXES[0]}")
        found = [path for name in (os.environ.get("CC", ""), "cc", "gcc", "clang") if (path := shutil.which(name))]
        if not found:
            raise FileNotFoundError("no C compiler was found")
        for compiler in found:
            try:
                _compile(compiler, library)
                break
            except subprocess.SubprocessError:
                if compiler == found[-1]:
                    raise
        loader = importlib.machinery.ExtensionFileLoader(_NAME, str(library))
        spec = importlib.util.spec_from_file_location(_NAME, library, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module


def _compile(compiler: str, library: Path) -> None:
    include = sysconfig.get_paths()["include"]
    subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", f"-I{include}", str(_SOURCE), "-o", str(library)],
        check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=_PATIENCE_S,
    )  # fmt: skip
