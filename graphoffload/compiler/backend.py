"""The torch.compile backend: our partitioner, followed by Inductor (or no compiler at all).

    Dynamo ─▶ OffloadBackend ─▶ compile_fx / aot_autograd ─▶ OffloadPartitioner ─▶ forward and backward graph ─▶ inner compiler

The key that identifies a plan is computed here, from Dynamo's graph, since torch asks for it before it traces the joint graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule

from graphoffload.compiler.cache_key import graph_key
from graphoffload.compiler.compile_variant import (
    Compiled,
    Graph,
    compile_by,
    dynamos_graph,
    inner,
    needs_gradient,
    traced_only,
    untrained,
)
from graphoffload.compiler.device_limits import device_of
from graphoffload.compiler.dispatch import dispatcher, is_one_of_several, may_join, turn_to_learn
from graphoffload.compiler.link import measure_with_ranks
from graphoffload.compiler.meeting import meet, tell_of_parts
from graphoffload.compiler.override import asked_now
from graphoffload.compiler.partitioner import OffloadPartitioner
from graphoffload.compiler.resets import RESETS
from graphoffload.compiler.session import new_key
from graphoffload.compiler.slices import first_of_several, made_or_in_slices
from graphoffload.errors import BudgetError, ConfigError, FallbackWarning, warn
from graphoffload.facts.limits import Limits
from graphoffload.facts.plan import Plan
from graphoffload.log import log
from graphoffload.monitor.budget_check import watch_budget
from graphoffload.monitor.named_backend import got_a_graph
from graphoffload.monitor.not_compiled import taken_in
from graphoffload.monitor.optimizer_peak import watch_optimizers
from graphoffload.monitor.outer_hooks import warn_of_outer_hooks, warn_of_parts
from graphoffload.monitor.shared_budget import count_calls
from graphoffload.options.config import OffloadConfig, split_options
from graphoffload.runtime import captured
from graphoffload.torch_internals import dynamo, releases


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
    dynamo.tell_of_resets(RESETS)
    got_a_graph()
    taken_in((*example_inputs, *gm.parameters()), config)
    if not needs_gradient(example_inputs):
        log.debug("no gradient is needed: a graph of %d nodes goes to %s untouched", len(gm.graph.nodes), config.inner)
        return inner(untrained(gm, example_inputs, config), None)
    warn_of_outer_hooks()
    device = device_of((*example_inputs, *gm.parameters()))
    measure_with_ranks(config.hardware, device)
    graph = dynamos_graph(gm, example_inputs, config)
    joins = may_join(graph)
    again = dynamo.retraceable(gm) if joins else None
    if again is not None:
        graph = turn_to_learn(graph)
    if joins and dynamo.ddp_part() == 1:
        warn_of_parts()
    alone = again is None or not is_one_of_several(graph)
    if alone:
        now = asked_now(config)
        if now != config:  # what set_budget asked for holds for a new shape as well
            graph, config = dynamos_graph(gm, example_inputs, now, graph.name), now
            graph = graph if again is None else turn_to_learn(graph)
        graph = replace(graph, limits=_met(graph))
    else:
        tell_of_parts()
    if config.has_budget and graph.limits.device_budget_bytes is not None:
        watch_optimizers(device, graph.limits.device_budget_bytes, config.digest())
    compiled = _compiled(graph, again, alone)
    if compiled.plan is not None and planned is not None:
        planned(compiled.key)
    if again is not None and compiled.plan is not None:
        if not compiled.plan.variant:  # a step watches its budget itself
            compiled = replace(compiled, function=watch_budget(compiled.function, compiled.key, config, graph.limits))
        return dispatcher(graph, again, compiled)
    watched = watch_budget(compiled.function, compiled.key, config, graph.limits)
    return count_calls(watched, compiled.key, config, graph.limits)


def _compiled(graph: Graph, again: dynamo.Retraceable | None, alone: bool) -> Compiled:
    """A graph as it is compiled first: by a plan of its own, or as one of several."""
    if again is None:
        return compile_by(graph, None)
    if not alone:
        return first_of_several(graph, again.copy)
    if not graph.limits.downstream:
        return made_or_in_slices(graph, again.copy, lambda graph: compile_by(graph, None))
    try:
        return compile_by(replace(graph, has_resort=True), None)
    except BudgetError:
        # One block called again and again has all parameters of the model, and is no whole model all the same.
        return first_of_several(replace(graph, module=again.copy()), again.copy)


def _met(graph: Graph) -> Limits:
    """The limits of a graph that is planned alone, with what all ranks have.

    Raises:
        ConfigError: ranks have different options or versions; it reaches the user as it is.
    """
    try:
        return meet(graph.limits, graph.config, graph.module)
    except ConfigError as error:
        raise dynamo.as_it_is(error) from None


def plan_graph(
    gm: GraphModule, example_inputs: Sequence[Any], config: OffloadConfig, check: Callable[[Graph], None] | None = None
) -> tuple[Plan | None, Callable[..., Any]]:
    """Plan one Dynamo graph as compiling would; returns the plan (None: no gradient) and a callable that runs the graphs
    uncompiled. check: called with the graph before anything is planned."""
    if not needs_gradient(example_inputs):
        return None, gm.forward
    graph = dynamos_graph(gm, example_inputs, config)
    if check is not None:
        check(graph)
    again = dynamo.retraceable(gm)
    if again is not None and may_join(graph):
        graph = turn_to_learn(graph)

    def planned(graph: Graph) -> tuple[Plan | None, Callable[..., Any]]:
        session = graph.session(new_key(graph_key(graph.module, config)), "explain", None)
        compiled = traced_only(graph, OffloadPartitioner(session=session))
        return session.plan, compiled

    return planned(graph) if again is None else made_or_in_slices(graph, again.copy, planned)


def _warn_of_fallbacks() -> None:
    if dynamo.config.suppress_errors:
        warn(
            FallbackWarning,
            "torch._dynamo.config.suppress_errors is on: an error in planning would silently run the model in eager, "
            "with every activation kept. Set it to False to see errors.",
        )
    limit = dynamo.config.recompile_limit
    if dynamo.compile_number() == limit > 1:
        warn(
            FallbackWarning,
            f"this is compile {limit} of the same code, and torch._dynamo.config.recompile_limit is {limit}: should it be "
            "compiled once more, torch runs it in eager, with every activation kept. TORCH_LOGS=recompiles says what makes "
            "torch compile again; raise the limit if there is a reason for it.",
        )
