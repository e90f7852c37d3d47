"""graphoffload for whatever Inductor compiles in this process: by the environment, or by a call.

    GRAPHOFFLOAD=1 GRAPHOFFLOAD_DEVICE_BUDGET=40GiB torchrun train.py        nothing in the script changes
    graphoffload.install(device_budget="40GiB")                              the same from code, until uninstall()

Each graph that is trained goes the way of the backend by name (compiler/backend.py). A graph without gradients, and one for
which somebody else set a `custom_partitioner_fn`, stays Inductor's. Nothing of the compiler is imported before a first graph
comes: processes that compile nothing, such as a launcher or a data loader, pay for no import.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from graphoffload.errors import ConfigError, NotOffloadedWarning, warn
from graphoffload.integrations.autoload import ON, VARIABLE
from graphoffload.log import say
from graphoffload.options.config import OffloadConfig
from graphoffload.torch_internals import inductor_calls
from graphoffload.units import format_bytes

_STEPS = 2  # of one optimizer: what is trained was compiled by then


class Switch:
    """The switch while it is on: the options, and what came of it.

    Args:
        how: what turned it on, as it is written. configure: gives the options at the first graph; its ConfigError stops that
            compile.
    """

    def __init__(self, how: str, configure: Callable[[], OffloadConfig]) -> None:
        self.how = how
        self.configure = configure
        self._config: OffloadConfig | None = None
        self._planned = self._untrained = self._others = 0
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._told = False
        self._process = os.getpid()
        self._undo = inductor_calls.take_over(self.compile)
        self._hook = register_optimizer_step_post_hook(self._after_step)
        atexit.register(self._at_exit)

    def turn_off(self) -> None:
        """Leave everything as it was before. What was compiled stays as it is."""
        self._undo()
        self._hook.remove()
        atexit.unregister(self._at_exit)

    def compile(
        self, gm: GraphModule, inputs: Sequence[Any], settings: dict[str, Any], as_before: Callable[[], Any]
    ) -> Callable[..., Any]:
        """Compile a graph that torch.compile hands to Inductor. settings: of torch._inductor.config; as_before: Inductor.

        Raises:
            ConfigError: an option of the environment is wrong; it is named.
        """
        from graphoffload.compiler.backend import compile_graph
        from graphoffload.compiler.compile_variant import needs_gradient
        from graphoffload.torch_internals import dynamo, inductor

        if not needs_gradient(inputs):
            self._untrained += 1
            return as_before()  # type: ignore[no-any-return]
        if (settings.get("custom_partitioner_fn") or inductor.config.custom_partitioner_fn) is not None:
            self._others += 1
            if self._others == 1:
                say(f"{self.how}: graphs with another custom_partitioner_fn are left to it")
            return as_before()  # type: ignore[no-any-return]
        if self._config is None:
            try:
                self._config = self.configure()
            except ConfigError as error:
                raise dynamo.as_it_is(error) from None
        if not self._planned:
            say(f"{self.how}: on for what Inductor compiles here, with {_shown(self._config)}")
        self._planned += 1
        inductor_options = (*self._config.inductor_options, *settings.items())
        return compile_graph(gm, inputs, self._config.with_options(inductor_options=inductor_options))

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling() or self._told or inductor_calls.eager_is_asked_for():
            return  # a compiled optimizer.step traces this: nothing of it belongs in there
        steps = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if steps < _STEPS:
            return
        self._told = True
        if not self._did_something():
            warn(NotOffloadedWarning, self._nothing(f"an optimizer has stepped {_STEPS} times"))

    def _at_exit(self) -> None:
        """Say that nothing was planned, in a process that trained or compiled. A launcher or a worker did neither."""
        worked = bool(self._steps) or self._untrained or self._others
        if self._told or os.getpid() != self._process or not worked or self._did_something():
            return
        say(self._nothing("the process ends"))

    def _did_something(self) -> bool:
        if self._planned:
            return True
        from graphoffload.runtime import registry

        return bool(registry.last_plans())  # by the backend's name, or by offload()

    def _nothing(self, when: str) -> str:
        left = [
            f"{count} {text}"
            for count, text in ((self._untrained, "without gradients"), (self._others, "with another custom_partitioner_fn"))
            if count
        ]
        seen = f"graphs that were left to it: {', '.join(left)}" if left else "no graph at all"
        return (
            f"{self.how} has no effect: {when}, and Inductor compiled no graph that is trained ({seen}). Have the model "
            "compiled: model.compile(), torch_compile=True of TrainingArguments, or your trainer's own option "
            "(docs/trainers.md). What another backend compiles is not planned."
        )


_ACTIVE: list[Switch] = []
"""The switch that is on; at most one."""


def install(**options: Any) -> None:
    """Turn graphoffload on for whatever Inductor compiles from now on in this process: `model.compile()`, a trainer's option.

    Args:
        options: fields of OffloadConfig, such as device_budget="40GiB", over GRAPHOFFLOAD_* of the environment; and options of
            torch._inductor.config. Another call's options hold for what is compiled after it.

    Raises:
        ConfigError: an unknown option, or a bad value.

    Example:
        >>> graphoffload.install(device_budget="40GiB")
        >>> model.compile()                                      # planned as with backend="graphoffload"
    """
    config = OffloadConfig.from_options(options)
    _turn_on("graphoffload.install()", lambda: config)


def uninstall() -> None:
    """Leave to Inductor what is compiled from now on. What was compiled stays planned until torch._dynamo.reset()."""
    while _ACTIVE:
        _ACTIVE.pop().turn_off()


def is_on() -> bool:
    """Whether what Inductor compiles now is planned."""
    return bool(_ACTIVE)


def turn_on_by_environment(text: str) -> None:
    """GRAPHOFFLOAD=text at the import of torch. What is wrong about it is said at the first graph."""

    def configure() -> OffloadConfig:
        if text.lower() not in ON:
            raise ConfigError(
                f"{VARIABLE}={text!r} in the environment is neither on (1) nor off (0). Set {VARIABLE}=1; options have "
                f"variables of their own, such as {VARIABLE}_DEVICE_BUDGET=40GiB."
            )
        return OffloadConfig.from_options()

    _turn_on(f"{VARIABLE}={text}", configure)


class SwitchedOn:
    """The switch for the length of a training run, as a trainer's callback has it: afterwards it is as it was before.

    Args:
        how: what turned it on. options: as of install(); without any, a switch that is on already stays as it is.

    Raises:
        ConfigError: an unknown option, or a bad value.
    """

    def __init__(self, how: str, options: Mapping[str, Any]) -> None:
        self.how, self.given, self.config = how, bool(options), OffloadConfig.from_options(options)
        self._before: tuple[Switch, ...] | None = None

    def begin(self) -> None:
        """Turn it on; again without effect."""
        if self._before is None and (self.given or not _ACTIVE):
            self._before = tuple(_ACTIVE)
            _RUNNING.append(self)
            _turn_on(self.how, lambda: self.config)

    def end(self) -> None:
        """Off, or on as before."""
        if self._before is None:
            return
        before, self._before = self._before, None
        at = _RUNNING.index(self)
        del _RUNNING[at]
        if at < len(_RUNNING):  # another one began since then and goes on: two callbacks of one trainer end as they began
            _RUNNING[at]._before = before
            return
        uninstall()
        for switch in before:
            _turn_on(switch.how, switch.configure)


_RUNNING: list[SwitchedOn] = []
"""Training runs that have begun and not ended, in this order."""


def _turn_on(how: str, configure: Callable[[], OffloadConfig]) -> None:
    uninstall()
    _ACTIVE.append(Switch(how, configure))


def _shown(config: OffloadConfig) -> str:
    default = OffloadConfig()
    changed = {name: value for name, value in vars(config).items() if value != getattr(default, name)}
    sizes = {name: format_bytes(value) for name, value in changed.items() if type(value) is int}
    return ", ".join(f"{name}={sizes.get(name, value)}" for name, value in changed.items()) or "no option (it fits the device)"
