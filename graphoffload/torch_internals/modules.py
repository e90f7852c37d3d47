"""nn.Module: what stands for its call, its hooks, and its parameters for a while. Seen in torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.utils.stateless import _reparametrize_module

with_tensors = _reparametrize_module
"""A context in which a module has other parameters and buffers. torch.func.functional_call does so for one call alone, and
explain() compiles in between. Without it: explain() would need the model's memory."""

call_in_eager: Callable[..., Any] = nn.Module._call_impl
"""A module's call with its hooks, whatever it was compiled with. Without it: an nn.Sequential is not compiled in place."""

apply_to_tensors: Callable[..., nn.Module] = nn.Module._apply
"""Replace each tensor of a module by a function's result. Without it: no float64 reference for models with complex buffers."""


def compiled_call(module: nn.Module) -> Any:
    """What `module.compile()` put in the place of a module's call; None where it did not. Without it: offload() cannot tell
    whether a module still runs as it was compiled."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Put a function, or nothing, in the place of a module's call. Without it: tune() cannot take a trial back."""
    module._compiled_call_impl = call


def unwrapped(module: Any) -> Any:
    """The module that torch.compile(module) wraps; others as they are. Without it: names of modules begin with "_orig_mod"."""
    return getattr(module, "_orig_mod", module)


def forward_hooks(module: nn.Module) -> Iterator[Any]:
    """Hooks around a module's forward, those before it first. Without it: a hook's graph is taken for the whole model."""
    yield from module._forward_pre_hooks.values()
    yield from module._forward_hooks.values()


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """A module's parameters by name, past attributes of the same names. Without it: a benchmark has no mixed precision that
    casts weights where they are used."""
    return module._parameters


@contextmanager
def compiled_as(module: nn.Module, compiled: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """A context in which a compiled module's call is what `compiled` makes of its call in eager. Without it: explain() of a
    model whose blocks are compiled is not about these blocks."""
    inner = unwrapped(module)
    name, owner = ("forward", module) if inner is not module else ("_compiled_call_impl", module)
    before = owner.__dict__.get(name)
    call = inner._call_impl
    if (type(inner).forward.__module__ or "").startswith("torch.nn.") and type(inner).forward is not nn.Module.forward:

        def call(*args: Any, **kwargs: Any) -> Any:  # Dynamo does not compile torch.nn's own frames
            return call_in_eager(inner, *args, **kwargs)

    object.__setattr__(owner, name, compiled(call))
    try:
        yield
    finally:
        object.__setattr__(owner, name, before)
