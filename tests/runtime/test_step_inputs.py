"""Inputs of later graphs in a planned step: a write to one is noticed while it is copied, and harmless after that."""

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
    found = compile_variant._computed((whole, left, right, whole.t(), whole[:, :1].expand(4, 6), whole.detach()))
    assert found == (0, 3)
