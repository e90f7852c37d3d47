"""Conditions outside a plan that change what it means: CUDA graphs cut at its copies, other ranks' plans, a slow host.

Inductor captures a graph with its copies (runtime/captured.py) unless another part of it cannot be captured. It then also cuts
the graph at the copies, captures the parts between, and calls the ops in every step (`graph_partition`, on by default since
2.9). If it may not cut, it captures nothing. A warning reports either once a plan.
"""

from __future__ import annotations

import torch

from graphoffload.errors import CudaGraphsWarning, PerRankPlanWarning, warn
from graphoffload.facts.plan import Plan
from graphoffload.options.config import OffloadConfig
from graphoffload.torch_internals import inductor

KERNEL_HOST_S = 33e-6
"""Host time of one kernel of compiled code: 5.5 ms of a small keep-all step, divided by its 168 kernels."""

OPS_HOST_S = 80e-6
"""Host time of the four ops of one transfer in a real step (docs/history/benchmarks-2026-11.md, twelfth session)."""

_BUSY_SHARE = 0.6
_warned_of_ranks = False


def asks_for_cuda_graphs(config: OffloadConfig) -> bool:
    """Whether mode, options or torch's own settings turn Inductor's CUDA graphs on."""
    options = dict(config.inductor_options)
    if config.mode and config.mode != "default":
        options = {**inductor.options_of_mode(config.mode), **options}
    return bool(options.get("triton.cudagraphs", inductor.config.triton.cudagraphs))


def host_time_note(plan: Plan, config: OffloadConfig, kernels: int, *, inductor: bool) -> str:
    """A note that predicted times assume a GPU that never waits for its host, if it may have to wait; "" otherwise.

    The host can limit forward and backward if it is busy for most of both. In a CUDA graph it cannot.
    """
    host_s = kernels * KERNEL_HOST_S + len(plan.transfers) * OPS_HOST_S
    whole_s = plan.prediction.predicted_time_s
    if not inductor or not plan.device.startswith("cuda") or not plan.changes_anything or asks_for_cuda_graphs(config):
        return ""
    if not whole_s or host_s <= _BUSY_SHARE * whole_s:
        return ""
    share = f"{round(10 * host_s / whole_s) * 10} %" if host_s < whole_s else "all"
    fewer = "; a larger min_tensor_bytes makes fewer transfers" if plan.transfers else ""
    return (
        f"{kernels} kernels or more and {len(plan.transfers)} transfers may keep the host busy for about {share} of the "
        'predicted time: it is that of a GPU that never waits for its host. Where it does, mode="reduce-overhead" has CUDA '
        f"graphs issue them{fewer}"
    )


def warn_of_surroundings(plan: Plan, config: OffloadConfig, *, inductor: bool, alone: bool = False) -> None:
    """Warn about conditions of a new plan, or of one from a compile cache: CUDA graphs that do not span it, and other ranks.

    Args:
        alone: there are other ranks, and the plan was made without knowing what they have.
    """
    if not plan.changes_anything:
        return
    if plan.transfers and asks_for_cuda_graphs(config) and not inductor:
        asked = f"mode={config.mode!r}" if config.mode else "triton.cudagraphs"
        text = f'{plan.graph}: {asked} has no effect with inner="aot_eager": no CUDA graph is captured. Use inner="inductor".'
        warn(CudaGraphsWarning, text)
    if alone and not plan.variant:  # a step's variants are chosen by a plan that its ranks have in common
        _warn_of_ranks()


def warn_of_cuts(plan: Plan, why: str) -> None:
    """Warn that a graph is not captured with its copies. Called while Inductor compiles it, with Inductor's settings for it."""
    if not plan.device.startswith("cuda"):
        return  # a CPU has no CUDA graphs
    count = len(plan.transfers)
    if inductor.config.graph_partition and not inductor.config.cpp_wrapper:
        found = (
            f"CUDA graphs are captured between its {count} offloads, releases, reloads and waits ({4 * count} calls a step), "
            f"not across them: {why}. Fewer, larger transfers (min_tensor_bytes) leave larger captured parts."
        )
    else:
        found = (
            f"no CUDA graph is captured of a graph with {count} offloaded tensors: {why}. Set graph_partition=True and "
            "cpp_wrapper=False of torch._inductor to have the parts between the copies captured."
        )
    warn(CudaGraphsWarning, f"{plan.graph}: {found}")


def _warn_of_ranks() -> None:
    global _warned_of_ranks
    if _warned_of_ranks:
        return
    _warned_of_ranks = True
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    warn(
        PerRankPlanWarning,
        f"rank {rank} of {size} plans for itself: a partitioner that is used without the backend asks no other rank, and knows "
        "its own free memory and its own measured times alone. Gradients are the same whatever the others decide, but the "
        'slowest rank sets the pace of all. Use backend="graphoffload"; or give device_budget and hardware as fixed values '
        '(such as "60GiB" and "h200-sxm"), and set LOCAL_WORLD_SIZE so that host_budget is shared (torchrun does).',
    )
