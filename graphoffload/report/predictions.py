"""Timelines of the plans of this process, for pictures. A plan from a compile cache or a file has none."""

from __future__ import annotations

from graphoffload.planner.predicted import Predicted

_KEPT = 1024  # plans; older ones are forgotten
_BY_KEY: dict[str, Predicted] = {}


def remember(key: str, predicted: Predicted) -> None:
    """Store the prediction of the plan with this key."""
    _BY_KEY.pop(key, None)
    _BY_KEY[key] = predicted
    while len(_BY_KEY) > _KEPT:
        _BY_KEY.pop(next(iter(_BY_KEY)), None)


def predicted_of(key: str) -> Predicted | None:
    """The prediction of the plan with this key; None if it was made in another process."""
    return _BY_KEY.get(key)
