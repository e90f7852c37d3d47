"""Runs a training step, and compares two of them: bit by bit, or by the error of the whole gradient against float64.

    a = run_step(compiled(case.fresh("cpu"), keep_all()), inputs, case.loss, seed=0)
    b = run_step(compiled(case.fresh("cpu"), backend), inputs, case.loss, seed=0)
    assert_equal_bits(a, b)

The error of a single tensor is large for a bias whose gradient is nearly zero. The norm over all gradients is not affected.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphoffload.testing.case import Case, weighted_loss
from graphoffload.torch_internals import pytrees
from graphoffload.torch_internals.modules import apply_to_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """All results of one step. Keys of `grads`: parameter names, and "input 0", … for arguments."""

    loss: Tensor
    outputs: tuple[Tensor, ...]
    grads: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    arguments: tuple[Tensor, ...]

    def named(self) -> dict[str, Tensor | None]:
        """All tensors that two equal steps must agree on, by name."""
        found: dict[str, Tensor | None] = {"loss": self.loss}
        found.update({f"output {i}": t for i, t in enumerate(self.outputs)})
        found.update({f"grad of {name}": t for name, t in self.grads.items()})
        found.update({f"buffer {name}": t for name, t in self.buffers.items()})
        found.update({f"argument {i} afterwards": t for i, t in enumerate(self.arguments)})
        return found


def own_copy(tensor: Tensor) -> Tensor:
    """A copy with the same strides and memory of its own."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.detach())


def own_arguments(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Fresh leaves with the same values, strides and requires_grad."""
    return tuple(
        own_copy(value).requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value for value in inputs
    )


def run_step(
    module: Callable[..., Any],
    inputs: tuple[Any, ...],
    loss: Callable[[Any], Tensor] = weighted_loss,
    seed: int = 0,
    *,
    autocast: torch.dtype | None = None,
) -> Result:
    """Forward, loss and backward from cleared gradients and a fixed seed; returns copies of all results."""
    arguments = own_arguments(inputs)
    parameters = _named(module, "named_parameters")
    for parameter in parameters.values():
        parameter.grad = None
    torch.manual_seed(seed)
    device = next((value.device.type for value in arguments if isinstance(value, Tensor)), "cpu")
    with torch.autocast(device, dtype=autocast) if autocast is not None else contextlib.nullcontext():
        output = module(*arguments)
    value = loss(output)
    outputs = tuple(own_copy(leaf) for leaf in pytrees.tree_leaves(output) if isinstance(leaf, Tensor))
    del output
    value.backward()
    grads: dict[str, Tensor | None] = {name: _copy_or_none(p.grad) for name, p in parameters.items()}
    for index, argument in enumerate(arguments):
        if isinstance(argument, Tensor) and argument.requires_grad:
            grads[f"input {index}"] = _copy_or_none(argument.grad)
    return Result(
        loss=value.detach().clone(),
        outputs=outputs,
        grads=grads,
        buffers={name: own_copy(buffer) for name, buffer in _named(module, "named_buffers").items()},
        arguments=tuple(own_copy(argument) for argument in arguments if isinstance(argument, Tensor)),
    )


def _named(module: Callable[..., Any], what: str) -> dict[str, Tensor]:
    if not isinstance(module, nn.Module):
        return {}
    return {name.removeprefix("_orig_mod."): tensor for name, tensor in getattr(module, what)()}


def _copy_or_none(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else own_copy(tensor)


def _bits(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.contiguous().reshape(-1).view(torch.uint8) if real.numel() else real.new_empty(0, dtype=torch.uint8)


def differences(a: Result, b: Result) -> list[str]:
    """Names of the tensors that differ in presence, shape, dtype or any bit; empty if equal.

    How many elements differ, and where the first one is, tells a tensor that came too late from sums in another order.
    """
    left, right = a.named(), b.named()
    found = [f"{name}: only in one of the two" for name in left.keys() ^ right.keys()]
    for name in left.keys() & right.keys():
        x, y = left[name], right[name]
        if x is None or y is None:
            if x is not y:
                found.append(f"{name}: None in one of the two")
        elif x.shape != y.shape or x.dtype != y.dtype:
            found.append(f"{name}: {tuple(x.shape)} {x.dtype} against {tuple(y.shape)} {y.dtype}")
        elif not torch.equal(_bits(x), _bits(y)):
            kind = torch.complex128 if x.is_complex() else torch.float64
            most = (x.to(kind) - y.to(kind)).abs().max().item()
            where = (_bits(x) != _bits(y)).reshape(x.numel(), -1).any(1).reshape(x.shape).nonzero().tolist()
            found.append(f"{name}: differs by up to {most:.3g} in {len(where)} of {x.numel()} elements, first {where[0]}")
    return sorted(found)


def assert_equal_bits(a: Result, b: Result) -> None:
    """Assert that loss, outputs, gradients, buffers and arguments are equal bit by bit."""
    found = differences(a, b)
    assert not found, "\n".join(found)


def whole_gradient_error(result: Result, reference: Result) -> float:
    """|g - g64| / |g64| over all gradients as one vector, in float64; `reference` comes from a float64 run."""
    assert result.grads.keys() == reference.grads.keys()
    error = norm = 0.0
    for name, exact in reference.grads.items():
        got = result.grads[name]
        assert (got is None) == (exact is None), name
        if got is None or exact is None:
            continue
        kind = torch.complex128 if exact.is_complex() else torch.float64
        error += float((got.to(kind) - exact.to(kind)).abs().square().sum())
        norm += float(exact.to(kind).abs().square().sum())
    return float((error / norm) ** 0.5) if norm else float(error > 0.0)


def in_float64(module: nn.Module) -> nn.Module:
    """`module` itself, with parameters and buffers in float64 or complex128."""

    def widen(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(torch.complex128)
        return tensor.to(torch.float64) if tensor.is_floating_point() else tensor

    apply_to_tensors(module, widen)
    return module


def float64_step(case: Case, device: torch.device | str, *, seed: int = 0, dtype: torch.dtype | None = None) -> Result:
    """The eager step in float64, from the same (rounded) parameters and inputs as the case in `dtype`."""
    arguments = tuple(
        value.detach().to(torch.float64).requires_grad_(value.requires_grad)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for value in case.example(device, dtype, seed=seed)
    )
    return run_step(in_float64(case.fresh(device, dtype)), arguments, case.loss, seed)


def keep_all(inner: str = "aot_eager") -> str:
    """The backend to compare with: the same inner compiler without offloading."""
    assert inner in ("aot_eager", "inductor"), inner
    return inner


def compiled(module: nn.Module, backend: Any, *, dynamic: bool | None = None) -> nn.Module:
    """`module`, compiled in place by `backend` after Dynamo is reset."""
    torch.compiler.reset()
    module.compile(backend=backend, dynamic=dynamic)
    return module


def compile_case(case: Case, backend: Any, device: torch.device | str, *, dtype: torch.dtype | None = None) -> nn.Module:
    """A fresh module of the case, compiled as the case requires. `backend` None leaves it eager."""
    module = case.fresh(device, dtype)
    return module if backend is None else compiled(module, backend, dynamic=True if case.dynamic else None)


def case_steps(
    case: Case,
    module: nn.Module,
    device: torch.device | str,
    *,
    seeds: tuple[int, ...] = (0,),
    dtype: torch.dtype | None = None,
) -> list[Result]:
    """One step for each seed, each starting from a fresh module's buffers."""
    for name, buffer in case.fresh(device, dtype).named_buffers():
        module.get_buffer(name).copy_(buffer)
    return [run_step(module, case.example(device, dtype, seed=seed), case.loss, seed, autocast=case.autocast) for seed in seeds]


def run_case(
    case: Case, backend: Any, device: torch.device | str, *, seeds: tuple[int, ...] = (0,), dtype: torch.dtype | None = None
) -> list[Result]:
    """A fresh module, compiled once, and one step for each seed. `backend` None runs eager."""
    return case_steps(case, compile_case(case, backend, device, dtype=dtype), device, seeds=seeds, dtype=dtype)
