"""The graph that Dynamo compiles now in the user's terms: which part of the model it is, and the names of its modules.

    model.compile()                     the model, as named_modules() sees it: model.layers.0.mlp, lm_head
      model.forward         skipped     a frame that Dynamo cannot trace
        model.model.forward compiled    a frame of its own, whose `self` is model.model: tracing calls that layers.0.mlp

Tracing names a module by the variable through which the frame reached it ("L['self'].__dict__['_modules']['model'].layers.0").
Such a text says neither where in the model the frame starts, nor always the module's name. The key next to it is the module's
identity (torch._dynamo.variables.nn_module), so names are looked up in named_modules() of the model. The model is found by the
function that torch.compile was given, or by one that runs around the frame and belongs to a module that holds the frame's.

Dynamo runs the code that it compiled for one module for every other one of its class, if the guards allow it. If the model
has several such modules, their common name has "*" where their names differ: "layers.*.mlp".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CellType, CodeType
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from graphoffload.options.patterns import clean_path, placed
from graphoffload.passes.module_names import rename_modules
from graphoffload.torch_internals import dynamo
from graphoffload.torch_internals.modules import forward_hooks

_VARIABLE = re.compile(r"(?:getattr\()*([LG])\[(['\"])([^'\"]*)\2\]")
_RESUMED = "torch_dynamo_resume_in_"

# Frames of torch between a module's call and its forward, and wrappers that run one module and nothing else.
_TORCH = Path(torch.__file__).parent
_CALLS = tuple(str(_TORCH / place) for place in ("nn/modules/module.py", "nn/parallel", "distributed/fsdp", "_dynamo"))


def is_part(frame: dynamo.Compiling) -> bool:
    """Whether this frame is not the function that torch.compile was given, but one that this function calls, or a module's
    hook."""
    if any(code is frame.code for code in _hooks(frame.running)):
        return True
    return any(not code.co_filename.startswith(_CALLS) for code in _callers(frame))


def _callers(frame: dynamo.Compiling) -> list[CodeType]:
    """Code around a frame, outermost first. The rest of a function after a graph break is called by the function itself."""
    codes = [around.code for around in frame.around]
    name, rest = _plain_name(frame.code), frame.code.co_name.startswith(_RESUMED)
    while rest and codes and (codes[-1].co_filename, _plain_name(codes[-1])) == (frame.code.co_filename, name):
        rest = codes.pop().co_name.startswith(_RESUMED)
    return codes


def _plain_name(code: CodeType) -> str:
    """A function's name, also of its rest after a graph break: torch_dynamo_resume_in_forward_at_12."""
    return re.sub(rf"^{_RESUMED}(.*?)_at_\d+$", r"\1", code.co_name)


def _hooks(running: object) -> Iterator[CodeType]:
    """Code of the hooks of the module whose call is compiled."""
    module = getattr(running, "__self__", None)
    if isinstance(module, nn.Module):
        for hook in forward_hooks(module):
            code = getattr(hook, "__code__", None)
            if isinstance(code, CodeType):
                yield code


def name_modules(gm: GraphModule) -> None:
    """Give the modules around a graph's operations the names of the model's named_modules(), if the model is known.

    Only metadata changes. For graphs from Dynamo, before anything reads them; outside of a compile nothing happens.
    """
    frame = dynamo.compiling()
    if frame is None:
        return
    rename_modules(gm, _Names(frame).of_stack)


class _Names:
    """Names of modules in one frame, each looked up once."""

    def __init__(self, frame: dynamo.Compiling) -> None:
        self.frame = frame
        self.known: dict[int, dict[int, list[str]]] = {}
        self.places: dict[int, str] = {}
        self.models = list(_models(frame))
        self.owner = _owner(frame)

    def of_stack(self, stack: Mapping[str, Any]) -> dict[str, Any]:
        """A node's stack of (path, class), outermost first, by identity, with the paths of `placed`."""
        texts = [entry[0] for entry in stack.values() if isinstance(entry, tuple)]
        return {
            key: (self._name(key, entry[0], texts[0]), *entry[1:]) if isinstance(entry, tuple) else entry
            for key, entry in stack.items()
        }

    def _name(self, key: str, text: str, first: str) -> str:
        start = self._start(text)
        path = clean_path(text)
        if start is not None:
            identity = key.partition("@")[0]
            same = self._paths(start).get(int(identity), []) if identity.isdigit() else []
            return placed(self._place(start), path if path in same or not same else same[0])
        outermost = clean_path(first)  # a function's frame: it starts at its first module
        if outermost and (path + ".").startswith(outermost + "."):
            return placed(outermost, path[len(outermost) + 1 :])
        return text

    def _start(self, text: str) -> nn.Module | None:
        """The module in the variable with which a path begins."""
        found = _VARIABLE.match(text)
        if found is None:
            return None
        value = (self.frame.local if found[1] == "L" else self.frame.outside).get(found[3])
        value = _content(value) if isinstance(value, CellType) else value
        return value if isinstance(value, nn.Module) else None

    def _paths(self, module: nn.Module) -> dict[int, list[str]]:
        """Every name of every module inside, by identity; "" is the module itself."""
        if id(module) not in self.known:
            names: dict[int, list[str]] = {}
            for name, inner in module.named_modules(remove_duplicate=False):
                names.setdefault(id(inner), []).append(clean_path(name))
            self.known[id(module)] = names
        return self.known[id(module)]

    def _place(self, module: nn.Module) -> str:
        """A module's name in the model; "*" where the names differ among modules that this code may run for."""
        if id(module) not in self.places:
            model = next((model for model in self.models if id(module) in self._paths(model)), module)
            self.places[id(module)] = self._place_in(model, module)
        return self.places[id(module)]

    def _place_in(self, model: nn.Module, module: nn.Module) -> str:
        owner, here = self.owner, self._paths(model)
        if owner is None or id(owner) not in here or id(module) not in self._paths(owner):
            return here[id(module)][0]
        alike = [here[id(other)][0] for other in model.modules() if type(other) is type(owner)]
        start = here[id(owner)][0] if owner is model else _common(alike)
        return ".".join(part for part in (start, self._paths(owner)[id(module)][0]) if part)


def _owner(frame: dynamo.Compiling) -> nn.Module | None:
    """The module whose method the frame runs: its first variable that is one; Dynamo's own begin with "__"."""
    modules = (value for name, value in frame.local.items() if not name.startswith("__") and isinstance(value, nn.Module))
    return next(modules, None)


def _models(frame: dynamo.Compiling) -> Iterator[nn.Module]:
    """Modules that may contain the frame's, outermost first: the one whose method torch.compile was given, and those around."""
    owners: list[Any] = [getattr(frame.running, "__self__", None)]
    owners += [_content(cell) for cell in getattr(frame.running, "__closure__", None) or ()]
    owners += [around.first for around in frame.around]
    yield from (owner for owner in owners if isinstance(owner, nn.Module))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _common(names: list[str]) -> str:
    """Names of equal depth as one name, with "*" for each part that differs: "layers.*"; "" if their depths differ."""
    parts = [name.split(".") for name in names]
    if len({len(each) for each in parts}) != 1:
        return ""
    return ".".join(column[0] if len(set(column)) == 1 else "*" for column in zip(*parts, strict=True))
