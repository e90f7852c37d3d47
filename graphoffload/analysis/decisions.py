"""Discrete decisions must not be made twice: a recomputed float may have other last bits.

    probs = softmax(h @ router);  chosen = topk(probs);  y = experts(chosen)        forward uses the experts that it chose

A recomputed value is fused into other kernels than in forward. They may reduce in another order, contract a product and a sum
to one instruction, or vectorize differently (pytorch #186572). The last bits then differ. If two experts are nearly equal,
backward would choose another one: a silent error that is far larger than rounding. Two kinds of operations are restricted:

    decision   It turns floats into integers, booleans or steps (rounding, casts to 8 bits), and forward uses the result. It may
               run again in backward only on floats that repeat to the bit.
    equality   It looks for equal elements in backward (gradients of amax and scatter_reduce), compares inside its kernel
               (_cdist_backward, _segment_reduce_backward), or repeats forward's decision (hardshrink_backward). The floats that
               it reads must repeat to the bit.

Floats that repeat to the bit are stored ones (saved values, inputs), random numbers drawn from a saved seed, and results of
operations that only move or select any of these. Integers computed from integers repeat as well, so a causal mask of positions
is not restricted.

Functions without a jump need no rule. relu, clamp, max-pooling and abs return nearly the same value on both sides of their
threshold, so another decision there changes the result by a rounding error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from graphoffload.analysis.callers import is_view
from graphoffload.analysis.saved_values import GraphPair, graph_outputs
from graphoffload.torch_internals.operators import OpOverload, schema_of


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Operations that repeat to the bit if their inputs do: they move, select, cast or negate.
_MOVES = _names(
    """_to_copy convert_element_type clone copy lift_fresh lift_fresh_copy alias detach contiguous cat stack where masked_fill
    gather index index_select take embedding select_scatter slice_scatter diagonal_scatter index_put scatter
    constant_pad_nd flip roll repeat expand_copy view_copy tril triu neg abs relu clamp clamp_min clamp_max maximum minimum
    amax amin max min sort topk kthvalue median nanmedian mode cummax cummin max_pool2d_with_indices argmax argmin
    _low_memory_max_pool_with_offsets"""
)
# Operations with a float result that jumps.
_STEPS = _names(
    """round floor ceil trunc fix frac sign sgn heaviside fmod remainder floor_divide copysign hardshrink threshold atan2 angle
    grid_sampler_2d grid_sampler_3d fake_quantize_per_tensor_affine fake_quantize_per_channel_affine
    fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask
    _fake_quantize_per_tensor_affine_cachemask_tensor_qparams _fake_quantize_learnable_per_tensor_affine
    _fake_quantize_learnable_per_channel_affine"""
)
_COMPARE_INSIDE = _names(
    "_cdist_backward _pdist_backward _segment_reduce_backward hardshrink_backward threshold_backward scatter_reduce_backward"
)
_EQUALITY = frozenset((torch.ops.aten.eq.Tensor, torch.ops.aten.ne.Tensor))
_ORDER = frozenset(("lt", "le", "gt", "ge"))
_SHAPES_ONLY = ("_like", "new_", "empty", "full", "sym_", "zeros", "ones")


@dataclass(slots=True)
class Trace:
    """The origin of the bits of some floats.

    Attributes:
        computed: operations that compute floats, whose bits may differ the second time.
        stored: floats that are read from memory.
        seen: every node that was looked at.
    """

    computed: frozenset[Node] = frozenset()
    stored: frozenset[Node] = frozenset()
    seen: frozenset[Node] = frozenset()


@dataclass(frozen=True, slots=True)
class RepeatedDecisions:
    """Values on whose bits a decision or comparison of backward depends: name -> the operation that decides or compares.

    Attributes:
        inexact: operations that backward runs again. They must not run again.
        exact: saved values. They must stay saved.
    """

    inexact: dict[str, str] = field(default_factory=dict)
    exact: dict[str, str] = field(default_factory=dict)


def repeated_decisions(pair: GraphPair, user_recomputed: frozenset[str] = frozenset()) -> RepeatedDecisions:
    """Decisions that backward makes again, and the floats that they depend on.

    Args:
        user_recomputed: operations of the user's checkpoint regions. The user asked for these to run again.
    """
    forward = {node.name for node in pair.forward.graph.nodes} - user_recomputed
    used = used_by_forward(pair)
    decided = decided_on(pair, used)
    found = RepeatedDecisions()
    for node in pair.backward.graph.nodes:
        again = node.name in used
        if node.op != "call_function" or node.name in user_recomputed or not depends_on_bits(node, used, decided):
            continue
        trace = trace_of(node, is_input)
        sources = {node} if again and trace.computed else trace.computed
        found.inexact.update((source.name, str(node.target)) for source in sources if source.name in forward)
        found.exact.update((source.name, str(node.target)) for source in trace.stored if not again or not trace.computed)
    return found


def used_by_forward(pair: GraphPair) -> frozenset[str]:
    """Names of the values that the model's results are computed from. Forward computes all other values only to save them."""
    found: set[str] = set()
    pending = [node for node in graph_outputs(pair.forward)[: pair.num_fwd_outputs] if node is not None]
    while pending:
        node = pending.pop()
        if node.name not in found:
            found.add(node.name)
            pending.extend(node.all_input_nodes)
    return frozenset(found)


def decided_on(pair: GraphPair, used: frozenset[str]) -> frozenset[str]:
    """Names of the floats on which forward made a decision, and of the floats that these were moved or selected from."""
    deciding = (node for node in pair.forward.graph.nodes if node.name in used and decides(node, used))
    return frozenset(source.name for node in deciding for source in trace_of(node, is_input).seen if is_float(source))


def depends_on_bits(node: Node, used: frozenset[str], decided: frozenset[str]) -> bool:
    """Whether an operation that runs again must read floats that repeat to the bit.

    Args:
        used: result of used_by_forward.
        decided: result of decided_on.
    """
    if compares(node):
        return True
    if node.name in used:
        return decides(node, used)
    return bool(decided) and _name(node) in _ORDER and any(source.name in decided for source in trace_of(node, is_input).seen)


def decides(node: Node, used: frozenset[str]) -> bool:
    """Whether an operation turns floats into integers, booleans or steps that forward uses."""
    name = _name(node)
    if not isinstance(node.target, OpOverload) or not _floats(node) or is_view(node):
        return False
    if name in _STEPS or _casts_to_eight_bits(node) or node.kwargs.get("rounding_mode") is not None:
        return not _is_relu(node)
    if any(part in name for part in _SHAPES_ONLY) or "batch_norm" in name or "attention" in name:
        return False
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return not _inexact(value)
    return any(
        user.name in used and isinstance(user.meta.get("val"), torch.Tensor) and not _inexact(user.meta["val"])
        for user in node.users
        if user.target is operator.getitem
    )


def compares(node: Node) -> bool:
    """Whether an operation looks for equal elements among floats, or compares floats inside its kernel."""
    if not _floats(node):
        return False
    return node.target in _EQUALITY or (_name(node) in _COMPARE_INSIDE and not _is_relu(node))


def trace_of(node: Node, stored: Callable[[Node], bool]) -> Trace:
    """The origin of the bits of the floats that an operation reads, looking through operations that only move them.

    Args:
        stored: whether a value is read from memory, and not computed again.
    """
    computed, found, seen = set(), set(), set()
    pending = _floats(node)
    while pending:
        source = pending.pop()
        if source in seen:
            continue
        seen.add(source)
        if stored(source):
            found.update([source] if is_float(source) else [])
        elif _repeats(source):
            pending.extend(source.all_input_nodes)
        else:
            computed.add(_operation(source))
    return Trace(frozenset(computed), frozenset(found), frozenset(seen))


def is_input(node: Node) -> bool:
    """Whether a node is given to its graph: an input, a saved value or a constant."""
    return node.op in ("placeholder", "get_attr")


def is_float(node: Node) -> bool:
    """Whether a node's value, or one of its several results, is a tensor of floats."""
    return any(map(_inexact, _values(node)))


def _repeats(node: Node) -> bool:
    """Whether an operation returns the same bits for the same bits. An operation that computes floats may not."""
    if not node.all_input_nodes or "inductor_" in _name(node) or not is_float(node):
        return True
    if node.target is operator.getitem or is_view(node):
        return True
    return _name(node) in _MOVES or getattr(node.target, "namespace", "") == "graphoffload"


def _operation(node: Node) -> Node:
    """The node to tag for a value: the operation itself, if the value is one of its several results."""
    source = node.args[0] if node.target is operator.getitem else node
    return source if isinstance(source, Node) else node


def _floats(node: Node) -> list[Node]:
    return [source for source in node.all_input_nodes if is_float(source)]


def _values(node: Node) -> Iterator[torch.Tensor]:
    value = node.meta.get("val")
    yield from (item for item in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(item, torch.Tensor))


def _inexact(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _name(node: Node) -> str:
    target = node.target
    return schema_of(target).name.partition("::")[2] if isinstance(target, OpOverload) else str(target)


def _casts_to_eight_bits(node: Node) -> bool:
    return any(_inexact(value) and value.element_size() == 1 for value in _values(node)) and _name(node) in (
        "_to_copy", "convert_element_type",
    )  # fmt: skip


def _is_relu(node: Node) -> bool:
    """Whether an operation is `threshold` or its gradient at 0, which has no jump."""
    numbers = (number for number in node.args if isinstance(number, (int, float)))
    return _name(node).startswith("threshold") and not any(numbers)
