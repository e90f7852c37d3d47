"""Configurations of torchtitan's models by their names, changed where they stand in a plan's way.

    --module graphoffload.integrations.torchtitan --config llama3_8b      torchtitan's llama3_8b, with

    compile.enable                   every block is compiled, by Inductor: the switch plans what that gets
    activation_checkpoint = None     the budget decides what is recomputed
    training.disable_cuda_graphs     its graph of a whole step cannot contain copies that outlive a graph

Options are GRAPHOFFLOAD_* of the environment, such as GRAPHOFFLOAD_DEVICE_BUDGET=60GiB; torchtitan's own stand on its command
line and win over what is set here.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from torchtitan.models import _supported_models

from graphoffload.integrations.releases import check_release
from graphoffload.integrations.switch import install, is_on

_OLDEST, _NEWEST = "0.3", "0.3"


def __getattr__(name: str) -> Callable[[], Any]:
    """The configuration of this name, of whichever model has one."""
    if not name.startswith("_"):
        for registry in _registries(name):
            build = getattr(registry, name, None)
            if callable(build) and getattr(build, "__module__", "") == registry.__name__:
                return functools.partial(planned, build)
    raise AttributeError(f"no model of torchtitan has a configuration {name!r}")


def __dir__() -> list[str]:
    """Names of all configurations."""
    return sorted(name for registry in _registries("") for name in _configurations(registry))


def planned(build: Callable[[], Any]) -> Any:
    """torchtitan's configuration as it is planned; turns graphoffload on, if the environment has not."""
    check_release("torchtitan", _OLDEST, _NEWEST)
    config = build()
    config.compile.enable = True
    if "model" not in config.compile.components:
        config.compile.components = [*config.compile.components, "model"]
    config.activation_checkpoint = None
    config.training.disable_cuda_graphs = True
    if not is_on():
        install()
    return config


def _registries(name: str) -> Iterator[ModuleType]:
    """The config_registry of each model, those first whose name the configuration begins with."""
    for model in sorted(_supported_models, key=lambda model: (not name.startswith(model), model)):
        try:
            yield importlib.import_module(f"torchtitan.models.{model}.config_registry")
        except ImportError:  # a model that needs a package which is not installed
            continue


def _configurations(registry: ModuleType) -> Iterator[str]:
    for name, value in vars(registry).items():
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", "") == registry.__name__:
            yield name
