"""Policies for tests. They are classes of a module, so that their instances are values, as the compile cache requires."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from graphoffload.facts.plan import Action
from graphoffload.facts.saved_tensors import SavedTensor

ACTIONS: tuple[Action, ...] = ("keep", "recompute", "offload")


@dataclass(frozen=True)
class Scattered:
    """One of `actions` for each tensor, chosen by a digest of its name and `seed`, so that all combinations of neighbors occur.

    If a tensor must not have the chosen action, the planner decides.
    """

    seed: int = 0
    actions: tuple[Action, ...] = ACTIONS

    def __call__(self, tensor: SavedTensor) -> Action | None:
        action = self.actions[zlib.crc32(f"{tensor.name}/{self.seed}".encode()) % len(self.actions)]
        if (action == "offload" and not tensor.eligible) or (action == "recompute" and not tensor.recomputable):
            return None
        return action


@dataclass(frozen=True)
class OffloadNonContiguous:
    """Offload tensors that are not contiguous, and keep all others."""

    def __call__(self, tensor: SavedTensor) -> Action | None:
        expected = 1
        for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
            if not isinstance(size, int) or not isinstance(stride, int):
                return "keep"
            if size != 1 and stride != expected:
                return "offload" if tensor.eligible else "keep"
            expected *= size
        return "keep"
