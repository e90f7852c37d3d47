"""Functions and modules of offload() that another torch.compile inlines.

    torch.compile(step, backend="inductor")(x) ─▶ Dynamo traces step, and the offloaded function or module inside it

Dynamo then never calls the inner backend: everything is one graph of the outer one, and the options of offload() have no
effect. Dynamo calls the functions here in that case, and in no other, and they warn. An outer compile by graphoffload itself
with the same options does what was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch

from graphoffload.compiler import backend as backends
from graphoffload.compiler.partitioner import OffloadPartitioner
from graphoffload.errors import NotOffloadedWarning, warn
from graphoffload.monitor.not_compiled import given_text, other_options
from graphoffload.options.config import OffloadConfig
from graphoffload.torch_internals import dynamo, inductor


def teller(what: str, config: OffloadConfig, options: Mapping[str, Any]) -> Callable[[Any], None]:
    """For Dynamo's `comptime`: one warning for each foreign backend whose graph inlines `what`."""
    given = given_text(options)
    told: set[str] = set()

    def tell(_: Any) -> None:
        outer, exports = dynamo.tracing_backend()
        if outer is None or exports or not torch.is_grad_enabled():
            return
        theirs = config_of(outer)
        if theirs == config:
            return
        name = getattr(outer, "compiler_name", None) or getattr(outer, "__name__", None) or type(outer).__name__
        text = _foreign(what, given, str(name)) if theirs is None else other_options(what, given, config, theirs)
        if text not in told:
            told.add(text)
            warn(NotOffloadedWarning, text)

    return tell


def told_when_inlined(compiled: Any, tell: Callable[[Any], None]) -> Any:
    """The result of torch.compile for a function, which calls `tell` if an outer compile traces it. Returns the same object."""
    target = dynamo.inlined_as(compiled)

    def inlined(*args: Any, **kwargs: Any) -> Any:
        dynamo.comptime(tell)
        return target(*args, **kwargs)

    # Dynamo counts the compiles of one code object and gives up at eight: each function has its own.
    code = inlined.__code__.replace(co_name=getattr(target, "__name__", "inlined"))
    own = FunctionType(code, inlined.__globals__, code.co_name, inlined.__defaults__, inlined.__closure__)
    dynamo.inlines_as(compiled, own)
    return compiled


def config_of(backend: Any) -> OffloadConfig | None:
    """The configuration under which a backend, as torch.compile wraps it, offloads; None if it is not graphoffload."""
    backend, kwargs, settings = dynamo.backend_of(backend)
    if backend is backends.graphoffload:
        return backends.configured(**kwargs)
    if isinstance(backend, backends.OffloadBackend):
        return backend.configured(**kwargs)
    if settings is not None:
        chosen = settings.get("custom_partitioner_fn", inductor.config.custom_partitioner_fn)
    else:
        chosen = (getattr(backend, "kwargs", None) or {}).get("partition_fn", backend)
    config = chosen.config if isinstance(chosen, OffloadPartitioner) else getattr(backend, "config", None)
    return config if isinstance(config, OffloadConfig) else None


def _foreign(what: str, given: str, name: str) -> str:
    return (
        f"offload({given}) of {what} has no effect inside torch.compile(..., backend={name!r}): Dynamo traces it into that "
        f"compile's graph, where graphoffload is not asked, and what it saves for backward is kept. Compile the "
        'outer one with backend="graphoffload" and these options, or leave the outer torch.compile away.'
    )
