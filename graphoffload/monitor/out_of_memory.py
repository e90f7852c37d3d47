"""The note for a compiled step that runs out of memory: predicted peak, allocated peak, and the budget to try next.

    outputs = compiled(*args)            forward: a try around the compiled callable
    CompiledFunction._backward_impl      backward: a try around the function that AOTAutograd calls in autograd's thread

The error stays the object that the allocator raised; it only gets a note. AOTAutograd makes the class of the backward anew for
every compile, also when a compile cache answered, and only the outputs' grad_fn refers to it. It is wrapped once, after the
first forward that needs a gradient. It lives as long as a backward may come, so it is also registered there as an owner of the
buffers that CUDA graphs captured. Arguments are passed on unchanged, including a list that the callee empties.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from graphoffload.facts.plan import Plan
from graphoffload.facts.remedies import AS_ONE_GRAPH
from graphoffload.log import say
from graphoffload.runtime import captured, registry
from graphoffload.runtime.step.call import told
from graphoffload.torch_internals import autograd, pytrees
from graphoffload.units import format_bytes

_MARGIN = 0.05
_MARK = "graphoffload: out of memory"


def with_note(compiled: Callable[..., Any], key: str) -> Callable[..., Any]:
    """`compiled`, whose out-of-memory errors (also those of its backward) get a note with the prediction of plan `key`."""
    backward_is_wrapped = False

    @functools.wraps(compiled)  # with its attributes: `_boxed_call`, `serialize`
    def run(*args: Any) -> Any:
        nonlocal backward_is_wrapped
        since = 0 if backward_is_wrapped else autograd.autograd_time()
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
    tensors = [value for value in pytrees.tree_leaves(outputs) if isinstance(value, torch.Tensor) and value.requires_grad]
    for function in autograd.compiled_backwards((tensor.grad_fn for tensor in tensors), since):
        autograd.wrap_backward(function, lambda backward: _noting(told(backward), key))
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
    """Add the note once; an error here never replaces the original one."""
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
    """The note for an error in `where`, "forward" or "backward"; the allocated peak is None if no allocator counts."""
    prediction = plan.prediction
    allocated = "unknown" if allocated_peak_bytes is None else format_bytes(allocated_peak_bytes)
    predicted = format_bytes(prediction.with_reserve(prediction.predicted_peak_bytes))
    kept = format_bytes(prediction.with_reserve(prediction.keep_peak_bytes))
    reserved = f" ({format_bytes(prediction.reserve_bytes)} of it reserved)" if prediction.reserve_bytes else ""
    return (
        f"{_MARK} in {where} of {plan.graph} (plan {plan.key}): predicted peak {predicted}{reserved}, "
        f"allocated peak {allocated}, with everything kept {kept}. {_what_to_do(plan, allocated_peak_bytes)}"
    )


def _what_to_do(plan: Plan, allocated_peak_bytes: int | None) -> str:
    budget = next_budget_bytes(plan, allocated_peak_bytes)
    alone = "These figures speak of this graph alone, and it is one of several" if plan.part else ""
    if budget is None:
        why = alone or "More is missing than any plan of this graph frees"
        return f"{why}: no device_budget would help. Make the batch or the sequence smaller, or {AS_ONE_GRAPH}."
    otherwise = f" {alone}: otherwise, {AS_ONE_GRAPH}." if alone else ""
    return (
        f'Try options={{"device_budget": "{format_bytes(budget)}"}}; '
        f"a budget that cannot be met is an error that names the least feasible one.{otherwise}"
    )


def next_budget_bytes(plan: Plan, allocated_peak_bytes: int | None) -> int | None:
    """The budget to try next; None if none would help.

    If more was allocated than predicted, the next plan's prediction will be too low by the same difference, so the budget is
    reduced by it. If less was allocated, the allocated peak is the memory that there is: other processes or fragmentation use
    the rest. In both cases 5 % are left free, since the failed allocation is in none of the figures. No plan is smaller than
    the memory that is not saved activations at keep-all's peak.
    """
    prediction = plan.prediction
    predicted = prediction.with_reserve(prediction.predicted_peak_bytes)
    if allocated_peak_bytes is None:
        allocated_peak_bytes = predicted
    short = max(0, allocated_peak_bytes - predicted)
    budget = int((min(predicted, allocated_peak_bytes) - short) * (1.0 - _MARGIN))
    least = prediction.with_reserve(prediction.keep_peak_bytes) - plan.saved.saved_bytes if plan.saved.tensors else 0
    return budget if budget > max(0, least) else None
