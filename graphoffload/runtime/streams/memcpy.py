"""One asynchronous copy of bytes on a given stream, by the CUDA runtime that torch itself has loaded.

`Tensor.copy_` needs its stream to be current and two flat views, and costs more host time than the driver does. If the runtime
library is not found (another vendor, a static build), there is no fast copy, and `copy_` under a stream switch is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from graphoffload.runtime.streams.native import Copy, compiled, copy_by

Memcpy = Callable[[int, int, int, int, int], int]
"""(destination, source, bytes, kind, stream) -> CUDA error code; releases the GIL."""

KINDS = {"h2d": 1, "d2h": 2}
_RELAXED = 2  # cudaStreamCaptureModeRelaxed


@functools.cache
def find_memcpy() -> Memcpy | None:
    """cudaMemcpyAsync of the runtime library already loaded into this process; None if there is none."""
    library = _runtime_library()
    function: Any = getattr(library, "cudaMemcpyAsync", None)
    if function is None:
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    function.restype = ctypes.c_int
    return cast("Memcpy", function)


@functools.cache
def find_copy() -> Copy | None:
    """A copy with its events in one call, by the same library's functions; None without the library or a C compiler."""
    library = _runtime_library()
    functions = [getattr(library, name, None) for name in ("cudaEventRecord", "cudaStreamWaitEvent", "cudaMemcpyAsync")]
    if not all(functions) or (module := compiled()) is None:
        return None
    record, wait, copy = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)  # type: ignore[arg-type]
    return copy_by(module, record, wait, copy)


def forget_last_error() -> None:
    """Clear the runtime's record of an error that was reported; else torch blames its next kernel for it."""
    function = getattr(_runtime_library(), "cudaGetLastError", None)
    if function is not None:
        function()


@functools.cache
def _runtime_library() -> ctypes.CDLL | None:
    version = torch.version.cuda
    if version is None or not hasattr(os, "RTLD_NOLOAD"):
        return None
    try:
        return ctypes.CDLL(f"libcudart.so.{version.split('.')[0]}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let this thread make calls that a capture of a CUDA graph forbids: page-locking memory, waiting for another stream."""
    exchange: Any = getattr(_runtime_library(), "cudaThreadExchangeStreamCaptureMode", None)
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))
