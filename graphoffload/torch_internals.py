"""What differs between torch releases, and nothing else. Tested: 2.11 to 2.13."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
)
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from graphoffload.errors import GraphOffloadError, UntestedTorchWarning, warn
from graphoffload.facts.saved import Tag

OLDEST_TESTED = (2, 11)
NEWEST_TESTED = (2, 13)

TAGS: dict[CheckpointPolicy, Tag] = {
    CheckpointPolicy.MUST_SAVE: "must_save",
    CheckpointPolicy.PREFER_SAVE: "prefer_save",
    CheckpointPolicy.MUST_RECOMPUTE: "must_recompute",
    CheckpointPolicy.PREFER_RECOMPUTE: "prefer_recompute",
    CheckpointPolicy.MUST_CPU_OFFLOAD: "must_offload",
    CheckpointPolicy.PREFER_CPU_OFFLOAD: "prefer_offload",
}

_checked = False


def torch_version() -> str:
    """The running torch, such as "2.13.0+cpu"."""
    return str(torch.__version__)


def check_torch() -> None:
    """Warn once about a torch that graphoffload was not tested with; refuse one that is too old.

    Raises:
        GraphOffloadError: torch is older than 2.11.
    """
    global _checked
    if _checked:
        return
    release = torch_version().split("+")[0].split(".")
    version = (int(release[0]), int(release[1]))
    if version < OLDEST_TESTED:
        raise GraphOffloadError(
            f"torch {torch_version()} is too old for graphoffload: it needs 2.11 or newer. Install torch>=2.11."
        )
    _checked = True
    if version > NEWEST_TESTED:
        warn(
            UntestedTorchWarning,
            f"graphoffload was tested with torch 2.11 to 2.13; this is {torch_version()}. Plans are verified on every compile, "
            'but what torch changed since is unknown: compare gradients once with verify="checksum" before a long run.',
        )


def tag_of(meta: dict[str, Any]) -> Tag | None:
    """A user's CheckpointPolicy tag on a joint-graph node."""
    policy = meta.get("recompute")
    return TAGS.get(policy) if isinstance(policy, CheckpointPolicy) else None


def min_cut(joint: GraphModule, joint_inputs: Any, kwargs: dict[str, Any]) -> tuple[GraphModule, GraphModule]:
    """torch's own min-cut partitioner, untouched, with its relative memory budget pinned to 1.0."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    arguments = {key: value for key, value in kwargs.items() if key in _MIN_CUT_ARGUMENTS}
    with torch._functorch.config.patch(activation_memory_budget=1.0, enable_activation_offloading=False):
        return min_cut_rematerialization_partition(joint, joint_inputs, **arguments)


_MIN_CUT_ARGUMENTS = ("compiler", "num_fwd_outputs", "static_lifetime_input_indices")


def mutated_inputs(graph: Graph) -> frozenset[Node]:
    """Placeholders of a joint or forward graph that AOTAutograd writes to behind it: the new value is an output of the graph.

    All of them, where an output mutates an input that no placeholder is described as, such as one of several views of a base.
    """
    placeholders = graph.find_nodes(op="placeholder")
    output = next(iter(reversed(graph.nodes)))
    written = {_described(desc.mutated_input) for desc in map(_described, output.meta.get("desc", ())) if _mutates(desc)}
    found = frozenset(node for node in placeholders if written and _described(node.meta.get("desc")) in written)
    return found if len(found) >= len(written) else frozenset(placeholders)


def trained_inputs(joint: Graph, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Fake parameters of a joint graph that is partitioned with these arguments: inputs that it makes a gradient of, and which
    stay at one address from call to call, where torch says which do.

    A fake input says neither that it needs a gradient nor that it is a leaf.
    """
    output = next(iter(reversed(joint.nodes)))
    made = {_described(d.grad_of) for d in map(_described, output.meta.get("desc", ())) if isinstance(d, GradAOTOutput)}
    placeholders = joint.find_nodes(op="placeholder")
    stays = set(kwargs.get("static_lifetime_input_indices") or range(len(placeholders)))
    return [
        node.meta["val"]
        for at, node in enumerate(placeholders)
        if at in stays and _described(node.meta.get("desc")) in made and isinstance(node.meta.get("val"), torch.Tensor)
    ]


def guard_leaves(graph: Graph, inputs: Iterable[Any]) -> None:
    """While Dynamo compiles this graph: what it makes of these inputs is not for tensors that are leaves where these are none,
    and the other way round. Dynamo itself only looks at whether they need a gradient.
    """
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import AttrSource

    context = torch._guards.TracingContext.try_get()
    for node, value in zip(graph.find_nodes(op="placeholder"), inputs, strict=False):
        source = getattr(node, "_dynamo_source", None)
        if context is not None and source is not None and isinstance(value, torch.Tensor) and value.requires_grad:
            guard = AttrSource(source, "is_leaf").make_guard(GuardBuilder.EQUALS_MATCH)
            context.guards_context.dynamo_guards.add(guard)


def _mutates(desc: Any) -> bool:
    return isinstance(desc, InputMutationAOTOutput)


def _described(desc: Any) -> Any:
    """The description of a whole argument, for that of a part of a tensor subclass."""
    while isinstance(desc, (SubclassGetAttrAOTInput, SubclassGetAttrAOTOutput)):
        desc = desc.base
    return desc


def parameter_positions(graph: Graph, values: Iterable[Any] = ()) -> tuple[int, ...]:
    """Which inputs of one of Dynamo's graphs are parameters: their positions among its placeholders."""
    placeholders = graph.find_nodes(op="placeholder")
    given = dict(enumerate(values))
    return tuple(at for at, node in enumerate(placeholders) if _is_parameter(node, given.get(at)))


def _is_parameter(node: Node, value: Any) -> bool:
    """By its value, or by where Dynamo found it: `_parameters` of a module may hold a plain tensor in a parameter's place."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")  # a property from torch 2.13 on, a method before
    shown = name() if callable(name) else name
    known = isinstance(value, torch.nn.Parameter) or isinstance(node.meta.get("example_value"), torch.nn.Parameter)
    return known or "._parameters[" in str(shown)


def parameters_among(joint: Graph, positions: tuple[int, ...] | None) -> frozenset[str]:
    """Names of a joint graph's placeholders that are parameters.

    Args:
        positions: of parameters among what AOTAutograd was given; None: as the graph has them that Dynamo compiles now, and
            none where there is no such graph, or AOTAutograd has only a part of it.
    """
    chosen = _positions_of_dynamos_graph() if positions is None else positions
    found = set()
    for node in joint.find_nodes(op="placeholder"):
        desc = _described(node.meta.get("desc"))
        if isinstance(desc, ParamAOTInput) or (isinstance(desc, PlainAOTInput) and desc.idx in chosen):
            found.add(node.name)
    return frozenset(found)


def _positions_of_dynamos_graph() -> tuple[int, ...]:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    context = torch._guards.TracingContext.try_get()
    if context is None or getattr(context, "ddp_optimizer_ctx", None) is not None:
        return ()
    try:
        return parameter_positions(InstructionTranslator.current_tx().output.graph)
    except AttributeError:
        return ()


def is_pointwise_use(node: Node) -> bool:
    """Whether Inductor counts what reads a value as pointwise, through views."""
    from torch._inductor import utils

    return bool(utils.is_pointwise_use(node))


def most_reads(device_type: str) -> int:
    """Buffers that a value may be computed from where it is read; what takes more Inductor stores. CPUs differ from 2.13 on."""
    from torch._inductor import config as inductor_config

    chosen: int | None = inductor_config.realize_acc_reads_threshold
    if chosen is None:
        name = "realize_cpu_acc_reads_threshold" if device_type == "cpu" else "_realize_acc_reads_threshold_default"
        chosen = int(getattr(inductor_config, name))
    return chosen


def apart() -> dict[str, Any]:
    """What gives a torch.compile a recompile limit of its own; nothing before torch 2.13."""
    return {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}


def compile_apart(function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    """torch.compile for a look, that a later compile of the same code neither counts nor learns from.

    Dynamo counts what is compiled for one code object and gives up at eight; sizes that differ from those of the last time it
    makes symbolic. Before `isolate_recompiles` (torch 2.13) what the look left is forgotten, if there was nothing before it.
    """
    from torch._dynamo import eval_frame, pgo

    compiled, code = torch.compile(function, backend=backend, dynamic=None, **apart()), getattr(function, "__code__", None)

    def run(*args: Any, **kwargs: Any) -> Any:
        forgets = not apart() and code is not None and not eval_frame._debug_get_cache_entry_list(code)
        try:
            with patch.object(pgo, "_CODE_STATE", defaultdict(pgo.CodeState)):
                return compiled(*args, **kwargs)
        finally:
            if forgets:
                eval_frame.remove_from_cache(code)

    return run


def tracing_backend() -> tuple[Any, bool]:
    """While Dynamo traces: the backend it traces for, and whether it exports, which compiles nothing; None outside."""
    from torch._dynamo.eval_frame import innermost_backend
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        output = InstructionTranslator.current_tx().output
    except AttributeError:
        return None, False
    backend: Any = output.compiler_fn
    while (inner := getattr(innermost_backend(backend), "__wrapped__", None)) is not None and callable(inner):
        backend = inner
    return innermost_backend(backend), bool(getattr(output, "export", False))


@dataclass(frozen=True, slots=True)
class Compiling:
    """What Dynamo compiles now: a frame with its variables, for the function that torch.compile was given.

    running: that function; None where it is unknown. around: frames between its call and this one, outermost first.
    """

    running: Any
    code: CodeType
    local: Mapping[str, Any]
    outside: Mapping[str, Any]
    around: tuple[FrameType, ...]


def compiling() -> Compiling | None:
    """The frame that Dynamo compiles now; None outside of a compile."""
    from torch._dynamo import convert_frame, eval_frame
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        traced: Any = InstructionTranslator.current_tx().output.root_tx
        facts = (traced.f_code, traced.f_locals, traced.f_globals)
    except AttributeError:
        return None
    around: list[FrameType] = []
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename == eval_frame.__file__:
            return Compiling(frame.f_locals.get("fn"), *facts, tuple(reversed(around)))
        around = [] if code.co_filename == convert_frame.__file__ else [*around, frame]
        frame = frame.f_back
    return Compiling(None, *facts, ())


def as_it_is(error: Exception) -> Exception:
    """An error of the same class and text that Dynamo passes on, where it would put any other into a BackendCompilerFailed."""
    from torch._dynamo.exc import ShortenTraceback

    kind = type(error)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "first_useful_frame": None}
    shown = type(kind.__name__, (kind, ShortenTraceback), {**names, "__init__": Exception.__init__})
    passed_on: Exception = shown(*error.args)
    return passed_on


def torch_memory_budget() -> float:
    """torch's own activation_memory_budget, which graphoffload pins to 1.0."""
    return float(torch._functorch.config.activation_memory_budget)


def eager_is_asked_for() -> bool:
    """Whether the user has compiled code run in eager just now: torch.compiler.set_stance, or TORCH_COMPILE_DISABLE."""
    from torch._dynamo import config, eval_frame

    stance = getattr(eval_frame, "_stance", None)
    return bool(config.disable) or getattr(stance, "stance", "default") != "default"


def autograd_time() -> int:
    """Number that the next autograd node of this thread gets."""
    return int(torch.autograd._get_sequence_nr())


def compiled_backwards(nodes: Iterable[Any], since: int) -> Iterator[Any]:
    """Classes of AOTAutograd's compiled functions among these autograd nodes and those before them that are made since a time.

    Each has `_backward_impl(ctx, args)`, called in autograd's thread with a list that it empties.
    """
    seen, pending = set(), list(nodes)
    while pending:
        node = pending.pop()
        if node is None or node in seen or node._sequence_nr() < since:
            continue
        seen.add(node)
        function = getattr(type(node), "_forward_cls", None)
        if function is not None and hasattr(function, "_backward_impl"):
            yield function
        pending.extend(earlier for earlier, _ in node.next_functions)
