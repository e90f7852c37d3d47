"""Which results take over the memory of what they are computed from: never one that Inductor gives memory of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from analysis.test_written_for_a_gpu import written
from torch import Tensor
from torch._inductor.codegen.common import KernelArgs
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from graphoffload.analysis.fusion import fusion_of
from graphoffload.analysis.lifetimes import donated_until, lives_in_memory, made_at

W = 32
SQUARE, WIDE = (W, W), (W, 4 * W)


def dgelu(d: Tensor, w: Tensor, h: Tensor) -> Tensor:
    """The product is read once, element by element."""
    return torch.ops.aten.gelu_backward(d @ w, h) @ w.t()


def through_views(d: Tensor, w: Tensor) -> Tensor:
    """As a linear layer's gradient comes: a matrix, seen as a batch of them."""
    return ((d @ w).view(4, W // 4, 4 * W) * 2 + 1).view(W, 4 * W) @ w.t()


def of_two_products(d: Tensor, w: Tensor) -> Tensor:
    """One result takes over one of two."""
    return ((d @ w) * (d.sin() @ w)) @ w.t()


def read_again(d: Tensor, w: Tensor) -> Tensor:
    """A later product reads it, too."""
    product = d @ w
    return product.cos() @ w.t() + product @ w.t()


def two_readers(d: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Two results of one kernel are computed from it."""
    product = d @ w
    return product.cos() @ w.t(), (product * 3) @ w.t()


def turned(d: Tensor, w: Tensor) -> Tensor:
    """Each element is computed from another one."""
    return (d @ d).t().contiguous().sin() @ w


def rows(d: Tensor, w: Tensor) -> Tensor:
    """Every element is computed from a whole row, and from itself last."""
    return functional.softmax(d @ w, -1) @ w.t()


def narrower(d: Tensor, w: Tensor) -> Tensor:
    """It has other elements."""
    return (d @ w).double().sin() @ w.t().double()


def returned(d: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The caller gets it."""
    product = d @ w
    return product, product.sin() @ w.t()


def an_input(d: Tensor, w: Tensor) -> Tensor:
    """The caller has it."""
    return d.sin() @ w


def a_part(d: Tensor, w: Tensor) -> Tensor:
    """Its other half is not written to."""
    return (d @ w)[:, : 2 * W].sin() @ w[:, : 2 * W].t()


def joined(d: Tensor, w: Tensor) -> Tensor:
    """What is written into a larger tensor has no memory to give away."""
    return torch.cat([d @ w, d.sin() @ w]).sin() @ w.t()


def normed(d: Tensor, w: Tensor) -> Tensor:
    """A kernel that reduces rows reads it twice, and last for the result."""
    product = d @ w
    return (product * product.square().mean(-1, keepdim=True).rsqrt()) @ w.t()


def saved_and_read_twice(d: Tensor, w: Tensor) -> Tensor:
    """A product reads it, too."""
    return d.sin() @ w + d @ w


def saved_and_a_temporary(d: Tensor, w: Tensor) -> Tensor:
    """The result takes over one of two; a temporary goes under any plan."""
    return ((w @ w.t()) * d) @ w


def saved_and_returned(d: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The caller gets it."""
    return d, d.sin() @ w


def saved_for_rows(d: Tensor, w: Tensor) -> Tensor:
    """Every element is computed from a whole row, and from itself last."""
    return functional.softmax(d, -1) @ w


def through_convolution(d: Tensor, w: Tensor) -> Tensor:
    """The gradient of images that lie in memory with channels last: one of the results of a convolution's backward."""
    images, kernel = d.view(2, 8, 8, 8).permute(0, 3, 1, 2), w[:8, :8].reshape(8, 8, 1, 1)
    settings = None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, False, False]
    return torch.ops.aten.convolution_backward(images, images, kernel, *settings)[0]


def channels_first(w: Tensor) -> Tensor:
    """Other images of the same size, computed from three that have channels first."""
    one, two, three, _ = w.view(4, 2, 8, 8, 8)
    return one.sin() + two.cos() * three


def with_a_shortcut(d: Tensor, w: Tensor) -> Tensor:
    """What is returned lies in memory as the first operand does."""
    return through_convolution(d, w) + channels_first(w)


def added_to_others(d: Tensor, w: Tensor) -> Tensor:
    """What is returned lies in memory as the other operand does."""
    return channels_first(w) + through_convolution(d, w)


def read_in_parts(d: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """What is read here lies in memory as most of its operands do, whatever the graph says."""
    images = through_convolution(d, w) + channels_first(w)
    return images[:, :4].cos(), images[:, 4:].contiguous()


GIVES = (dgelu, through_views, of_two_products, with_a_shortcut, rows, normed)
OTHER_LAYOUTS = (added_to_others, read_in_parts)
KEEPS = (read_again, two_readers, turned, narrower, returned, an_input, a_part, joined, *OTHER_LAYOUTS)


@contextlib.contextmanager
def in_place() -> Iterator[list[tuple[str, str]]]:
    """Pairs of buffers that Inductor makes one piece of memory; only those of the whole size count."""
    found: list[tuple[str, str]] = []
    original = KernelArgs.make_inplace

    def noting(args: KernelArgs, old: str, new: str) -> None:
        size = torch._inductor.virtualized.V.graph.get_buffer(new).get_size()
        if torch.Size(map(int, size)).numel() >= W * W:
            found.append((old, new))
        original(args, old, new)

    with mock.patch.object(KernelArgs, "make_inplace", noting):
        yield found


def traced(function: Callable[..., object]) -> GraphModule:
    """A graph as Inductor gets it."""
    shapes = (SQUARE, WIDE, WIDE)[: function.__code__.co_argcount]
    inputs = [torch.randn(shape) for shape in shapes]

    def returning(*given: Tensor) -> tuple[object, ...]:
        result = function(*given)
        return result if isinstance(result, tuple) else (result,)

    return make_fx(returning, select_decomp_table(), tracing_mode="fake")(*inputs)


@pytest.mark.parametrize("function", [*GIVES, *KEEPS])
def test_what_is_written_over(function: Callable[..., object]) -> None:
    module = traced(function)
    fusion = fusion_of(module.graph, fuses=True)
    lives = {made: (first, last) for _, made, first, last in lives_in_memory(module.graph.nodes, fusion, made_at(fusion))}
    starts = {made: fusion.spans.get(made, (first,))[0] for made, (first, _) in lives.items()}
    over = [made for made, (_, last) in lives.items() if any(last < starts[reader] for reader in readers(made, lives))]
    with in_place() as pairs:
        written(module, 0)
    assert len(over) == (function in GIVES), over
    assert len(over) <= len(pairs), (over, pairs)
    assert not (pairs and function in OTHER_LAYOUTS), "to expect it would be wrong, and not only careful to expect nothing"


@pytest.mark.parametrize("donated", [True, False])
@pytest.mark.parametrize(
    ("function", "goes"),
    [(an_input, True), (saved_and_read_twice, False), (saved_and_a_temporary, False), (saved_and_returned, False),
     (saved_for_rows, True), (rows, False)],
)  # fmt: skip
def test_a_donated_activation(function: Callable[..., object], goes: bool, donated: bool) -> None:
    """The first input, given away or not. Inductor gives it away wherever that is expected, and nowhere else."""
    module = traced(function)
    fusion = fusion_of(module.graph, fuses=True)
    saved = next(node for node in module.graph.nodes if node.op == "placeholder")
    until = donated_until(module.graph.nodes, fusion, [saved] if donated else [])
    with in_place() as pairs:
        written(module, 0, [0] if donated else [])
    assert set(until) == ({saved} if goes and donated else set())
    assert any(old == "arg0_1" for old, _ in pairs) == bool(until), pairs
    assert all(at == fusion.spans[next(iter(node.users))][0] - 1 for node, at in until.items())


def readers(made: torch.fx.Node, lives: dict[torch.fx.Node, tuple[int, int]]) -> list[torch.fx.Node]:
    """The values in memory that are computed from one of them."""
    found, pending = [], [*made.users]
    while pending:
        user = pending.pop()
        if user in lives:
            found.append(user)
        else:
            pending.extend(user.users)
    return found
