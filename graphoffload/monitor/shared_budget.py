"""One budget over several graphs: which graphs share it, and a warning if together they keep more than the user gave.

    for block in model.layers: block.compile(backend=...)       one plan, made for the first block, runs for every one of them

Each graph is planned with the memory that is allocated when it is compiled as static. On a GPU, in the first forward, this
includes what earlier graphs keep. Later graphs are unknown then, including other blocks that run the same compiled code. So the
calls of the first forward are counted: which plans ran, and how often. When its backward begins, the sum is known.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from graphoffload.errors import SharedBudgetWarning, warn
from graphoffload.facts.limits import Limits
from graphoffload.facts.remedies import share_of_budget
from graphoffload.monitor.caveats import asks_for_cuda_graphs
from graphoffload.options.config import OffloadConfig
from graphoffload.runtime import registry
from graphoffload.runtime.step.resident import Budget
from graphoffload.torch_internals import dynamo, pytrees
from graphoffload.units import format_bytes


class _Call:
    """One call of a graph. Only a hook of its outputs' backward holds it, as it holds the saved activations of the call."""

    def __init__(self, forward: _Forward, key: str) -> None:
        self.forward = forward
        self.key = key

    def __call__(self, *_: Any) -> None:
        self.forward.begin_backward()


class _Forward:
    """Calls of the first forward of all graphs compiled with one configuration. A call that was dropped without a backward
    keeps nothing and does not count.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.judged = False
        self._living: weakref.WeakSet[_Call] = weakref.WeakSet()

    @property
    def calls(self) -> Counter[str]:
        """How many calls of each plan's key still wait for their backward."""
        return Counter(call.key for call in self._living)

    def ran(self, key: str, outputs: Any) -> None:
        """A graph ran; the first backward of any of its outputs ends the count."""
        for value in pytrees.tree_leaves(outputs):
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                call = _Call(self, key)
                value.grad_fn.register_prehook(call)
                self._living.add(call)
                return

    def begin_backward(self) -> None:
        """The bytes that one forward keeps are known now; checked once."""
        if not self.judged:
            self.judged = True
            judge(self.calls, self.limits)


def judge(calls: Mapping[str, int], limits: Limits) -> None:
    """Warn if one forward, by the calls of each plan's key in it, keeps more than the explicit budget."""
    plans = [(plan, count) for key, count in calls.items() if (plan := registry.of_key(key)) is not None]
    number = sum(count for _, count in plans)
    budget = limits.device_budget_bytes
    if number < 2 or budget is None:
        return
    kept = sum(plan.bytes_of("keep") * count for plan, count in plans)
    fixed = limits.static_bytes + limits.reserve_bytes
    total = fixed + kept
    if total > budget:
        warn(
            SharedBudgetWarning,
            f"device_budget={format_bytes(budget)} was planned for each of {len(plans)} graphs alone, and {number} calls of "
            f"them ran in one forward: until backward they keep {format_bytes(kept)} on top of {format_bytes(fixed)}, "
            f"which is {format_bytes(total - budget)} too much. Compile the whole model as one graph, "
            f"{share_of_budget(budget, fixed, number)}",
        )


def may_link(config: OffloadConfig) -> bool:
    """Whether copies, and tensors that stay uncopied, may outlive the graphs of this configuration (decision 6)."""
    return registry.across_graphs() and (config.inner == "aot_eager" or not asks_for_cuda_graphs(config))


def may_share_budget(config: OffloadConfig) -> bool:
    """Whether a downstream graph uses the same explicit budget."""
    return config.has_budget and may_link(config)


def is_downstream(inputs: Iterable[Any]) -> bool:
    """Whether a graph is downstream of a trained one: an input that is not a leaf needs a gradient."""
    return any(isinstance(x, torch.Tensor) and x.requires_grad and not x.is_leaf for x in inputs)


def where_it_runs(limits: Limits, gm: GraphModule, inputs: Sequence[Any], config: OffloadConfig) -> Limits:
    """Limits of a graph that also say where it runs, as its inputs show. Its compile is guarded to such inputs.

    Equal blocks share one compile. If the first one's input is a leaf that needs a gradient (hidden states of a frozen
    embedding), its plan for a graph that runs alone would otherwise be the plan of all others as well.
    """
    downstream = is_downstream(inputs)
    found = replace(limits, shared=downstream and may_share_budget(config), downstream=downstream)
    if may_share_budget(config) or is_one_of_many(config, replace(limits, downstream=True)):
        dynamo.guard_leaves(gm.graph, [x if not isinstance(x, torch.nn.Parameter) else None for x in inputs])
    return found


def budget_of(limits: Limits) -> Budget | None:
    """The part of a shared budget that the runtime needs; None without one."""
    if not limits.shared or limits.device_budget_bytes is None:
        return None
    return Budget(limits.device_budget_bytes, limits.reserve_bytes, limits.static_bytes)


_FORWARDS: dict[str, _Forward] = {}


def count_calls(compiled: Callable[..., Any], key: str, config: OffloadConfig, limits: Limits) -> Callable[..., Any]:
    """`compiled`, counted in the first forward that follows; `compiled` itself without a budget."""
    if not config.has_budget or limits.device_budget_bytes is None:
        return compiled
    digest = config.digest()
    forward = _FORWARDS.get(digest)
    if forward is None or forward.judged:
        forward = _FORWARDS[digest] = _Forward(limits)

    @functools.wraps(compiled)
    def run(*args: Any) -> Any:
        outputs = compiled(*args)
        if not forward.judged:
            forward.ran(key, outputs)
        return outputs

    return run


def is_one_of_many(config: OffloadConfig, limits: Limits) -> bool:
    """Whether a downstream graph offloads without a goal: such graphs share the link, and no number relies on their copies."""
    return limits.downstream and not limits.explicit and config.policy == "offload"
