"""Convolutions run on channels_last memory where Inductor lays images out so: timed in it, and given it in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import graphoffload
from graphoffload.analysis.timing import signature
from graphoffload.passes import strides
from graphoffload.passes.strides import images_as_laid_out
from graphoffload.testing import draw
from graphoffload.torch_internals import inductor

SHAPE = (2, 64, 12, 12)
LAST = (64 * 12 * 12, 1, 12 * 64, 64)


def backward(x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    """Of a depthwise convolution."""
    at = ([1, 1], [1, 1], [1, 1], False, [0, 0], 64)
    found: Tensor = torch.ops.aten.convolution_backward(gradient, x, weight, None, *at, [True, True, False])[0]
    return found


def of_silu(x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    return backward(torch.ops.aten.silu(x), gradient, weight)


def of_a_convolution(x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    return backward(torch.ops.aten.convolution(x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 64), gradient, weight)


def fakes(*, last: bool) -> list[Tensor]:
    """Images, a gradient and weights; `last`: images in channels_last memory."""
    with FakeTensorMode():
        images, gradient = torch.empty(SHAPE), torch.empty(SHAPE)
        return [images.contiguous(memory_format=torch.channels_last) if last else images, gradient, torch.empty(64, 1, 3, 3)]


def values(*shape: int) -> Tensor:
    return draw(*shape, device="cpu", dtype=torch.float32, seed=0)


def reader(module: GraphModule) -> Node:
    (node,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution_backward.default)
    return node


@pytest.mark.parametrize(
    ("function", "last", "copied"),
    [(backward, False, 0), (backward, True, 0), (of_silu, False, 1), (of_silu, True, 0), (of_a_convolution, False, 0)],
)
def test_images_of_a_backward(function: Callable[..., Tensor], last: bool, copied: int) -> None:
    """The graph was traced with contiguous images. Only what stays so with the inputs that it gets is copied; its inputs
    never are, since keep-all has them in the same layout."""
    module = make_fx(function)(*fakes(last=False))
    assert images_as_laid_out(module, fakes(last=last)) == copied
    images = reader(module).args[1]
    assert isinstance(images, Node)
    assert (images.target is torch.ops.aten.clone.default) == bool(copied)
    if copied:
        assert images.meta["val"].stride() == LAST
        x, gradient, weight = (values(*value.shape) for value in fakes(last=False))
        torch.testing.assert_close(module(x, gradient, weight), function(x, gradient, weight))


def test_one_copy_for_a_convolution_that_runs_again() -> None:
    def twice(x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
        y = torch.ops.aten.silu(x)
        return of_a_convolution(y, gradient, weight) + backward(y, gradient, weight)

    module = make_fx(twice)(*fakes(last=False))
    assert images_as_laid_out(module, fakes(last=False)) == 1
    clone, *others = module.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    assert not others
    assert {user.target for user in clone.users} == set(strides._CONVOLUTIONS)


@pytest.mark.parametrize("last", [False, True])
def test_a_convolution_is_timed_in_the_layout_that_it_runs_in(last: bool) -> None:
    module = make_fx(of_a_convolution)(*fakes(last=False))
    (forward,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    contiguous = str(fakes(last=False)[0].stride())
    for node in (forward, reader(module)):
        named = signature(node, last)
        assert named is not None
        assert (str(LAST) in named) == last
        assert (contiguous in named) != last


@pytest.mark.parametrize("fuses", [False, True])
def test_a_convolution_is_timed_without_the_bias_that_inductor_adds(fuses: bool) -> None:
    def biased(x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.conv2d(x, weight, gradient.mean((0, 2, 3)), groups=64)

    module = make_fx(biased)(*fakes(last=False))
    (node,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    assert node.args[2] is not None
    named = signature(node, fuses=fuses)
    assert named is not None
    assert (" None " in named) is fuses


class Net(nn.Module):
    """A convolution that Inductor runs on channels_last memory, or none."""

    def __init__(self, *, images: bool) -> None:
        super().__init__()
        self.part: nn.Module = nn.Conv2d(64, 64, 3, padding=1, groups=64) if images else nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.part(nn.functional.silu(x))


@pytest.mark.parametrize("images", [False, True])
def test_inductor_lays_out_images_as_it_is_said_to(images: bool) -> None:
    asked: list[bool] = []
    laid_out: list[bool] = []
    inner = inductor.compile_inner

    def watched(gm: GraphModule, inputs: Any, **kwargs: Any) -> Any:
        if not kwargs.get("is_backward"):
            asked.append(inductor.images_channels_last(gm, on_gpu=False))
        return inner(gm, inputs, **kwargs)

    def backend(graph: GraphModule, inputs: list[Tensor]) -> Any:
        return inductor.compile_graph(graph, inputs, settings={"fx_graph_cache": False}, inner_compile=watched)

    with inductor.watching_codegen(after=lambda lowering: laid_out.append(lowering.layout_opt)):
        torch.compile(Net(images=images), backend=backend)(values(*SHAPE).requires_grad_())
    assert asked == laid_out[:1] == [images]


def test_blocks_whose_inputs_are_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch saves a block's input in channels_last memory. One that is offloaded was not laid out. Backward gets its
    images in that memory all the same, and the gradient is plain torch's to the bit."""
    images = values(*SHAPE)
    copied: list[int] = []
    last: list[bool] = []

    def counted(module: GraphModule, inputs: Any) -> int:
        copied.append(images_as_laid_out(module, inputs))
        read = strides._propagated(module, inputs)[str(reader(module).args[1])].meta["val"]
        last.append(read.is_contiguous(memory_format=torch.channels_last))
        return copied[-1]

    monkeypatch.setattr("graphoffload.compiler.inner_compile.images_as_laid_out", counted)
    gradients = []
    for options in (None, {"device_budget": "700KB", "reserve": 0, "min_tensor_bytes": 0, "hardware": "h100-sxm"}):
        torch._dynamo.reset()
        torch.manual_seed(0)
        blocks = nn.ModuleList(Net(images=True) for _ in range(3))
        for block in blocks:
            block.compile(**({} if options is None else {"backend": "graphoffload", "options": options}))
        for _ in range(4):
            blocks.zero_grad()
            x = images.clone().requires_grad_()
            y = x
            for block in blocks:
                y = block(y)
            y.square().mean().backward()
        gradients.append([parameter.grad for parameter in (*blocks.parameters(), x)])
    assert graphoffload.stats()["offloads"]
    assert any(copied)
    assert all(last)
    for ours, plain in zip(*gradients[::-1], strict=True):
        assert ours is not None
        assert plain is not None
        assert torch.equal(ours, plain)
