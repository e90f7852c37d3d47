"""The fields of OffloadConfig as options of a command: `--device-budget 40GiB`, read as in the environment."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

from graphoffload.errors import ConfigError
from graphoffload.options.config import ENV_PREFIX, OffloadConfig, parse_text


def dashed(name: str) -> str:
    """A field's name as an option has it."""
    return name.replace("_", "-")


def add_fields(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Make these fields options of a command."""
    fields = parser.add_argument_group("the configuration", f"Also set by {ENV_PREFIX}<FIELD>; an option wins.")
    for name in names:
        fields.add_argument(f"--{dashed(name)}", dest=f"field_{name}", metavar="VALUE", help=field_help(name))


def field_help(name: str) -> str:
    """What OffloadConfig's docstring says of a field."""
    names = "|".join(field.name for field in dataclasses.fields(OffloadConfig))
    _, _, fields = (OffloadConfig.__doc__ or "").partition("Attributes:")  # under -OO a dataclass writes a signature there
    text = re.search(rf"\b{name}: (.*?)(?=\s+(?:{names}): |\n\s*\n)", fields, re.S)
    return re.sub(r"\s+", " ", text[1]).replace("%", "%%").rstrip(".") if text else ""


def given_fields(args: argparse.Namespace) -> dict[str, str]:
    """Texts of the fields that a command was given, by name."""
    return {name[len("field_") :]: text for name, text in vars(args).items() if name.startswith("field_") and text is not None}


def config_of(args: argparse.Namespace) -> OffloadConfig:
    """The options given, over the environment.

    Raises:
        ConfigError: a bad value.
    """
    given = given_fields(args)
    inductor: dict[str, Any] = {}
    if (text := given.pop("inductor_options", None)) is not None:
        try:
            inductor = dict(json.loads(text))
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f'inductor_options={text!r} is no JSON object ({error}); write {{"max_autotune": true}}.'
            ) from None
    return OffloadConfig.from_options({**inductor, **{name: parse_text(name, text) for name, text in given.items()}})
