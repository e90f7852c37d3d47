"""Output about plans: the line after each compile, tables, pictures of a step and of a graph, and the dump folder."""

from graphoffload.report.offload_report import OffloadReport

__all__ = ["OffloadReport"]
