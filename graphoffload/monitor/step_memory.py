"""Out of memory anywhere in a step: what was predicted there, and what the next step is planned with.

torch tells an observer before it raises, also where the allocation is in eager code between two compiled calls, such as the
loss or an optimizer. The line says which part of the step it was. A caller who catches the error and goes on with the next
batch finds the step planned for less memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphoffload.log import say
from graphoffload.runtime.step.calls import LATEST, STEPS, StepRun
from graphoffload.torch_internals import allocator
from graphoffload.units import format_bytes

_LEAST_SHARE, _MOST_SHARE = 0.02, 0.1  # of the device, by which the next plan has less


@dataclass(frozen=True, slots=True)
class Shortage:
    """An allocation that failed: where in the step, and how much less the next plan may use; 0 where no activation lived."""

    where: str
    lacking_bytes: int


_FAILED: dict[torch.device, Shortage] = {}
_watched: list[bool] = []


def watch() -> None:
    """Have torch report allocations that fail, from now on."""
    if not _watched and torch.cuda.is_available():
        _watched.append(True)
        allocator.observe_failures(_failed)


def shortage_of(device: torch.device) -> Shortage | None:
    """The latest failed allocation of a device, once."""
    return _FAILED.pop(device, None)


def where_in(run: StepRun) -> str:
    """The part of a step that runs now, in words."""
    count = len(run.calls)
    if STEPS.call is not None:
        return f"the forward of call {STEPS.call.index}"
    running = [call.index for call in run.calls if call.began and not call.ended]
    if running:
        return f"the backward of call {running[-1]}"
    if not run.turned:
        return f"eager code after the forward of call {count - 1}" if count else "eager code before the first call"
    left = [call.index for call in run.calls if not call.ended]
    return f"eager code before the backward of call {left[-1]}" if left else "eager code after the last backward"


def _failed(index: int, asked_bytes: int, _allocated_bytes: int, free_bytes: int) -> None:
    device = torch.device("cuda", index)
    run = LATEST.get(device)
    if run is None:
        return
    if _idle(run):  # others may still wait for their backwards
        run = next((outer for outer in reversed(run.alive) if outer.waits), run)
    whole = torch.cuda.get_device_properties(index).total_memory
    lacking = int(min(max(0, asked_bytes - free_bytes) + _LEAST_SHARE * whole, _MOST_SHARE * whole))
    where, idle = where_in(run), _idle(run)
    _FAILED[device] = Shortage(where, 0 if idle else lacking)
    run.aborted = True
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    say(
        f"out of memory in {where}: {format_bytes(asked_bytes)} are asked for, {format_bytes(allocated)} are allocated, and "
        f"{format_bytes(reserved - allocated)} are cached in other pieces."
        + (_IDLE if idle else _of_activations(run, allocated, asked_bytes, whole) + _of_plan(run, lacking))
    )


def _idle(run: StepRun) -> bool:
    """Whether all its backwards are over."""
    return run.turned and all(call.ended for call in run.calls)


_IDLE = " No activations live there, so no other plan of the step helps: free memory, or make the model smaller."


def _of_activations(run: StepRun, allocated_bytes: int, asked_bytes: int, whole_bytes: int) -> str:
    """How much of what is allocated a plan could move; and what would be left without it, if that alone is too much."""
    ours = run.ours_bytes()
    text = f" Activations of compiled graphs are {format_bytes(ours)} of it."
    least = allocated_bytes - ours + asked_bytes
    if least > whole_bytes:
        text += (
            f" Without any of them {format_bytes(least)} are needed at this point, and the device has "
            f"{format_bytes(whole_bytes)}: no plan fits. Make the batch or sequence smaller, or what is eager here: a loss "
            "that is compiled with the model or computed in chunks holds no logits in float32."
        )
    return text


def _of_plan(run: StepRun, lacking_bytes: int) -> str:
    if run.plan is None:
        return ""
    peak = run.plan.solution.timeline.peak_bytes
    return (
        f" The step's predicted peak is {format_bytes(peak)}. The next step is planned for {format_bytes(lacking_bytes)} less."
    )
