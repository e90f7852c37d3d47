"""Inputs of later graphs in a planned step: a write to one is noticed while it is copied, and harmless after that.
Inputs in one memory, and nested ones."""

from __future__ import annotations

import pytest
import torch
from lazy import lazy_streams
from torch import Tensor, nn
from torch.nn import functional

import graphoffload
from graphoffload.compiler import compile_variant
from graphoffload.errors import RuntimeStateError
from graphoffload.facts.saved_tensors import INPUT

BLOCKS, WIDTH, WORDS = 6, 64, 100
OPTIONS = {
    "inner": "aot_eager", "device_budget": "3.4MiB", "hardware": "h200-sxm", "reserve": 0, "min_tensor_bytes": 1,
}  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Writes to the input of one block after it, or two blocks later. viewed: the input is a view of all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.write: tuple[int, int] | None = None
        self.viewed = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        inputs = []
        for number, block in enumerate(self.blocks):
            inputs.append(x)
            x = block(x.transpose(0, 1)).transpose(0, 1) if self.viewed else block(x)
            if self.write is not None and self.write[1] == number:
                with torch.no_grad():
                    inputs[self.write[0]].add_(1.0)
        return self.head(x)


def step(model: Model, seed: int) -> list[Tensor]:
    ids = torch.randint(0, WORDS, (8, 128), generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def each_compiled(blocks: nn.ModuleList, backend: str, options: dict[str, object]) -> None:
    for block in blocks:
        block.compile(backend=backend, dynamic=False, **({"options": options} if options else {}))


def built() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.mark.parametrize(("number", "viewed"), [*((number, False) for number in range(BLOCKS)), (1, True), (BLOCKS - 1, True)])
def test_a_write_while_it_is_copied_stops_the_step_once(number: int, viewed: bool) -> None:
    plain, model = built(), built()
    plain.viewed = model.viewed = viewed
    budget = "3.8MiB" if viewed else "3.4MiB"  # at less, no copy of the views is late
    for block in model.blocks:
        block.compile(backend="graphoffload", options={**OPTIONS, "device_budget": budget})
    with lazy_streams() as lazy:
        for seed in range(4):
            assert all(map(torch.equal, step(model, seed), step(plain, seed)))
        plans = {plan.key: plan for plan in graphoffload.last_plans() if plan.variant}
        offloaded = [t.tensor for plan in plans.values() for t in plan.transfers if plan.saved[t.tensor].op == INPUT]
        assert offloaded, "the plan offloads inputs of blocks"
        plain.write = model.write = number, number
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(plain, 4)
        with pytest.raises(RuntimeStateError, match="modified in place while it was copied"):
            step(model, 4)
        plain.write = model.write = None
        for seed in range(5, 8):
            assert all(map(torch.equal, step(model, seed), step(plain, seed)))
        assert not lazy.complaints


def test_an_input_that_many_calls_have_is_no_activation() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return x + functional.gelu(self.a(x)) * functional.gelu(self.b(memory))

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
            self.blocks = nn.ModuleList(Decoder() for _ in range(BLOCKS))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids)
            memory = torch.tanh(self.embedding(ids.flip(0)))
            for block in self.blocks:
                x = block(x, memory)
            return self.head(x)

    torch.manual_seed(0)
    plain = Both()
    torch.manual_seed(0)
    model = Both()
    for block in model.blocks:
        block.compile(backend="graphoffload", options={**OPTIONS, "device_budget": "1.9MiB"})
    with lazy_streams() as lazy:
        for seed in range(5):
            assert all(map(torch.equal, step(model, seed), step(plain, seed)))  # type: ignore[arg-type]
        assert not lazy.complaints
    last = graphoffload.last_plans()[-1]
    assert last.variant
    assert [tensor.shape for tensor in last.saved.tensors if tensor.op == INPUT] == [(8, 128, WIDTH)], "x alone, not the memory"


def test_a_part_of_a_tensor_is_no_activation() -> None:
    """Offloading it would free nothing while the other part lives."""
    whole = torch.ones(4, 6, requires_grad=True) * 2
    left, right = whole.chunk(2, dim=1)
    for value in (left, right, whole[:, :1].expand(4, 6), whole.detach()):
        assert compile_variant._computed((value,)) == ()
    assert compile_variant._computed((whole,)) == compile_variant._computed((whole.t(),)) == (0,)
    assert compile_variant._computed((whole, left * 1, whole.t(), torch.ones(2).to_sparse())) == (1,), "two in one memory"


def test_a_view_of_an_input_is_given_as_well() -> None:
    """The same memory twice, neither a view of the other in the block's graph."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            again = other.transpose(0, 1)
            return torch.tanh(self.a(x)) * (again.sin() * again)

    def run(backend: str, **options: object) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        first, blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Twice() for _ in range(3))
        each_compiled(blocks, backend, options)
        x = first(torch.randn(4, 8, WIDTH))
        for block in blocks:
            x = block(x, x.transpose(0, 1))
        x.sum().backward()
        return [p.grad for p in (*first.parameters(), *blocks.parameters()) if p.grad is not None]

    expected = run("aot_eager")
    with lazy_streams() as lazy:
        assert all(map(torch.equal, run("graphoffload", **{**OPTIONS, "device_budget": "1B"}), expected))
        assert not lazy.complaints


@pytest.mark.parametrize("how", ["add_", "copy_", "dropout"])
def test_an_input_that_was_written_to_before_the_call(how: str) -> None:
    """Its counter of writes is not at zero."""

    def changed(x: Tensor) -> Tensor:
        if how == "copy_":
            return torch.empty_like(x).copy_(x)
        return (x * 1.0).add_(0.1) if how == "add_" else functional.dropout(x * 2.0, 0.0, True, inplace=True)

    def run(backend: str, **options: object) -> list[Tensor]:
        torch._dynamo.reset()
        model = built()
        each_compiled(model.blocks, backend, options)
        x = model.embedding(torch.arange(WORDS).view(4, -1))
        for block in model.blocks:
            x = block(changed(x))
        x.square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = run("aot_eager")
    with lazy_streams() as lazy:
        assert all(map(torch.equal, run("graphoffload", **{**OPTIONS, "device_budget": "1B"}), expected))
        assert not lazy.complaints


@pytest.mark.parametrize("number", [0, 1])
def test_a_write_after_the_first_call_of_a_plan_is_noticed_as_well(number: int) -> None:
    """The first call of a graph runs below autograd's counting of writes."""
    plain, model = built(), built()
    for block in model.blocks:
        block.compile(backend="graphoffload", options=OPTIONS)
    with lazy_streams():
        for seed in range(2):
            assert all(map(torch.equal, step(model, seed), step(plain, seed)))
        plain.write = model.write = number, number
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(plain, 2)
        with pytest.raises(RuntimeStateError, match="modified in place while it was copied"):
            step(model, 2)


def test_sizes_that_only_an_activation_has_are_not_read_from_it() -> None:
    """Hidden states are nested tensors: a reload that needs its own size cannot be written."""

    def run(backend: str, **options: object) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        blocks = nn.ModuleList(Block() for _ in range(3))
        each_compiled(blocks, backend, options)
        parts = [torch.randn(count, WIDTH) for count in (5, 9, 7)]
        x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True) * 1.0
        for block in blocks:
            x = block(x)
        x.values().sum().backward()
        return [p.grad for p in blocks.parameters() if p.grad is not None]

    expected = run("aot_eager")
    with lazy_streams():
        assert all(map(torch.equal, run("graphoffload", **{**OPTIONS, "device_budget": "1B"}), expected))
