"""graphoffload: a torch.compile backend that decides for each saved activation: keep, recompute, or offload to host memory.

    model.compile(backend="graphoffload")                                       # fit this GPU; change nothing when it fits
    model.compile(backend="graphoffload", options={"device_budget": "40GiB"})   # fit this much, at the least cost in time
    GRAPHOFFLOAD=1 torchrun train.py                                            # a script that compiles, as it is

A tour, in the order in which one compile goes through the packages:

**Joint graph.** torch traces forward and backward into one graph and calls our partitioner (compiler/partitioner.py, reached
by name through compiler/backend.py, or by `explain` and `offload` through api/introspect.py). compiler/pipeline.py is the whole
flow on one page; it works on copies, and the joint graph is never written to. What the user asked for is read by options/, and
becomes one constraint for each activation in compiler/constraints.py.

**Analysis.** torch's own min-cut partitioner splits a copy (torch_internals/partitioning.py). analysis/saved_values.py finds
what backward needs, by storage, and writes it down as a SavedTable (facts/saved_tensors.py): bytes, producer, modules, first
and last use, whether it may leave the device. analysis/chains.py says what recomputing it takes, analysis/costs.py what each
operation costs, hardware/ what the device and its link can do.

**Plan.** analysis/program.py turns all that into an instance without a graph (planner/problem.py). compiler/decide.py asks the
solver (planner/solver.py); the simulator alone judges a plan (planner/simulator.py), and a lower bound stands beside the result
(planner/strategies/relaxation.py). Out comes a Plan (facts/plan.py): one decision with its reason for each activation, and one
Transfer for each offload.

**Passes.** passes/ holds the only code that writes to a graph: tag.py marks what is recomputed, offload.py inserts offload and
release into the forward, reload.py reload and wait into the backward. analysis/verify.py checks the result, one small function
a rule.

**Ops.** The four ops (runtime/ops.py) run in every step: copies on side streams (runtime/streams/) to page-locked buffers of
exact size (runtime/pinned/), found again by a handle that travels through autograd (runtime/handles.py). monitor/ compares what
happened with what was promised, and warns.

**Report.** report/ shows plans as text and as pictures and writes the dump folder; log.py prints the one line after each
compile. Every complaint is a class in errors.py. `python -m graphoffload` shows hardware and plans from a shell (docs/cli.md).

docs/one_tensor.md follows one activation all the way, with code that runs; docs/layout.md says where to change what.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphoffload.api.changing import set_budget, set_slowdown
    from graphoffload.api.introspect import explain, offload
    from graphoffload.api.tuning import tune
    from graphoffload.compiler.backend import OffloadBackend
    from graphoffload.compiler.partitioner import OffloadPartitioner, partition_fn
    from graphoffload.hardware.profile import HardwareProfile
    from graphoffload.integrations.switch import install, uninstall
    from graphoffload.options.boundaries import mark_boundaries, mark_boundary
    from graphoffload.options.config import OffloadConfig
    from graphoffload.report.offload_report import OffloadReport
    from graphoffload.runtime import host_memory, release_host_memory, reset_stats, stats
    from graphoffload.runtime.registry import last_plans

__all__ = [
    "HardwareProfile", "OffloadBackend", "OffloadConfig", "OffloadPartitioner", "OffloadReport", "explain", "host_memory",
    "install", "last_plans", "mark_boundaries", "mark_boundary", "offload", "partition_fn", "release_host_memory",
    "reset_stats", "set_budget", "set_slowdown", "stats", "tune", "uninstall",
]  # fmt: skip

_HOMES = {
    "api.changing": ("set_budget", "set_slowdown"),
    "api.introspect": ("explain", "offload"),
    "api.tuning": ("tune",),
    "compiler.backend": ("OffloadBackend",),
    "compiler.partitioner": ("OffloadPartitioner", "partition_fn"),
    "hardware.profile": ("HardwareProfile",),
    "integrations.switch": ("install", "uninstall"),
    "options.boundaries": ("mark_boundaries", "mark_boundary"),
    "options.config": ("OffloadConfig",),
    "report.offload_report": ("OffloadReport",),
    "runtime": ("host_memory", "release_host_memory", "reset_stats", "stats"),
    "runtime.registry": ("last_plans",),
}


def __getattr__(name: str) -> Any:
    """Import everything at the first use of any name: `import torch` imports this file (integrations/autoload.py)."""
    if not name.startswith("_"):
        for home, names in _HOMES.items():
            module = import_module(f"{__name__}.{home}")
            globals().update({exported: getattr(module, exported) for exported in names})
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
