"""explain(): plans without training; and the decorator."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import torch
from torch import nn

from graphoffload.api.explanation import Explanation
from graphoffload.api.in_place import compile_in_place, offload_in_place
from graphoffload.api.inlined import teller, told_when_inlined
from graphoffload.compiler.backend import OffloadBackend
from graphoffload.compiler.optimizer_state import named_state_bytes
from graphoffload.errors import ConfigError
from graphoffload.options.config import OffloadConfig
from graphoffload.report.offload_report import OffloadReport
from graphoffload.torch_internals import dynamo, modules

_T = TypeVar("_T")


def explain(
    model: Any, config: OffloadConfig | Mapping[str, Any] | None = None, *, optimizer: object = None, **fields: Any
) -> Callable[..., OffloadReport]:
    """Plan without training: `explain(model, config)(*args)` returns the report of all graphs that this call would compile.

    Everything is traced with fake tensors: no kernel runs, no memory is allocated, no buffer changes and no random number is
    drawn. A model on the meta device is traced as one on the CPU. Together with a named `hardware` this answers on a laptop
    whether a model would fit a GPU that is not there.

    Where a forward runs several graphs, since blocks are compiled one by one or the graph breaks, one step is planned for all
    of them, as training does. Its backward is followed with fake tensors too.

    A model may read a value between two graphs (`.item()`, `x[mask]`). Values that follow from the inputs alone are computed on
    the CPU. For those that also follow from parameters, the forward is run once if all tensors are on the CPU. Otherwise the
    report has the graphs before that place, and a PartialPlanWarning and a note say where it ends.

    Args:
        model: a module or function, not compiled; modules inside may be compiled, by `block.compile()` or offload().
        config: an OffloadConfig or options as for torch.compile; or its fields as keywords.
        optimizer: whose state counts: one of compiler.optimizer_state.NAMES, or a torch.optim.Optimizer. None: not counted.

    Raises:
        ConfigError: `config` is something else, such as the model's input, which belongs into the second call; or the model
            reads a value that is not known before anything is planned; or `optimizer` is not known.
        GraphOffloadError: as compiling would.
    """
    chosen = chosen_config('explain(model, config)(*inputs), as in explain(model, device_budget="40GiB")(x)', config, fields)
    if not callable(model):
        raise ConfigError(f"explain() takes a module or a function; got {type(model).__name__}.")
    parameters = [p for p in model.parameters() if p.requires_grad] if isinstance(model, nn.Module) else []
    state = None if optimizer is None else named_state_bytes(optimizer, parameters)

    def run(*args: Any, **kwargs: Any) -> OffloadReport:
        return Explanation(model, chosen, args, kwargs, parameters, state).report()

    return run


def chosen_config(call: str, config: object, fields: Mapping[str, Any]) -> OffloadConfig:
    """The configuration from a configuration, options, or fields; `call` is how the function is called, for the error.

    Raises:
        ConfigError: a configuration together with fields, or another type.
    """
    if isinstance(config, OffloadConfig):
        if fields:
            door = call.partition("(")[0]
            raise ConfigError(f"{door}() takes a config or fields, not both; got a config and {sorted(fields)}.")
        return config
    if config is not None and not isinstance(config, Mapping):
        shown = f"={config!r}" if isinstance(config, (str, int, float)) else ""
        raise ConfigError(
            f"config{shown} is a {type(config).__name__}; give an OffloadConfig or a dict of options, or leave it out. "
            f"The call is {call}."
        )
    return OffloadConfig.from_options({**(config or {}), **fields})


@overload
def offload(target: type[_T], /, **options: Any) -> type[_T]: ...
@overload
def offload(target: _T, /, **options: Any) -> _T: ...
@overload
def offload(target: None = None, /, **options: Any) -> Callable[[_T], _T]: ...
def offload(target: Any = None, /, **options: Any) -> Any:
    """Compile with graphoffload: a decorator for a function or an `nn.Module` class, or a call on an instance.

        @graphoffload.offload(device_budget="40GiB")
        class Model(nn.Module): ...              # the class stays the class; each instance's forward is compiled in place

        graphoffload.offload(model, max_slowdown=0.02)      # compiles in place and returns the model; state_dict keys unchanged

    `options` are the backend's; see docs/config.md.
    """
    config = OffloadConfig.from_options(options)
    if target is None:
        return functools.partial(_apply, config, options)
    return _apply(config, options, target)


def _apply(config: OffloadConfig, options: Mapping[str, Any], target: Any) -> Any:
    backend = OffloadBackend(config)
    tell = teller(getattr(target, "__qualname__", type(target).__qualname__), config, options)
    if isinstance(target, type) and issubclass(target, nn.Module):
        return _compile_class(target, backend, tell)
    if isinstance(target, dynamo.OptimizedModule):
        raise ConfigError(
            "offload() got what torch.compile(model) returned, which stays compiled as it is. Give the model itself: "
            "offload(compiled._orig_mod, ...)."
        )
    if isinstance(target, nn.Module):
        return offload_in_place(target, config, options)
    if inspect.isgeneratorfunction(target) or inspect.iscoroutinefunction(target):
        name = getattr(target, "__name__", type(target).__name__)
        raise ConfigError(
            f"offload() got {name}, a generator or coroutine, which torch.compile leaves in eager. Give one it calls."
        )
    if callable(target) and not isinstance(target, type):
        return told_when_inlined(torch.compile(target, backend=backend), tell)
    got = f"the class {target.__name__}" if isinstance(target, type) else type(target).__name__
    raise ConfigError(f"offload() takes a function, an nn.Module class or an instance; got {got}.")


def _compile_class(kind: type[nn.Module], backend: OffloadBackend, tell: Callable[[Any], None]) -> type[nn.Module]:
    """Each instance compiles itself in place on its first call: subclasses, pickling and the class's identity stay."""
    original = kind.__call__

    @functools.wraps(original)
    def compiled_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            dynamo.comptime(tell)
        elif modules.compiled_call(self) is None:
            compile_in_place(self, backend)
        return original(self, *args, **kwargs)

    kind.__call__ = compiled_call  # type: ignore[method-assign]
    return kind
