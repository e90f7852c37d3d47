"""The names of `joint` under the path that callers import them from."""

from graphoffload.planner.step.joint import Joined, join

__all__ = ["Joined", "join"]
