"""A model and its inputs from a function of the user's script."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from graphoffload.cli.output import CommandError

_FORMS = "(model, args), (model, args, kwargs) or (model, kwargs), with args a tuple or list and kwargs a dict"


def built(target: str, *, meta: bool) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(model, args, kwargs) as the script's function returns them.

    Raises:
        CommandError: no such file or function, or it fails, or returns something else.
    """
    name, _, function = target.partition(":") if not Path(target).is_file() else (target, "", "")
    function = function or "build"
    path = Path(name).expanduser()
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise CommandError(f"{name} {what}; give a Python file and a function in it, such as train.py:build.")
    module = _imported(path)
    build = getattr(module, function, None)
    if not callable(build):
        functions = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        own = [name for name in functions if getattr(vars(module)[name], "__module__", "") == module.__name__]
        there = f"its functions and classes: {', '.join(own)}" if own else "it has none"
        raise CommandError(f"{path} has no function {function!r}; {there}. Write one that returns {_FORMS}.")
    with torch.device("meta") if meta else nullcontext():
        result = _theirs(path, f"{path}:{function}()", build)
    return _checked(f"{path}:{function}()", result)


def _imported(path: Path) -> ModuleType:
    """The script as a module that is not `__main__`; files beside it can be imported, as when it is run."""
    name = f"_script_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CommandError(f"{path} is no Python file; give one that ends in .py, such as train.py:build.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.resolve().parent))
    before, sys.argv = sys.argv, [str(path)]
    try:
        _theirs(path, f"importing {path}", lambda: spec.loader.exec_module(module))  # type: ignore[union-attr]
    finally:
        sys.argv = before
    return module


def _theirs(path: Path, what: str, run: Callable[[], Any]) -> Any:
    """Runs the user's code; what it raises is shown from the first line of the script on."""
    try:
        return run()
    except SystemExit as error:
        raise CommandError(
            f'{what} ended the process (SystemExit: {error.code}). Put what trains under if __name__ == "__main__".'
        ) from None
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        places = [place for place, frame in enumerate(frames) if Path(frame.filename).resolve() == path.resolve()]
        shown = "".join(traceback.format_list(frames[places[0] :])) if places else ""
        raise CommandError(f"{what} failed: {type(error).__name__}: {error}\n{shown}".rstrip()) from error


def _checked(what: str, result: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Model, args and kwargs; or a complaint that says what came instead."""
    parts = tuple(result) if isinstance(result, (tuple, list)) else ()
    if len(parts) not in (2, 3):
        kinds = f" of {len(parts)} ({', '.join(type(part).__name__ for part in parts)})" if parts else ""
        raise CommandError(f"{what} returned a {type(result).__name__}{kinds}; it must return {_FORMS}.")
    model, inputs, named = (parts[0], (), parts[1]) if isinstance(parts[1], dict) and len(parts) == 2 else (*parts, {})[:3]
    if not callable(model) or isinstance(model, type):
        raise CommandError(f"{what} returned a {_kind(model)} for the model; it must return {_FORMS}.")
    if not isinstance(inputs, (tuple, list)):
        remedy = " Write (model, (tensor,))." if isinstance(inputs, torch.Tensor) else ""
        raise CommandError(f"{what} returned a {_kind(inputs)} for args; it must return {_FORMS}.{remedy}")
    if not isinstance(named, dict) or not all(isinstance(key, str) for key in named):
        raise CommandError(f"{what} returned a {_kind(named)} for kwargs; it must return {_FORMS}.")
    return model, tuple(inputs), named


def _kind(value: Any) -> str:
    return f"class ({value.__name__})" if isinstance(value, type) else type(value).__name__
