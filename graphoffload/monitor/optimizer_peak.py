"""Optimizers whose step takes more than a device_budget: no plan of activations lowers that, and another way to step may.

    AdamW(parameters)                 temporary tensors as large as all parameters, while gradients and state are there
    AdamW(parameters, fused=True)     none

The first steps after a plan are looked at. What they take is known only where they raise torch's peak.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from graphoffload.errors import BudgetExceededWarning, warn
from graphoffload.units import format_bytes

_STEPS = 10


@dataclass(slots=True)
class _Watched:
    """A budget on a device, the optimizer steps that will be looked at for it, and whether one was said to take more."""

    device: torch.device
    budget_bytes: int
    steps: int = _STEPS
    said: bool = False


@dataclass(frozen=True, slots=True)
class _Before:
    """Bytes when a step begins: allocated, and the peak so far."""

    allocated_bytes: int
    peak_bytes: int


_watched: dict[str, _Watched] = {}
_before: weakref.WeakKeyDictionary[Optimizer, _Before] = weakref.WeakKeyDictionary()
_peaks: dict[torch.device, int] = {}


def watch_optimizers(device: torch.device, budget_bytes: int, digest: str) -> None:
    """Look at the next steps of optimizers on a GPU, once for each configuration that gave a budget: `digest`."""
    if device.type == "cuda":
        _watched.setdefault(digest, _Watched(device, budget_bytes))


def is_an_optimizers(device: torch.device, peak_bytes: int) -> bool:
    """Whether torch's peak is one that an optimizer's step has raised."""
    return _peaks.get(device) == peak_bytes


def _begin(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():  # a compiled optimizer.step traces this: nothing of it belongs in there
        return
    looking = {watched.device for watched in _watched.values() if watched.steps}
    if looking and (device := _device_of(optimizer)) in looking:
        _before[optimizer] = _Before(torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))


def _end(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling() or (before := _before.pop(optimizer, None)) is None:
        return
    device = _device_of(optimizer)
    assert device is not None
    peak_bytes = torch.cuda.max_memory_allocated(device)
    raised = peak_bytes > before.peak_bytes
    if raised:
        _peaks[device] = peak_bytes
    for watched in _watched.values():
        if watched.device != device or not watched.steps:
            continue
        watched.steps -= 1
        if raised and peak_bytes > watched.budget_bytes and not watched.said:
            watched.said = True
            text = _text(optimizer, watched.budget_bytes, before.allocated_bytes, peak_bytes)
            warn(BudgetExceededWarning, text)


register_optimizer_step_pre_hook(_begin)
register_optimizer_step_post_hook(_end)


def _device_of(optimizer: Optimizer) -> torch.device | None:
    """Where the first of its parameters is."""
    return next((parameter.device for group in optimizer.param_groups for parameter in group["params"]), None)


def _text(optimizer: Optimizer, budget_bytes: int, before_bytes: int, peak_bytes: int) -> str:
    name = type(optimizer).__name__
    excess, added = format_bytes(peak_bytes - budget_bytes), format_bytes(peak_bytes - before_bytes)
    return (
        f"device_budget={format_bytes(budget_bytes)} was exceeded by {excess} in {name}.step(), which no plan of activations "
        f"changes: {format_bytes(before_bytes)} are allocated when it begins, and {added} are added until it ends. "
        f"{_remedy(optimizer, name)}device_budget has to be at least {format_bytes(peak_bytes)}."
    )


def _remedy(optimizer: Optimizer, name: str) -> str:
    """How torch's optimizers step without temporary tensors for all parameters at once; "" for others."""
    given = {key: {group.get(key) for group in optimizer.param_groups} for key in ("fused", "foreach")}
    if "fused" in optimizer.defaults and True not in given["fused"]:
        return f"{name}(..., fused=True) makes no temporary tensors. Without it, "
    if "foreach" in optimizer.defaults and given["foreach"] != {False} and True not in given["fused"]:
        return f"{name}(..., foreach=False) makes temporary tensors for one parameter at a time. Without it, "
    return ""
