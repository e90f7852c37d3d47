"""What Dynamo knows while it traces, and a compile that leaves no trace."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config
from torch.fx import Graph


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


def eager_is_asked_for() -> bool:
    """Whether the user has compiled code run in eager just now: torch.compiler.set_stance, or TORCH_COMPILE_DISABLE."""
    from torch._dynamo import config, eval_frame

    stance = getattr(eval_frame, "_stance", None)
    return bool(config.disable) or getattr(stance, "stance", "default") != "default"
