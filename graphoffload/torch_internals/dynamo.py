"""Dynamo: what it compiles now, the wrappers that torch.compile makes, its limits, and a compile that leaves no trace.

Seen in torch 2.11 to 2.15.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any

import torch
import torch._functorch.config
from torch._dynamo import config, graph_break
from torch._dynamo.comptime import comptime
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import Graph, GraphModule

from graphoffload.torch_internals.ambient import Ambient, as_in, state_here
from graphoffload.torch_internals.fake_tensors import outside_all_modes
from graphoffload.torch_internals.patching import replaced

__all__ = [
    "BackendCompilerFailed", "Caller", "Compiling", "OptimizedModule", "Retraceable", "ShapeGuardError", "as_it_is",
    "backend_of", "compile_isolated", "compile_number", "compiles_nothing_for", "compiling", "comptime", "config",
    "count_of_graphs", "ddp_part", "eager_is_asked_for", "graph_break", "guard_leaves", "has_tried_frames", "inlined_as",
    "inlines_as", "is_tracing", "isolated", "many_compiles", "retraceable", "tell_of_resets", "tracing_backend", "undisabled",
    "whole_under_ddp",
]  # fmt: skip


def guard_leaves(graph: Graph, inputs: Iterable[Any]) -> None:
    """While Dynamo compiles this graph: what it makes of these inputs is not for tensors that are leaves where these are none,
    and the other way round. Dynamo itself only looks at whether they need a gradient.

    Without it: equal blocks all run under the plan of the first one, which may stand alone.
    """
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import AttrSource

    context = torch._guards.TracingContext.try_get()
    for node, value in zip(graph.find_nodes(op="placeholder"), inputs, strict=False):
        source = getattr(node, "_dynamo_source", None)
        if context is not None and source is not None and isinstance(value, torch.Tensor) and value.requires_grad:
            guard = AttrSource(source, "is_leaf").make_guard(GuardBuilder.EQUALS_MATCH)
            context.guards_context.dynamo_guards.add(guard)


def tell_of_resets(listener: Any) -> None:
    """Have the next torch._dynamo.reset() call `listener.reset()`. Without it: what is known of a deleted model goes with the
    next step, and its host memory some steps later."""
    from torch._dynamo import eval_frame

    backends = getattr(eval_frame, "cached_backends", None)  # those that are reset; a reset forgets them
    if isinstance(backends, dict):
        backends.setdefault(id(listener), listener)


def isolated() -> dict[str, Any]:
    """What gives a torch.compile a recompile limit of its own; nothing before torch 2.13."""
    return {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}


def undisabled(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a backend compiled, without the wrapper that keeps Dynamo from tracing it: Dynamo puts one around what it is given.
    Without it: each call pays for two."""
    inside = getattr(function, "_torchdynamo_orig_callable", None)
    own = getattr(function, "_torchdynamo_wrapper_id", None) == id(function)  # not one that functools.wraps has copied
    return inside if own and callable(inside) else function


def is_tracing() -> bool:
    """Whether operations are traced now, by Dynamo or AOTAutograd, and not run. Without it: explain() counts the tensors that
    tracing makes as memory of the step."""
    return torch._guards.TracingContext.try_get() is not None


def compile_isolated(function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    """torch.compile for a look, that a later compile of the same code neither counts nor learns from.

    Dynamo counts what is compiled for one code object and gives up at eight; sizes that differ from those of the last time it
    makes symbolic. Before `isolate_recompiles` (torch 2.13) what the look left is forgotten, if there was nothing before it.
    Without it: explain() makes the training that follows compile with symbolic sizes, or not at all.
    """
    from torch._dynamo import eval_frame, pgo

    compiled, code = torch.compile(function, backend=backend, dynamic=None, **isolated()), getattr(function, "__code__", None)

    def run(*args: Any, **kwargs: Any) -> Any:
        forgets = not isolated() and code is not None and not eval_frame._debug_get_cache_entry_list(code)
        try:
            with replaced(pgo, _CODE_STATE=defaultdict(pgo.CodeState)):
                return compiled(*args, **kwargs)
        finally:
            if forgets:
                eval_frame.remove_from_cache(code)

    return run


@dataclass(frozen=True, slots=True)
class Retraceable:
    """One of Dynamo's graphs, with what it takes to compile it again when Dynamo is gone.

    inputs: fake, as Dynamo traced them; sizes may be symbols of `fake_mode`. state: in which Dynamo compiled it.
    """

    graph: GraphModule
    inputs: tuple[Any, ...]
    fake_mode: Any
    state: Ambient

    def copy(self) -> GraphModule:
        """The graph, to be compiled: that writes to it."""
        copied = GraphModule(self.graph, copy.deepcopy(self.graph.graph))
        for name in _DYNAMOS:
            if hasattr(self.graph, name):
                setattr(copied, name, getattr(self.graph, name))
        copied.meta = dict(self.graph.meta)
        for old, new in zip(self.graph.graph.nodes, copied.graph.nodes, strict=True):
            if hasattr(old, "_dynamo_source"):
                new._dynamo_source = old._dynamo_source
        return copied

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """A context in which AOTAutograd compiles the copy as it does while Dynamo compiles: under Dynamo's lock, since tracing
        writes to state of the process; outside of the caller's modes, such as a counter of FLOPs; in the state of then.

        Raises:
            ShapeGuardError: what was compiled asks something of the sizes that the callers' guards do not check.
        """
        from torch._dynamo.convert_frame import compile_lock

        shape_env = self.fake_mode.shape_env
        before = len(shape_env.guards) if shape_env is not None else 0
        context = torch._guards.TracingContext(self.fake_mode)
        compiling = torch._guards.CompileContext(None)
        with (
            compile_lock, _compiling(), outside_all_modes(), as_in(self.state), torch._guards.tracing(context),
            torch._guards.compile_context(compiling),
        ):  # fmt: skip
            yield
        if shape_env is not None and len(shape_env.guards) > before:
            raise ShapeGuardError(f"compiling it again asks {shape_env.guards[before].expr} of the sizes")


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """A context that says so to the process, as Dynamo does; without it, compiled code that other threads call raises, since it
    takes itself for code that is traced."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


class ShapeGuardError(RuntimeError):
    """Code that was compiled after Dynamo was done holds for fewer sizes than Dynamo's guards let in."""


_DYNAMOS = ("_param_name_to_source", "dynamo_compile_id", "compile_subgraph_reason", "torchrec_compile_id")


def retraceable(gm: GraphModule) -> Retraceable | None:
    """While Dynamo compiles: its graph, to be compiled again later; None where an input is not traced, or it has parts of its
    own. Without it: a graph has one variant, and the calls of a step cannot differ.
    """
    context = torch._guards.TracingContext.try_get()
    inputs = tuple(node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder"))
    if context is None or context.fake_mode is None or any(value is None for value in inputs):
        return None
    if ddp_part() is not None:
        return None
    kept = Retraceable(gm, inputs, context.fake_mode, state_here())
    return replace(kept, graph=kept.copy())


def ddp_part() -> int | None:
    """While Dynamo compiles: which of the parts this graph is into which torch splits what runs under DDP; None: it does not.
    Without it: nobody says why no step is planned."""
    context = getattr(torch._guards.TracingContext.try_get(), "ddp_optimizer_ctx", None)
    return None if context is None else int(context.curr_bucket) + 1


def tracing_backend() -> tuple[Any, bool]:
    """While Dynamo traces: the backend it traces for, and whether it exports, which compiles nothing; None outside.

    Without it: offload() inside another compile has no effect, and nothing says so.
    """
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
class Caller:
    """A function that runs around the one that is compiled: its code, and its first argument, `self` of a method."""

    code: CodeType
    first: Any


@dataclass(frozen=True, slots=True)
class Compiling:
    """What Dynamo compiles now: a frame's code with its variables, for the function that torch.compile was given.

    running: that function; None where it is unknown. around: what runs between its call and this, outermost first.
    """

    running: Any
    code: CodeType
    local: Mapping[str, Any]
    outside: Mapping[str, Any]
    around: tuple[Caller, ...]


def compiling() -> Compiling | None:
    """What Dynamo compiles now; None outside of a compile.

    Interpreter frames are read here and nowhere else. Dynamo hands a backend the graph alone: neither the function that
    torch.compile was given nor the objects whose methods run around a frame are to be had from any of its functions, and
    traceback.StackSummary has texts where `self` is needed. Without it: names of modules start at the frame that is compiled,
    and a pattern that matches in another frame is taken for a mistake.
    """
    from torch._dynamo import convert_frame, eval_frame
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        traced: Any = InstructionTranslator.current_tx().output.root_tx
        facts = (traced.f_code, traced.f_locals, traced.f_globals)
    except AttributeError:
        return None
    around: list[FrameType] = []
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename == eval_frame.__file__:
            return Compiling(frame.f_locals.get("fn"), *facts, tuple(map(_caller, reversed(around))))
        around = [] if code.co_filename == convert_frame.__file__ else [*around, frame]
    return Compiling(None, *facts, ())


def _caller(frame: FrameType) -> Caller:
    return Caller(frame.f_code, frame.f_locals.get(next(iter(frame.f_code.co_varnames), "")))


def as_it_is(error: Exception) -> Exception:
    """An error of the same class and text that Dynamo passes on, where it would put any other into a BackendCompilerFailed.

    Without it: a wrong option is a BackendCompilerFailed with Dynamo's advice.
    """
    from torch._dynamo.exc import ShortenTraceback

    kind = type(error)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "first_useful_frame": None}
    shown = type(kind.__name__, (kind, ShortenTraceback), {**names, "__init__": Exception.__init__})
    passed_on: Exception = shown(*error.args)
    return passed_on


def eager_is_asked_for() -> bool:
    """Whether the user has compiled code run in eager just now: torch.compiler.set_stance, or TORCH_COMPILE_DISABLE.

    Without it: a warning that nothing was compiled where that was asked for.
    """
    from torch._dynamo import eval_frame

    stance = getattr(eval_frame, "_stance", None)
    return bool(config.disable) or getattr(stance, "stance", "default") != "default"


def compiles_nothing_for(backend: str) -> bool:
    """Whether torch.compile was given a backend by its name, and Dynamo has compiled no frame in this process.

    Without it: no warning where a whole model runs in eager.
    """
    from torch._dynamo.backends import registry

    return registry._COMPILER_FNS.get(backend) is not None and not torch._dynamo.utils.counters["frames"]["ok"]


def has_tried_frames() -> bool:
    """Whether Dynamo has traced a frame in this process; it skips those of torch.nn. Without it: as compiles_nothing_for."""
    return torch._dynamo.utils.counters["frames"]["total"] > 0


def backend_of(compiler: Any) -> tuple[Any, dict[str, Any], dict[str, Any] | None]:
    """The backend in torch.compile's wrapper, the keywords that it is called with, and Inductor's settings if it is that.

    Without it: an outer compile by graphoffload itself is taken for a foreign one.
    """
    if isinstance(compiler, torch._TorchCompileWrapper):
        return compiler.compiler_fn, dict(compiler.kwargs), None
    return compiler, {}, compiler.config if isinstance(compiler, torch._TorchCompileInductorWrapper) else None


def inlined_as(compiled: Any) -> Callable[..., Any]:
    """The function that Dynamo traces in the place of what torch.compile made of it."""
    target: Callable[..., Any] = compiled._torchdynamo_inline
    return target


def inlines_as(compiled: Any, function: Callable[..., Any]) -> None:
    """Have Dynamo trace another function in the place of what torch.compile made. Without it: as for tracing_backend."""
    compiled._torchdynamo_inline = function  # traced inside an outer compile
    compiled._torchdynamo_orig_callable = function  # compiled by torch.compile(compiled, ...)


def compile_number() -> int | None:
    """Which compile of the same code Dynamo is at, from 1; None outside. Without it: no warning before Dynamo gives up."""
    compiling = torch._guards.CompileContext.current_compile_id()
    return None if compiling is None else (compiling.frame_compile_id or 0) + 1


def many_compiles(most: int, in_all: int) -> contextlib.AbstractContextManager[Any]:
    """A context in which one function may be compiled so often. Without it: tune() and benchmarks end in eager."""
    patched: contextlib.AbstractContextManager[Any] = config.patch(recompile_limit=most, accumulated_recompile_limit=in_all)
    return patched


def count_of_graphs() -> int:
    """Graphs that Dynamo has handed to backends so far. Without it: a benchmark cannot tell that a variant broke the graph."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def whole_under_ddp() -> contextlib.AbstractContextManager[Any]:
    """A context in which torch does not split graphs under DDP by buckets. Without it: a benchmark measures parts."""
    patched: contextlib.AbstractContextManager[Any] = config.patch(optimize_ddp=False)
    return patched
