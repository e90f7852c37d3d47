"""Whatever strides a saved tensor has, and whatever strides the compiler gives it instead, its logical values come back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import graphoffload
from graphoffload.analysis.saved_values import GraphPair, saved_table
from graphoffload.compiler import inner_compile
from graphoffload.errors import ChecksumError, RuntimeStateError
from graphoffload.facts.plan import Plan, Transfer
from graphoffload.facts.saved_tensors import SavedTable
from graphoffload.passes.strides import reload_as_laid_out
from graphoffload.runtime import registry, twin_copies
from graphoffload.testing import assert_equal_bits, compiled, draw, keep_all, observe, run_step, whole_gradient_error
from graphoffload.testing.faults import host_copies, reloads

OPS = torch.ops.graphoffload
PERMUTATIONS = list(itertools.permutations(range(4)))
SHAPE = (2, 3, 4, 5)


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return draw(*shape, device="cpu", dtype=dtype, seed=0)


ROUNDTRIPS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: values(*SHAPE),
    "one_element": lambda: values(1),
    "no_dimensions": lambda: values(1)[0],
    "sliced_rows": lambda: values(6, 8)[1:4],
    "sliced_columns": lambda: values(6, 8)[:, 2:5],
    "every_second": lambda: values(6, 8)[::2, ::2],
    "offset": lambda: values(100)[17:77].view(3, 20),
    "offset_transposed": lambda: values(100)[17:77].view(3, 20).t(),
    "expanded": lambda: values(3, 1, 4).expand(3, 5, 4),
    "expanded_scalar": lambda: values(1).expand(7),
    "zero_size": lambda: values(3, 0, 4),
    "zero_size_transposed": lambda: values(3, 0, 4).transpose(0, 2),
    "channels_last": lambda: values(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "channels_last_slice": lambda: values(2, 8, 4, 5).contiguous(memory_format=torch.channels_last)[:, 2:5],
    "overlapping": lambda: values(20).as_strided((4, 5), (3, 1)),
    "size_one_odd_stride": lambda: values(8).as_strided((1, 8), (3, 1)),
    "diagonal": lambda: values(5, 5).diagonal(),
    "bool": lambda: values(4, 6).t() > 0,
    "int64": lambda: (values(4, 6) * 100).long().t(),
    "uint8": lambda: (values(4, 7).abs() * 50).to(torch.uint8)[:, 1:],
    "bfloat16": lambda: values(4, 7, dtype=torch.bfloat16).t(),
    "float64": lambda: values(4, 7, dtype=torch.float64).t(),
    "complex64": lambda: torch.complex(values(4, 7), values(4, 7)).t(),
    "nan_payloads": lambda: torch.tensor([0x7FC00001, 0x7FC00002, -0x7FFFFF], dtype=torch.int32).view(torch.float32),
}


@pytest.fixture
def plan() -> str:
    """Key of a registered plan in checksum mode."""
    transfer = Transfer(
        id=0, tensor="x", nbytes=None, offload_after="x", release_after=None, reload_before="y", wait_before="y", module="layer"
    )
    registry.register(Plan(key="layouts", graph="layouts", transfers=(transfer,), checksum=True), store=False)
    return "layouts"


def bits(tensor: Tensor) -> list[int]:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.contiguous().reshape(-1).view(torch.uint8).tolist() if real.numel() else []


def roundtrip(x: Tensor, size: Any, stride: Any, plan: str) -> Tensor:
    """Offload, overwrite the source as the compiler may after release, reload."""
    source = x.clone() if x.numel() else x
    handle = OPS.offload(x, plan, 0)
    OPS.release(x, handle, plan, 0)
    if x.numel():
        x.as_strided((1,), (1,), x.storage_offset()).fill_(0)
    y = OPS.reload(handle, plan, 0, size, stride, x.dtype)
    OPS.wait(y, handle, plan, 0)
    assert bits(y) == bits(source)
    return y


@pytest.mark.parametrize("name", ROUNDTRIPS)
def test_values_and_strides_come_back(name: str, plan: str) -> None:
    """With the strides that the source has; a stride of 0 cannot be asked for, so those come back dense."""
    x = ROUNDTRIPS[name]()
    dense = torch.empty_like(x, memory_format=torch.contiguous_format)
    for stride in {tuple(x.stride()), dense.stride()} if 0 not in x.stride() and name != "overlapping" else {dense.stride()}:
        y = roundtrip(ROUNDTRIPS[name](), x.shape, stride, plan)
        assert (y.shape, y.stride(), y.dtype) == (x.shape, stride, x.dtype)


@pytest.mark.parametrize("asked", PERMUTATIONS, ids=str)
def test_strides_differ_from_the_graph(asked: tuple[int, ...], plan: str) -> None:
    """Inductor lays a tensor out otherwise than its fake tensor says: every pair of orders gives the logical values."""
    order = torch.empty([SHAPE[i] for i in asked]).permute([asked.index(i) for i in range(4)]).stride()
    for held in PERMUTATIONS:
        x = values(*[SHAPE[i] for i in held]).permute([held.index(i) for i in range(4)])
        assert tuple(x.shape) == SHAPE
        assert roundtrip(x, SHAPE, order, plan).stride() == order


def test_reload_twice_from_one_offload(plan: str) -> None:
    """As retain_graph does; the host copy stays until the handle goes."""
    x = values(4, 6).t()
    expected, handle = bits(x), OPS.offload(x, plan, 0)
    OPS.release(x, handle, plan, 0)
    for _ in range(2):
        y = OPS.reload(handle, plan, 0, x.shape, x.stride(), x.dtype)
        OPS.wait(y, handle, plan, 0)
        assert bits(y) == expected
        y.fill_(0)


def test_a_changed_host_copy_is_noticed(plan: str) -> None:
    """One flipped bit in the host's memory raises in checksum mode, naming tensor and module."""
    x = values(4, 6)

    def flip(host: Tensor) -> None:
        host.view(torch.uint8)[3] ^= 1

    with host_copies(flip), pytest.raises(ChecksumError, match=r"x of layer: the 96 bytes that came back"):
        roundtrip(x, x.shape, x.stride(), plan)


def test_release_of_other_memory_is_refused(plan: str) -> None:
    """A temporary in place of the source: the race of F6, caught before the memory is reused."""
    x = values(4, 6)
    handle = OPS.offload(x, plan, 0)
    with pytest.raises(RuntimeStateError, match=r"x of layer: release was given memory at 0x\w+, but offload copies"):
        OPS.release(x.clone(), handle, plan, 0)


@pytest.mark.parametrize(
    ("size", "stride", "dtype", "says"),
    [
        ((6, 4), (4, 1), torch.float32, r"x of layer: backward asks for \(6, 4\) .*, but \(4, 6\) .* was offloaded"),
        ((4, 6), (6, 1), torch.bfloat16, r"asks for .* torch.bfloat16, but .* torch.float32 .*Keep it, with policy="),
    ],
    ids=["shape", "type"],
)
def test_reload_of_another_tensor_is_refused(
    plan: str, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, says: str
) -> None:
    """Values out of order between forward and backward are an error, not a gradient. So is a type that torch's fake kernel says
    and the operation does not make, and the error says what to do about it."""
    x = values(4, 6)
    handle = OPS.offload(x, plan, 0)
    OPS.release(x, handle, plan, 0)
    with pytest.raises(RuntimeStateError, match=says):
        OPS.reload(handle, plan, 0, size, stride, dtype)


class Permuted(nn.Module):
    """Saves a 4-d tensor in one permutation, behind a product whose layout the compiler may choose."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.order, last = order, (2, 3, 4, 8)[order[-1]]
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, 64).reshape(8, 8))
        self.mix = nn.Parameter(torch.linspace(-1.0, 1.0, last * 2).reshape(last, 2))

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.weight).permute(self.order)
        return y.cos() @ self.mix


class Permutations(nn.Module):
    """Several permutations at once, so that one compile tests them all."""

    def __init__(self, orders: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Permuted(order) for order in orders)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [part(x) for part in self.parts]


INPUT = (draw(2, 3, 4, 8, device="cpu", dtype=torch.float32, seed=0, requires_grad=True),)


def config(inner: str) -> graphoffload.OffloadConfig:
    return graphoffload.OffloadConfig(policy="offload", inner=inner, min_tensor_bytes=0, verify="checksum")


def test_every_permutation_without_inductor() -> None:
    """Equal to keep-all, to the bit."""
    expected = run_step(compiled(Permutations(PERMUTATIONS), keep_all()), INPUT)
    with observe() as seen:
        got = run_step(compiled(Permutations(PERMUTATIONS), graphoffload.OffloadBackend(config("aot_eager"))), INPUT)
    assert_equal_bits(got, expected)
    assert seen.counters["offloads"] >= len(PERMUTATIONS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "orders", [PERMUTATIONS[1::8], pytest.param(PERMUTATIONS, marks=pytest.mark.long)], ids=["some", "every"]
)
def test_permutations_under_inductor(orders: Sequence[tuple[int, ...]]) -> None:
    """Equal to the twin to the bit, and to eager up to rounding; checksums compare logical values."""
    exact = run_step(Permutations(orders).double(), tuple(x.detach().double().requires_grad_() for x in INPUT))
    with observe() as seen:
        module = compiled(Permutations(orders), graphoffload.OffloadBackend(config("inductor")))
        got = run_step(module, INPUT)
    assert seen.counters["offloads"] >= len(orders)
    assert seen.counters["checked"] == seen.counters["reloads"] == seen.counters["offloads"]
    with twin_copies():
        assert_equal_bits(got, run_step(module, INPUT))
    assert whole_gradient_error(got, exact) < 1e-5
    with reloads(lambda y: y.zero_()):
        assert whole_gradient_error(run_step(module, INPUT), exact) > 0.1


class Patches(nn.Module):
    """What a convolution leaves transposed, Inductor lays out in order: other strides than the graph's."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 16, 4, 4), nn.LayerNorm(16)
        self.positions, self.up, self.down = nn.Parameter(torch.randn(16, 16)), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x.square().mean()


@pytest.mark.parametrize("told", [True, pytest.param(False, marks=pytest.mark.long)])
def test_backward_is_compiled_for_the_strides_that_forward_has(told: bool) -> None:
    """Nothing is laid out anew, and a module that is not told of them gets the same gradient."""
    images = values(2, 3, 16, 16)
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Patches()
    net(images).backward()
    expected = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    graphoffload.reset_stats()
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
        mock.patch.object(inner_compile, "reload_as_laid_out", reload_as_laid_out if told else mock.Mock()),
    ):
        net.compile(backend="graphoffload", options={"policy": "offload", "min_tensor_bytes": 0})
        net(images).backward()
    counted = graphoffload.stats()
    assert counted["offloads"] >= 5
    assert (counted["relaid"] == 0) == told, counted["relaid"]
    for one, other in zip(expected, net.parameters(), strict=True):
        assert one is not None
        assert other.grad is not None
        torch.testing.assert_close(one, other.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("by_strides", [False, True])
def test_a_reload_that_is_viewed_by_strides_keeps_the_graphs(by_strides: bool) -> None:
    """Strides and offset of such a view are those of the graph's layout: in another one it would show other elements."""
    graph = torch.fx.Graph()
    with FakeTensorMode():
        handle = graph.placeholder("handle")
        handle.meta["val"] = torch.empty(1, dtype=torch.int64)
        y = graph.call_function(OPS.reload.default, (handle, "plan", 0, [3, 4], [4, 1], torch.float32))
        y.meta["val"] = torch.empty(3, 4)
        op, rest = (torch.ops.aten.as_strided.default, ([4], [1], 4)) if by_strides else (torch.ops.aten.select.int, (0, 1))
        row = graph.call_function(op, (y, *rest))
        row.meta["val"] = y.meta["val"][1]
    graph.output(row)
    module = torch.fx.GraphModule({}, graph)
    assert reload_as_laid_out(module, "plan", {0: (1, 3)}) == (not by_strides)
    assert next(node for node in module.graph.nodes if node.name == y.name).args[4] == ([4, 1] if by_strides else [1, 3])


def table_with_a_late_view(view: Any) -> SavedTable:
    """Of a forward that reads y for the last time in its cos, and then takes a view of y that only backward reads."""

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.sin(x)
        return torch.exp(torch.cos(y)), view(y, [3, 4])

    def backward(saved: Tensor, tangent: Tensor) -> tuple[Tensor]:
        return (saved.cos().reshape(12) * tangent,)

    with FakeTensorMode():
        x = torch.empty(12)
        pair = GraphPair(make_fx(forward)(x), make_fx(backward)(*forward(x)[::-1]), 1)
    (placeholder,) = pair.backward.graph.find_nodes(op="placeholder")[:1]
    saved = pair.forward.graph.output_node().args[0][1]  # type: ignore[index, union-attr]
    placeholder.name = saved.name  # type: ignore[union-attr]
    return saved_table(pair)


def test_a_view_whose_schema_does_not_say_so_is_one() -> None:
    """torch 2.15 makes `_unsafe_view` of linear layers: the memory is free after the same operation as with `view`."""
    aten = torch.ops.aten
    (plain,), (unsafe,) = (table_with_a_late_view(view).tensors for view in (aten.view.default, aten._unsafe_view.default))
    assert unsafe.name == plain.name == "sin"
    assert unsafe.last_forward_position == plain.last_forward_position
    assert unsafe.eligible
