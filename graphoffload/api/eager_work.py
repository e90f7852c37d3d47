"""What runs one by one between the graphs of a step: its operations, to be priced for any hardware (analysis/costs.py).

    embedding, loss     bytes of what is read and of what is written; FLOPs where there is a formula
    views               nothing

Wrong when: an operation's kernels read or write more than its inputs and results, such as a softmax in several passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from graphoffload.analysis.costs import Operation, Work, work_of
from graphoffload.analysis.storages import example_nbytes
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.torch_internals.operators import OpOverload, schema_of
from graphoffload.torch_internals.pytrees import tree_leaves
from graphoffload.torch_internals.storages import identity


class EagerWork:
    """The operations that were added since the last `taken`."""

    def __init__(self) -> None:
        self._work: list[Work] = []

    def add(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Count an operation that ran."""
        given, made = _tensors((args, kwargs)), _tensors(result)
        before = {identity(value.untyped_storage()) for value in given}
        new = [value for value in made if identity(value.untyped_storage()) not in before]
        if not new and not schema_of(func).is_mutable:
            return
        moved = sum(example_nbytes(value) for value in (*given, *(new or made[:1])))
        self._work.append(work_of(Operation(func, tuple(args), dict(kwargs), result), moved))

    def taken(self) -> tuple[Work, ...]:
        """The operations so far, and from none again."""
        work, self._work = tuple(self._work), []
        return work


def seconds_of(work: Iterable[Work], hardware: HardwareProfile) -> float:
    """The time of operations that run one after the other."""
    return sum((one.time_s(hardware) for one in work), start=0.0)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
