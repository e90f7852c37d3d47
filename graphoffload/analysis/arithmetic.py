"""What a fused kernel computes that takes longer than the bytes that it moves.

    erf, tanh          a few dozen instructions each: a kernel that reads and writes 2 bytes a number waits for them, one that
                       moves 4 does not
    random numbers     are made before anything is written, so that their time comes on top

Rates are an H200's (docs/results/fused-kernels.json, decisions 69 and 75). A CPU's time is not estimated so finely.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from graphoffload.analysis.fusion import Fusion
from graphoffload.analysis.storages import fake, size_hint
from graphoffload.analysis.stored import is_random
from graphoffload.hardware.profile import HardwareProfile

_RANDOM_PER_S = 4.5e11
"""Random numbers that compiled kernels make, above the time of their bytes."""
_FUNCTIONS_PER_S: dict[Any, float] = {torch.ops.aten.erf.default: 6.7e11, torch.ops.aten.tanh.default: 8.2e11}
"""Numbers of which a kernel computes a function, at most."""


def besides_s(node: Node, fusion: Fusion, sizes: Mapping[int, int], hardware: HardwareProfile) -> float:
    """Seconds that the kernel of an operation takes for it besides its bytes. sizes: of storages, in bytes."""
    value = fake(node)
    if hardware.source == "cpu" or value is None:
        return 0.0
    numbers = size_hint(value.numel(), unknown=0)
    if is_random(node):  # one for each element: four that are made at once are three too many, as Inductor has it
        return numbers / _RANDOM_PER_S
    rate = _FUNCTIONS_PER_S.get(node.target) if fusion.fuses else None
    if rate is None:
        return 0.0
    read = sum(sizes.get(identity, 0) for identity in fusion.read_by(node))
    return max(0.0, numbers / rate - 2 * read / hardware.device_bandwidth_bytes_per_s)
