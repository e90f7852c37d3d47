"""What is said when a compiled step runs out of memory: predicted peak, allocated peak, and the budget to try next.

    outputs = compiled(*args)            forward: a try around the compiled callable
    CompiledFunction._backward_impl      backward: a try around what AOTAutograd calls in autograd's thread

The error stays the object that the allocator raised; it only gets a note. AOTAutograd makes the class of the backward anew for
every compile, also when a compile cache answered, and nobody but the outputs' grad_fn knows it: it is wrapped once, behind the
first forward that needs a gradient. It lives as long as a backward may come, so it is also made known there as an owner of what
CUDA graphs captured. Arguments travel on as they came, a list that the callee empties included.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphoffload import compat
from graphoffload.log import say
from graphoffload.runtime import captured, registry
from graphoffload.saved import Plan
from graphoffload.units import format_bytes

_MARGIN = 0.05
_MARK = "graphoffload: out of memory"


def with_note(compiled: Callable[..., Any], key: str) -> Callable[..., Any]:
    """`compiled`, whose out-of-memory errors, those of its backward included, say what the plan `key` predicted."""
    backward_is_wrapped = False

    @functools.wraps(compiled)  # with its attributes: `_boxed_call`, `serialize`
    def run(*args: Any) -> Any:
        nonlocal backward_is_wrapped
        since = 0 if backward_is_wrapped else compat.autograd_time()
        try:
            outputs = compiled(*args)
        except torch.OutOfMemoryError as error:
            _annotate(error, key, "forward")
            raise
        if not backward_is_wrapped:
            backward_is_wrapped = _wrap_backward(outputs, key, since)
        return outputs

    return run


def _wrap_backward(outputs: Any, key: str, since: int) -> bool:
    """Wrap the backward of the call that began at `since` and gave these outputs; False when none of them has a gradient."""
    tensors = [value for value in pytree.tree_leaves(outputs) if isinstance(value, torch.Tensor) and value.requires_grad]
    for function in compat.compiled_backwards((tensor.grad_fn for tensor in tensors), since):
        if not hasattr(function._backward_impl, "__wrapped__"):
            function._backward_impl = staticmethod(_noting(function._backward_impl, key))
        captured.own(key, function)
    return bool(tensors)


def _noting(backward: Callable[..., Any], key: str) -> Callable[..., Any]:
    @functools.wraps(backward)
    def run(ctx: Any, args: list[Any]) -> Any:
        try:
            return backward(ctx, args)
        except torch.OutOfMemoryError as error:
            _annotate(error, key, "backward")
            raise

    return run


def _annotate(error: torch.OutOfMemoryError, key: str, where: str) -> None:
    """Add the note once; an error on its way out is never replaced by one from here."""
    plan = registry.stored(key)
    if plan is None or any(str(line).startswith(_MARK) for line in getattr(error, "__notes__", ())):
        return
    peak = torch.cuda.max_memory_allocated(plan.device) if plan.device.startswith("cuda") else None
    text = note(plan, where, peak)
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:  # Python 3.10
        say(text)


def note(plan: Plan, where: str, allocated_peak_bytes: int | None) -> str:
    """The note for an error in `where`, "forward" or "backward"; the allocated peak is None where no allocator counts."""
    prediction = plan.prediction
    allocated = "unknown" if allocated_peak_bytes is None else format_bytes(allocated_peak_bytes)
    return (
        f"{_MARK} in {where} of {plan.graph} (plan {plan.key}): "
        f"predicted peak {format_bytes(prediction.predicted_peak_bytes)}, "
        f"allocated peak {allocated}, with everything kept {format_bytes(prediction.keep_peak_bytes)}. "
        f'Try options={{"device_budget": "{format_bytes(next_budget_bytes(plan, allocated_peak_bytes))}"}}; '
        "a budget that cannot be met is an error that names the least feasible one."
    )


def next_budget_bytes(plan: Plan, allocated_peak_bytes: int | None) -> int:
    """The budget to try next.

    Where more was allocated than predicted, the prediction was short by the difference, and the next plan's will be: the budget
    goes down by that. Where less was, that much is what there is: other processes or fragmentation have the rest. In both cases
    5 % are left free, as the allocation that failed is in none of the figures.
    """
    predicted = plan.prediction.predicted_peak_bytes
    if allocated_peak_bytes is None:
        allocated_peak_bytes = predicted
    short = max(0, allocated_peak_bytes - predicted)
    return max(0, int((min(predicted, allocated_peak_bytes) - short) * (1.0 - _MARGIN)))
