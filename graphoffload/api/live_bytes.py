"""What fake tensors would take on a device, as a run with them goes on: who owns what lives, and the most that ever lived.

    parameters, inputs      ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~   outside
    call 0 | f0: ====saved by the graph=========================b0|   inside: its call's, until it is freed
           | its outputs ~~~~~~~~~~~~~~~~~~~~~~                       outside, from the end of the call on; one that it
           |                                                          saves as well, from the end of its backward
    eager code between the graphs, and what autograd saves of it ~~~  outside

A storage is counted from the operation that makes it until Python and autograd have dropped it, as torch's allocator would
count it. What is traced does not count, only what runs. Wrong when: a kernel allocates memory inside of one operation.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from graphoffload.torch_internals.dynamo import is_tracing
from graphoffload.torch_internals.fake_tensors import FakeTensor
from graphoffload.torch_internals.pytrees import tree_leaves
from graphoffload.torch_internals.storages import identity

_BLOCK_BYTES = 512  # torch's CUDA allocator takes whole blocks


@dataclass(slots=True)
class _Living:
    nbytes: int
    inside: bool
    end: Any  # the weak reference that tells when it is freed


class LiveBytes:
    """Bytes of the fake storages that live. outside_bytes: those that no compiled graph saves; peak_bytes: the most of these
    since `start_peak`. inside: whether a compiled graph runs now."""

    def __init__(self) -> None:
        self.outside_bytes = self.peak_bytes = 0
        self.inside = False
        self._living: dict[int, _Living] = {}

    def add(self, values: Any) -> None:
        """Count the storages of new tensors among these."""
        if is_tracing():
            return
        for value in tree_leaves(values):
            if isinstance(value, FakeTensor):
                self._add(value.untyped_storage())

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = identity(storage)
        if key in self._living:
            return
        nbytes = storage.nbytes()
        nbytes = -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES if isinstance(nbytes, int) else 0

        def end(_: Any) -> None:
            living = self._living.pop(key, None)
            if living is not None and not living.inside:
                self.outside_bytes -= living.nbytes

        self._living[key] = _Living(nbytes, self.inside, weakref.ref(storage, end))
        if not self.inside:
            self._grow(nbytes)

    def _grow(self, nbytes: int) -> None:
        self.outside_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.outside_bytes)

    def give(self, values: Any, saved: Iterable[Any] = ()) -> frozenset[int]:
        """What a graph returns is its caller's, but for what it saves for its backward as well; what that is, for `leave`."""
        ours = _keys(saved)
        returned = _keys(tree_leaves(values))
        self.leave(returned - ours)
        return returned & ours

    def leave(self, keys: Iterable[int]) -> None:
        """These storages are no longer a graph's, as far as they live."""
        for key in keys:
            self._give(self._living.get(key))

    def _give(self, living: _Living | None) -> None:
        if living is not None and living.inside:
            living.inside = False
            self._grow(living.nbytes)

    def start_peak(self) -> int:
        """The most since the last start, and another start."""
        peak, self.peak_bytes = self.peak_bytes, self.outside_bytes
        return peak

    def bytes_of(self, tensors: Iterable[Any]) -> int:
        """Bytes of the storages of these tensors, each once, as far as they live."""
        keys = {identity(t.untyped_storage()) for t in tensors if isinstance(t, torch.Tensor)}
        return sum(self._living[key].nbytes for key in keys if key in self._living)


def _keys(values: Iterable[Any]) -> frozenset[int]:
    return frozenset(identity(value.untyped_storage()) for value in values if isinstance(value, FakeTensor))
