"""Run a script, a module or a command with graphoffload on for whatever Inductor compiles there (GRAPHOFFLOAD=1).

    train.py args        this Python runs the script
    -m module args       this Python runs the module
    anything else        a command, such as torchrun or accelerate; what it starts inherits the environment

Options of graphoffload stand before the command; what follows the command's name is its own. The script compiles as it does
without this: model.compile(), torch.compile(model), or a trainer's option; docs/trainers.md has each trainer's. The command
takes this process's place, so that signals and the exit status are its own.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphoffload.cli.fields import add_fields, config_of, given_fields
from graphoffload.cli.output import DONE
from graphoffload.errors import ConfigError
from graphoffload.integrations.autoload import VARIABLE
from graphoffload.options.config import ENV_PREFIX, FIELD_NAMES, OffloadConfig, parse_text

_GROUP = "torch.backends"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_fields(parser, FIELD_NAMES)
    rest: dict[str, Any] = {"nargs": argparse.REMAINDER, "default": []}
    parser.add_argument("-m", dest="module", metavar="MODULE", help="a module and its arguments, as python -m runs it", **rest)
    parser.add_argument("command_given", metavar="COMMAND", help="a script, or a command such as torchrun", **rest)


def start(args: argparse.Namespace) -> int:
    """Run the command in this process's place; returns where the system does."""
    config_of(args)
    launch(["-m", *args.module] if args.module else args.command_given, given_fields(args))
    return DONE


def launch(command: Sequence[str], options: Mapping[str, str]) -> None:
    """Run a command in this process's place with the switch on; does not return.

    Args:
        command: as after `run`. options: texts of fields, as their variables have them.

    Raises:
        ConfigError: no such script or command, or an environment in which torch calls no entry points.
    """
    argv = full_command(command)
    environment = with_switch(os.environ, options)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(argv[0], argv, environment)


def full_command(command: Sequence[str]) -> list[str]:
    """A command as the system runs it.

    Raises:
        ConfigError: nothing to run, or it is not there.
    """
    given = list(command[1:]) if command[:1] == ["--"] else list(command)
    if not given:
        raise ConfigError("run: no command. Give a script with its arguments: python -m graphoffload run train.py --lr 1e-4")
    first = given[0]
    if first == "-m":
        return [sys.executable, *given]
    if first.endswith(".py"):
        if not Path(first).is_file():
            raise ConfigError(f"run: {first} does not exist here ({Path.cwd()}). Name a script, -m module, or a command.")
        return [sys.executable, *given]
    if first.startswith("-"):
        raise ConfigError(f"run: {first} is no option of graphoffload. Options stand before the command, and -- may end them.")
    if shutil.which(first) is None:
        raise ConfigError(f"run: there is no command {first!r} on the PATH. Name a script (.py), -m module, or a command.")
    return given


def with_switch(environ: Mapping[str, str], options: Mapping[str, str]) -> dict[str, str]:
    """An environment in which graphoffload is on with these options.

    Raises:
        ConfigError: torch would not call the entry point there.
    """
    if environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        raise ConfigError(
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 in the environment keeps torch from calling entry points, so that "
            f"{VARIABLE}=1 has no effect. Unset it, or call graphoffload.install() in the script."
        )
    if "graphoffload" not in importlib.metadata.entry_points(group=_GROUP).names:
        raise ConfigError(
            f"graphoffload is not installed for {sys.executable}: torch finds no entry point of it. Install it "
            "(pip install -e . in a checkout), or call graphoffload.install() in the script."
        )
    left = {name: text for name, text in environ.items() if name not in _overridden(options)}
    return {**left, VARIABLE: "1", **{ENV_PREFIX + name.upper(): text for name, text in options.items()}}


def _overridden(options: Mapping[str, str]) -> tuple[str, ...]:
    """Variables of the other of two fields that are one choice, as OffloadConfig.from_options drops them."""
    given = OffloadConfig.from_options({name: parse_text(name, text) for name, text in options.items()}, environ={})
    budget, slowdown = ENV_PREFIX + "DEVICE_BUDGET", ENV_PREFIX + "MAX_SLOWDOWN"
    return (budget,) * given.limits_time + (slowdown,) * given.has_budget
