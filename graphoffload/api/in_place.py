"""Modules that graphoffload compiles in place, and copies of them.

torch stores an in-place compile as `_compiled_call_impl`, and nn.Module silently leaves it out when it copies or pickles. A
copy would run uncompiled, with every activation kept. A mark in the module's __dict__ is copied with the rest.

    copy.deepcopy(model)        the copy is made first and registered in `memo`; the mark finds it there, and compiles it
    torch.save(model), pickle   the mark becomes a str, so that the file loads without graphoffload, and a warning is issued
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from graphoffload.compiler.backend import OffloadBackend
from graphoffload.errors import NotOffloadedWarning, warn
from graphoffload.monitor.not_compiled import given_text, watched
from graphoffload.options.config import OffloadConfig
from graphoffload.torch_internals.modules import call_in_eager, compiled_call, set_compiled_call

_MARK = "_graphoffload_in_place"


def offload_in_place(module: nn.Module, config: OffloadConfig, options: Mapping[str, Any]) -> nn.Module:
    """Compile a module in place, so that its deep copies are compiled too. Returns the same module.

    Args:
        options: as the user gave them, for warnings.
    """
    compile_in_place(module, OffloadBackend(config))
    calls = [compiled_call(module)]
    watched(module, config, options)
    module.__dict__[_MARK] = _Mark(module, config, options, (*calls, compiled_call(module)))
    return module


def compile_in_place(module: nn.Module, backend: OffloadBackend, **options: Any) -> None:
    """`module.compile(backend=backend)`, also where forward is torch.nn's, inherited or not, which Dynamo does not compile."""
    forward = type(module).forward
    if getattr(forward, "__module__", "").startswith("torch.nn.") and forward is not nn.Module.forward:
        # Dynamo skips frames inside torch.nn, so compiling Sequential.forward itself would compile nothing, silently.
        set_compiled_call(module, torch.compile(_caller(module), backend=backend, **options))
        return
    module.compile(backend=backend, **options)


def _caller(module: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return call_in_eager(module, *args, **kwargs)

    return call


class _Mark:
    """The backend that a module was compiled with in place. `calls`: the stand-in for its call; any other call is a later
    compile."""

    def __init__(self, module: nn.Module, config: OffloadConfig, options: Mapping[str, Any], calls: tuple[Any, ...]) -> None:
        self.module, self.config, self.options, self.calls = weakref.ref(module), config, dict(options), calls

    def __deepcopy__(self, memo: dict[int, Any]) -> object:
        """Compile the copy of the module, which is still empty: nn.Module fills it after this, without the compile."""
        module = self.module()
        copied = memo.get(id(module))
        if module is None or not isinstance(copied, nn.Module) or not self._holds(module):
            return None
        return offload_in_place(copied, self.config, self.options).__dict__[_MARK]

    def __reduce__(self) -> tuple[Any, ...]:
        module, given = self.module(), given_text(self.options)
        if module is not None and self._holds(module):
            warn(NotOffloadedWarning, _pickled(type(module).__qualname__, given))
        return str, (f"offload({given})",)

    def _holds(self, module: nn.Module) -> bool:
        return any(compiled_call(module) is call for call in self.calls)


def _pickled(what: str, given: str) -> str:
    return (
        f"offload({given}) of this {what} is not saved with it: torch leaves an in-place compile out of what it "
        "pickles, and what is loaded runs uncompiled, with every activation kept. Call graphoffload.offload() on what is "
        "loaded, or save and load its state_dict()."
    )
