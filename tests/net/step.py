"""One training step of an architecture: loss, gradients, buffers; and, asked for, the bytes that autograd saved in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from graphoffload.testing.compare import in_float64, own_copy
from net.table import loss_of


@dataclass(frozen=True, slots=True)
class Taken:
    """What a step left: the loss, gradients by parameter's name (None: it got none), floating-point buffers.

    `updates`: how far each parameter moved, where the step contains updates.
    """

    loss: Tensor
    grads: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    updates: dict[str, Tensor] = field(default_factory=dict)

    def named(self) -> dict[str, Tensor]:
        """All that is compared by tensor."""
        found = {f"grad of {name}": grad for name, grad in self.grads.items() if grad is not None}
        found |= {f"update of {name}": value for name, value in self.updates.items()}
        return {"loss": self.loss, **found, **{f"buffer {name}": value for name, value in self.buffers.items()}}


class OwnStep(nn.Module):
    """A model whose step is more than one forward and one backward; `compile` compiles the parts that a trainer compiles."""

    backwards: int = 1
    """How often each graph is run backward after one forward."""

    def step(self, **inputs: Any) -> Tensor:
        """The whole step: forwards, backwards, perhaps updates. Returns what is compared as the loss."""
        raise NotImplementedError

    def parts(self) -> list[nn.Module]:
        """The modules that are compiled."""
        raise NotImplementedError

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Each part by itself, by the same backend."""
        for part in self.parts():
            part.compile(*args, **kwargs)


def take(model: nn.Module, inputs: dict[str, Any], saved: Saved | None = None) -> Taken:
    """Forward, loss and backward from cleared gradients and seed 0; buffers and parameters are as before afterwards."""
    before = {name: own_copy(buffer) for name, buffer in model.named_buffers()}
    begun = {name: own_copy(p) for name, p in model.named_parameters()} if isinstance(model, OwnStep) else {}
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(0)
    with saved.counting(model, inputs) if saved is not None else contextlib.nullcontext():
        loss = model.step(**inputs) if isinstance(model, OwnStep) else loss_of(model(**inputs))
    if not isinstance(model, OwnStep):
        loss.backward()
    grads = {name: None if p.grad is None else own_copy(p.grad) for name, p in model.named_parameters()}
    buffers = {name: own_copy(buffer) for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if buffer.shape == before[name].shape:
                buffer.copy_(before[name])
        updates = {name: p - begun[name] for name, p in model.named_parameters() if name in begun and p.is_floating_point()}
        for name, parameter in model.named_parameters():
            if name in begun:
                parameter.copy_(begun[name])
    return Taken(loss.detach().clone(), grads, buffers, {name: moved for name, moved in updates.items() if moved.any()})


@dataclass(slots=True)
class Saved:
    """Bytes that autograd keeps for backward, by storage, parameters, buffers and inputs left out.

    `tickets`: int64 tensors of one element, which is what an offloaded tensor leaves (and some models save as well).
    """

    nbytes: int = 0
    tickets: int = 0
    seen: dict[int, StorageWeakRef] = field(default_factory=dict)

    @contextlib.contextmanager
    def counting(self, model: nn.Module, inputs: dict[str, Any]) -> Iterator[None]:
        """Count what is packed inside. An address that comes again after its memory was freed is another tensor."""
        own = [*model.parameters(), *model.buffers(), *(v for v in pytree.tree_leaves(inputs) if isinstance(v, Tensor))]
        excluded = {part.untyped_storage().data_ptr() for tensor in own for part in inside(tensor)}

        def pack(tensor: Tensor) -> Tensor:
            for part in inside(tensor):
                count(part)
            return tensor

        def count(tensor: Tensor) -> None:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if address and address not in excluded and (address not in self.seen or self.seen[address].expired()):
                self.seen[address] = StorageWeakRef(storage)
                ticket = tensor.dtype == torch.int64 and tensor.shape == (1,) and storage.nbytes() == 8
                self.tickets += ticket
                self.nbytes += 0 if ticket else storage.nbytes()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield


def inside(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with memory of their own that a tensor is made of: itself, what a subclass wraps; none while tracing."""
    if isinstance(tensor, (FakeTensor, FunctionalTensor)):
        return
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from inside(getattr(tensor, name))


NARROW = (torch.float32, torch.bfloat16, torch.float16)


class _Wide(TorchFunctionMode):
    """A floating-point type that a model asks for by name (in norms, rotary embeddings, losses) is float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.float, Tensor.bfloat16, Tensor.half):
            return args[0].double()

        def widen(value: Any) -> Any:
            return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value

        return func(*(widen(value) for value in args), **{name: widen(value) for name, value in (kwargs or {}).items()})


def take_float64(model: nn.Module, inputs: dict[str, Any]) -> Taken:
    """The eager step in float64 throughout, from the same parameters and inputs; experts one by one, not in groups.

    Autocast casts float32 alone, so a step under it is in float64 as well.
    """
    default = torch.get_default_dtype()
    wide = pytree.tree_map(lambda v: v.double() if isinstance(v, Tensor) and v.dtype in NARROW else v, inputs)
    if getattr(getattr(model, "config", None), "_experts_implementation", None) not in (None, "eager"):
        model.set_experts_implementation("eager")  # torch has no grouped product in float64
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            return take(in_float64(model), wide)
    finally:
        torch.set_default_dtype(default)


def whole_error(got: Taken, reference: Taken) -> float:
    """|g - r| / |r| over all gradients as one vector; infinite where there is a NaN, or a gradient that the other lacks.

    No gradient and one of zeros are the same: torch.compile gives zeros to a parameter that only unused results depend on.
    """
    error = norm = 0.0
    for name, exact in reference.grads.items():
        grad = got.grads[name]
        there = grad if exact is None else exact if grad is None else None
        if there is not None and bool(there.count_nonzero()):
            return float("inf")
        if grad is not None and exact is not None:
            error += float(_apart(grad, exact) ** 2)
            norm += _norm(exact) ** 2
    found = (error / norm) ** 0.5 if norm else float(error > 0.0)
    return found if found == found else float("inf")


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _norm(tensor: Tensor) -> float:
    return float(_wide(tensor).norm())


def _apart(left: Tensor, right: Tensor) -> float:
    return float((_wide(left) - _wide(right)).norm())


def missing(got: Taken, plain: Taken) -> list[str]:
    """Parameters of which only one of the two has a gradient, were it zero."""
    return [
        f"grad of {name}: {'missing' if got.grads[name] is None else 'there'} where plain's is not"
        for name in plain.grads
        if (got.grads[name] is None) != (plain.grads[name] is None)
    ]


def worse(
    got: Taken, plain: Taken, reference: Taken, *, factor: float = 3.0, own: float = 1e-5, shared: float = 1e-7
) -> list[str]:
    """Tensors whose error is above `factor` times plain's, plus `own` of the tensor's norm and `shared` of all gradients'."""
    scale = sum(_norm(grad) ** 2 for grad in reference.grads.values() if grad is not None) ** 0.5
    found = []
    mine, theirs = got.named(), plain.named()
    for name, exact in reference.named().items():
        if name not in mine or name not in theirs:
            continue
        if mine[name].shape != exact.shape:
            found.append(f"{name}: shape {tuple(mine[name].shape)} instead of {tuple(exact.shape)}")
            continue
        error, allowed = _apart(mine[name], exact), factor * _apart(theirs[name], exact)
        limit = allowed + own * _norm(exact) + (shared * scale if name.startswith("grad") else own)
        if not error <= limit and _apart(theirs[name], exact) == _apart(theirs[name], exact):
            found.append(f"{name}: error {error:.3g}, plain's {allowed / factor:.3g}, norm {_norm(exact):.3g}")
    return found
