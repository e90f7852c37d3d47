"""Fake tensors with known values, for models that read a value: known if it follows from the caller's tensors.

    ids (given) ──▶ ids == 7 ──▶ .sum() ──▶ .item()      known: computed on the CPU beside the fake tensors
    ids (given) ──▶ embedding(weight) ──▶ .item()         unknown, unless the whole forward is run: `everything`

A model that reads a value (`.item()`, `.tolist()`, an `if` on a tensor) or whose sizes depend on one (`x[mask]`,
`masked_select`, `nonzero`) cannot be traced with fake tensors alone. Vision-language models read image grids and token ids,
which the caller gives. So each operation whose tensors are all known also runs on small real ones. Parameters are known only
under `everything`: then the forward really runs, on the CPU. An operation that writes to a known tensor writes to our copy. If
it writes an unknown value, the storage is unknown from then on. This is inexact in two ways: values computed on the CPU may
differ in their last bits from a GPU's, and random numbers differ from those of training.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from graphoffload.api.eager_work import EagerWork
from graphoffload.api.live_bytes import LiveBytes
from graphoffload.torch_internals.dynamo import is_tracing
from graphoffload.torch_internals.fake_tensors import (
    UNKNOWN,
    FakeTensor,
    FakeTensorMode,
    flex_attention_on_any_device,
    numbers_read_by,
)
from graphoffload.torch_internals.operators import OpOverload, schema_of
from graphoffload.torch_internals.pytrees import tree_flatten, tree_map, tree_unflatten
from graphoffload.torch_internals.storages import identity

_MOST_BYTES = 64 << 20  # of one operation's results; more is an activation
_DEEPEST = 3  # objects in objects that a parameter carries
_NAMESPACES = ("aten", "prims")
_NOTHING: Any = object()
_CPU = torch.device("cpu")


class Values:
    """Known values of the fake tensors of one mode; `everything`: of any size, since the whole forward is to run. `eager`: is
    told each operation that runs outside of graphs."""

    def __init__(self, *, everything: bool = False, eager: EagerWork | None = None) -> None:
        self.everything, self.eager = everything, eager
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.live = LiveBytes()
        self._fake: Callable[..., Any] = self.mode.dispatch
        # The instance's own attribute: torch looks a mode up by its exact type for higher-order operators.
        # Dynamo would otherwise compile our frames as well, when it runs the code between two graphs.
        self.mode.dispatch = torch.compiler.disable(self._counted)  # type: ignore[method-assign]
        self._known: Any = WeakTensorKeyDictionary()
        self._spoiled: dict[int, Any] = {}  # our storages whose content no longer follows the fake tensors; kept alive
        self._callers: set[int] = set()
        self._inside = False

    def fake(self, real: Tensor) -> Tensor:
        """A fake tensor for one that the caller gave, on the CPU for the meta device. Its memory is read when something needs
        its value, and never written to."""
        made = self._faked(real)
        self.live.add(made)
        return made

    def _faked(self, real: Tensor) -> Tensor:
        if isinstance(real, FakeTensor):
            return real
        made = self._empty(real, "cpu" if real.device.type == "meta" else real.device)
        made = made.requires_grad_(real.requires_grad)
        if isinstance(real, torch.nn.Parameter):
            made = torch.nn.Parameter(made.detach(), requires_grad=real.requires_grad)
        if type(real) not in (Tensor, torch.nn.Parameter):
            carried = {name: self._carried(value) for name, value in vars(real).items()}
            made.__dict__.update({**carried, **vars(made)})
        plain = type(real) in (Tensor, torch.nn.Parameter) and real.layout is torch.strided and real.device.type != "meta"
        if plain and (self.everything or (not isinstance(real, torch.nn.Parameter) and _nbytes(real) <= _MOST_BYTES)):
            self._known[made] = lambda: self._taken(real)
        return made

    def _carried(self, value: Any, depth: int = 0) -> Any:
        """What a parameter of a class of its own has beside its values, such as bitsandbytes' state of a quantized weight, with
        fake tensors for those inside."""
        if isinstance(value, Tensor):
            return self._faked(value)
        if depth > _DEEPEST or not any(isinstance(each, Tensor) for each in getattr(value, "__dict__", {}).values()):
            return value
        made = copy.copy(value)
        made.__dict__.update({name: self._carried(each, depth + 1) for name, each in vars(value).items()})
        return made

    def _empty(self, like: Tensor, device: Any) -> Tensor:
        before, self._inside = self._inside, True
        try:
            with self.mode:
                return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
        finally:
            self._inside = before

    @contextmanager
    def readable(self) -> Iterator[None]:
        """In the mode, with known numbers also where torch reads them without asking a mode: `torch.tensor([fake])`."""

        def read(name: str, fake: Tensor) -> Any:
            real = self._value(fake)
            return getattr(Tensor, name)(fake if real is _NOTHING else real)

        with numbers_read_by(read), flex_attention_on_any_device(), self.mode:
            yield

    def _taken(self, real: Tensor) -> Tensor:
        if not isinstance(real, torch.nn.Parameter):
            return real.detach().to(_CPU, copy=True)
        self._callers.add(identity(real.untyped_storage()))
        return real.detach()

    def _counted(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation, and count the memory of its results; not of what torch makes inside of it to find their shapes."""
        outermost = not self._inside
        result = self._dispatch(func, types, args, kwargs)
        if outermost and isinstance(func, OpOverload):
            self.live.add(result)
            if self.eager is not None and not self.live.inside and not is_tracing():
                self.eager.add(func, args, kwargs or {}, result)
        return result

    def _dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation on fake tensors, and on their values if they are known."""
        kwargs = kwargs or {}
        if self._inside or not isinstance(func, OpOverload):
            return self._fake(func, types, args, kwargs)
        self._inside = True
        try:
            args = self._without_masks(func, args)
            try:
                result = self._fake(func, types, args, kwargs)
            except UNKNOWN:
                real = self._run(func, args, kwargs)
                if real is _NOTHING:
                    raise
                like = next((value for value in tree_flatten((args, kwargs))[0] if isinstance(value, FakeTensor)), None)
                return tree_map(lambda value: self._as_fake(value, like), real)
            if self.everything or sum(map(_nbytes, _tensors(result))) <= _MOST_BYTES:
                self._remember(result, self._run(func, args, kwargs))
            else:
                self._spoil(func, args, kwargs)
            return result
        finally:
            self._inside = False

    def _without_masks(self, func: Any, args: Sequence[Any]) -> Sequence[Any]:
        """`x[mask]` of an unknown x by a known mask: the mask's value says the size, so it becomes indices."""
        if func is not torch.ops.aten.index.Tensor:
            return args
        indices: list[Any] = []
        for index in args[1]:
            real = self._value(index) if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) else _NOTHING
            found = [index] if real is _NOTHING else [self._as_fake(part, index) for part in real.nonzero().unbind(1)]
            indices.extend(found)
        return (args[0], indices)

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the operation on real tensors; _NOTHING if it needs an unknown one, or may not or cannot run."""
        if func is torch.ops.aten.masked_select.default and self._value(args[0]) is _NOTHING:
            return self._selected(*args)
        values, spec = tree_flatten((args, dict(kwargs)))
        known = [self._value(value) for value in values]
        written = [self._value(value) for value in _written(func, args, kwargs)]
        if (
            any(value is _NOTHING for value in known)
            or func.namespace not in _NAMESPACES
            or any(value is not _NOTHING and identity(value.untyped_storage()) in self._callers for value in written)
        ):
            self._spoil(func, args, kwargs)
            return _NOTHING
        real_args, real_kwargs = tree_unflatten(known, spec)
        try:
            return func(*real_args, **real_kwargs)
        except (RuntimeError, NotImplementedError):  # no kernel on a CPU: the result is unknown
            self._spoil(func, args, kwargs)
            return _NOTHING

    def _selected(self, x: Any, mask: Any) -> Any:
        """A tensor of the length that a known mask selects of an unknown `x`; its own values are unknown."""
        real = self._value(mask)
        if real is _NOTHING:
            return _NOTHING
        count = int(real.expand(torch.broadcast_shapes(real.shape, x.shape)).sum())
        with self.mode:
            return torch.empty(count, dtype=x.dtype, device=x.device)

    def _value(self, value: Any) -> Any:
        """The real counterpart of an argument; _NOTHING for a tensor of unknown value, or a generator."""
        if isinstance(value, torch.device):
            return _CPU
        if isinstance(value, (torch.Generator, torch.SymInt, torch.SymFloat, torch.SymBool)):
            return _NOTHING
        if not isinstance(value, Tensor):
            return value
        if not isinstance(value, FakeTensor):
            return value.to(_CPU) if _nbytes(value) <= _MOST_BYTES or self.everything else _NOTHING
        real = self._known.get(value)
        if real is None:
            return _NOTHING
        if not isinstance(real, Tensor):
            real = self._known[value] = real()
        return _NOTHING if identity(real.untyped_storage()) in self._spoiled else real

    def _remember(self, result: Any, real: Any) -> None:
        if real is _NOTHING:
            return
        for fake, value in zip(_tensors(result), _tensors(real), strict=False):
            if isinstance(fake, FakeTensor) and fake.shape == value.shape and fake.dtype == value.dtype:
                self._known[fake] = value

    def _spoil(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Mark the memory that the operation writes to as unknown from now on, in every view."""
        for fake in _written(func, args, kwargs):
            real = self._value(fake)
            if real is not _NOTHING:
                storage = real.untyped_storage()
                self._spoiled[identity(storage)] = storage

    def _as_fake(self, value: Any, like: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        fake = self._empty(value, like.device)
        self._known[fake] = value
        return fake


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Tensors that an operation writes to. Our own ops declare that they write to the tensors they move; those keep their
    value."""
    if func.namespace == "graphoffload" or not schema_of(func).is_mutable:
        return []
    found: list[Tensor] = []
    for number, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            found.extend(_tensors(given))
    return found


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
