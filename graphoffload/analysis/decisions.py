"""Discrete decisions: what must not be decided twice, since a compiler may compute a value in other bits the second time.

    probs = softmax(h @ router);  chosen = topk(probs);  y = experts(chosen)        forward goes to the experts that it chose

A value that is recomputed is fused into other kernels than forward's: a reduction in another order, products and sums
contracted to one instruction or not, vectorised or not (pytorch #186572). The last bits differ, and where two experts are
nearly equal, backward would go to another one: silent, and no rounding error. So

    decision   an operation that makes integers, booleans or steps (rounding, casts to 8 bits) of floats, where forward used
               these: it may run again in backward only on floats that repeat to the bit
    equality   backward's own look for equal elements (gradients of amax, of scatter_reduce), and kernels that compare inside
               (_cdist_backward, _segment_reduce_backward), or take forward's decision again (hardshrink_backward): what they
               read must repeat to the bit

and what repeats to the bit is what lies in memory (saved values, inputs), random numbers drawn from a saved seed, and what only
moves or selects any of these. Integers computed from integers repeat: causal masks made of positions stay free.

Functions without a jump need none of this: relu, clamp, max-pooling and abs give nearly the same on both sides of their
threshold, so that a decision taken otherwise there is rounding as well.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from graphoffload.analysis.callers import is_view
from graphoffload.analysis.saved_values import GraphPair, graph_outputs


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Operations that repeat to the bit where what they read does: they move, select, cast or negate.
_MOVES = _names(
    """_to_copy convert_element_type clone copy lift_fresh lift_fresh_copy alias detach contiguous cat stack where masked_fill
    gather index index_select take embedding select_scatter slice_scatter diagonal_scatter index_put scatter
    constant_pad_nd flip roll repeat expand_copy view_copy tril triu neg abs relu clamp clamp_min clamp_max maximum minimum
    amax amin max min sort topk kthvalue median nanmedian mode cummax cummin max_pool2d_with_indices argmax argmin
    _low_memory_max_pool_with_offsets"""
)
# Operations whose result is a float and jumps.
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
    """Where the bits of values come from: `computed` floats, which may be others the second time, and `stored` ones."""

    computed: frozenset[Node] = frozenset()
    stored: frozenset[Node] = frozenset()
    seen: frozenset[Node] = frozenset()


@dataclass(frozen=True, slots=True)
class RepeatedDecisions:
    """What backward decides again or compares, by name, each with the operation that does so.

    Attributes:
        inexact: operations that backward runs again, and on whose bits that depends: they must not run again.
        exact: saved values that are looked at: while they stay saved, all is well.
    """

    inexact: dict[str, str] = field(default_factory=dict)
    exact: dict[str, str] = field(default_factory=dict)


def repeated_decisions(pair: GraphPair, user_recomputed: frozenset[str] = frozenset()) -> RepeatedDecisions:
    """Decisions that backward takes again on floats that it computes again.

    Args:
        user_recomputed: operations of the user's checkpoint regions, which do what the user asked for.
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
    """Names of what the model's own results are computed from; the rest of forward is there to be saved."""
    found: set[str] = set()
    pending = [node for node in graph_outputs(pair.forward)[: pair.num_fwd_outputs] if node is not None]
    while pending:
        node = pending.pop()
        if node.name not in found:
            found.add(node.name)
            pending.extend(node.all_input_nodes)
    return frozenset(found)


def decided_on(pair: GraphPair, used: frozenset[str]) -> frozenset[str]:
    """Names of floats on which forward took a decision, and of those that these only move."""
    deciding = (node for node in pair.forward.graph.nodes if node.name in used and decides(node, used))
    return frozenset(source.name for node in deciding for source in trace_of(node, is_input).seen if is_float(source))


def depends_on_bits(node: Node, used: frozenset[str], decided: frozenset[str]) -> bool:
    """Whether an operation, run again, must read floats that repeat to the bit.

    Args:
        used: of used_by_forward. decided: of decided_on.
    """
    if compares(node):
        return True
    if node.name in used:
        return decides(node, used)
    return bool(decided) and _name(node) in _ORDER and any(source.name in decided for source in trace_of(node, is_input).seen)


def decides(node: Node, used: frozenset[str]) -> bool:
    """Whether an operation makes integers, booleans or steps of floats, and forward uses these."""
    name = _name(node)
    if not isinstance(node.target, torch._ops.OpOverload) or not _floats(node) or is_view(node):
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
    """Whether an operation looks for elements of floats that are equal, or compares them inside."""
    if not _floats(node):
        return False
    return node.target in _EQUALITY or (_name(node) in _COMPARE_INSIDE and not _is_relu(node))


def trace_of(node: Node, stored: Callable[[Node], bool]) -> Trace:
    """Where the bits of the floats that an operation reads come from, looking through what only moves them.

    Args:
        stored: whether a value is taken from memory, and not computed where it is read.
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
    """Whether a graph is given a value: an input, what is saved, a constant."""
    return node.op in ("placeholder", "get_attr")


def is_float(node: Node) -> bool:
    """Whether a value, or one of several results, is a tensor of floats."""
    return any(map(_inexact, _values(node)))


def _repeats(node: Node) -> bool:
    """Whether an operation gives the same bits for the same bits; floats that it computes may be others."""
    if not node.all_input_nodes or "inductor_" in _name(node) or not is_float(node):
        return True
    if node.target is operator.getitem or is_view(node):
        return True
    return _name(node) in _MOVES or getattr(node.target, "namespace", "") == "graphoffload"


def _operation(node: Node) -> Node:
    """What is tagged for a value: its operation, for one of several results."""
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
    return target._schema.name.partition("::")[2] if isinstance(target, torch._ops.OpOverload) else str(target)


def _casts_to_eight_bits(node: Node) -> bool:
    return any(_inexact(value) and value.element_size() == 1 for value in _values(node)) and _name(node) in (
        "_to_copy", "convert_element_type",
    )  # fmt: skip


def _is_relu(node: Node) -> bool:
    """threshold and its gradient at 0: no jump."""
    numbers = (number for number in node.args if isinstance(number, (int, float)))
    return _name(node).startswith("threshold") and not any(numbers)
