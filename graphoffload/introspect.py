"""explain(): plans without training; and the decorator."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch._dynamo.comptime import comptime
from torch._dynamo.eval_frame import OptimizedModule
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_map_only

from graphoffload import compat
from graphoffload.backend import OffloadBackend, plan_graph
from graphoffload.config import OffloadConfig
from graphoffload.errors import ConfigError
from graphoffload.hardware import resolve_hardware
from graphoffload.in_place import compile_in_place, offload_in_place
from graphoffload.inlined import teller, told_when_inlined
from graphoffload.limits import resolve_limits
from graphoffload.report import OffloadReport
from graphoffload.saved import Plan
from graphoffload.sharing import judge
from graphoffload.units import format_bytes

_T = TypeVar("_T")

_NOTHING = "nothing is saved for backward: no input or parameter needs a gradient, or torch.no_grad() is on"


def explain(model: Any, config: OffloadConfig | Mapping[str, Any] | None = None, **fields: Any) -> Callable[..., OffloadReport]:
    """Plan without training: `explain(model, config)(*args)` returns the report of all graphs that this call would compile.

    Everything is traced with fake tensors: no kernel runs, no memory is taken, no buffer changes and no random number is drawn.
    A model on the meta device is traced as one on the CPU. Together with a named `hardware` this answers on a laptop whether a
    model would fit a GPU that is not there.

    Args:
        model: a module or function, not compiled.
        config: an OffloadConfig or options as for torch.compile; or its fields as keywords.

    Raises:
        ConfigError: `config` is something else, such as the model's input, which belongs into the second call.
        GraphOffloadError: as compiling would.
    """
    chosen = chosen_config('explain(model, config)(*inputs), as in explain(model, device_budget="40GiB")(x)', config, fields)
    if not callable(model):
        raise ConfigError(f"explain() takes a module or a function; got {type(model).__name__}.")

    def run(*args: Any, **kwargs: Any) -> OffloadReport:
        graphs = _Graphs(chosen)
        with _fake_world(model) as mode:
            inputs, named = tree_map_only(torch.Tensor, _faker(mode), (args, kwargs))
            target = model.forward if isinstance(model, nn.Module) else model
            compiled = compat.compile_apart(target, graphs)
            try:
                compiled(*inputs, **named)
            except torch._dynamo.exc.BackendCompilerFailed as error:
                raise error.inner_exception from None
            except DataDependentOutputException as error:
                raise ConfigError(
                    f"explain() computes nothing, and the model asks for a value of its own ({error}; .item(), or an if on "
                    "a tensor). Explain the parts before and behind, or compile and look at graphoffload.last_plans()."
                ) from error
            graphs.judge(model)
        calls = tuple(graphs.calls[plan.key] for plan in graphs.plans)
        notes = _left_out(model, chosen) if graphs.plans else (_NOTHING,)
        return OffloadReport(plans=tuple(graphs.plans), graph_breaks=max(0, graphs.count - 1), calls=calls, notes=notes)

    return run


def _left_out(model: Any, config: OffloadConfig) -> tuple[str, ...]:
    """What no plan knows of that the optimizer and the loop will take on the GPU that is planned for."""
    parameters = [p for p in model.parameters() if p.requires_grad] if isinstance(model, nn.Module) else []
    if (
        not parameters
        or config.reserve != "auto"
        or resolve_hardware(config.hardware, str(parameters[0].device)).source == "cpu"
    ):
        return ()
    gradients = format_bytes(sum(p.numel() * p.element_size() for p in parameters))
    return (
        f"not counted: gradients that stay from one backward to the next ({gradients} where several are accumulated), and "
        "fp32 copies of parameters that a mixed-precision wrapper keeps; a larger reserve leaves room for them",
    )


def chosen_config(call: str, config: object, fields: Mapping[str, Any]) -> OffloadConfig:
    """The configuration out of one, options, or fields; `call` is how the function is called, for the error.

    Raises:
        ConfigError: a configuration and fields beside it, or something else.
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


class _Graphs:
    """A backend that plans every graph and runs it with fake tensors."""

    def __init__(self, config: OffloadConfig) -> None:
        self.config = config
        self.plans: list[Plan] = []
        self.calls: Counter[str] = Counter()
        self.count = 0
        self.__name__ = "graphoffload_explain"

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        self.count += 1
        plan, compiled = plan_graph(gm, example_inputs, self.config)
        if plan is None:
            return compiled
        self.plans.append(plan)

        @functools.wraps(compiled)
        def run(*args: Any) -> Any:
            self.calls[plan.key] += 1
            return compiled(*args)

        return run

    def judge(self, model: Any) -> None:
        """What the first backward would warn of, from the model's own tensors and what all calls keep."""
        if self.config.device_budget == "auto" or self.config.max_slowdown is not None:
            return
        tensors = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
        judge(self.calls, resolve_limits(self.config, tensors))


def _faker(mode: FakeTensorMode) -> Callable[[torch.Tensor], torch.Tensor]:
    def fake(value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, torch._subclasses.FakeTensor):
            return value
        device = "cpu" if value.device.type == "meta" else value.device
        with mode:
            result = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return result.requires_grad_(value.requires_grad)

    return fake


@contextmanager
def _fake_world(model: Any) -> Iterator[FakeTensorMode]:
    """A fake-tensor mode, with the model's parameters and buffers replaced by fakes for its duration."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = _faker(mode)
    if not isinstance(model, nn.Module):
        with mode:
            yield mode
        return
    tensors: dict[str, torch.Tensor] = {}
    seen: dict[int, torch.Tensor] = {}
    for name, value in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if id(value) not in seen:
            made = fake(value.detach()).requires_grad_(value.requires_grad)
            seen[id(value)] = nn.Parameter(made, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else made
        tensors[name] = seen[id(value)]
    with _reparametrize_module(model, tensors), mode:
        yield mode


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
    if isinstance(target, OptimizedModule):
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
            comptime(tell)
        elif self._compiled_call_impl is None:
            compile_in_place(self, backend)
        return original(self, *args, **kwargs)

    kind.__call__ = compiled_call  # type: ignore[method-assign]
    return kind
