"""graphoffload."""

from graphoffload.backend import OffloadBackend
from graphoffload.boundary import mark_boundaries, mark_boundary
from graphoffload.config import OffloadConfig
from graphoffload.introspect import explain, offload
from graphoffload.partitioner import OffloadPartitioner, partition_fn
from graphoffload.runtime import host_memory, release_host_memory, reset_stats, stats
from graphoffload.runtime.registry import last_plans

__all__ = ["OffloadBackend", "OffloadConfig", "OffloadPartitioner", "explain", "host_memory", "last_plans", "mark_boundaries", "mark_boundary", "offload", "partition_fn", "release_host_memory", "reset_stats", "stats"]
