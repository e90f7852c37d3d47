"""What a user asks for in the middle of training, instead of what was compiled with."""

from __future__ import annotations

from typing import Any


class Override:
    """What graphoffload.set_budget or set_slowdown asked for, instead of what was compiled with; `version` counts them.

    configs: digests of the configurations that it stands for, those of all graphs at that time. A model that is compiled later
    with other options keeps to those.
    """

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.configs: frozenset[str] = frozenset()
        self.version = 0


OVERRIDE = Override()
