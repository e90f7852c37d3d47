"""Another budget or slowdown in the middle of training.

    graphoffload.set_budget("40GiB")     every step is planned for it from its next start on, whatever it was compiled with
    graphoffload.set_slowdown(0.02)
    graphoffload.set_budget("auto")      what fits the device

A step is planned again between two steps, never inside one. Its line says so. A plan for a number that was asked for before
needs no compile.
"""

from __future__ import annotations

from typing import Any

from graphoffload.compiler.dispatch import GRAPHS
from graphoffload.compiler.override import OVERRIDE
from graphoffload.errors import ConfigError
from graphoffload.log import say
from graphoffload.options.config import OffloadConfig
from graphoffload.runtime import registry
from graphoffload.runtime.step.calls import LATEST
from graphoffload.units import format_bytes


def set_budget(device_budget: int | float | str) -> None:
    """Plan each step anew for this budget, from its next start on.

    Args:
        device_budget: bytes, a size such as "40GiB", a share of the device such as "80%", or "auto" for what fits.

    Raises:
        ConfigError: it is no size, or nothing is compiled that could be planned again.
    """
    _set(device_budget=device_budget, max_slowdown=None)


def set_slowdown(max_slowdown: float) -> None:
    """Plan each step anew for this slowdown, from its next start on.

    Args:
        max_slowdown: share of the step's time, 0.02 for 2 %.

    Raises:
        ConfigError: it is no such share, or nothing is compiled that could be planned again.
    """
    _set(device_budget="auto", max_slowdown=max_slowdown)


def _set(**options: Any) -> None:
    OffloadConfig().with_options(**options)  # says what is wrong with a number at once
    if not GRAPHS:
        alone = "what is compiled cannot be planned again, such as graphs under CUDA graphs" if registry.last_plans() else ""
        raise ConfigError(
            f"nothing can be planned for {options} yet: {alone or 'no graph was compiled by graphoffload so far'}. Give the "
            'number where the model is compiled, as in model.compile(backend="graphoffload", options={"device_budget": ...}).'
        )
    OVERRIDE.options = options
    OVERRIDE.configs = frozenset(graph.graph.config.digest() for graph in GRAPHS.values())
    OVERRIDE.version += 1
    runs = [run for latest in LATEST.values() for run in (latest, *latest.alive)]
    running = any(run.calls and not run.is_nested for run in runs)
    budget = options["device_budget"]
    shown = f"device_budget={format_bytes(budget) if isinstance(budget, int) else budget}"
    given = shown if options["max_slowdown"] is None else f"max_slowdown={options['max_slowdown']}"
    say(f"{given} from the next step on" + (", since one is running" if running else ""))
