"""The torch.compile backend: our partitioner, followed by Inductor (or no compiler at all).

    Dynamo ─▶ OffloadBackend ─▶ compile_fx / aot_autograd ─▶ OffloadPartitioner ─▶ forward and backward graph ─▶ inner compiler

The key that identifies a plan is computed here, from Dynamo's graph, since torch asks for it before it traces the joint graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.fx import GraphModule

from graphoffload.compiler.cache_key import graph_key
from graphoffload.compiler.device_limits import resolve_limits
from graphoffload.compiler.inner_compile import compile_as_planned
from graphoffload.compiler.module_names import is_part, name_modules
from graphoffload.compiler.partitioner import OffloadPartitioner
from graphoffload.compiler.session import CompileSession, Purpose, new_key
from graphoffload.errors import ConfigError, FallbackWarning, warn
from graphoffload.facts.limits import Limits
from graphoffload.facts.plan import Plan
from graphoffload.log import log, say
from graphoffload.monitor.budget_check import watch_budget
from graphoffload.monitor.caveats import asks_for_cuda_graphs, warn_of_surroundings
from graphoffload.monitor.not_compiled import taken_in
from graphoffload.monitor.out_of_memory import with_note
from graphoffload.monitor.pattern_coverage import Fragment, fragment_of
from graphoffload.monitor.shared_budget import budget_of, count_calls, is_one_of_many, may_link, where_it_runs
from graphoffload.options.config import OffloadConfig, split_options
from graphoffload.report.offload_report import plan_table, summary_line
from graphoffload.runtime import captured, registry
from graphoffload.runtime.pinned.preallocation import allow
from graphoffload.torch_internals import dynamo, partitioning, releases
from graphoffload.units import format_bytes

_graphs = itertools.count()


class OffloadBackend:
    """`torch.compile(model, backend=OffloadBackend(config))`. Equal configurations make equal backends."""

    def __init__(self, config: OffloadConfig | None = None, **fields: Any) -> None:
        """Take a configuration, or its fields (sizes as in OffloadConfig); the environment fills fields that are not given."""
        if config is not None and fields:
            raise ConfigError(f"OffloadBackend takes a config or fields, not both; got a config and {sorted(fields)}.")
        if config is not None and not isinstance(config, OffloadConfig):
            raise ConfigError(
                f"OffloadBackend got config={config!r}, a {type(config).__name__}; give an OffloadConfig, or fields."
            )
        self.config = config if config is not None else OffloadConfig.from_options(fields)
        self.__name__ = "graphoffload"

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        """Compile one Dynamo graph. `options` and `mode` of torch.compile change this backend's configuration."""
        return compile_graph(gm, example_inputs, _checked(self.configured, **kwargs), planned=self._planned)

    def configured(self, *, options: Mapping[str, Any] | None = None, mode: str | None = None) -> OffloadConfig:
        """This backend's configuration under `options` and `mode` of torch.compile."""
        config = self.config
        if options:
            own, inner = split_options(options)
            config = config.with_options(**own)
            config = config.with_options(inductor_options=(*config.inductor_options, *inner.items()))
        return config.with_options(mode=mode) if mode else config

    def _planned(self, key: str) -> None:
        """Called with the key of the plan of the latest compile; a hook for tools that measure it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OffloadBackend) and self.config == other.config

    def __hash__(self) -> int:
        return hash(self.config)

    def __repr__(self) -> str:
        return f"OffloadBackend({self.config!r})"


def graphoffload(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """The backend by name: `torch.compile(model, backend="graphoffload", options={...})`."""
    return compile_graph(gm, example_inputs, _checked(configured, options=options, mode=mode))


def _checked(configure: Callable[..., OffloadConfig], **given: Any) -> OffloadConfig:
    """A configuration from torch.compile's options, which torch stores until it has a first graph to compile.

    Raises:
        ConfigError: as `configure`; it reaches the user as it is.
    """
    try:
        return configure(**given)
    except ConfigError as error:
        late = f"{error} (torch.compile hands options on with a first graph; OffloadBackend and offload() check them at once.)"
        raise dynamo.as_it_is(ConfigError(late)) from None


def configured(*, options: Mapping[str, Any] | None = None, mode: str | None = None) -> OffloadConfig:
    """The configuration of the backend by name, from `options` and `mode` of torch.compile and the environment."""
    config = OffloadConfig.from_options(options)
    return config.with_options(mode=mode) if mode else config


def compile_graph(
    gm: GraphModule, example_inputs: Sequence[Any], config: OffloadConfig, *, planned: Callable[[str], None] | None = None
) -> Callable[..., Any]:
    """Compile one Dynamo graph with a configuration; a graph that needs no gradient goes to the inner compiler unchanged.

    Args:
        planned: called with the key of the plan, if there is one, whether it was made now or came from a compile cache.
    """
    releases.check_torch()
    _warn_of_fallbacks()
    captured.collect()
    taken_in((*example_inputs, *gm.parameters()), config)
    if not _needs_gradient(example_inputs):
        log.debug("no gradient is needed: a graph of %d nodes goes to %s untouched", len(gm.graph.nodes), config.inner)
        return _inner(gm, example_inputs, config, None)
    base, session = _session_to_run(gm, example_inputs, config)
    allow(session.limits.host_budget_bytes)
    compiled = _inner(gm, example_inputs, config, session)
    if session.plan is None:
        _take_stored(base, session)
    key, limits = session.key, session.limits
    if session.plan is not None:
        _link(base, session.plan, config, limits)
        if planned is not None:
            planned(key)
    if asks_for_cuda_graphs(config):
        captured.own(key, compiled)
    return count_calls(watch_budget(with_note(compiled, key), key, config, limits), key, config, limits)


def plan_graph(gm: GraphModule, example_inputs: Sequence[Any], config: OffloadConfig) -> tuple[Plan | None, Callable[..., Any]]:
    """Plan one Dynamo graph as compiling would; returns the plan (None: no gradient) and a callable that runs the graphs
    uncompiled."""
    if not _needs_gradient(example_inputs):
        return None, gm.forward
    name_modules(gm)
    key = new_key(graph_key(gm, config))
    session = _session(gm, example_inputs, config, _limits(gm, example_inputs, config), key, "explain")
    partitioner = OffloadPartitioner(session=session)
    if config.inner == "aot_eager":
        compiled: Any = _aot_eager(gm, example_inputs, partitioner)
    else:
        from torch._inductor.compile_fx import compile_fx

        patches = {**_inductor_patches(config), "custom_partitioner_fn": partitioner, "force_disable_caches": True}
        compiled = compile_fx(gm, list(example_inputs), inner_compile=_run_as_it_is, config_patches=patches)
    return session.plan, compiled


def _limits(gm: GraphModule, example_inputs: Sequence[Any], config: OffloadConfig) -> Limits:
    """What this graph may use: its inputs here are those that the user gave."""
    limits = resolve_limits(config, (*example_inputs, *gm.parameters(), *gm.buffers()))
    return where_it_runs(limits, gm, example_inputs, config)


def _session_to_run(gm: GraphModule, example_inputs: Sequence[Any], config: OffloadConfig) -> tuple[str, CompileSession]:
    """What the plan is for, as a key that other processes find it by, and the session that makes it."""
    name_modules(gm)
    limits = _limits(gm, example_inputs, config)
    base = graph_key(gm, config, extra=f"{limits.quantised()} {_device_name(example_inputs)}")
    known = None if config.dump_dir else _stored(base, limits)  # torch's compile cache has no graphs to dump
    key = known.key if known is not None else new_key(base)
    return base, _session(gm, example_inputs, config, limits, key, "run")


def _session(
    gm: GraphModule, example_inputs: Sequence[Any], config: OffloadConfig, limits: Limits, key: str, purpose: Purpose
) -> CompileSession:
    return CompileSession(
        config,
        limits,
        key,
        f"graph{next(_graphs)}",
        purpose,
        _fragment(gm, config),
        partitioning.parameter_positions(gm.graph, example_inputs),
    )


def _run_as_it_is(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    from functorch.compile import make_boxed_func

    return make_boxed_func(gm.forward)


def _take_stored(base: str, session: CompileSession) -> None:
    """The plan of a graph that torch's compile cache had; none where nothing was partitioned, as no output needs a gradient."""
    config, plan = session.config, registry.stored(base)
    if plan is None or plan.key != session.key:
        return
    session.plan = plan
    if registry.of_key(session.key) is None:
        registry.register(plan, runs=True, store=False)
    say(f"{plan.graph}: {plan.summary or summary_line(plan)} (from the compile cache)")
    if log.isEnabledFor(10):
        log.debug("%s", plan_table(plan))
    warn_of_surroundings(plan, config, inductor=config.inner == "inductor")


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


def _needs_gradient(inputs: Sequence[Any]) -> bool:
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


def _inner(
    gm: GraphModule, example_inputs: Sequence[Any], config: OffloadConfig, session: CompileSession | None
) -> Callable[..., Any]:
    if config.inner == "aot_eager":
        return _aot_eager(gm, example_inputs, None if session is None else OffloadPartitioner(session=session))
    from torch._inductor.compile_fx import compile_fx

    patches = _inductor_patches(config)
    if session is None:
        return cast("Callable[..., Any]", compile_fx(gm, list(example_inputs), config_patches=patches))
    patches["custom_partitioner_fn"] = OffloadPartitioner(session=session)
    ordered = compile_fx(gm, list(example_inputs), inner_compile=compile_as_planned(session), config_patches=patches)
    return cast("Callable[..., Any]", ordered)


def _inductor_patches(config: OffloadConfig) -> dict[str, Any]:
    patches: dict[str, Any] = {}
    if config.mode and config.mode != "default":
        patches.update(torch._inductor.list_mode_options(config.mode))
    patches.update(dict(config.inductor_options))
    if patches.get("custom_partitioner_fn") is not None:
        raise ConfigError(
            'options={"custom_partitioner_fn": ...} beside backend="graphoffload": the backend is a partitioner itself. '
            'Use one of them; graphoffload inside Inductor is torch.compile(m, options={"custom_partitioner_fn": '
            "graphoffload.OffloadPartitioner(config)})."
        )
    return patches


def _aot_eager(gm: GraphModule, example_inputs: Sequence[Any], partitioner: OffloadPartitioner | None) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    chosen = partitioner if partitioner is not None else min_cut_rematerialization_partition
    backend = aot_autograd(fw_compiler=boxed_nop, partition_fn=chosen, keep_inference_input_mutations=True)
    compiled: Callable[..., Any] = backend(gm, list(example_inputs))
    return compiled


def _warn_of_fallbacks() -> None:
    if torch._dynamo.config.suppress_errors:
        warn(
            FallbackWarning,
            "torch._dynamo.config.suppress_errors is on: an error in planning would silently run the model in eager, "
            "with every activation kept. Set it to False to see errors.",
            stacklevel=4,
        )
    compiling = torch._guards.CompileContext.current_compile_id()
    limit = torch._dynamo.config.recompile_limit
    if compiling is not None and (compiling.frame_compile_id or 0) + 1 == limit > 1:
        warn(
            FallbackWarning,
            f"this is compile {limit} of the same code, and torch._dynamo.config.recompile_limit is {limit}: should it be "
            "compiled once more, torch runs it in eager, with every activation kept. TORCH_LOGS=recompiles says what makes "
            "torch compile again; raise the limit if there is a reason for it.",
            stacklevel=4,
        )
