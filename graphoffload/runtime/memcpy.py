"""One asynchronous copy of bytes on a given stream, by the CUDA runtime that torch itself has loaded.

`Tensor.copy_` needs its stream to be current and two flat views, and costs more host time than the driver does. Where the
runtime library is not found (another vendor, a static build) there is no fast copy, and `copy_` under a stream switch serves.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable

import torch

Memcpy = Callable[[int, int, int, int, int], int]
"""(destination, source, bytes, kind, stream) -> CUDA error code; releases the GIL."""

KINDS = {"h2d": 1, "d2h": 2}


@functools.cache
def find_memcpy() -> Memcpy | None:
    """cudaMemcpyAsync of the runtime library already loaded into this process; None if there is none."""
    version = torch.version.cuda
    if version is None or not hasattr(os, "RTLD_NOLOAD"):
        return None
    try:
        library = ctypes.CDLL(f"libcudart.so.{version.split('.')[0]}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        function = library.cudaMemcpyAsync
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    function.restype = ctypes.c_int
    return function
