"""The plans of a graph that is planned alone: for one configuration after the other, and for what is allocated beside it.

    limits_now()   what the process may use, with what was learnt (outside.py)      ─▶  plan()   as it was made before, or now

A plan is known by what it was made for, in steps of bytes: plans that differ by less serve for each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from graphoffload.compiler.compile_variant import Compiled, Graph, compile_by
from graphoffload.compiler.device_limits import device_budget_now, device_of, resolve_limits
from graphoffload.compiler.meeting import least
from graphoffload.compiler.outside import Outside
from graphoffload.compiler.slices import made_or_in_slices
from graphoffload.facts.limits import Limits
from graphoffload.monitor.budget_check import watch_budget
from graphoffload.options.config import OffloadConfig
from graphoffload.torch_internals.dynamo import Retraceable

_STATIC_STEP, _BUDGET_STEP = 64 * 2**20, 256 * 2**20


@dataclass(frozen=True, slots=True)
class _Made:
    """A compiled plan, and what it was made within."""

    compiled: Compiled
    limits: Limits


class OwnPlans:
    """The plans of one graph that is planned alone.

    limits: that the present one was made within, with the budget that holds. outside: what was learnt. compiles: how many were
    made after the first.
    """

    def __init__(self, graph: Graph, again: Retraceable) -> None:
        self.graph, self.again = graph, again
        self.limits, self.outside, self.compiles = graph.limits, Outside(), 0
        self._lacking_bytes = 0
        self._made: dict[str, _Made] = {}

    @property
    def is_for_any_size(self) -> bool:
        """Whether Dynamo compiled the graph for more sizes than one."""
        return any(isinstance(value, torch.SymInt) for value in self.graph.inputs)

    def reserve_now(self, config: OffloadConfig) -> int:
        """Bytes of state that optimizers are still to make, or that the user wants free."""
        return resolve_limits(config, self.graph.inputs).reserve_bytes

    def limits_now(self, config: OffloadConfig) -> Limits:
        """What holds now for a plan: with what is allocated, and what was learnt."""
        limits, first, outside = least(resolve_limits(config, self.graph.inputs), config), self.graph.limits, self.outside
        if outside.static_bytes is not None:
            limits = replace(limits, static_bytes=outside.static_bytes + outside.grown(limits.reserve_bytes))
        budget = limits.device_budget_bytes
        if budget is not None:
            device = device_of(self.graph.inputs)
            if outside.turn_bytes and not limits.explicit and device.type == "cuda":  # its blocks must fit in one piece each
                budget = min(budget, device_budget_now(device, limits.reserve_bytes, of_a_step=True))
            limits = replace(limits, device_budget_bytes=budget - self._lacking_bytes)
        if config.reserve != "auto":  # for what came meanwhile
            reserve = max(0, limits.reserve_bytes - max(0, limits.static_bytes - first.static_bytes))
            limits = replace(limits, reserve_bytes=reserve)
        return replace(limits, downstream=first.downstream, turn_bytes=outside.turn_bytes)

    def plan(self, config: OffloadConfig, lacking_bytes: int = 0, least_bytes: int | None = None) -> Compiled:
        """The plan for a configuration, which is the present one from now on: as it was made before, or made now.

        Args:
            lacking_bytes: device memory that was missing, and is left free by this plan and those after it.
            least_bytes: the least budget that there is a plan for, in place of one that no plan meets.

        Raises:
            BudgetError: no plan meets the budget.
        """
        self._lacking_bytes += lacking_bytes
        limits = self.limits_now(config)
        name, learnt = self._name(config, limits, least_bytes)
        made = self._made.get(name)
        if made is None:
            budget = limits.device_budget_bytes if least_bytes is None else least_bytes
            graph = replace(self.graph, module=self.again.copy(), config=config, learnt=learnt)
            graph = replace(graph, limits=replace(limits, device_budget_bytes=budget))
            compiled = made_or_in_slices(graph, self.again.copy, self._compile)
            self.compiles += 1
            function = watch_budget(compiled.function, compiled.key, config, limits)
            made = self._made[name] = _Made(replace(compiled, function=function), limits)
        self.limits = replace(made.limits, device_budget_bytes=limits.device_budget_bytes)
        outside = self.outside
        outside.is_least = least_bytes is not None
        outside.grown_bytes = max(0, limits.static_bytes - (outside.static_bytes or limits.static_bytes))
        return made.compiled

    def hold(self, config: OffloadConfig, compiled: Compiled) -> None:
        """The present plan is that for what is known now: back to it costs no compile."""
        name, _ = self._name(config, self.limits_now(config))
        self._made[name] = _Made(compiled, self.limits)

    def has(self, config: OffloadConfig) -> bool:
        """Whether there is a plan for a configuration and for what is known now."""
        return self._name(config, self.limits_now(config))[0] in self._made

    def _name(self, config: OffloadConfig, limits: Limits, least_bytes: int | None = None) -> tuple[str, str]:
        """What a plan is known by; and the part of it that limits in steps of 1 GiB do not have."""
        budget = limits.device_budget_bytes
        steps = (limits.static_bytes // _STATIC_STEP, None if budget is None else budget // _BUDGET_STEP)
        learnt = f"{steps} lacking {self._lacking_bytes} least {least_bytes}"
        return f"{config.digest()} {limits.quantised()} {learnt}", learnt

    def _compile(self, graph: Graph) -> Compiled:
        with self.again.traced():
            return compile_by(graph, None)
