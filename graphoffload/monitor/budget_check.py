"""Whether a budget was kept: checked after a few steps, with one warning if it was not.

    graph0 | its backward | graph1 | its backward | graph0
    ^ 2.0 GiB             ^ 3.1                   ^ 3.1         graph0's call raised it

The peak so far is read where a call begins. It was raised by the call before, or by its backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from graphoffload.errors import BudgetExceededWarning, warn
from graphoffload.facts.limits import Limits
from graphoffload.facts.plan import Plan
from graphoffload.facts.remedies import AS_ONE_GRAPH, lower_budget
from graphoffload.monitor.optimizer_peak import is_an_optimizers
from graphoffload.options.config import OffloadConfig
from graphoffload.runtime import registry
from graphoffload.torch_internals.allocator import maps_by_pages
from graphoffload.units import format_bytes

_LOOKS = (3, 10)  # calls of a graph before the peak is read: compiling is over, optimizer state exists
_said: set[str] = set()
_RISES: dict[str, _Rise] = {}


@dataclass(slots=True)
class _Rise:
    """Of the peak of a device, as the first calls of watched graphs find it.

    raised_by: key of the plan whose call was the latest when it rose; "" if that is not known. latest: of the latest call.
    """

    peak_bytes: int = 0
    raised_by: str = ""
    latest: str = ""

    def begin(self, key: str, peak_bytes: int) -> None:
        """A call begins by the plan of this key."""
        if peak_bytes > self.peak_bytes:
            self.raised_by = self.latest
        elif peak_bytes < self.peak_bytes:  # torch's counter was reset
            self.raised_by = ""
        self.peak_bytes, self.latest = peak_bytes, key


def watch_budget(compiled: Callable[..., Any], key: str, config: OffloadConfig, limits: Limits) -> Callable[..., Any]:
    """`compiled`, with a BudgetExceededWarning if steps take more than an explicit device_budget; `compiled` itself without
    one."""
    plan, budget = registry.of_key(key), limits.device_budget_bytes
    if plan is None or budget is None or not config.has_budget or torch.device(plan.device).type != "cuda":
        return compiled
    calls = before_bytes = 0

    @functools.wraps(compiled)
    def run(*args: Any) -> Any:
        nonlocal calls, before_bytes
        calls += 1
        if calls <= _LOOKS[-1]:
            peak_bytes = int(torch.cuda.max_memory_allocated(plan.device))
            _RISES.setdefault(plan.device, _Rise()).begin(key, peak_bytes)
            if calls == 1:
                before_bytes = peak_bytes
            elif calls in _LOOKS:
                _look(plan, budget, config.digest(), before_bytes, peak_bytes)
        return compiled(*args)

    return run


def _look(plan: Plan, budget_bytes: int, digest: str, before_bytes: int, peak_bytes: int) -> None:
    """Warn of a peak above the budget, unless it is one from before the first step, `before_bytes`, or an optimizer's."""
    if digest in _said:
        return
    if peak_bytes <= budget_bytes or peak_bytes == before_bytes or is_an_optimizers(torch.device(plan.device), peak_bytes):
        return
    _said.add(digest)
    plan = _raised_by(plan, budget_bytes) or _highest(plan, budget_bytes)
    excess, peak, predicted = peak_bytes - budget_bytes, format_bytes(peak_bytes), plan.prediction
    planned = format_bytes(_predicted_bytes(plan))
    reserved = f", {format_bytes(predicted.reserve_bytes)} of it reserved" if predicted.reserve_bytes else ""
    alone = f", and speaks of that graph alone, which is one of several: {AS_ONE_GRAPH}" if plan.part else ""
    warn(
        BudgetExceededWarning,
        f"device_budget={format_bytes(budget_bytes)} was exceeded by {format_bytes(excess)}: torch counts a peak of {peak} "
        f"since it was last reset; the plan of {plan.graph} predicted {planned}{reserved}{alone}{_uncut(plan.device)}. If "
        f"nothing else was allocated in this process, {lower_budget(budget_bytes, excess)}, "
        "or let graphoffload.tune() correct the plan by what it measures.",
    )


def _raised_by(plan: Plan, budget_bytes: int) -> Plan | None:
    """The plan whose call raised the peak: graphs that take turns, as for several lengths, are planned one by one, and the
    first to be called often enough is not the one that took the memory. None of several graphs whose backwards come later."""
    found = registry.of_key(_RISES[plan.device].raised_by)
    if found is None or found.part or found.variant or _predicted_bytes(found) > budget_bytes:
        return None
    return found


def _highest(plan: Plan, budget_bytes: int) -> Plan:
    """Of the plans for this budget, the one with the highest peak."""
    others = (other for other in registry.last_plans() if other.device == plan.device and not other.variant)
    return max((plan, *(other for other in others if _predicted_bytes(other) <= budget_bytes)), key=_predicted_bytes)


def _predicted_bytes(plan: Plan) -> int:
    return plan.prediction.with_reserve(plan.prediction.predicted_peak_bytes)


def _uncut(device: str) -> str:
    """What of the peak is in no tensor. Of a free block that is larger than what is asked for, the allocator leaves up to 1 MiB
    uncut, which counts as allocated."""
    stats = torch.cuda.memory_stats(device)
    uncut_bytes = stats.get("allocated_bytes.all.peak", 0) - stats.get("requested_bytes.all.peak", 0)
    if uncut_bytes < 2**20 or maps_by_pages():
        return ""
    return (
        f". {format_bytes(uncut_bytes)} of the peak are in no tensor: torch's allocator does not cut off ends of blocks below "
        "1 MiB, and PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True has it do so"
    )
