"""One variant of a graph, compiled: while Dynamo compiles, or later from what Dynamo left.

    Dynamo ─▶ compile_by(recipe="first")          later ─▶ compile_by(recipe of the step's plan)
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule

from graphoffload.analysis.storages import example_storage_nbytes, size_hint, storage_id
from graphoffload.analysis.token_regions import TokenRegion, regions_by_token
from graphoffload.compiler.cache_key import graph_key
from graphoffload.compiler.device_limits import free_garbage, map_by_pages_if_tight, resolve_limits
from graphoffload.compiler.inner_compile import compile_as_planned
from graphoffload.compiler.meeting import is_alone
from graphoffload.compiler.module_names import is_part, name_modules
from graphoffload.compiler.partitioner import OffloadPartitioner
from graphoffload.compiler.session import CompileSession, Purpose, new_key
from graphoffload.errors import ConfigError, PlanError
from graphoffload.facts.limits import Limits
from graphoffload.facts.plan import Plan
from graphoffload.facts.recipe import Recipe
from graphoffload.facts.refusals import Refusal, refusal_of
from graphoffload.facts.saved_tensors import INPUT
from graphoffload.log import log, say
from graphoffload.monitor.caveats import asks_for_cuda_graphs, warn_of_surroundings
from graphoffload.monitor.out_of_memory import with_note
from graphoffload.monitor.pattern_coverage import WHOLE, Fragment, fragment_of
from graphoffload.monitor.shared_budget import budget_of, is_one_of_many, may_link, where_it_runs
from graphoffload.options.config import OffloadConfig
from graphoffload.passes.slices import compute_in_slices
from graphoffload.report.offload_report import plan_table, summary_line
from graphoffload.runtime import captured, registry
from graphoffload.runtime.pinned.preallocation import allow
from graphoffload.torch_internals import dynamo, inductor, partitioning
from graphoffload.units import format_bytes

LEAST_SLICED = 64 << 20
"""An MLP that holds less bytes while it runs is never in slices: its kernels are small, and there is little to save."""
_graphs = itertools.count()


@dataclass(frozen=True, slots=True)
class Graph:
    """One Dynamo graph and what it is compiled for. inputs: as Dynamo gave them, or the fake ones that it traced. activations:
    which of them, by position, other graphs computed. slices: of the tokens, in which its MLPs are computed. has_resort: as in
    CompileSession. learnt: what plans differ in that were made again while it ran."""

    module: GraphModule
    inputs: Sequence[Any]
    config: OffloadConfig
    limits: Limits
    fragment: Fragment
    name: str
    device_name: str
    activations: tuple[int, ...] = ()
    slices: int = 0
    has_resort: bool = False
    learnt: str = ""

    def session(self, key: str, purpose: Purpose, recipe: Recipe | None, *, of_a_step: bool = False) -> CompileSession:
        """A compile of this graph, alone or as a part of a step."""
        parameters = partitioning.parameter_positions(self.module.graph, self.inputs)
        part = of_a_step or recipe is not None
        activations = self.activations if part else ()
        limits = replace(self.limits, turn_bytes=0) if part else self.limits  # a step has that in what was recorded
        return CompileSession(
            self.config, limits, key, self.name, purpose, self.fragment, parameters, activations, recipe, self.slices,
            self.has_resort,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled variant. plan: None where nothing was partitioned, as no output needs a gradient. kept_bytes: what it saves
    without an op, besides memory of its caller. tight: a call of it takes nearly all that the device has."""

    function: Callable[..., Any]
    key: str
    plan: Plan | None
    kept_bytes: int
    tight: bool = False


def dynamos_graph(gm: GraphModule, example_inputs: Sequence[Any], config: OffloadConfig, name: str = "") -> Graph:
    """The graph that Dynamo compiles now, with the limits that hold for it; `name`: a new one where none is given."""
    name_modules(gm)
    tensors = (*example_inputs, *gm.parameters(), *gm.buffers())
    free_garbage(tensors)
    limits = resolve_limits(config, tensors)
    limits = where_it_runs(limits, gm, example_inputs, config)
    name = name or f"graph{next(_graphs)}"
    fragment, device_name = _fragment(gm, config), _device_name(example_inputs)
    return Graph(gm, example_inputs, config, limits, fragment, name, device_name, _computed(example_inputs))


def untrained(gm: GraphModule, example_inputs: Sequence[Any], config: OffloadConfig) -> Graph:
    """A graph that needs no gradient: nothing of it is planned."""
    return Graph(gm, example_inputs, config, Limits(), WHOLE, "", "")


def by_recipe(graph: Graph, recipe: Recipe | None) -> Graph:
    """The graph that a recipe speaks of: in slices, written into its module, where it says so.

    Raises:
        PlanError: it has nothing that could be in slices.
    """
    if recipe is None or not recipe.slices or graph.slices:
        return graph
    sliced = in_slices(graph, graph.module, recipe.slices)
    if sliced is None:
        raise PlanError(f"{graph.name} has no MLP, and its variant {recipe.name!r} computes one in slices.")
    return sliced


def regions_of(module: GraphModule, slices: int) -> list[TokenRegion]:
    """The MLPs of a graph that are worth slices."""
    return [region for region in regions_by_token(module.graph, slices) if region.inside_bytes >= LEAST_SLICED]


def in_slices(graph: Graph, module: GraphModule, slices: int) -> Graph | None:
    """The graph with its MLPs in so many slices of the tokens, written into `module`, a copy of its own; None where it has no
    MLP."""
    regions = regions_of(module, slices)
    if not regions:
        return None
    return replace(graph, module=compute_in_slices(module, regions, slices), slices=slices)


def compile_by(graph: Graph, recipe: Recipe | None) -> Compiled:
    """Compile a graph; `recipe`: None for a plan of its own. Slices that it asks for are written into the graph's module."""
    graph = by_recipe(graph, recipe)
    config, limits = graph.config, graph.limits
    variant = "" if recipe is None else f"{recipe.identity} {graph.activations}"
    extra = f"{limits.quantised()} {graph.learnt} {graph.device_name} {variant} {_planned_sizes(graph.inputs)}"
    base = graph_key(graph.module, config, extra=extra)
    known = None if config.dump_dir else _stored(base, limits)  # torch's compile cache has no graphs to dump
    session = graph.session(known.key if known is not None else new_key(base), "run", recipe)
    allow(limits.host_budget_bytes)
    function = dynamo.undisabled(inner(graph, session))
    if session.plan is None:
        _take_stored(base, session)
    if session.plan is not None:
        _link(base, session.plan, config, limits)
        _make_room(session.plan, limits)
    if asks_for_cuda_graphs(config):
        captured.own(session.key, function)
    return Compiled(with_note(function, session.key), session.key, session.plan, _kept_bytes(session.plan))


def _computed(inputs: Sequence[Any]) -> tuple[int, ...]:
    """Positions of inputs that other graphs or eager code computed in this forward: they need a gradient, are no leaves, and
    are all of their storage, such as a convolution's output with its dimensions in another order. Two inputs in one memory
    would be two copies of it, and neither would free it."""
    tensors = {at: value for at, value in enumerate(inputs) if isinstance(value, torch.Tensor) and value.layout not in _SPARSE}
    owners = Counter(map(storage_id, tensors.values()))
    return tuple(
        at
        for at, value in tensors.items()
        if value.requires_grad and not value.is_leaf and _is_whole(value) and owners[storage_id(value)] == 1
    )


_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
"""Layouts of tensors without a storage."""


def _is_whole(value: torch.Tensor) -> bool:
    if value._base is None:
        return True
    repeats = any(stride == 0 and size != 1 for size, stride in zip(value.shape, value.stride(), strict=True))
    return not repeats and example_storage_nbytes(value) == value.numel() * value.element_size()


def _kept_bytes(plan: Plan | None) -> int:
    if plan is None:
        return 0
    kept = {decision.name for decision in plan.decisions if decision.action == "keep"}
    shared = Refusal.SHARES_WITH_OUTPUT
    own = (t for t in plan.saved.tensors if refusal_of(t.why_not) is not shared and t.op != INPUT)
    return sum(tensor.planned_bytes for tensor in own if tensor.name in kept)


def inner(graph: Graph, session: CompileSession | None) -> Callable[..., Any]:
    """The graph compiled by the configuration's inner compiler; without a session it is not planned."""
    config = graph.config
    if config.inner == "aot_eager":
        partitioner = None if session is None else OffloadPartitioner(session=session)
        return partitioning.aot_eager(graph.module, graph.inputs, partitioner)
    patches = inductor_patches(config)
    if session is None:
        return inductor.compile_graph(graph.module, graph.inputs, settings=patches)
    patches["custom_partitioner_fn"] = OffloadPartitioner(session=session)
    return inductor.compile_graph(graph.module, graph.inputs, settings=patches, inner_compile=compile_as_planned(session))


def traced_only(graph: Graph, partitioner: Any) -> Callable[..., Any]:
    """The graph traced and partitioned as compiling would, and run as it is."""
    if graph.config.inner == "aot_eager":
        return partitioning.aot_eager(graph.module, graph.inputs, partitioner)
    patches = {**inductor_patches(graph.config), "custom_partitioner_fn": partitioner, "force_disable_caches": True}
    return inductor.compile_graph(graph.module, graph.inputs, settings=patches, inner_compile=_run_as_it_is)


def _run_as_it_is(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    from functorch.compile import make_boxed_func

    return make_boxed_func(gm.forward)


def _planned_sizes(inputs: Sequence[Any]) -> list[int]:
    """The sizes that a graph for any size is planned for. Dynamo compiles the same graph once more for others where a guard
    wants that: with one key, the later plan would be the earlier graph's as well."""
    sizes = (size for value in inputs for size in (value.shape if isinstance(value, torch.Tensor) else (value,)))
    return [size_hint(size) for size in sizes if isinstance(size, torch.SymInt)]


def _take_stored(base: str, session: CompileSession) -> None:
    """The plan of a graph that torch's compile cache had; none where nothing was partitioned, as no output needs a gradient."""
    config, plan = session.config, registry.stored(base)
    if plan is None or plan.key != session.key:
        return
    session.plan = plan
    if registry.of_key(session.key) is None:
        registry.register(plan, runs=True, store=False)
    if not plan.variant:
        say(f"{plan.graph}: {plan.summary or summary_line(plan)} (from the compile cache)")
    if log.isEnabledFor(10):
        log.debug("%s", plan_table(plan))
    warn_of_surroundings(plan, config, inductor=config.inner == "inductor", alone=is_alone())


def _stored(base: str, limits: Limits) -> Plan | None:
    """The plan of an earlier compile, where it suits the host memory that is available now."""
    plan = registry.stored(base)
    if plan is None or plan.suits_host(limits.host_budget_bytes):
        return plan
    log.debug(
        "%s is planned again: its stored plan takes %s of host memory and was made within %s, now there are %s",
        plan.graph, *map(format_bytes, (plan.prediction.host_bytes, plan.host_budget_bytes, limits.host_budget_bytes)),
    )  # fmt: skip
    return None


def _link(base: str, plan: Plan, config: OffloadConfig, limits: Limits) -> None:
    """Store a plan for the next compile of its graph, and tell the runtime what it may do with it."""
    registry.remember(base, plan)
    if plan.transfers and asks_for_cuda_graphs(config) and plan.device.startswith("cuda"):
        captured.prepare(torch.device(plan.device))  # torch's compile cache may answer without compiling
    if may_link(config):
        window = config.max_inflight_bytes
        run = registry.run_plan(plan.key)
        run.link(window if isinstance(window, int) else None, budget_of(limits), downstream=is_one_of_many(config, limits))


def _make_room(plan: Plan, limits: Limits) -> None:
    """A graph that runs alone may need nearly all of the device's memory in one piece."""
    if not plan.variant:
        keep_all = plan.prediction.with_reserve(plan.prediction.keep_peak_bytes)
        map_by_pages_if_tight(torch.device(plan.device), keep_all, limits.device_budget_bytes, of_a_step=False)


def needs_gradient(inputs: Sequence[Any]) -> bool:
    """Whether a graph with these inputs is trained."""
    return torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs)


def _device_name(inputs: Sequence[Any]) -> str:
    device = next((value.device for value in inputs if isinstance(value, torch.Tensor) and value.device.type == "cuda"), None)
    return torch.cuda.get_device_name(device) if device is not None else "cpu"


def _fragment(gm: GraphModule, config: OffloadConfig) -> Fragment:
    """Whether this graph is only part of the user's compiled function, so that a pattern may match in another part."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    broken = reason is None or getattr(reason, "graph_break", False)
    frame = dynamo.compiling()
    whole = not broken and (frame is None or not is_part(frame))
    return fragment_of(frame.running if frame is not None else None, config.digest(), whole=whole)


def inductor_patches(config: OffloadConfig) -> dict[str, Any]:
    """Inductor's settings of a configuration."""
    patches: dict[str, Any] = {}
    if config.mode and config.mode != "default":
        patches.update(inductor.options_of_mode(config.mode))
    patches.update(dict(config.inductor_options))
    if patches.get("custom_partitioner_fn") is not None:
        raise ConfigError(
            'options={"custom_partitioner_fn": ...} beside backend="graphoffload": the backend is a partitioner itself. '
            'Use one of them; graphoffload inside Inductor is torch.compile(m, options={"custom_partitioner_fn": '
            "graphoffload.OffloadPartitioner(config)})."
        )
    return patches
