"""Patterns over the graphs of one model: with graph breaks or per-block compile, each graph sees only a part of the modules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from graphoffload.errors import PatternError, PatternWarning, warn

Fragment = Literal["", "part", "last"]
_matched: dict[str, set[str]] = {}
_warned: set[tuple[str, str]] = set()


def matched_somewhere(config: str, patterns: Iterable[str]) -> None:
    """Remember patterns that matched in a graph compiled with the configuration of this digest."""
    _matched.setdefault(config, set()).update(patterns)


def warn_of_unmatched(config: str, patterns: Iterable[str], error: PatternError | None) -> None:
    """Behind the last graph of a model: one warning for each pattern that matched in none of its graphs."""
    for pattern in patterns:
        if pattern in _matched.get(config, ()) or (config, pattern) in _warned:
            continue
        _warned.add((config, pattern))
        detail = f" {error}" if error is not None else ""
        warn(
            PatternWarning,
            f"pattern {pattern!r} matched no module in any graph of this model, so it has no effect.{detail} "
            "Correct the pattern, or remove it.",
            stacklevel=7,
        )
