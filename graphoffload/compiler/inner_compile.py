"""Inductor's inner compile for graphs under a plan, with the settings that keep Inductor from undoing the plan.

With CUDA graphs there are two ways. Either forward and backward are each captured in one piece, copies included
(runtime/captured.py), or the pieces between the copies are captured. The first is tried. It is given up for a graph that
something else cuts, since each branch of a captured graph must end in it.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.fx import GraphModule

from graphoffload.analysis.fusion import CRUMBS, FARTHEST
from graphoffload.compiler.session import CompileSession
from graphoffload.compiler.written_order import in_order
from graphoffload.facts.plan import Plan
from graphoffload.log import log
from graphoffload.monitor.caveats import warn_of_cuts
from graphoffload.passes.capture import make_capturable
from graphoffload.passes.prepare_joint import copy_graph
from graphoffload.passes.strides import images_as_laid_out, reload_as_laid_out
from graphoffload.runtime import registry
from graphoffload.runtime.captured import prepare
from graphoffload.runtime.ops import KERNELS, handles_may_be_copied
from graphoffload.torch_internals import inductor
from graphoffload.torch_internals.inductor_layouts import rows_alone_padded

AS_PLANNED = {
    "reorder_for_peak_memory": False,
    "allow_buffer_reuse": False,
    "triton.reorder_for_reducing_graph_partitions": False,
}
"""Settings of torch._inductor.config without which Inductor would move the ops of a plan."""
KEPT, APART = {"score_fusion_memory_threshold": 11}, {"score_fusion_memory_threshold": 65}
"""Settings for a plan that changes nothing, and for an unfused one. They are in the key of torch's compile cache, which so
distinguishes code under `planned_fusions` from Inductor's own. Inductor's own threshold is 10 bytes."""

_LEFT_OUT = (
    "everything is kept; {} times Inductor was kept from making one kernel of two that share less than 1 % of their data: all "
    "chunks of a loss would be in memory at once"
)


def compile_as_planned(session: CompileSession) -> Callable[..., Any]:
    """Inductor's inner compile for the graphs of a session. Under a plan that keeps everything the code is Inductor's own, but
    for fusions for a few shared bytes.

    Each setting prevents one effect:

    * reorder_for_peak_memory would move every release next to its offload and every reload next to its wait.
    * Buffer reuse would hold the memory of a dead buffer for a later one of the same size, as long as Inductor's own estimate
      of the peak allows it. The estimate ignores kernels' workspaces and reloads: on a 32k-token stack four dead gradients
      (3.8 GB) were allocated at the peak. Freed buffers go back to torch's allocator instead, which reuses them as well.
    * With CUDA graphs, Inductor would gather operations that it may not capture, and move every reload to the start of
      backward.
    * Inductor would pad the strides of tensors with short rows, which then have gaps.
    * Inductor would remove copies of memory that no output shares, saved values included. Once a handle is saved instead of
      a copy, the copy would be removed, and memory that others write to would be offloaded.
    """

    def compile_inner(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        plan = session.plan
        if plan is None or not plan.changes_anything:
            with inductor.config.patch(KEPT), planned_fusions(None, farthest=None) as left_out:
                compiled = inductor.compile_inner(gm, example_inputs, **kwargs)
            if left_out:
                log.info("%s: %s", session.name, _LEFT_OUT.format(len(left_out)))
            return compiled
        disabled = ",".join(filter(None, (inductor.config.disabled_passes, "remove_noop_ops")))
        run = registry.run_plan(plan.key)
        if not kwargs.get("is_backward"):
            run.channels_last = inductor.images_channels_last(gm, on_gpu=False)
        else:
            reload_as_laid_out(gm, plan.key, run.strides)
            if run.channels_last:
                images_as_laid_out(gm, example_inputs)
        settings = {**AS_PLANNED, **(APART if plan.unfused_bytes is not None else {}), "disabled_passes": disabled}
        with (
            inductor.config.patch(settings),
            planned_fusions(plan.unfused_bytes),
            noting_strides(run),
            direct_calls(),
            in_order(),
            rows_alone_padded(),
        ):
            if not _asks_for_capture(kwargs) or not plan.transfers:
                return inductor.compile_inner(gm, example_inputs, **kwargs)
            why_not = _why_cut(plan, kwargs)
            if not why_not:
                compiled = _captured_whole(gm, example_inputs, kwargs, plan)
                if compiled is not None:
                    return compiled
                why_not = "something else in it cannot be captured, or it writes to its inputs"
            run.capturable = False
            warn_of_cuts(plan, why_not)
            return inductor.compile_inner(gm, example_inputs, **kwargs)

    return compile_inner


def _asks_for_capture(kwargs: dict[str, Any]) -> bool:
    asked = kwargs.get("cudagraphs")
    return bool(inductor.config.triton.cudagraphs if asked is None else asked.value)


def _why_cut(plan: Plan, kwargs: dict[str, Any]) -> str:
    """Why a graph cannot be captured with its copies, as far as it is known before compiling; "" if it may be."""
    run = registry.run_plan(plan.key)
    if kwargs.get("is_backward") and not run.capturable:
        return "its forward is cut"
    if not plan.device.startswith("cuda") or not prepare(torch.device(plan.device)):
        return "there are no CUDA graphs on this device"
    if plan.checksum:
        return 'verify="checksum" compares digests outside of graphs'
    if handles_may_be_copied():
        return "saved-tensor hooks are active, and may copy what identifies a host buffer"
    return ""


def _captured_whole(gm: GraphModule, example_inputs: Sequence[Any], kwargs: dict[str, Any], plan: Plan) -> Any:
    """The graph compiled so that its copies are captured with it; None if Inductor would cut it nevertheless, or torch would
    run it without a graph but capture its backward.
    """
    attempt = copy_graph(gm)
    attempt.meta = gm.meta
    make_capturable(attempt)
    asked = kwargs.get("cudagraphs")
    compiled = inductor.compile_inner(attempt, example_inputs, **kwargs)
    whole = len(getattr(compiled, "partition_maps", None) or ()) <= 1
    if whole and (kwargs.get("is_backward") or not _mutates_inputs(compiled, kwargs)):
        registry.run_plan(plan.key).capturable = True
        return compiled
    if asked is not None:
        asked.value = True
    inductor.forget_output_strides()
    return None


def _mutates_inputs(compiled: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a graph writes to inputs that are no parameters or buffers: torch replays no graph of those."""
    mutated = set(getattr(compiled, "mutated_input_idxs", None) or ())
    return bool(mutated - set(kwargs.get("static_input_idxs") or ()))


@contextlib.contextmanager
def planned_fusions(unfused_bytes: int | None, *, farthest: int | None = FARTHEST) -> Iterator[list[str]]:
    """Fuse operations only if at most `farthest` others are between them, a plan's ops not counted, and if they share enough
    bytes. Do not fuse two that do not need each other and write `unfused_bytes` each.

    Distance: Inductor's own limit for two operations that read the same data is 64, about one transformer layer. It fused
    values that two layers recompute from the same rotary table; the next layer's activations were then needed a layer too
    early, before their reloads could arrive. For an operation that reads another's result there is no limit, and a kernel runs
    where its earliest part does: for the sum of a shared parameter's two gradients, all layers between them ran first while
    their weight gradients waited (+1.07 GB). An operation that reads nothing else and writes next to nothing may be
    anywhere: for the running statistics of batch norms, written at the end of the graph, there were two kernels more each.

    Few shared bytes: Inductor makes one kernel of two that do not need each other if both read the same ten bytes. If a loss is
    computed in chunks to save memory, all chunks read the same three scalars, and the logits of all chunks were alive at once.

    Unfused: in a gated MLP's backward one kernel reads three tensors of the MLP's width and writes three. Separate kernels read
    more, but have four or five of these tensors alive instead of six. A plan asks for it if nothing else meets its budget, or
    uses up its slowdown.

    Yields the pairs, by name, that are not fused since they share too few bytes.
    """
    own: Any = type(inductor.choices())

    left_out: list[str] = []
    places = WeakKeyDictionary[Any, list[int]]()  # where each scheduler has a plan's ops

    def near(scheduler: Any, node1: Any, node2: Any) -> bool:
        if farthest is None:
            return True
        ours = places.get(scheduler)
        if ours is None:
            ours = places[scheduler] = inductor.places_of(scheduler, "graphoffload")

        def apart(one: int, other: int) -> int:
            first, last = sorted((one, other))
            return last - first - (bisect_left(ours, last) - bisect_left(ours, first))

        return max(apart(node1.min_order, node2.max_order), apart(node2.min_order, node1.max_order)) <= farthest

    class Planned(own):  # type: ignore[misc]  # whatever class the user configured
        @staticmethod
        def can_fuse_horizontal(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            if not near(scheduler, node1, node2) or not own.can_fuse_horizontal(scheduler, node1, node2, shared_data_score):
                return False
            if unfused_bytes is not None and min(node.get_write_buffer_sizes() for node in (node1, node2)) >= unfused_bytes:
                return False
            if shared_data_score <= CRUMBS * min(node.get_read_write_buffers_sizes() for node in (node1, node2)):
                left_out.append(f"{node1.get_name()} with {node2.get_name()}")
                return False
            return True

        @staticmethod
        def can_fuse_vertical(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            early = near(scheduler, node1, node2) or _is_small(node1, node2)
            return early and bool(own.can_fuse_vertical(scheduler, node1, node2, shared_data_score))

    with inductor.choosing(Planned()):
        yield left_out


def _is_small(node1: Any, node2: Any) -> bool:
    """Whether an operation needs nothing but what another one computes, and writes next to nothing: early, it takes no room."""
    needs = all(dep.name in node1.get_buffer_names() for dep in node2.unmet_dependencies)
    return needs and node2.get_write_buffer_sizes() <= CRUMBS * node1.get_read_write_buffers_sizes()


@contextlib.contextmanager
def noting_strides(run: registry.RunPlan) -> Iterator[None]:
    """Note in `run.strides` Inductor's layout of each offloaded tensor, for graphs compiled in the block."""
    ours = (torch.ops.graphoffload.offload.default, torch.ops.graphoffload.offload_captured.default)

    def note(lowering: Any) -> None:
        for operation in lowering.operations:
            if getattr(operation, "op_overload", None) in ours and operation.constant_args[0] == run.key:
                strides = operation.inputs[0].get_stride()
                if all(isinstance(step, int) or getattr(step, "is_Integer", False) for step in strides):
                    run.strides[operation.constant_args[1]] = tuple(map(int, strides))

    with inductor.watching_codegen(after=note):
        yield


@contextlib.contextmanager
def direct_calls() -> Iterator[None]:
    """Let the code that Inductor writes in the block call the four ops' functions instead of torch.ops: half of an op's host
    time was the way from Python through torch's dispatcher back to Python.

    Inductor sees the same ops, with the same schemas and tags. Code in C++ (cpp_wrapper) still uses the dispatcher.
    """
    names = {getattr(torch.ops.graphoffload, op).default: f"graphoffload_kernels.{op}" for op in vars(KERNELS)}

    def rename(lowering: Any) -> None:
        if not (lowering.cpp_wrapper or getattr(lowering, "fx_wrapper", False)):
            for operation in lowering.operations:
                name = names.get(getattr(operation, "op_overload", None))
                if name is not None:
                    operation.python_kernel_name = name

    imports = inductor.wrapper_imports("from graphoffload.runtime.ops import KERNELS as graphoffload_kernels")
    with inductor.watching_codegen(before=rename), imports:
        yield
