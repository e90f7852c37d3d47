"""explain(): plans without training; and the decorator."""

from __future__ import annotations

import functools
import inspect
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, overload

import torch
from torch import nn

from graphoffload.api.in_place import compile_in_place, offload_in_place
from graphoffload.api.inlined import teller, told_when_inlined
from graphoffload.api.values import Values
from graphoffload.compiler.backend import OffloadBackend, plan_graph
from graphoffload.compiler.device_limits import resolve_limits
from graphoffload.compiler.optimizer_state import state_bytes
from graphoffload.errors import ConfigError, PartialPlanWarning, warn
from graphoffload.facts.plan import Plan
from graphoffload.hardware.measurement import resolve_hardware
from graphoffload.log import say
from graphoffload.monitor.shared_budget import judge
from graphoffload.options.config import OffloadConfig
from graphoffload.report.offload_report import OffloadReport
from graphoffload.torch_internals import dynamo, modules
from graphoffload.torch_internals.fake_tensors import UNKNOWN, FakeTensor
from graphoffload.torch_internals.pytrees import tree_flatten, tree_map_only
from graphoffload.units import format_bytes

_T = TypeVar("_T")

_NOTHING = "nothing is saved for backward: no input or parameter needs a gradient, or torch.no_grad() is on"


def explain(model: Any, config: OffloadConfig | Mapping[str, Any] | None = None, **fields: Any) -> Callable[..., OffloadReport]:
    """Plan without training: `explain(model, config)(*args)` returns the report of all graphs that this call would compile.

    Everything is traced with fake tensors: no kernel runs, no memory is allocated, no buffer changes and no random number is
    drawn. A model on the meta device is traced as one on the CPU. Together with a named `hardware` this answers on a laptop
    whether a model would fit a GPU that is not there.

    A model may read a value between two graphs (`.item()`, `x[mask]`). Values that follow from the inputs alone are computed on
    the CPU. For those that also follow from parameters, the forward is run once if all tensors are on the CPU. Otherwise the
    report has the graphs before that place, and a PartialPlanWarning and a note say where it ends.

    Args:
        model: a module or function, not compiled.
        config: an OffloadConfig or options as for torch.compile; or its fields as keywords.

    Raises:
        ConfigError: `config` is something else, such as the model's input, which belongs into the second call; or the model
            reads a value that is not known before anything is planned.
        GraphOffloadError: as compiling would.
    """
    chosen = chosen_config('explain(model, config)(*inputs), as in explain(model, device_budget="40GiB")(x)', config, fields)
    if not callable(model):
        raise ConfigError(f"explain() takes a module or a function; got {type(model).__name__}.")

    def run(*args: Any, **kwargs: Any) -> OffloadReport:
        graphs, unknown = _look(model, chosen, Values(), args, kwargs)
        notes = []
        where = _places_of(model, args, kwargs)
        if unknown is not None and where == {"cpu"}:
            again = f"{_place(unknown)} reads a value that depends on parameters: the forward was run once on the CPU"
            say(f"explain: {again.replace('was run', 'is run')}")
            graphs, unknown = _look(model, chosen, Values(everything=True), args, kwargs)
            notes.append(again)
        if unknown is not None:
            notes.append(_ends_at(unknown, graphs, where))
            warn(PartialPlanWarning, f"explain() planned a part of the model. {notes[-1]}", stacklevel=3)
        elif not graphs.plans:
            notes.append(_NOTHING)
        graphs.judge(model)
        calls = tuple(graphs.calls[plan.key] for plan in graphs.plans)
        if graphs.plans:
            notes.extend(_left_out(model, chosen))
        return OffloadReport(plans=tuple(graphs.plans), graph_breaks=max(0, graphs.count - 1), calls=calls, notes=tuple(notes))

    return run


def _left_out(model: Any, config: OffloadConfig) -> tuple[str, ...]:
    """Memory that the optimizer and the loop will take on the GPU that is planned for, and that no plan counts."""
    parameters = [p for p in model.parameters() if p.requires_grad] if isinstance(model, nn.Module) else []
    if not parameters or config.reserve != "auto":
        return ()
    device = str(parameters[0].device)
    if resolve_hardware(config.hardware, device).source == "cpu":
        return ()
    state = 0 if device.startswith("cuda") else state_bytes(parameters)
    counted = [f'{format_bytes(state)} of optimizer state (reserve="{format_bytes(state)}" counts it)'] * bool(state)
    gradients = format_bytes(sum(p.numel() * p.element_size() for p in parameters))
    counted.append(f"gradients that stay from one backward to the next ({gradients} where several are accumulated)")
    counted.append("fp32 copies of parameters that a mixed-precision wrapper keeps")
    return (f"not counted: {', '.join(counted)}",)


def _look(
    model: Any, config: OffloadConfig, values: Values, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[_Graphs, BaseException | None]:
    """The graphs that a forward runs, and the error at which it stops if it needs an unknown value."""
    graphs = _Graphs(config)
    with torch.random.fork_rng(devices=[]), _fake_world(model, values):
        inputs, named = tree_map_only(torch.Tensor, values.fake, (args, kwargs))
        target = model.forward if isinstance(model, nn.Module) else model
        try:
            dynamo.compile_isolated(target, graphs)(*inputs, **named)
        except dynamo.BackendCompilerFailed as error:
            raise error.inner_exception from None
        except UNKNOWN as error:
            return graphs, error
    return graphs, None


def _places_of(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[str]:
    """The device types of the tensors of the model and of its inputs, and "fake"."""
    tensors = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    tensors += [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
    return {"fake" if isinstance(tensor, FakeTensor) else tensor.device.type for tensor in tensors} or {"cpu"}


def _place(error: BaseException) -> str:
    """The last line of code outside the package that an error passed, such as "model.py:12 in forward"."""
    inside = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*inside, "<"))]
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name}" if frames else "the model"


def _ends_at(error: BaseException, graphs: _Graphs, where: set[str]) -> str:
    """A note that says what is not planned, which value is missing, and the remedy.

    Raises:
        ConfigError: nothing was planned before.
    """
    asks = f"{_place(error)} asks for a value ({error}) that is not known"
    why = "an operation before it has no value on a CPU" if where == {"cpu"} else f"tensors are on: {', '.join(sorted(where))}"
    remedy = (
        "Give inputs with values on the CPU (parameters too, where the value depends on them), explain the parts before and "
        "after it, or compile the model and look at graphoffload.last_plans() after a step."
    )
    if not graphs.plans:
        nothing = f"explain() plans nothing: {asks} ({why}), and no graph before it saves anything."
        raise ConfigError(f"{nothing} {remedy}") from error
    planned = f"{len(graphs.plans)} graph{'s' * (len(graphs.plans) != 1)} before it"
    return f"{asks} ({why}): planned are the {planned}, and nothing after. {remedy}"


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
        """The warnings of the first backward, from the model's own tensors and the bytes that all calls keep."""
        if not self.config.has_budget:
            return
        tensors = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
        judge(self.calls, resolve_limits(self.config, tensors))


@contextmanager
def _fake_world(model: Any, values: Values) -> Iterator[None]:
    """The fake-tensor mode of `values`, with the model's parameters and buffers replaced by fakes for its duration."""
    if not isinstance(model, nn.Module):
        with values.readable():
            yield
        return
    tensors: dict[str, torch.Tensor] = {}
    seen: dict[int, torch.Tensor] = {}
    for name, value in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if id(value) not in seen:
            seen[id(value)] = values.fake(value)
        tensors[name] = seen[id(value)]
    with modules.with_tensors(model, tensors), values.readable():
        yield


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
