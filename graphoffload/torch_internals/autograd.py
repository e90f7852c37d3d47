"""autograd's own counters and AOTAutograd's compiled functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch._functorch.config


def autograd_time() -> int:
    """Number that the next autograd node of this thread gets."""
    return int(torch.autograd._get_sequence_nr())


def compiled_backwards(nodes: Iterable[Any], since: int) -> Iterator[Any]:
    """Classes of AOTAutograd's compiled functions among these autograd nodes and those before them that are made since a time.

    Each has `_backward_impl(ctx, args)`, called in autograd's thread with a list that it empties.
    """
    seen, pending = set(), list(nodes)
    while pending:
        node = pending.pop()
        if node is None or node in seen or node._sequence_nr() < since:
            continue
        seen.add(node)
        function = getattr(type(node), "_forward_cls", None)
        if function is not None and hasattr(function, "_backward_impl"):
            yield function
        pending.extend(earlier for earlier, _ in node.next_functions)
