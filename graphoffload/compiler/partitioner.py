"""The partitioner object that torch calls with a joint graph.

It holds the configuration, the limits, the plan's key and the graph's name, and nothing else: Inductor copies and pickles it,
and puts its `uuid()` into its cache key.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule

from graphoffload.compiler.link import hardware_of
from graphoffload.compiler.meeting import is_alone
from graphoffload.compiler.pipeline import Rewritten, rewrite
from graphoffload.compiler.request import Request
from graphoffload.compiler.session import CompileSession, session_of_joint
from graphoffload.errors import ConfigError, FallbackWarning, NotOffloadedWarning, warn
from graphoffload.facts.limits import Limits
from graphoffload.facts.plan import Plan
from graphoffload.log import log, say
from graphoffload.monitor.caveats import asks_for_cuda_graphs, host_time_note, warn_of_surroundings
from graphoffload.options.config import OffloadConfig
from graphoffload.passes.by_shape import view_by_shape
from graphoffload.passes.prepare_joint import copy_graph, tagged_copy
from graphoffload.planner.predicted import Predicted
from graphoffload.report import predictions
from graphoffload.report.dump import write_dump
from graphoffload.report.offload_report import plan_table, summary_line
from graphoffload.torch_internals import checkpoint_tags, partitioning, releases
from graphoffload.torch_internals.inductor import config as inductor_config
from graphoffload.torch_internals.partitioning import CustomPartitionerFn


class OffloadPartitioner(CustomPartitionerFn):
    """Partitions AOTAutograd's joint graph: torch's own min-cut, then keep, recompute or offload for every saved activation.

    As an Inductor option, `torch.compile(m, options={"custom_partitioner_fn": OffloadPartitioner(config)})`, it also needs the
    option `"reorder_for_peak_memory": False`, and raises without it. torch then asks for its `uuid()` before it has seen the
    graph. So it cannot tell two module namings apart, and a compile cache never answers for it; for the backend it can.

    Args:
        config: what the user asks for; None: what the environment says, else what fits the device.
        key, name: as in CompileSession, where the caller knows them.
        session: made by a backend, which has seen the graph's real inputs; None: each call makes one from its joint graph.
    """

    def __init__(
        self,
        config: OffloadConfig | None = None,
        *,
        key: str | None = None,
        name: str = "",
        session: CompileSession | None = None,
    ) -> None:
        if config is not None and not isinstance(config, OffloadConfig):
            raise ConfigError(f"OffloadPartitioner got config={config!r}, a {type(config).__name__}; give an OffloadConfig.")
        self.session = session
        if session is not None:
            config, key, name = session.config, session.key, session.name
        self.config = config if config is not None else OffloadConfig.from_options({})
        self.key = key
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        """What torch's cache key sees; it is never loaded to partition with."""
        identity = (self.config, self.key) if self.session is None else self.session.identity()
        return _without_session, identity

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadPartitioner:
        """Inductor copies its settings; a copy is this partitioner, session included."""
        return self

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        """Forward and backward graph of a joint graph; `kwargs` are those of torch's own partitioners."""
        releases.check_torch()
        _check_torch_settings()
        view_by_shape(gm)
        if not joint_inputs and gm.graph.find_nodes(op="placeholder"):
            return _partition_region(gm, joint_inputs, kwargs)
        session = self.session or session_of_joint(self.config, self.key, self.name, gm, kwargs)
        parameters = partitioning.must_be_parameters(gm.graph, session.parameters)
        rewritten = rewrite(Request(session, gm, joint_inputs, kwargs, session.goal, parameters))
        inductor = kwargs.get("compiler") == "inductor"
        notes = rewritten.plan.notes
        if note := host_time_note(rewritten.plan, self.config, rewritten.kernels, inductor=inductor):
            notes = (*notes, note)
        rewritten = replace(rewritten, plan=replace(rewritten.plan, notes=notes, part=session.is_part))
        if rewritten.plan.transfers and self.key is None and inductor:
            _check_inductor_settings(self.config)
        warn_of_surroundings(rewritten.plan, self.config, inductor=inductor, alone=is_alone())
        _announce(rewritten, gm, session)
        return rewritten.graphs.forward, rewritten.graphs.backward

    def uuid(self) -> str:
        """Part of torch's cache key: the plan's key, or, where that is unknown, a value that is never repeated."""
        return self.key or secrets.token_hex(16)


def _partition_region(
    joint: GraphModule, joint_inputs: Sequence[object], kwargs: dict[str, Any]
) -> tuple[GraphModule, GraphModule]:
    """Partition a region (analysis/regions.py), which torch passes without inputs, as torch does; warn about offload tags."""
    tagged = [node for node in joint.graph.nodes if checkpoint_tags.tag_of(node.meta) == "must_offload"]
    if tagged:
        warn(
            NotOffloadedWarning,
            f"{len(tagged)} operations inside a torch.compiler.nested_compile_region are tagged MUST_CPU_OFFLOAD, the first is "
            f"{tagged[0].name!r}. torch partitions a region by itself: they are saved, and whether they are offloaded is "
            "decided with the graph around the region. Ask for that by policy, or take the region's decorator off.",
        )
    return partitioning.min_cut(tagged_copy(joint, relax=False, notes=[]), joint_inputs, kwargs)


def _without_session(config: OffloadConfig, key: str | None, *_identity: object) -> OffloadPartitioner:
    return OffloadPartitioner(config, key=key)


def partition_fn(gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
    """For `functorch.compile.aot_module(m, ..., partition_fn=graphoffload.partition_fn)`; configured by the environment."""
    if "config" in kwargs:
        raise ConfigError(
            "partition_fn is configured by the environment. Give partition_fn=OffloadPartitioner(config) instead."
        )
    config = OffloadConfig.from_options({"inner": "aot_eager"})
    return OffloadPartitioner(config)(gm, joint_inputs, **kwargs)


def summary_of(plan: Plan, config: OffloadConfig, limits: Limits) -> str:
    """The one line about a plan that was made for a configuration."""
    hardware = hardware_of(config.hardware, plan.device)
    return summary_line(
        plan,
        device_bytes=None if hardware.source == "cpu" else hardware.memory_bytes,
        budget_bytes=limits.device_budget_bytes if config.has_budget else None,
        reserved_for="optimizer state" if config.reserve == "auto" else "",
        hint=plan.hint,
    )


def _announce(rewritten: Rewritten, joint: GraphModule, session: CompileSession) -> None:
    """Say the plan's one line, keep what it predicts, and write the dump that was asked for."""
    config = session.config
    hardware = hardware_of(config.hardware, rewritten.plan.device)
    summary = summary_of(replace(rewritten.plan, hint=rewritten.hint), config, session.limits)
    named = "" if config.hardware == "measure" or hardware.source == "cpu" else hardware.name
    plan = replace(
        rewritten.plan,
        summary=summary,
        hint=rewritten.hint,
        hardware=named,
        host_budget_bytes=session.limits.host_budget_bytes,
    )
    predicted = _predicted(rewritten, session, hardware.name)
    session.finish(plan)
    predictions.remember(plan.key, predicted)
    if not plan.variant and not plan.is_tiny:  # a variant's line is that of its step
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


def _predicted(rewritten: Rewritten, session: CompileSession, hardware: str) -> Predicted:
    budget = session.goal.device_budget_bytes
    limit_bytes = None if budget is None else max(0, budget - session.limits.reserve_bytes)
    candidates = {candidate.name: candidate for candidate in rewritten.candidates}
    return Predicted(
        rewritten.timeline,
        rewritten.keep_timeline,
        limit_bytes,
        hardware,
        candidates,
        rewritten.layers,
        rewritten.plan.turn_bytes,
    )


def _check_torch_settings() -> None:
    budget = partitioning.torch_memory_budget()
    if budget != 1.0:
        warn(
            FallbackWarning,
            f"torch._functorch.config.activation_memory_budget={budget} is ignored under graphoffload (pinned to 1.0): "
            "it limits the sum of saved bytes, not the peak, and draws dropout anew in recomputation. "
            "Use device_budget or max_slowdown.",
        )


def _check_inductor_settings(config: OffloadConfig) -> None:
    if asks_for_cuda_graphs(config) and inductor_config.triton.reorder_for_reducing_graph_partitions:
        warn(
            FallbackWarning,
            "torch._inductor.config.triton.reorder_for_reducing_graph_partitions is on: with CUDA graphs it moves every reload "
            'to the start of backward, so that nothing is saved. Add "triton.reorder_for_reducing_graph_partitions": False to '
            'options, or use backend="graphoffload", which does.',
        )
    if inductor_config.reorder_for_peak_memory:
        warn(
            FallbackWarning,
            "torch._inductor.config.reorder_for_peak_memory is on: it moves every release next to its offload and every "
            'reload next to its wait, so that no copy overlaps with compute. Add "reorder_for_peak_memory": False to '
            'options, or use backend="graphoffload", which does.',
        )
