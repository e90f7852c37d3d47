"""Groups graph nodes that share memory, by the storage of their fake tensors.

Two fake tensors share a storage exactly if the real tensors will. torch finds donated buffers in the same way. Several saved
views of one storage are therefore one copy, and a view of an input or of a model output is recognized. The rule fails for an
operation whose fake implementation returns one tensor twice (saved_values.py refuses it), and for regions (regions.py).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from graphoffload.torch_internals.operators import OpOverload, is_undeclared_view, schema_of
from graphoffload.torch_internals.storages import identity


def fake(node: Node) -> torch.Tensor | None:
    """The fake tensor of a node's value; None for tuples, symbols and opaque values."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) and value.layout == torch.strided else None


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of a fake tensor's storage; valid while the tensor lives."""
    return identity(tensor.untyped_storage())


def concrete(value: int | torch.SymInt) -> int | None:
    """The int; None if it is symbolic."""
    return int(value) if is_concrete_int(value) else None


def size_key(value: int | torch.SymInt) -> int | str:
    """The int, or the text of a symbolic one. Two sizes are the same if these are; comparing symbols would add guards."""
    known = concrete(value)
    return str(value) if known is None else known


def size_hint(value: int | torch.SymInt, unknown: int = 2**62) -> int:
    """The int, or the example's value of a symbolic one; a nested tensor's has none. Unlike int(), this adds no guard and so
    causes no recompilation."""
    if isinstance(value, torch.SymInt):
        hint = getattr(value.node, "hint", None)
        return int(hint) if isinstance(hint, int) else unknown
    return value


def tensor_nbytes(tensor: torch.Tensor) -> int | None:
    """Bytes of a fake tensor's elements; None if a size is symbolic. The one size function for graph nodes."""
    count = concrete(tensor.numel())
    return None if count is None else count * tensor.element_size()


def example_nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a fake tensor's elements; symbolic sizes as in the example that is compiled, 0 if that is unknown."""
    return size_hint(tensor.numel(), unknown=0) * tensor.element_size()


def storage_nbytes(tensor: torch.Tensor) -> int | None:
    """Bytes of a fake tensor's whole storage; None if symbolic."""
    return concrete(tensor.untyped_storage().nbytes())


def example_storage_nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a fake tensor's whole storage; symbolic sizes as in the example that is compiled, 0 if that is unknown."""
    return size_hint(tensor.untyped_storage().nbytes(), unknown=0)


def tensors_of(node: Node) -> list[torch.Tensor]:
    """The strided tensors that a node gives, one or several."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [one for one in values if isinstance(one, torch.Tensor) and one.layout == torch.strided]


def group_by_storage(nodes: Iterable[Node]) -> dict[int, list[Node]]:
    """Nodes with a tensor value, by storage and in the order of the graph."""
    groups: dict[int, list[Node]] = {}
    for node in nodes:
        tensor = fake(node)
        if tensor is not None:
            groups.setdefault(storage_id(tensor), []).append(node)
    return groups


def covers_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor starts its storage, fills it, and has neither gaps nor overlaps."""
    if concrete(tensor.storage_offset()) != 0:
        return False
    expected: int | torch.SymInt = 1
    dims = [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if concrete(size) != 1]
    by_hint = sorted(dims, key=lambda dim: size_hint(dim[0]))
    for stride, size in by_hint:
        if not same_size(stride, expected):
            return False
        expected = expected * size
    return same_size(tensor.untyped_storage().nbytes(), expected * tensor.element_size())


def same_size(left: int | torch.SymInt, right: int | torch.SymInt) -> bool:
    """Equality that never adds a guard: symbolic values are equal when their expressions are."""
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    left_expr = left.node.expr if isinstance(left, torch.SymInt) else left
    right_expr = right.node.expr if isinstance(right, torch.SymInt) else right
    return bool(left_expr - right_expr == 0)


def read_by(node: Node) -> Iterator[Node]:
    """Nodes that a node reads; for one of several results, the nodes that its operation reads."""
    for source in node.all_input_nodes:
        yield source
        if node.target is operator.getitem:
            yield from source.all_input_nodes


def only_views(node: Node) -> bool:
    """Whether a node is a view: it returns its argument's memory and does not read it."""
    if not isinstance(node.target, OpOverload):
        return False
    if is_undeclared_view(node.target):
        return True
    return all(result.alias_info is not None and not result.alias_info.is_write for result in schema_of(node.target).returns)


def with_views(node: Node) -> dict[Node, None]:
    """A node and its views, and the views of these; a split, whose results are views, and its results."""
    value = fake(node)
    assert value is not None
    found, pending = {node: None}, [node]
    while pending:
        for user in pending.pop().users:
            if is_in(user, storage_id(value)):
                found[user] = None
                pending.append(user)
    return found


def is_in(node: Node, storage: int) -> bool:
    """Whether a node's value is a tensor in that storage, or several that all are."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    tensors = [one for one in values if isinstance(one, torch.Tensor) and one.layout == torch.strided]
    return len(tensors) == len(values) > 0 and all(storage_id(one) == storage for one in tensors)
