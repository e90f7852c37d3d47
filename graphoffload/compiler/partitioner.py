"""The partitioner object that torch calls with a joint graph.

It holds the configuration, the limits, the plan's key and the graph's name, and nothing else: Inductor copies and pickles it,
and puts its `uuid()` into its cache key.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import GraphModule

from graphoffload.compiler.cache_key import graph_key
from graphoffload.compiler.device_limits import resolve_limits
from graphoffload.compiler.module_names import name_modules
from graphoffload.compiler.pipeline import Rewritten, rewrite
from graphoffload.compiler.trial import Request
from graphoffload.errors import ConfigError, FallbackWarning, NotOffloadedWarning, warn
from graphoffload.facts.limits import Limits
from graphoffload.hardware.measurement import resolve_hardware
from graphoffload.log import log, say
from graphoffload.monitor.caveats import asks_for_cuda_graphs, host_time_note, warn_of_surroundings
from graphoffload.monitor.pattern_coverage import WHOLE, Fragment
from graphoffload.options.config import OffloadConfig
from graphoffload.passes.prepare_joint import copy_graph, tagged_copy
from graphoffload.planner.predicted import Predicted
from graphoffload.report import predictions
from graphoffload.report.dump import write_dump
from graphoffload.report.offload_report import plan_table, summary_line
from graphoffload.runtime import registry
from graphoffload.torch_internals import checkpoint_tags, partitioning, releases


class OffloadPartitioner(CustomPartitionerFn):
    """Partitions AOTAutograd's joint graph: torch's own min-cut, then keep, recompute or offload for every saved activation.

    As an Inductor option, `torch.compile(m, options={"custom_partitioner_fn": OffloadPartitioner(config)})`, it needs
    `"reorder_for_peak_memory": False` beside it, and says so. torch then asks for its `uuid()` before it has seen the graph,
    so it cannot tell two module namings apart and is never served from a compile cache; the backend can, and is.

    Args:
        config: what the user asks for; None: what the environment says, else what fits the device.
        key: identity of graph, names, annotations and configuration together, where the caller knows it.
        limits: what the process may use, where the caller has seen the graph's real inputs; None: as the joint graph's, which
            are fake, tell.
        parameters: which of the graph's inputs, by position, are parameters; None: as Dynamo says. What is no parameter is
            the caller's memory, which backward reads only where torch alone would.
    """

    def __init__(
        self,
        config: OffloadConfig | None = None,
        *,
        key: str | None = None,
        name: str = "",
        fragment: Fragment = WHOLE,
        limits: Limits | None = None,
        parameters: tuple[int, ...] | None = None,
    ) -> None:
        if config is not None and not isinstance(config, OffloadConfig):
            raise ConfigError(f"OffloadPartitioner got config={config!r}, a {type(config).__name__}; give an OffloadConfig.")
        self.config = config if config is not None else OffloadConfig.from_options({})
        self.key = key
        self.name = name
        self.fragment = fragment
        self.limits = limits
        self.parameters = parameters

    def __getstate__(self) -> dict[str, Any]:
        """What torch's cache key sees: not the name, which numbers the graphs of a process, nor the model's number, nor bytes
        that differ from run to run, but what decides the plan."""
        fragment = replace(self.fragment, model=0)
        limits = None if self.limits is None else self.limits.quantised()
        graph = {"key": self.key, "name": "", "fragment": fragment, "limits": limits, "parameters": self.parameters}
        return {"config": self.config, **graph}

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadPartitioner:
        """Inductor copies its configuration; a copy is this partitioner, name included."""
        return self

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        """Forward and backward graph of a joint graph; `kwargs` are those of torch's own partitioners."""
        releases.check_torch()
        _check_torch_settings()
        if not joint_inputs and gm.graph.find_nodes(op="placeholder"):
            return _partition_region(gm, joint_inputs, kwargs)
        limits = self.limits
        if limits is None:
            limits = resolve_limits(self.config, _inputs(gm), partitioning.trained_inputs(gm.graph, kwargs))
        if self.key is None:
            name_modules(gm)  # no backend has done so
        key = self.key or graph_key(gm, self.config)
        request = Request(
            gm,
            joint_inputs,
            kwargs,
            self.config,
            key,
            self.name or f"graph{len(registry.last_plans())}",
            limits,
            self.fragment,
            partitioning.parameters_among(gm.graph, self.parameters),
        )
        rewritten = rewrite(request)
        inductor = kwargs.get("compiler") == "inductor"
        if note := host_time_note(rewritten.plan, self.config, rewritten.kernels, inductor=inductor):
            rewritten = replace(rewritten, plan=replace(rewritten.plan, notes=(*rewritten.plan.notes, note)))
        if rewritten.plan.transfers and self.key is None and inductor:
            _check_inductor_settings(self.config)
        warn_of_surroundings(rewritten.plan, self.config, inductor=inductor)
        part = limits.downstream or bool(self.fragment)
        _announce(replace(rewritten, plan=replace(rewritten.plan, part=part)), gm, self.config, limits)
        return rewritten.graphs.forward, rewritten.graphs.backward

    def uuid(self) -> str:
        """Part of torch's cache key: the plan's key, or, where that is unknown, a value that is never repeated."""
        return self.key or secrets.token_hex(16)


def _partition_region(
    joint: GraphModule, joint_inputs: Sequence[object], kwargs: dict[str, Any]
) -> tuple[GraphModule, GraphModule]:
    """A region (analysis/regions.py), which torch gives without inputs, as torch partitions it; names tags of more."""
    tagged = [node for node in joint.graph.nodes if checkpoint_tags.tag_of(node.meta) == "must_offload"]
    if tagged:
        warn(
            NotOffloadedWarning,
            f"{len(tagged)} operations inside a torch.compiler.nested_compile_region are tagged MUST_CPU_OFFLOAD, the first is "
            f"{tagged[0].name!r}. torch partitions a region by itself: they are saved, and whether they are offloaded is "
            "decided with the graph around the region. Ask for that by policy, or take the region's decorator off.",
        )
    return partitioning.min_cut(tagged_copy(joint, relax=False, notes=[]), joint_inputs, kwargs)


def _inputs(joint: GraphModule) -> Iterator[object]:
    """Values of the model's inputs; gradients of its outputs are placeholders as well, but nothing that lives throughout."""
    for node in joint.graph.find_nodes(op="placeholder"):
        if not str(node.target).startswith("tangents"):
            yield node.meta.get("val")


def partition_fn(gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
    """For `functorch.compile.aot_module(m, ..., partition_fn=graphoffload.partition_fn)`; configured by the environment."""
    if "config" in kwargs:
        raise ConfigError(
            "partition_fn is configured by the environment. Give partition_fn=OffloadPartitioner(config) instead."
        )
    config = OffloadConfig.from_options({"inner": "aot_eager"})
    return OffloadPartitioner(config)(gm, joint_inputs, **kwargs)


def _announce(rewritten: Rewritten, joint: GraphModule, config: OffloadConfig, limits: Limits) -> None:
    hardware = resolve_hardware(config.hardware, rewritten.plan.device)
    device_bytes = None if hardware.source == "cpu" else hardware.memory_bytes
    budget_bytes = None if config.device_budget == "auto" else limits.device_budget_bytes
    summary = summary_line(
        rewritten.plan,
        device_bytes=device_bytes,
        budget_bytes=budget_bytes,
        reserved_for="optimizer state" if config.reserve == "auto" else "",
        hint=rewritten.hint,
    )
    named = "" if config.hardware == "measure" or hardware.source == "cpu" else hardware.name
    plan = replace(rewritten.plan, summary=summary, hardware=named)
    predicted = _predicted(rewritten, limits, hardware.name, config.max_slowdown)
    registry.register(plan)
    predictions.remember(plan.key, predicted)
    say(f"{plan.graph}: {plan.summary}")
    if log.isEnabledFor(10):
        log.debug("%s", plan_table(plan))
    if config.dump_dir and rewritten.before is not None:
        write_dump(
            config.dump_dir,
            plan,
            joint=copy_graph(joint),
            forward_before=rewritten.before.forward,
            backward_before=rewritten.before.backward,
            forward=rewritten.graphs.forward,
            backward=rewritten.graphs.backward,
            predicted=predicted,
        )


def _predicted(rewritten: Rewritten, limits: Limits, hardware: str, slowdown: float | None) -> Predicted:
    budget = limits.device_budget_bytes if slowdown is None else None  # what is planned for a slowdown is to meet no budget
    limit_bytes = None if budget is None else max(0, budget - limits.reserve_bytes)
    candidates = {candidate.name: candidate for candidate in rewritten.candidates}
    return Predicted(rewritten.timeline, rewritten.keep_timeline, limit_bytes, hardware, candidates)


def _check_torch_settings() -> None:
    budget = partitioning.torch_memory_budget()
    if budget != 1.0:
        warn(
            FallbackWarning,
            f"torch._functorch.config.activation_memory_budget={budget} is ignored under graphoffload (pinned to 1.0): "
            "it limits the sum of saved bytes, not the peak, and draws dropout anew in recomputation. "
            "Use device_budget or max_slowdown.",
            stacklevel=5,
        )


def _check_inductor_settings(config: OffloadConfig) -> None:
    if asks_for_cuda_graphs(config) and inductor_config.triton.reorder_for_reducing_graph_partitions:
        warn(
            FallbackWarning,
            "torch._inductor.config.triton.reorder_for_reducing_graph_partitions is on: with CUDA graphs it moves every reload "
            'to the start of backward, so that nothing is saved. Add "triton.reorder_for_reducing_graph_partitions": False to '
            'options, or use backend="graphoffload", which does.',
            stacklevel=5,
        )
    if inductor_config.reorder_for_peak_memory:
        warn(
            FallbackWarning,
            "torch._inductor.config.reorder_for_peak_memory is on: it moves every release next to its offload and every "
            'reload next to its wait, so that no copy hides behind compute. Add "reorder_for_peak_memory": False to '
            'options, or use backend="graphoffload", which does.',
            stacklevel=5,
        )
