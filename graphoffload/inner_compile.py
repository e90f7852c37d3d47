"""Inductor's inner compile for graphs under a plan: without what would undo the plan or hold memory that it counts as free."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch._inductor import config as inductor_config
from torch.fx import GraphModule

from graphoffload.analysis.fusion import FARTHEST
from graphoffload.runtime import registry

AS_PLANNED = {
    "reorder_for_peak_memory": False,
    "allow_buffer_reuse": False,
    "triton.reorder_for_reducing_graph_partitions": False,
}
"""Settings of torch._inductor.config without which Inductor would move what was planned."""


def compile_as_planned(key: str | None) -> Callable[..., Any]:
    """Inductor's inner compile for the graphs of the plan `key`; a plan that keeps everything changes nothing.

    reorder_for_peak_memory moves every release next to its offload and every reload next to its wait. Buffer reuse holds the
    memory of a dead buffer for a later one of the same size, as long as Inductor's own estimate of the peak allows it, which
    knows nothing of kernels' workspaces and of reloads: on a 32k-token stack four gradients that nobody needs any more (3.8 GB)
    stood at the peak. Freed buffers go back to torch's allocator instead, which reuses them as well. With CUDA graphs,
    Inductor also gathers what it may not capture, which takes every reload to the start of backward. And it leaves out copies
    of memory that no output shares, saved values included: once a handle is saved in a copy's place, the copy would be left
    out, and what is offloaded would be memory that others write to.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    def compile_inner(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        plan = registry.of_key(key) if key else None
        if plan is None or not plan.changes_anything:
            return compile_fx_inner(gm, example_inputs, **kwargs)
        disabled = ",".join(filter(None, (inductor_config.disabled_passes, "remove_noop_ops")))
        with inductor_config.patch({**AS_PLANNED, "disabled_passes": disabled}), only_near_fusions():
            return compile_fx_inner(gm, example_inputs, **kwargs)

    return compile_inner


@contextlib.contextmanager
def only_near_fusions() -> Iterator[None]:
    """Operations that merely read the same data are fused only where at most FARTHEST others stand between them.

    Inductor's own limit is 64, about one transformer layer: it fused what two layers recompute from the same rotary table, so
    that the next layer's activations were needed a layer too early, before their reloads could arrive.
    """
    from torch._inductor.virtualized import V

    own: Any = type(V.choices)

    class Near(own):  # type: ignore[misc]  # whatever class the user configured
        @staticmethod
        def can_fuse_horizontal(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            far = max(abs(node1.min_order - node2.max_order), abs(node2.min_order - node1.max_order)) > FARTHEST
            return not far and bool(own.can_fuse_horizontal(scheduler, node1, node2, shared_data_score))

    with V.set_choices_handler(Near()):
        yield
