"""What is allocated beside the activations of a graph that is planned alone, as its runs showed it (alone.py)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Outside:
    """Bytes of a device that no plan of the graph moves.

    turn_bytes: between forward and backward, above what lives throughout and what the graph leaves; None: not measured.
    static_bytes: throughout the run that was measured; None: not measured. start_bytes: allocated when that run began.
    grown_bytes: more than that, which the present plan counts. more_bytes: what the last run began with above start_bytes.
    freed: runs in a row that began with much less than the plan counts.
    again: how often the graph was planned again for it. looks: how often it was asked whether it has to be.
    is_least: the present plan exceeds the budget, and none takes less.
    """

    turn_bytes: int | None = None
    static_bytes: int | None = None
    start_bytes: int = 0
    grown_bytes: int = 0
    more_bytes: int = 0
    freed: int = 0
    again: int = 0
    looks: int = 0
    is_least: bool = False
