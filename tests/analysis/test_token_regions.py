"""Which parts of Dynamo's graphs are computed in slices of the tokens, and that they give the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import GraphModule

from graphoffload.analysis.token_regions import TokenRegion, regions_by_token
from graphoffload.passes.slices import compute_in_slices

WIDTH, WIDE, TOKENS = 16, 64, 24


class MLP(nn.Module):
    """`act`: what stands between both linears, given what the wide one gave and the input."""

    def __init__(self, act: Callable[[Any, Tensor], Tensor], wide: int = WIDE) -> None:
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(WIDTH, wide), nn.Linear(WIDE, WIDTH), nn.Linear(WIDTH, WIDE, bias=False)
        self.scale, self.act = nn.Parameter(torch.rand(WIDE)), act

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.sin(x)
        return y + self.down(self.act(self, y))


def found(model: nn.Module, *inputs: Tensor, slices: int = 4) -> tuple[list[TokenRegion], list[Tensor], list[Tensor]]:
    """The regions of a model's graph; its output and gradients as they are, and in slices."""
    regions: list[TokenRegion] = []

    def backend(gm: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        regions.extend(regions_by_token(gm.graph, slices))
        compute_in_slices(gm, regions, slices)
        gm.graph.lint()
        return gm.forward

    def run(function: Callable[..., Tensor]) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        given = [value.clone().requires_grad_() for value in inputs]
        output = function(*given)
        output.square().sum().backward()
        return [output.detach(), *(value.grad for value in (*given, *model.parameters()) if value.grad is not None)]

    torch._dynamo.reset()
    whole = run(model)
    return regions, whole, run(torch.compile(model, backend=backend, dynamic=False))


ACTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "gelu": lambda mlp, x: F.gelu(mlp.up(x), approximate="tanh"),
    "gated": lambda mlp, x: F.silu(mlp.gate(x)) * mlp.up(x),
    "by methods": lambda mlp, x: mlp.up(x).relu().square().mul(mlp.scale),
    "cast": lambda mlp, x: (mlp.up(x).to(torch.float64).sigmoid() * 2).float(),
    "dropout at rest": lambda mlp, x: F.dropout(torch.tanh(mlp.up(x)), 0.5, False),
    "no dropout": lambda mlp, x: F.dropout(torch.tanh(mlp.up(x)), 0.0),
    "gelu by hand": lambda mlp, x: 0.5 * (h := mlp.up(x)) * (1 + torch.tanh(0.8 * (h + 0.04 * torch.pow(h, 3.0)))),
}
REFUSED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "dropout": lambda mlp, x: F.dropout(mlp.up(x), 0.5),
    "softmax over tokens": lambda mlp, x: mlp.up(x).softmax(1),
    "sum over tokens": lambda mlp, x: mlp.up(x) * mlp.gate(x).sum(1, keepdim=True),
    "in place": lambda mlp, x: F.relu(mlp.up(x), inplace=True),
    "in place by name": lambda mlp, x: mlp.up(x).mul_(2),
    "tokens by tokens": lambda mlp, x: torch.matmul(torch.matmul(x, x.transpose(1, 2)), mlp.up(x)),
    "shifted": lambda mlp, x: mlp.up(x).roll(1, 1),
    "another device": lambda mlp, x: mlp.up(x).to("cpu"),
}


@pytest.mark.parametrize("name", ACTS)
@pytest.mark.parametrize("shape", [(1, TOKENS), (TOKENS,), (8, 3), (3, 5)])
def test_mlps_are_regions(name: str, shape: tuple[int, ...]) -> None:
    """A token's result is the same, and so are gradients but for the order of sums."""
    torch.manual_seed(0)
    regions, whole, sliced = found(MLP(ACTS[name]), torch.randn(*shape, WIDTH))
    assert len(regions) == 1
    for ours, theirs in zip(sliced, whole, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_region(name: str) -> None:
    torch.manual_seed(0)
    regions, whole, sliced = found(MLP(REFUSED[name]), torch.randn(2, TOKENS, WIDTH))
    assert regions == []
    assert all(map(torch.equal, sliced, whole))


def test_one_linear_for_both_halves() -> None:
    """Phi's way: gate and up are one linear, cut along its features."""

    def act(mlp: Any, x: Tensor) -> Tensor:
        gate, up = mlp.up(x).chunk(2, dim=-1)
        return F.silu(gate) * up

    regions, whole, sliced = found(MLP(act, 2 * WIDE), torch.randn(1, TOKENS, WIDTH))
    assert len(regions) == 1
    torch.testing.assert_close(sliced, whole)


def test_cut_along_tokens() -> None:
    def act(mlp: Any, x: Tensor) -> Tensor:
        first, second = mlp.up(x).chunk(2, dim=1)
        return torch.cat([second, first], dim=1)

    regions, whole, sliced = found(MLP(act), torch.randn(1, TOKENS, WIDTH))
    assert regions == []
    assert all(map(torch.equal, sliced, whole))


def test_an_adapter_beside_each_linear() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = ((WIDTH, WIDE), (WIDE, WIDTH))
            self.base = nn.ModuleList(nn.Linear(*size).requires_grad_(False) for size in sizes)
            self.down = nn.ModuleList(nn.Linear(size[0], 2, bias=False) for size in sizes)
            self.up = nn.ModuleList(nn.Linear(2, size[1], bias=False) for size in sizes)

        def linear(self, at: int, x: Tensor) -> Tensor:
            return self.base[at](x) + self.up[at](self.down[at](x)) * 0.5

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(1, F.silu(self.linear(0, x)))

    regions, whole, sliced = found(Adapted(), torch.randn(1, TOKENS, WIDTH))
    assert [(region.length, region.dim, len(region.whole)) for region in regions] == [(TOKENS, -2, 1)]
    torch.testing.assert_close(sliced, whole)


def test_a_weight_with_as_many_rows_as_there_are_tokens() -> None:
    """What is computed of a parameter inside looks like tokens here, and is none."""

    class Scaled(MLP):
        def __init__(self) -> None:
            super().__init__(lambda mlp, x: torch.sigmoid(F.linear(mlp.up(x), mlp.square * 2.0)))
            self.square = nn.Parameter(torch.randn(WIDE, WIDE))

    regions, whole, sliced = found(Scaled(), torch.randn(WIDE, WIDTH))
    assert regions == []
    assert all(map(torch.equal, sliced, whole))


def test_a_result_inside_that_others_read() -> None:
    class Both(MLP):
        def forward(self, x: Tensor) -> Tensor:
            wide = F.gelu(self.up(x))
            return self.down(wide) + wide.mean(-1, keepdim=True)

    assert found(Both(ACTS["gelu"]), torch.randn(1, TOKENS, WIDTH))[0] == []


def test_something_that_writes_in_between() -> None:
    """The input is written over after the wide linear read it, and is read again."""

    class Writes(MLP):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.sin(x).detach()
            wide = self.up(y)
            y.zero_()
            return self.down(F.gelu(wide) + self.gate(y))

    model = Writes(ACTS["gelu"])
    model.up.requires_grad_(False)
    regions, whole, sliced = found(model, torch.randn(1, TOKENS, WIDTH))
    assert regions == []
    torch.testing.assert_close(sliced, whole)


def test_one_region_begins_with_what_another_ended_in() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, WIDE), nn.GELU(), nn.Linear(WIDE, WIDTH)) for _ in range(3)
            )

        def forward(self, x: Tensor) -> Tensor:
            h = self.parts[0](x)
            return h + self.parts[2](self.parts[1](h))

    regions, whole, sliced = found(Chain(), torch.randn(2, TOKENS, WIDTH))
    assert len(regions) == 3
    torch.testing.assert_close(sliced, whole)


def test_a_number_that_is_learned() -> None:
    class Cooled(MLP):
        def __init__(self) -> None:
            super().__init__(lambda mlp, x: F.gelu(mlp.up(x)) * mlp.heat.exp())
            self.heat = nn.Parameter(torch.tensor(0.1))

    regions, whole, sliced = found(Cooled(), torch.randn(1, TOKENS, WIDTH))
    assert regions == []
    torch.testing.assert_close(sliced, whole)


@pytest.mark.parametrize("shape", [(TOKENS, WIDE), (1, WIDE)])
def test_a_bias_for_each_token(shape: tuple[int, ...]) -> None:
    class Biased(MLP):
        def __init__(self) -> None:
            super().__init__(lambda mlp, x: F.gelu(F.linear(x, mlp.gate.weight, mlp.bias)))
            self.bias = nn.Parameter(torch.randn(*shape))

    regions, whole, sliced = found(Biased(), torch.randn(TOKENS, WIDTH))
    assert regions == []
    torch.testing.assert_close(sliced, whole)


def test_chunks_by_keyword() -> None:
    def act(mlp: Any, x: Tensor) -> Tensor:
        gate, up = torch.chunk(input=mlp.up(x), chunks=2, dim=-1)
        return F.silu(gate) * up

    regions, whole, sliced = found(MLP(act, 2 * WIDE), torch.randn(1, TOKENS, WIDTH))
    assert len(regions) == 1
    torch.testing.assert_close(sliced, whole)


def test_a_result_with_strides_of_its_own() -> None:
    """Dynamo makes numbers of strides, which slices side by side do not have."""

    class Strided(MLP):
        def forward(self, x: Tensor) -> Tensor:
            part = torch.chunk(F.gelu(self.up(x)), 4, -1)[0]
            return torch.as_strided(part, part.size(), part.stride()) * 2.0

    regions, whole, sliced = found(Strided(ACTS["gelu"]), torch.randn(1, TOKENS, WIDTH))
    assert regions == []
    torch.testing.assert_close(sliced, whole)


def test_fewer_tokens_than_slices() -> None:
    assert found(MLP(ACTS["gelu"]), torch.randn(1, 3, WIDTH))[0] == []


def test_sizes_that_change_are_not_cut() -> None:
    """And nothing is asked of them, which would make numbers of symbols behind Dynamo's back."""
    regions: list[TokenRegion] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        guards = next(value.node.shape_env for value in inputs if isinstance(value, torch.SymInt)).guards
        before = len(guards)
        regions.extend(regions_by_token(gm.graph, 4))
        assert len(guards) == before
        return gm.forward

    def wide(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, first)), second)

    torch._dynamo.reset()
    given = torch.randn(1, TOKENS, WIDTH), torch.randn(WIDE, WIDTH), torch.randn(WIDTH, WIDE)
    torch.compile(wide, backend=backend, dynamic=True)(*given)
    assert regions == []


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from(sorted({*ACTS, *REFUSED} - {"cast"})), min_size=1, max_size=3),
    st.integers(2, 9),
    st.integers(1, 4),
    st.integers(2, 30),
)
def test_any_model_gives_the_same(names: list[str], slices: int, batch: int, tokens: int) -> None:
    """Whatever stands beside what: random numbers come in the same order."""
    torch.manual_seed(1)
    both = {**ACTS, **REFUSED}
    model, x = nn.Sequential(*(MLP(both[name]) for name in names)).double(), torch.randn(batch, tokens, WIDTH).double()
    torch.manual_seed(2)
    regions: list[TokenRegion] = []

    def backend(gm: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        regions.extend(regions_by_token(gm.graph, slices))
        return compute_in_slices(gm, regions, slices).forward

    def gradients(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(2)
        run(x).square().mean().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    torch._dynamo.reset()
    expected = gradients(model)
    torch.testing.assert_close(gradients(torch.compile(model, backend=backend, dynamic=False)), expected, rtol=1e-9, atol=1e-12)


class TwoOutputs(torch.autograd.Function):
    """A linear, and something else that has as many tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(weight)
        return F.linear(x, weight), torch.mul(other, 2.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return torch.matmul(gradients[0], ctx.saved_tensors[0]), None, None


class Counting(torch.autograd.Function):
    """A linear that writes to a tensor of the caller's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, count: Tensor) -> Tensor:
        torch.mul(count, 0.9, out=count)
        ctx.save_for_backward(weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return torch.matmul(gradient, ctx.saved_tensors[0]), None, None


def squeezed_later(mlp: MLP, x: Tensor) -> Tensor:
    given = mlp.gate(x[:, :1]).tanh().cumsum(-1)
    result: Tensor = mlp.down(F.silu(mlp.up(torch.sin(x)) + given))
    return result.mean() + given.squeeze_(1).mean()


def read_by_a_dead_linear(mlp: MLP, x: Tensor) -> Tensor:
    y = torch.sin(x)
    mlp.up(y)
    same = y.float()  # it is y
    same.add_(1)
    return y.square().mean() + same.cos().mean()


def its_own_matrix(mlp: MLP, x: Tensor) -> Tensor:
    y = torch.sin(x[0])
    a, b, c, d = F.silu(F.linear(y, y)).chunk(4, -1)
    return (a * b * c * d).sum() + mlp.scale.sum()


def two_outputs(mlp: MLP, x: Tensor) -> Tensor:
    y = torch.sin(x)
    product, other = TwoOutputs.apply(y, mlp.up.weight.detach(), x.detach().cumsum(-1).repeat(1, 1, WIDE // WIDTH))
    result: Tensor = mlp.down(F.silu(product + other)).square().mean()
    return result


def counting(mlp: MLP, x: Tensor) -> Tensor:
    count = mlp.scale.detach().clone()
    product = Counting.apply(torch.sin(x), mlp.up.weight.detach(), count)
    result: Tensor = mlp.down(F.silu(product)).square().mean() + count.sum()
    return result


def by_a_teacher(mlp: MLP, x: Tensor) -> Tensor:
    with torch.inference_mode():
        taught = mlp.down(F.silu(mlp.up(torch.sin(x))))
    return (x - taught.clone()).square().mean()


@pytest.mark.parametrize("act", [squeezed_later, read_by_a_dead_linear, its_own_matrix, two_outputs, counting, by_a_teacher])
@pytest.mark.parametrize("batch", [4, 8])
def test_what_only_looks_like_an_mlp(act: Callable[[Any, Tensor], Tensor], batch: int) -> None:
    """Each was taken for one, and gave a wrong result or an error. 4: a batch of one sample a slice."""

    class Net(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return act(self, x)

    torch.manual_seed(0)
    regions, whole, sliced = found(Net(F.silu), torch.randn(batch, 64, WIDTH))
    assert regions == []
    assert all(map(torch.equal, sliced, whole))
