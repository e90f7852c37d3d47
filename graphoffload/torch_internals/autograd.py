"""autograd's own counters and hooks, and AOTAutograd's compiled functions. Seen in torch 2.11 to 2.15.

The ops call the names without `def` for each tensor that they move: these are torch's own functions, not wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch._functorch.config

from graphoffload.torch_internals import pytrees

version: Callable[[torch.Tensor], int] = attrgetter("_version")
"""How often a tensor was written to. Without it: a write to memory that stayed on the device for backward is not noticed."""


def with_its_version(value: torch.Tensor) -> torch.Tensor:
    """The same memory and the same counter of writes, without what computed it. Without it: below autograd, where ops run, a
    detached tensor has a counter of its own, which no write to the memory of others moves."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return value.detach()


keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the backward that runs now was asked to retain its graph. Without it: host copies cannot be closed, nor memory handed
back, before the graph dies."""

saved_tensor_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
"""The innermost active pair of saved-tensor hooks. Without it: each handle needs a ticket, and each reload a
synchronisation."""

def computes_again() -> bool:
    """Whether a reentrant checkpoint's backward runs its forward again in this thread. Without it: checkpointing around what is
    compiled is not named, where it runs forward under no_grad."""
    node: Any = torch._C._current_autograd_node()
    return node is not None and "checkpoint" in node.name().lower()  # also those of trainers: CheckpointFunctionBackward


def in_checkpoint() -> bool:
    """Whether checkpointing drops what is saved now, and runs it again in backward. Without it: a planned call that runs again
    may run another variant, and its backward gets what that one saved."""
    hooks = saved_tensor_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


profiler_is_on: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether a profiler records. Without it: each copy pays for a range with its tensor's name."""


def autograd_time() -> int:
    """Number that the next autograd node of this thread gets. Without it: `compiled_backwards` walks the whole graph."""
    return int(torch.autograd._get_sequence_nr())


def compiled_backwards(nodes: Iterable[Any], since: int) -> Iterator[Any]:
    """Classes of AOTAutograd's compiled functions among these autograd nodes and those before them that are made since a time.

    Each has `_backward_impl(ctx, args)`, called in autograd's thread with a list that it empties. Without it: an out-of-memory
    error in backward says nothing of the plan.
    """
    return (type(node)._forward_cls for node in _compiled_nodes(nodes, since))


def _compiled_nodes(nodes: Iterable[Any], since: int) -> Iterator[Any]:
    """Autograd nodes of compiled functions among these and those before them that are made since a time."""
    seen, pending = set(), list(nodes)
    while pending:
        node = pending.pop()
        if node is None or node in seen or node._sequence_nr() < since:
            continue
        seen.add(node)
        function = getattr(type(node), "_forward_cls", None)
        if function is not None and hasattr(function, "_backward_impl"):
            yield node
        pending.extend(earlier for earlier, _ in node.next_functions)


def compiled_node(outputs: Any, since: int = 0) -> Any:
    """The autograd node of the compiled function that gave these outputs, made since a time; None where none of them has one.

    An output may be a view that autograd made of the function's result, or of an input: that leads to the node of an earlier
    call. Without it: nobody sees when a call's backward runs.
    """
    values = outputs if isinstance(outputs, (tuple, list)) else pytrees.tree_leaves(outputs)
    for value in values:
        node, _ = _made_by(value)
        if node is not None and node._sequence_nr() >= since:
            return node
    if not since:
        return None
    return next(_compiled_nodes((v.grad_fn for v in values if isinstance(v, torch.Tensor)), since), None)  # views of views


def leave_with_node(node: Any, value: Any) -> None:
    """Have the autograd node of a compiled function hold a value, for `left_with_node`. `_backward_impl` gets it as ctx."""
    node.graphoffload_value = value


def left_with_node(ctx: Any) -> Any:
    """What was left with this node; None if nothing was."""
    return getattr(ctx, "graphoffload_value", None)


def _made_by(value: Any) -> tuple[Any, int]:
    """The autograd node of the compiled function that made a value, and which of its outputs it is; None if none did."""
    node, output = (value.grad_fn, value.output_nr) if isinstance(value, torch.Tensor) else (None, 0)
    for _ in range(_VIEWS):
        if node is None:
            return None, 0
        if hasattr(type(node), "_forward_cls"):
            return node, output
        node, output = next((edge for edge in node.next_functions if edge[0] is not None), (None, 0))
    return (node, output) if hasattr(type(node), "_forward_cls") else (None, 0)


def output_bytes(outputs: Any, node: Any) -> dict[int, int]:
    """Bytes of what a compiled function returned and autograd can give a gradient to, by output of its node."""
    found = {}
    for value in pytrees.tree_leaves(outputs):
        made_by, output = _made_by(value)
        if made_by is node:
            found[output] = int(value.numel()) * int(value.element_size())
    return found


def zeros_bytes(output_bytes: Mapping[int, int], gradients: Sequence[Any]) -> int:
    """Bytes of the zeros that autograd makes for outputs of a compiled function that have no gradient: logits that only the
    loss inside of it reads, for one. It makes them after the hooks before its backward, which are given `gradients`."""
    return sum(n for output, n in output_bytes.items() if output < len(gradients) and gradients[output] is None)


_VIEWS = 4  # autograd nodes of views between a compiled function and an output


def wrap_backward(function: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have one of `compiled_backwards` run as `wrap` makes it, with functools.wraps; one that is wrapped already stays so."""
    if not hasattr(function._backward_impl, "__wrapped__"):
        function._backward_impl = staticmethod(wrap(function._backward_impl))
