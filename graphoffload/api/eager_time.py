"""The time of operations that run one by one between the graphs of a step, on hardware that is not there.

    embedding, loss     max(FLOPs / achieved rate, bytes read and written / bandwidth) + a launch each
    views               nothing

Wrong when: an operation's kernels read or write more than its inputs and results, such as a softmax in several passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from graphoffload.analysis.storages import example_nbytes
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.torch_internals.operators import OpOverload, packet_of, schema_of
from graphoffload.torch_internals.pytrees import tree_leaves
from graphoffload.torch_internals.storages import identity


class EagerTime:
    """Seconds of the operations that were added since the last `taken`."""

    def __init__(self, hardware: HardwareProfile) -> None:
        self.hardware = hardware
        self._seconds = 0.0

    def add(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Count an operation that ran."""
        given, made = _tensors((args, kwargs)), _tensors(result)
        before = {identity(value.untyped_storage()) for value in given}
        new = [value for value in made if identity(value.untyped_storage()) not in before]
        if not new and not schema_of(func).is_mutable:
            return
        written = new or made[:1]
        moved = sum(example_nbytes(value) for value in (*given, *written))
        seconds = moved / self.hardware.device_bandwidth_bytes_per_s
        formula = flop_registry.get(packet_of(func))
        if formula is not None and written:
            rate = self.hardware.matmul_rate_flops_per_s(str(written[0].dtype).removeprefix("torch."))
            seconds = max(seconds, int(formula(*args, **kwargs, out_val=result)) / rate)
        self._seconds += seconds + self.hardware.kernel_launch_s

    def taken(self) -> float:
        """The seconds so far, and from zero again."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
