"""Sums that run in the kernel of a matrix product, as in addmm: of product and bias, or of a weight's gradients in two uses."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

from graphoffload.analysis.storages import fake, size_key
from graphoffload.torch_internals.inductor import is_pointwise_use


def added_to_products(graph: Graph, kinds: Mapping[Node, str]) -> dict[Node, Node]:
    """Sums that Inductor fuses with a matrix product, each with its product, starting with the last sum as Inductor does.

    A sum of two products is fused with the second. On a GPU, a sum that only pointwise operations read is fused with these.
    """
    found: dict[Node, Node] = {}
    for node in reversed(graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)):
        if kinds[node] != "fused" or len(node.args) != 2:
            continue
        for product, other in (node.args[::-1], node.args):
            if not isinstance(product, Node) or product.target is not torch.ops.aten.mm.default or len(product.users) != 1:
                continue
            value, summand = fake(product), fake(other) if isinstance(other, Node) else None
            if value is None or summand is None or summand.dtype != value.dtype or not _expands_to(summand, value):
                continue
            if _is_on_gpu(value) and all(user not in found and is_pointwise_use(user) for user in node.users):
                continue
            found[node] = product
            break
    return found


def _is_on_gpu(value: torch.Tensor) -> bool:
    return value.device.type != "cpu"


def _expands_to(summand: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the sum of both has the shape of `value`."""
    own, wanted = ([size_key(size) for size in tensor.shape[::-1]] for tensor in (summand, value))
    return len(own) <= len(wanted) and all(size in (1, into) for size, into in zip(own, wanted, strict=False))
