"""What a user asks for in the middle of training, instead of what was compiled with."""

from __future__ import annotations

from typing import Any

from graphoffload.options.config import OffloadConfig


class Override:
    """What graphoffload.set_budget or set_slowdown asked for, instead of what was compiled with; `version` counts them.

    configs: digests of the configurations that it stands for, those of all graphs at that time. What is compiled later with one
    of them is planned for what is asked for now; a model with other options keeps to those.
    """

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.configs: frozenset[str] = frozenset()
        self.version = 0


OVERRIDE = Override()


def asked_now(config: OffloadConfig) -> OffloadConfig:
    """What is asked for now: as it was compiled, or as it was changed since."""
    return config.with_options(**OVERRIDE.options) if config.digest() in OVERRIDE.configs else config
