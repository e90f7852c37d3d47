"""Names for module boundaries, carried by the traced operations themselves.

    mark_boundary(layer.self_attn, name="core_attn")
    mark_boundaries(model, {"core_attn": "*.self_attn"})

A marked module runs its forward inside `torch.fx.traceback.annotate`. Every operation traced in it, and every backward
operation that autograd adds for one, carries the name in `node.meta["custom"]`. There is one key per name, such as
"graphoffload_boundary.core_attn", since an inner annotation replaces an outer one of the same key, and nested boundaries must
keep both names.

The module object stays the same: its class becomes a subclass of itself, made once per class. state_dict keys, isinstance,
hooks and parameters are unchanged, and deepcopy and pickle carry the mark to the copy.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from graphoffload.errors import ConfigError, GraphOffloadError
from graphoffload.options.patterns import clean_path, matches, no_match
from graphoffload.torch_internals.modules import unwrapped

ModuleT = TypeVar("ModuleT", bound=nn.Module)

ANNOTATION = "graphoffload_boundary."
_NAMES = "_graphoffload_boundaries"
_MARKED: dict[type[nn.Module], type[nn.Module]] = {}  # one for each class: two marked modules have the same type


def mark_boundary(module: ModuleT, name: str = "core_attn") -> ModuleT:
    """Give a module's boundary a name that `offload_modules` and policies can refer to. Returns the same module.

    Marking again with another name gives it both. Mark before compiling: compiled code keeps its plan until it is compiled
    again.

    Raises:
        ConfigError: not a Module, a name that is not a plain word, a module whose forward was replaced on the instance, or one
            without a forward, such as a ModuleList.
        GraphOffloadError: this torch cannot annotate traced operations.
    """
    annotate = _annotate()
    if not isinstance(module, nn.Module):
        raise ConfigError(f"mark_boundary got a {type(module).__name__}; give an nn.Module.")
    if not isinstance(name, str) or not name or not all(part.isidentifier() for part in name.replace("-", "_").split(".")):
        raise ConfigError(
            f'mark_boundary(name={name!r}): a boundary\'s name is a word such as "core_attn", without "*" or spaces.'
        )
    module = unwrapped(module)
    if "forward" in vars(module):
        raise ConfigError(
            f"mark_boundary({type(module).__name__}, {name!r}): forward was replaced on this instance (by a hook library?), "
            "so the mark would not be seen. Mark the module first, then replace its forward."
        )
    if not _can_run(module):
        raise ConfigError(
            f"mark_boundary({type(module).__name__}, {name!r}): it has no forward, so nothing runs inside it. Mark what it "
            f"holds: for part in module.children(): mark_boundary(part, {name!r})."
        )
    names: tuple[str, ...] = getattr(module, _NAMES, ())
    if not names:
        module.__class__ = _marked_class(type(module), annotate)  # type: ignore[assignment]
    object.__setattr__(module, _NAMES, tuple(dict.fromkeys((*names, name))))
    return module


def _can_run(module: nn.Module) -> bool:
    """Whether a module has a forward; a ModuleList has none."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def mark_boundaries(model: ModuleT, boundaries: Mapping[str, str | Sequence[str]]) -> ModuleT:
    """mark_boundary for every submodule with a forward that a pattern matches: {name: pattern or patterns}. Returns the model.

    Raises:
        PatternError: a pattern that matches no module; the nearest paths are named. Nothing is marked then.
        ConfigError: as mark_boundary.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"mark_boundaries got a {type(model).__name__}; give an nn.Module.")
    if not isinstance(boundaries, Mapping) or not all(isinstance(part, (str, list, tuple)) for part in boundaries.values()):
        raise ConfigError(
            f'mark_boundaries got {boundaries!r}; give a name and a pattern or several, such as {{"core_attn": "*.self_attn"}}.'
        )
    paths = {clean_path(path): module for path, module in model.named_modules() if path and _can_run(module)}
    chosen: list[tuple[nn.Module, str]] = []
    for name, patterns in boundaries.items():
        for pattern in (patterns,) if isinstance(patterns, str) else tuple(patterns):
            found = [path for path in paths if matches(pattern, path)]
            if not found:
                raise no_match(pattern, paths, where=f"mark_boundaries for {name!r}")
            chosen.extend((paths[path], name) for path in found)
    for module, name in chosen:
        mark_boundary(module, name)
    return model


def boundaries_of(node_meta: Mapping[str, Any]) -> tuple[str, ...]:
    """Boundary names around a graph node's operation, outermost first, for forward and backward nodes of a joint graph."""
    custom = node_meta.get("custom") or {}
    return tuple(key[len(ANNOTATION) :] for key in custom if isinstance(key, str) and key.startswith(ANNOTATION))


def names_of(module: nn.Module) -> tuple[str, ...]:
    """Names that mark_boundary gave to this module itself."""
    return tuple(getattr(module, _NAMES, ()))


def _annotate() -> Callable[[dict[str, Any]], Any]:
    try:
        from torch.fx.traceback import annotate
    except ImportError as error:
        import torch

        raise GraphOffloadError(
            f"torch {torch.__version__} has no torch.fx.traceback.annotate, which carries boundary names into the graph. "
            "Install torch>=2.11, or name the module by its path in offload_modules instead."
        ) from error
    return annotate


def _marked_class(kind: type[nn.Module], annotate: Callable[[dict[str, Any]], Any]) -> type[nn.Module]:
    if kind in _MARKED:
        return _MARKED[kind]
    plain_forward = kind.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with annotate({ANNOTATION + name: True for name in self._graphoffload_boundaries}):
            return plain_forward(self, *args, **kwargs)

    def reduce_ex(self: Any, protocol: Any) -> Any:
        reduced = kind.__reduce_ex__(self, protocol)
        if reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            return (_new, (kind,), *reduced[2:])
        return (_remark, (reduced[0], reduced[1], self._graphoffload_boundaries), *reduced[2:])

    body = {
        "forward": functools.wraps(plain_forward)(forward),
        "__reduce_ex__": reduce_ex,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    _MARKED[kind] = type(kind.__name__, (kind,), body)
    return _MARKED[kind]


def _new(kind: type[nn.Module]) -> nn.Module:
    """An empty marked module, for copy and pickle to fill."""
    marked = _marked_class(kind, _annotate())
    return marked.__new__(marked)


def _remark(build: Callable[..., nn.Module], args: tuple[Any, ...], names: tuple[str, ...]) -> nn.Module:
    """Build a module of a class with its own copy and pickle, and mark it."""
    module = build(*args)
    for name in names if not names_of(module) else ():
        mark_boundary(module, name)
    return module
