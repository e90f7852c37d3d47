"""Variables of the environment that are on unless set to 0, for what happens by itself and somebody may want to rule out."""

from __future__ import annotations

import os

from graphoffload.errors import ConfigError

_ON, _OFF = ("", "1", "true", "on"), ("0", "false", "off")


def is_on(variable: str, without: str) -> bool:
    """Whether a variable leaves something on.

    Args:
        without: what 0 is for, such as "keep copies inside their graph".

    Raises:
        ConfigError: the variable is neither on nor off.
    """
    text = os.environ.get(variable, "").strip().lower()
    if text not in (*_ON, *_OFF):
        raise ConfigError(f"{variable}={text!r} is neither on nor off. Set it to 0 to {without}, or to 1, or unset it.")
    return text in _ON
