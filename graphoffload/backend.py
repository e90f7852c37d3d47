"""The place of the backend in releases before 0.2, for entry points that were installed then."""

from graphoffload.compiler.backend import OffloadBackend, graphoffload

__all__ = ["OffloadBackend", "graphoffload"]
