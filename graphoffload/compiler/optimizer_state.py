"""Optimizer state for the parameters of a graph, and the part of it that does not exist yet.

    step 1   forward, backward, optimizer.step(): the state of every trained parameter is made, and stays
    step 2   forward, backward: as large as before, plus the state

A plan is made in the first forward, so it leaves room for the state that the optimizer will make. Only the optimizers know
whether the state of a parameter exists. When a graph is compiled, those of this process that hold the parameter are inspected,
and nothing is remembered. The state of another model therefore does not count here, loaded state counts with its own bytes, and
state that was dropped with its optimizer counts as still to come.

An optimizer without state yet is expected to make what its class is known to make. An unknown optimizer, or none, is expected
to make two tensors like the parameter, as Adam does. This is too little if a wrapper keeps copies in another dtype: those are
no optimizer's state.

An optimizer may hold another one that steps for it: torchtitan's container, accelerate's wrapper, SAM's base. Both list the
same parameters, and only the inner one makes state. So a parameter counts at the innermost optimizer that lists it.

Optimizers are found among the objects that Python's garbage collector tracks, since torch does not report one before its first
step. One that gc.freeze has hidden is not found. Fake parameters, as in explain() and in a joint graph, stand for real ones of
the same shape, dtype and device, one for one.
"""

from __future__ import annotations

import gc
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from graphoffload.errors import ConfigError
from graphoffload.torch_internals.fake_tensors import FakeTensor

_TWO = 2  # tensors like the parameter: Adam and its kin
_BLOCK_BYTES = 512  # torch's CUDA allocator takes whole blocks


def state_bytes(parameters: Iterable[Tensor], others: Iterable[Tensor] = ()) -> int:
    """Device bytes of optimizer state that trained parameters do not have yet.

    `others`: leaves that need a gradient and may be trained or not; they count if an optimizer holds them.
    """
    held, leaves = _Held(), {id(leaf): leaf for leaf in parameters}
    known = sum(held.state_bytes(leaf, alone=_TWO) for leaf in leaves.values())
    return known + sum(held.state_bytes(leaf, alone=0) for leaf in others if id(leaf) not in leaves)


NAMES = ("adam", "adamw", "adafactor", "muon", "sgd", "sgd with momentum")
"""Optimizers that `named_state_bytes` knows by name."""


def named_state_bytes(optimizer: object, parameters: Iterable[Tensor]) -> int:
    """Device bytes of the state that an optimizer keeps for parameters, whether it has made it or not.

    optimizer: an object, which keeps what its groups say for its own parameters, or one of NAMES. State has the parameter's
    dtype, as torch.optim makes it. "muon" has one tensor for a matrix and AdamW's two for all others, as it is commonly used.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(optimizer, Optimizer):
        groups = optimizer.param_groups
        return sum(_made_or_expected(optimizer, g, p) for g in groups for p in g["params"] if p.requires_grad)
    if not isinstance(optimizer, str) or (name := re.sub(r"[-_+ ]+", " ", optimizer.lower()).strip()) not in _TENSORS:
        got = repr(optimizer) if isinstance(optimizer, str) else f"a {type(optimizer).__name__}"
        raise ConfigError(f"optimizer={got} is not known. Give a torch.optim.Optimizer, or one of: {', '.join(NAMES)}.")
    unique = {id(p): p for p in parameters if p.requires_grad}.values()
    return sum(_TENSORS[name](p) for p in unique)


def _made_or_expected(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> int:
    made = [value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor) and value.dim()]
    if made:
        return sum(-(-_nbytes(value) // _BLOCK_BYTES) * _BLOCK_BYTES for value in made) + _BLOCK_BYTES
    if type(optimizer) is torch.optim.Adafactor:
        return _factored(parameter)
    return _bytes_by(optimizer, group, parameter)


def _factored(parameter: Tensor) -> int:
    """Adafactor's state: a row and a column of variances for each matrix."""
    if parameter.dim() < _MATRIX:
        return _taken(parameter, 1)
    *_, rows, columns = parameter.shape
    elements = parameter.numel() // max(columns, 1) + parameter.numel() // max(rows, 1)
    return (-(-elements * parameter.element_size() // _BLOCK_BYTES) + 1) * _BLOCK_BYTES


_MATRIX = 2  # dimensions
_TENSORS: dict[str, Callable[[Tensor], int]] = {
    "adam": lambda parameter: _taken(parameter, _TWO),
    "adamw": lambda parameter: _taken(parameter, _TWO),
    "adafactor": _factored,
    "muon": lambda parameter: _taken(parameter, 1 if parameter.dim() == _MATRIX else _TWO),
    "sgd": lambda parameter: 0,
    "sgd with momentum": lambda parameter: _taken(parameter, 1),
    "sgd momentum": lambda parameter: _taken(parameter, 1),
}


def unmade_state_bytes(device: torch.device) -> int:
    """Bytes of state that the optimizers of this process are still to make on a device."""
    return sum(
        _bytes_by(optimizer, group, parameter)
        for optimizer, group, parameter in _listed()
        if parameter.requires_grad and parameter.device == device
    )


def share_of_trained(inputs: Iterable[Any]) -> float:
    """The share of all elements that optimizers train which is among a graph's inputs; 0 where no optimizer is known."""
    trained = {id(parameter): parameter.numel() for _, _, parameter in _listed()}
    known = {id(value) for value in inputs}
    total = sum(trained.values())
    return sum(count for key, count in trained.items() if key in known) / total if total else 0.0


class _Held:
    """The optimizers of each parameter, and the parameter's group in each."""

    def __init__(self) -> None:
        self._holders: defaultdict[int, list[tuple[Optimizer, dict[str, Any]]]] = defaultdict(list)
        self._alike: defaultdict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
        for optimizer, group, parameter in _listed():
            if id(parameter) not in self._holders:
                self._alike[_kind(parameter)].append(parameter)
            self._holders[id(parameter)].append((optimizer, group))

    def state_bytes(self, leaf: Tensor, *, alone: int) -> int:
        """Bytes for one leaf; `alone`: number of tensors like it if no optimizer holds it."""
        alike = self._alike[_kind(leaf)] if isinstance(leaf, FakeTensor) else []
        real = alike.pop(0) if alike else leaf
        holders = self._holders.get(id(real), [])
        if not holders:
            return _taken(leaf, alone)
        return sum(_bytes_by(optimizer, group, real) for optimizer, group in holders)


def _listed() -> Iterator[tuple[Optimizer, dict[str, Any], Tensor]]:
    """Each optimizer of this process with each parameter that it lists and no optimizer inside it does, and its group."""
    for optimizer in _optimizers():
        inside = {id(p) for inner in _inside(optimizer) for group in inner.param_groups for p in group["params"]}
        for group in optimizer.param_groups:
            yield from ((optimizer, group, parameter) for parameter in group["params"] if id(parameter) not in inside)


def _optimizers() -> Iterator[Optimizer]:
    """The optimizers of this process, including lazily started subclasses and wrapped ones."""
    yield from filter(_is_optimizer, gc.get_objects())


def _is_optimizer(found: object) -> bool:
    return issubclass(type(found), Optimizer) and hasattr(found, "param_groups")


def _inside(optimizer: Optimizer) -> list[Optimizer]:
    """Optimizers that are attributes of this one, or values of an attribute's list, tuple or dictionary."""
    found: list[Any] = []
    for value in vars(optimizer).values():
        found += value if isinstance(value, (list, tuple)) else value.values() if type(value) is dict else [value]
    return [each for each in found if each is not optimizer and _is_optimizer(each)]


def _bytes_by(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> int:
    """Bytes that one optimizer is expected to make for a parameter; 0 if it has made them."""
    return 0 if optimizer.state.get(parameter) else _taken(parameter, _copies(optimizer, group))


def _copies(optimizer: Optimizer, group: dict[str, Any]) -> int:
    """Number of tensors like a parameter that an optimizer will keep for it."""
    kind = type(optimizer)
    if kind is torch.optim.SGD:
        return int(bool(group["momentum"]))
    if kind is torch.optim.RMSprop:
        return 1 + bool(group["momentum"]) + bool(group["centered"])
    if kind in _ONE:
        return 1
    return 0 if kind is torch.optim.Adafactor else _TWO + bool(group.get("amsgrad"))


_ONE = {getattr(torch.optim, name, None) for name in ("Adagrad", "ASGD", "Muon")} - {None}


def _taken(parameter: Tensor, copies: int) -> int:
    """Bytes that the allocator gives for `copies` like a parameter, and for the step counter that fused optimizers keep."""
    nbytes = _nbytes(parameter)
    return (copies * -(-nbytes // _BLOCK_BYTES) + 1) * _BLOCK_BYTES if copies and nbytes else 0


def _kind(value: Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), value.dtype, value.device


def _nbytes(value: Tensor) -> int:
    """Bytes of this process's part if the parameter is sharded; 0 for a symbolic size."""
    local = value.to_local() if hasattr(value, "to_local") else value
    count = local.numel()
    return count * local.element_size() if isinstance(count, int) else 0
