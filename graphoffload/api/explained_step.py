"""The step of several graphs, planned without running it: a forward and backward with fake tensors stands for the recorded run.

    model(x) with fakes   |f0|gap|f1| ... |fN|loss|bN| ... |b0|     every graph with everything kept, uncompiled
    LiveBytes             memory outside the graphs at the start of each, and the most of it in each gap
    EagerWork             the operations between the graphs, one by one
    at(config)            the graphs' variants and the limits for one device: the run itself is the same for all
    StepFacts             the same facts as a recorded run's (compiler/step_facts.py), at that device's times
    make_step_plan        what the training process makes of them at its third run

The optimizer's state lives throughout, as it does from the second step on. Wrong when: eager code between the graphs
takes memory inside one operation, or waits for something else than its kernels; the training process measures both.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch.fx import GraphModule

from graphoffload.analysis.costs import Work
from graphoffload.analysis.storages import storage_id
from graphoffload.api.eager_work import EagerWork, seconds_of
from graphoffload.api.live_bytes import LiveBytes
from graphoffload.compiler.cache_key import graph_key
from graphoffload.compiler.compile_variant import Compiled, Graph, by_recipe, dynamos_graph, needs_gradient, traced_only
from graphoffload.compiler.device_limits import resolve_limits
from graphoffload.compiler.dispatch import Family, family_of, look, may_join, widened, with_fitted
from graphoffload.compiler.link import hardware_of
from graphoffload.compiler.partitioner import OffloadPartitioner
from graphoffload.compiler.session import new_key
from graphoffload.compiler.step_plan import Asked, StepPlan, make_step_plan
from graphoffload.facts.plan import Plan
from graphoffload.facts.recipe import Recipe
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.options.config import OffloadConfig
from graphoffload.planner.step.facts import CallFacts, Gap, StepFacts
from graphoffload.report.ledger import Ledger
from graphoffload.report.step_report import StepReport, outside_of, report_of_step
from graphoffload.runtime import registry
from graphoffload.torch_internals import autograd, dynamo
from graphoffload.torch_internals.dynamo import Retraceable
from graphoffload.torch_internals.pytrees import tree_leaves

SEVERAL = 2
"""Calls of graphs in a forward that are planned as a step; fewer are a graph that is planned by itself."""


class NotOneStepError(Exception):
    """The graphs of this forward are not planned as a step; the text says why."""


@dataclass(slots=True, eq=False)
class _Explained:
    """One graph that is explained. function: keeps everything, uncompiled."""

    number: int
    graph: Graph
    again: Retraceable
    family: Family
    function: Callable[..., Any]
    device: torch.device

    def at(self, config: OffloadConfig, activations: tuple[int, ...]) -> _Explained:
        """The same graph for another device, or with fewer inputs that count as activations: the limits there, and the variants
        that are good ones there."""
        if (config, activations) == (self.graph.config, self.graph.activations):
            return self
        there, limits = resolve_limits(config, self.again.inputs), self.graph.limits
        limits = replace(limits, device_budget_bytes=there.device_budget_bytes, reserve_bytes=there.reserve_bytes)
        graph = replace(self.graph, config=config, limits=limits, activations=activations)
        return replace(self, graph=graph, family=family_of(graph, self.again))

    def widen(self) -> None:
        """Have variants in slices as well from now on, where these may pay."""
        if not any(recipe.slices for recipe in self.family.recipes):
            self.family, _ = widened(self.family, self.graph, self.again, self.graph.limits.device_budget_bytes)

    def fit(self, recomputes: frozenset[str]) -> bool:
        """Have a variant that computes these activations again, from now on; whether there is one."""
        family = with_fitted(self.family, self.graph, self.again, recomputes)
        self.family = family or self.family
        return family is not None

    def variant(self, recipe: Recipe) -> Compiled:
        """The graph planned by a recipe, and not compiled."""
        graph = replace(self.graph, module=self.again.copy(), inputs=self.again.inputs)
        graph = by_recipe(graph, recipe)
        session = graph.session(new_key(graph_key(graph.module, graph.config, extra=recipe.identity)), "explain", recipe)
        with self.again.traced():
            function = traced_only(graph, OffloadPartitioner(session=session))
        return Compiled(function, session.key, session.plan, 0)


@dataclass(frozen=True, slots=True)
class _Mark:
    """A moment of the run: bytes outside the graphs, the most since the moment before, and the gradients among them; work: the
    operations outside the graphs since the moment before."""

    outside_bytes: int
    peak_bytes: int
    gradient_bytes: int
    work: tuple[Work, ...]


@dataclass(frozen=True, slots=True)
class Sharding:
    """Parameters, gradients and optimizer state divided among `ranks`, as FSDP does; gathered_bytes: of what is whole on each
    rank throughout."""

    ranks: int
    gathered_bytes: int

    def left_out(self, nbytes: int) -> int:
        """Of so many bytes, those that other ranks hold."""
        return nbytes - -(-nbytes // self.ranks)


class StepLook:
    """A backend that runs every graph with everything kept, and marks when each call starts and ends.

    parameters: the fake ones, for their gradients. sharding: None: this process has all of them.
    """

    def __init__(self, config: OffloadConfig, live: LiveBytes, eager: EagerWork, sharding: Sharding | None = None) -> None:
        self.config, self.live, self.eager, self.sharding = config, live, eager, sharding
        self.parameters: Sequence[torch.Tensor] = ()
        self._graphs: dict[Any, _Explained] = {}
        self.sequence: list[int] = []
        self.inputs: list[tuple[int, ...]] = []
        self.ended: list[int] = []
        self.marks: dict[tuple[str, int], _Mark] = {}
        self.count = 0
        self.__name__ = "graphoffload_explain"

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Look at one of Dynamo's graphs; blocks that are equal are one graph, as one compile serves them all."""
        self.count += 1
        if not needs_gradient(example_inputs):
            return gm.forward
        graph = dynamos_graph(gm, example_inputs, self.config)
        again = dynamo.retraceable(gm)
        if again is None or not may_join(graph):
            raise NotOneStepError(f"{graph.name} is planned alone, whatever other graphs run")
        needs = tuple(isinstance(value, torch.Tensor) and value.requires_grad for value in example_inputs)
        identity = graph_key(gm, self.config), needs, graph.limits.downstream
        explained = self._graphs.get(identity)
        if explained is None:
            family, function = look(graph)
            if family is None:
                return function
            tensors = (value for value in again.inputs if isinstance(value, torch.Tensor))
            device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
            kept = replace(graph, module=again.graph, inputs=again.inputs)
            explained = self._graphs[identity] = _Explained(len(self._graphs), kept, again, family, function, device)

        @functools.wraps(explained.function)
        def run(*args: Any) -> Any:
            return self._run(explained, args)

        return run

    def _run(self, graph: _Explained, args: Sequence[Any]) -> Any:
        index = len(self.sequence)
        self.sequence.append(graph.number)
        given = args[0] if len(args) == 1 and isinstance(args[0], list) else args
        self.inputs.append(tuple(storage_id(given[at]) for at in graph.graph.activations))
        self._mark("forward", index)
        self.live.inside, since = True, autograd.autograd_time()
        try:
            outputs = graph.function(*args)
        finally:
            self.live.inside = False
        node = autograd.compiled_node(outputs, since)
        if node is None:
            raise NotOneStepError(f"nothing that call {index} of {graph.graph.name} returns needs a gradient")
        saved = self.live.give(outputs, saved=node.saved_tensors)
        node.register_prehook(functools.partial(self._begin, index, autograd.output_bytes(outputs, node)))
        node.register_hook(functools.partial(self._end, index, saved))
        self._mark("forward end", index)
        return outputs

    def _begin(self, index: int, output_bytes: Mapping[int, int], gradients: Sequence[Any]) -> None:
        self._mark("backward", index, autograd.zeros_bytes(output_bytes, gradients))
        self.live.inside = True

    def _end(self, index: int, saved: frozenset[int], gradients: Any, *_: Any) -> None:
        self.live.inside = False
        self.live.give(gradients)
        self.live.leave(saved)
        self.ended.append(index)
        self._mark("backward end", index)

    def _mark(self, kind: str, index: int, soon_bytes: int = 0) -> None:
        gradients = self.live.bytes_of(p.grad for p in self.parameters if p.grad is not None)
        outside, peak = self.live.outside_bytes + soon_bytes, self.live.start_peak()
        self.marks[kind, index] = _Mark(outside, max(peak, outside), gradients, self.eager.taken())

    def backward(self, outputs: Any) -> None:
        """Run the backward: of the loss, if a number is returned, else of all that is returned.

        Raises:
            NotOneStepError: the backwards do not come once each, in the reverse order of the forwards.
        """
        if len(self.sequence) < SEVERAL:
            return
        roots = [value for value in tree_leaves(outputs) if isinstance(value, torch.Tensor) and value.requires_grad]
        roots = [root for root in roots if not root.dim()] or roots
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        if self.ended != list(range(len(self.sequence) - 1, -1, -1)):
            raise NotOneStepError("the backwards of its graphs do not run once each, in the reverse order of the forwards")

    def at(self, config: OffloadConfig) -> list[_Explained]:
        """The graphs for a device, each once, in the order of their first calls.

        An input of several calls is an activation of none of them, as in training.
        """
        times = Counter(memory for inputs in self.inputs for memory in set(inputs))
        found = []
        for number in dict.fromkeys(self.sequence):
            graph = next(graph for graph in self._graphs.values() if graph.number == number)
            own = [inputs for other, inputs in zip(self.sequence, self.inputs, strict=True) if other == number]
            activations = graph.graph.activations
            left = tuple(at for place, at in enumerate(activations) if all(times[inputs[place]] == 1 for inputs in own))
            found.append(graph.at(config, left))
        return found

    def facts(self, graphs: Sequence[_Explained], state_bytes: int) -> StepFacts:
        """What the run says of the step of these graphs; `state_bytes`: of the optimizer, throughout."""
        hardware = hardware_of(graphs[0].graph.config.hardware, str(graphs[0].device))
        always = self.live.bytes_of(self.parameters) + state_bytes
        numbers = [graph.number for graph in graphs]
        indices = [numbers.index(number) for number in self.sequence]
        held = list(accumulate((graphs[index].family.input_bytes[0] for index in indices), initial=0))
        calls = []
        for call, index in enumerate(indices):
            forward, backward = self.marks["forward", call], self.marks["backward", call]
            before = state_bytes - held[call] - self._elsewhere(forward, always)
            after = state_bytes - held[call + 1] - self._elsewhere(backward, always)
            calls.append(
                CallFacts(
                    graph=index,
                    forward_outside_bytes=forward.outside_bytes + before,
                    backward_outside_bytes=backward.outside_bytes + after,
                    before_forward=_gap(forward, before, hardware) if call else Gap(),
                    before_backward=_gap(backward, after, hardware),
                )
            )
        base = min(min(call.forward_outside_bytes, call.backward_outside_bytes) for call in calls)
        families = [graph.family for graph in graphs]
        return StepFacts(
            tuple(family.variants for family in families),
            tuple(calls),
            base,
            tuple(family.bound for family in families),
            copies_between=self.sharding is not None,
        )

    def _elsewhere(self, mark: _Mark, always_bytes: int) -> int:
        """Bytes counted at a moment that other ranks hold, less what is gathered."""
        if self.sharding is None:
            return 0
        return self.sharding.left_out(always_bytes + mark.gradient_bytes) - self.sharding.gathered_bytes

    def gradient_bytes_at(self, call: int, backward: bool) -> int:
        """Gradients that exist when a call's forward or backward starts."""
        return self.marks["backward" if backward else "forward", call].gradient_bytes


def _gap(until: _Mark, more_bytes: int, hardware: HardwareProfile) -> Gap:
    return Gap(seconds_of(until.work, hardware), until.peak_bytes + more_bytes)


@dataclass(frozen=True, slots=True)
class ExplainedStep:
    """A planned step as a report shows it. calls: how often each plan runs."""

    plans: tuple[Plan, ...]
    calls: tuple[int, ...]
    step: StepReport
    ledger: Ledger
    keep_ledger: Ledger


def plan_look(look: StepLook, config: OffloadConfig, state_bytes: int | None, reserve_bytes: int | None) -> ExplainedStep:
    """Plan the step that was looked at.

    Args:
        config: the one that it was looked at with, or the same for other hardware.
        state_bytes: of the optimizer; None: not known. reserve_bytes: None: as the configuration says.

    Raises:
        BudgetError: no plan of the step meets the budget.
    """
    graphs = look.at(config)
    first, facts = graphs[0].graph, look.facts(graphs, state_bytes or 0)
    limits, goal = first.limits, first.session("", "explain", None).goal
    reserve = limits.reserve_bytes if reserve_bytes is None else reserve_bytes
    given = limits.device_budget_bytes if limits.explicit else None
    asked = Asked(goal, reserve, limits.host_budget_bytes, given)
    plan = make_step_plan(tuple(look.sequence), graphs, facts, asked, runs=False)
    facts = plan.facts
    compiled = [call[0] for call in plan.calls]
    plans = {made.key: found for made in compiled if (found := registry.of_key(made.key)) is not None}
    hardware = hardware_of(config.hardware, str(graphs[0].device))
    names = [graphs[fact.graph].graph.name for fact in facts.calls]
    step = report_of_step(plan.solution, facts, names, plan.summary, reserve, limits.device_budget_bytes, hardware)
    keys = [made.key for made in compiled]
    return ExplainedStep(
        tuple(plans.values()), tuple(keys.count(key) for key in plans), step, *_ledgers(look, plan, facts, state_bytes, reserve)
    )


def _ledgers(
    look: StepLook, plan: StepPlan, facts: StepFacts, state_bytes: int | None, reserve: int
) -> tuple[Ledger, Ledger]:
    """What the memory at the peak is, for the plan and for keep-all."""
    solution = plan.solution

    def here(nbytes: int) -> int:
        return nbytes if look.sharding is None else nbytes - look.sharding.left_out(nbytes)

    parameters = here(look.live.bytes_of(look.parameters))
    found = []
    for timeline, chosen in ((solution.timeline, solution.chosen), (solution.keep_timeline, (0,) * len(facts.calls))):
        outside, call, backward = outside_of(facts, chosen, timeline.peak_step)
        gradients = here(look.gradient_bytes_at(call, backward))
        found.append(
            Ledger(
                parameters_bytes=parameters,
                gradients_bytes=gradients,
                optimizer_bytes=None if state_bytes is None else here(state_bytes),
                activations_bytes=timeline.peak_bytes - outside,
                outside_bytes=outside - parameters - gradients - here(state_bytes or 0),
                reserve_bytes=reserve,
            )
        )
    return found[0], found[1]
