"""Layouts that Inductor chooses for what it computes: for torch 2.11 to 2.15, seen in 2.11, 2.13 and 2.14."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from graphoffload.torch_internals.patching import replaced

__all__ = ["rows_alone_padded"]


@contextlib.contextmanager
def rows_alone_padded() -> Iterator[None]:
    """A context in which Inductor pads a tensor's rows, as it does on a GPU, but not what consists of rows.

    Products are faster where rows are a multiple of 128 bytes apart: a vocabulary of 50,257. Short rows stay as they are, and
    blocks of them, such as 49 x 49 weights of attention, are as aligned as their rows: to pad the blocks takes memory, and
    makes no row better aligned. Without it: tensors that are offloaded have gaps, are copied once more for that, and are larger
    than planned.
    """
    from torch._inductor.ir import Layout

    own: Any = vars(Layout).get("_pad_strides")
    if own is None:  # a torch yet to come pads elsewhere, or not at all
        yield
        return
    pad = own.__func__

    def padded(strides: Sequence[Any], size: Sequence[Any], dtype: Any) -> Sequence[Any]:
        found: Sequence[Any] = pad(strides, size, dtype)
        if found is strides:
            return strides
        order = sorted((step, at) for at, (step, length) in enumerate(zip(strides, size, strict=True)) if length != 1)
        rows = order[1][1] if len(order) > 1 else None
        return strides if rows is None or found[rows] == strides[rows] else found

    with replaced(Layout, _pad_strides=staticmethod(padded)):
        yield
