"""Modules that offload() compiled in place without effect: another torch.compile inlines them, they are not called, or Dynamo
runs them in eager.

    offload(net, ...)      net is watched
    net(x)                 it ran; it is watched until a graph with one of its parameters is compiled
    graph compiled         the modules in that graph are no longer watched
    optimizer.step()       twice, on parameters of a net that is still watched: a warning

Dynamo goes straight to the forward of a module that it finds in a function, past the module's own compile. If it does so for
graphoffload itself, the parameters among the graph's inputs identify the module.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from graphoffload.errors import NotOffloadedWarning, warn
from graphoffload.options.config import OffloadConfig
from graphoffload.torch_internals import dynamo
from graphoffload.torch_internals.modules import compiled_call, set_compiled_call


@dataclass(slots=True)
class _Waiting:
    """A request for a module that has not run as it was compiled.

    `steps`: of an optimizer, in which it had gradients. `call`: a stand-in for the compiled call until it runs; it holds the
    module. `ran`: the module ran as it was compiled, and no graph of it was seen.
    """

    config: OffloadConfig
    given: str
    call: weakref.ref[Callable[..., Any]]
    steps: int = 0
    ran: bool = False


_waiting: weakref.WeakKeyDictionary[nn.Module, _Waiting] = weakref.WeakKeyDictionary()
_taken_in: weakref.WeakSet[type[nn.Module]] = weakref.WeakSet()
_compiled: weakref.WeakSet[type[nn.Module]] = weakref.WeakSet()


def watched(module: nn.Module, config: OffloadConfig, options: Mapping[str, Any]) -> nn.Module:
    """Watch a module that was compiled in place until a graph of it is compiled. Returns the same module."""
    if type(module).__hash__ is None:
        return module
    compiled = compiled_call(module)
    mine = weakref.ref(module)

    def first_call(*args: Any, **kwargs: Any) -> Any:
        owner = mine()
        if owner is not None and not torch.compiler.is_compiling():
            waiting = _waiting.get(owner)
            if waiting is not None and dynamo.eager_is_asked_for():
                del _waiting[owner]
            elif waiting is not None:
                waiting.ran = True
            if compiled_call(owner) is first_call:
                set_compiled_call(owner, compiled)
        return compiled(*args, **kwargs)

    _waiting[module] = _Waiting(config, given_text(options), weakref.ref(first_call))
    set_compiled_call(module, first_call)
    return module


def taken_in(inputs: Iterable[Any], config: OffloadConfig) -> None:
    """graphoffload compiles a graph with these inputs and parameters: watched modules in it are offloaded by that graph."""
    parameters = {id(value) for value in inputs if isinstance(value, nn.Parameter)} if _waiting else set()
    for module, waiting in list(_waiting.items()):
        if not any(id(parameter) in parameters for parameter in module.parameters()):
            continue
        del _waiting[module]
        if waiting.ran:
            _compiled.add(type(module))
            continue
        _taken_in.add(type(module))  # Dynamo may run the same code for another module, without a compile
        if waiting.config != config and compiled_call(module) is waiting.call():
            warn(NotOffloadedWarning, other_options(type(module).__qualname__, waiting.given, waiting.config, config))


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    if not _waiting:
        return
    stepped = {id(p): p.grad is not None for group in optimizer.param_groups for p in group["params"]}
    for module, waiting in list(_waiting.items()):
        grads = [stepped[id(p)] for p in module.parameters() if id(p) in stepped]
        if not grads or 2 * sum(grads) < len(grads):  # a few may be tied to another module's
            continue
        waiting.steps += 1
        if waiting.steps > 1:  # gradients of the first step may be older than offload()
            del _waiting[module]
            kind = type(module)
            if waiting.ran and kind not in _taken_in and kind not in _compiled:
                warn(NotOffloadedWarning, _left_to_eager(kind.__qualname__, waiting.given))
            elif compiled_call(module) is waiting.call() and kind not in _taken_in:
                inside = _trained_inside(module, {key for key, has_grad in stepped.items() if has_grad})
                warn(NotOffloadedWarning, _never_ran(kind.__qualname__, waiting.given, inside))


register_optimizer_step_post_hook(_after_step)


def given_text(options: Mapping[str, Any]) -> str:
    """Options as they are written in a call."""
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def other_options(what: str, given: str, ours: OffloadConfig, theirs: OffloadConfig) -> str:
    """The warning if an outer compile by graphoffload has other options than the module that it inlines."""
    names = [name for name in vars(ours) if getattr(ours, name) != getattr(theirs, name)]
    differ = ", ".join(f"{name}={getattr(theirs, name)!r} instead of {getattr(ours, name)!r}" for name in names)
    return (
        f"offload({given}) of {what} has no effect inside another compile by graphoffload: one graph has one configuration, "
        f"the outer one's, with {differ}. Give both the same options, or leave one of them away."
    )


def _trained_inside(module: nn.Module, trained: set[int]) -> list[str]:
    """Names of the outermost modules inside with a forward of their own and a parameter that has a gradient."""
    names: list[str] = []
    for name, child in module.named_children():
        if not any(id(parameter) in trained for parameter in child.parameters()):
            continue
        if type(child).forward is nn.Module.forward:  # a ModuleList
            names.extend(f"{name}.{inner}" for inner in _trained_inside(child, trained))
        else:
            names.append(name)
    return names


def _never_ran(what: str, given: str, inside: list[str]) -> str:
    shown = ", ".join(f"offload(module.{name}, {given})" for name in inside[:2]) + (", …" if len(inside) > 2 else "")
    instead = f", or compile what is called instead of it: {shown}" if inside else ""
    return (
        f"offload({given}) of this {what} has no effect: an optimizer has stepped twice on its parameters, and it never ran as "
        "it was compiled. Either another torch.compile around it took it into its own graph: compile that one with "
        'backend="graphoffload" and these options, or leave it away. Or its forward, its layers or another method, such as '
        f"Lightning's training_step, are called directly: call the module itself{instead}."
    )


def _left_to_eager(what: str, given: str) -> str:
    return (
        f"offload({given}) of this {what} has no effect: it ran, an optimizer has stepped twice on its parameters, and no "
        "graph with any of them was compiled. Dynamo leaves it to eager, as it does with torch.nn's recurrent layers "
        "(torch._dynamo.config.allow_rnn) and what it cannot trace. TORCH_LOGS=graph_breaks says what it met; offload() the "
        "layers beside it."
    )
