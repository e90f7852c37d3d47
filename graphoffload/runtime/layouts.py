"""How a tensor's elements are laid out in memory: computed once for each transfer, and again when its shape changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch


def empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """torch.empty_strided; on the current CUDA device by the function that Inductor's code calls, which takes half the host
    time."""
    if device.type == "cuda" and device.index == torch._C._cuda_getDevice():
        guards: Any = torch._C._dynamo.guards
        return cast("torch.Tensor", guards._empty_strided_cuda(tuple(size), tuple(stride), dtype))
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def contiguous_strides(size: Sequence[int]) -> tuple[int, ...]:
    """Strides of a row-major tensor, in elements."""
    strides, step = [], 1
    for length in reversed(size):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def same_layout(size: Sequence[int], left: Sequence[int], right: Sequence[int]) -> bool:
    """Whether two strides address the same elements; strides of dimensions of length 1 do not count."""
    return all(a == b or length == 1 for length, a, b in zip(size, left, right, strict=True))


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill one block of memory without gaps or overlaps, in any order."""
    expected = 1
    for step, length in sorted((s, n) for s, n in zip(stride, size, strict=True) if n != 1):
        if step != expected:
            return False
        expected *= length
    return True


class Layout:
    """Shape, type and device of a source at its offload, and the layout of its bytes on the host.

    given: strides of the source. stride: strides of the host copy; equal to the source's if that is dense, else row-major.
    """

    __slots__ = ("_asked", "dense", "device", "dtype", "given", "nbytes", "size", "stride")

    def __init__(self, x: torch.Tensor) -> None:
        self.size = x.shape
        self.given = x.stride()
        self.dtype = x.dtype
        self.device = x.device
        self.nbytes = x.numel() * x.element_size()
        self.dense = is_dense(self.size, self.given)
        self.stride: tuple[int, ...] = self.given if self.dense else contiguous_strides(self.size)
        self._asked: tuple[Sequence[int], Sequence[int], bool] | None = None

    def returns_as_it_lies(self, size: Sequence[int], stride: Sequence[int]) -> bool | None:
        """Whether a dense tensor of this size and stride takes the host's bytes in their order; None if the size differs."""
        asked = self._asked
        if asked is not None and asked[0] == size and asked[1] == stride:
            return asked[2]
        if tuple(size) != self.size:
            return None
        found = same_layout(self.size, self.stride, stride) and is_dense(size, stride)
        self._asked = (size, stride, found)
        return found
