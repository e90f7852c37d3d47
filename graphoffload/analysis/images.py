"""Copies of images and weights to channels_last memory, in which Inductor runs convolutions. They are in no graph.

    forward    x ─▶ copy ─▶ convolution ─▶ y           a copy of an input that backward reads is saved in its place
                             relu ─▶ result            the caller gets the graph's layout: not written over y
    backward   tangent ─▶ copy ─▶ convolution_backward

What a kernel computes on the way to a convolution is written in that layout at once. So only inputs and results are copied: the
batch, parameters, and where blocks are compiled one by one what goes from one to the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from graphoffload.analysis.saved_values import GraphPair, graph_outputs
from graphoffload.analysis.storages import concrete, example_nbytes, fake
from graphoffload.torch_internals.inductor import nodes_channels_last

_FORWARD, _BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
_OPERANDS = {_FORWARD: (0, 1), _BACKWARD: (0, 1, 2)}
"""Positions of the images, the weight and the gradient."""
OfOne = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class ImageCopies:
    """Nodes are given by name.

    Attributes:
        saved: inputs of forward, of which backward gets a copy.
        forward, backward: (convolution, what is copied for it alone, bytes): an operand, or its own result.
        as_given: results in the graph's layout, which differs from the one that they are computed in.
    """

    saved: frozenset[str] = frozenset()
    forward: tuple[OfOne, ...] = ()
    backward: tuple[OfOne, ...] = ()
    as_given: frozenset[str] = frozenset()


def image_copies(pair: GraphPair, *, channels_last: bool) -> ImageCopies:
    """The copies of a pair; `channels_last`: Inductor runs all of its convolutions so, else those with such an operand."""
    forward = list(_convolutions(pair.forward))
    if not forward:
        return ImageCopies()
    laid_out = nodes_channels_last(pair.forward) if channels_last else set()
    outputs = graph_outputs(pair.forward)
    results = {node for node in outputs[: pair.num_fwd_outputs] if node is not None and _is_other(node) and node in laid_out}
    saved = {
        node.name
        for node in outputs[pair.num_fwd_outputs :]
        if node is not None and node.op == "placeholder" and node in laid_out - results and _is_other(node)
    }
    given = pair.backward.graph.find_nodes(op="placeholder")
    inputs = {node.name for node in pair.forward.graph.find_nodes(op="placeholder")} - saved
    inputs |= {node.name for node in given if str(node.target).startswith("tangents")}
    there, back = (
        [(node, operand) for node in convolutions for operand in _copied(node, inputs, channels_last=channels_last)]
        for convolutions in (forward, _convolutions(pair.backward))
    )
    there += [(node, node) for node in forward if node in results]
    return ImageCopies(
        saved=frozenset(saved),
        forward=tuple((node.name, operand.name, _bytes_of(operand)) for node, operand in there),
        backward=tuple((node.name, operand.name, _bytes_of(operand)) for node, operand in back),
        as_given=frozenset(node.name for node in results),
    )


def _convolutions(module: GraphModule) -> Iterator[Node]:
    for target in (_FORWARD, _BACKWARD):
        yield from module.graph.find_nodes(op="call_function", target=target)


def _copied(node: Node, inputs: set[str], *, channels_last: bool) -> list[Node]:
    """A convolution's operands that are copied: those of these inputs that are in another layout."""
    operands = [operand for at in _OPERANDS[node.target] if isinstance(operand := node.args[at], Node)]  # type: ignore[index]
    if not channels_last and not any(map(_is_channels_last, operands)):
        return []
    return [one for one in operands if one.op == "placeholder" and one.name in inputs and _is_other(one)]


def _is_other(node: Node) -> bool:
    """Whether a value is images in another layout than channels_last."""
    value = fake(node)
    return _is_images(value) and not value.is_contiguous(memory_format=torch.channels_last)  # type: ignore[union-attr]


def _is_channels_last(node: Node) -> bool:
    value = fake(node)
    return _is_images(value) and value.is_contiguous(memory_format=torch.channels_last) and not value.is_contiguous()  # type: ignore[union-attr]


def _is_images(value: torch.Tensor | None) -> bool:
    """Whether a value has four dimensions, all of them known."""
    return value is not None and value.dim() == 4 and all(concrete(n) is not None for n in (*value.shape, *value.stride()))


def _bytes_of(node: Node) -> int:
    value = fake(node)
    return 0 if value is None else example_nbytes(value)
