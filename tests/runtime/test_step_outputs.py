"""What a graph returns and saves as well, such as a model's last hidden state, counts from when its caller lets go of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from lazy import LazyStreams
from torch import Tensor, nn

from graphoffload.planner.step.facts import StepFacts
from graphoffload.planner.step.joint import OUTSIDE, join
from tests.runtime.stepping import OPTIONS, lazy, plan_now

__all__ = ["lazy"]

ROWS, WIDTH, WORDS = 4096, 64, 256
HIDDEN_BYTES = ROWS * WIDTH * 4


class Part(nn.Module):
    """Returns its logits, and what they are computed from: the gradient of the head's weight reads that."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.up(x).sin()
        return self.head(hidden), hidden


class Model(nn.Module):
    """Two graphs; whoever calls them lets go of hidden states, or holds them until backward."""

    def __init__(self, holds: bool) -> None:
        super().__init__()
        self.first, self.last, self.holds = Part(), Part(), holds
        self.held: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.first, self.last):
            logits, hidden = part(x)
            x = logits[:, :WIDTH]
            self.held += [hidden] if self.holds else []
        return logits.square().mean()


@pytest.mark.parametrize("holds", [False, True], ids=["lets go", "holds"])
def test_what_only_autograd_holds_is_counted(lazy: LazyStreams, holds: bool) -> None:
    """In recorded runs the hidden states are computed again, so that memory outside does not have them."""
    torch.manual_seed(0)
    model, x = Model(holds), torch.randn(ROWS, WIDTH)
    options: dict[str, Any] = {**OPTIONS, "device_budget": 2**24}
    for part in (model.first, model.last):
        part.compile(backend="graphoffload", options=options, dynamic=False)
    for _ in range(4):
        model(x).backward()
        model.held.clear()
    plan = plan_now()
    assert plan is not None
    facts = plan.facts
    keep, *_, smallest = facts.graphs[0]
    assert HIDDEN_BYTES in keep.saved_outputs
    assert not smallest.saved_outputs
    assert all(facts.variant(index, call.ran).name == "smallest" for index, call in enumerate(facts.calls))
    counted = [sum(one.nbytes for one in call.dropped if one.nbytes == HIDDEN_BYTES) for call in facts.calls]
    assert counted == ([0, 0] if holds else [HIDDEN_BYTES] * 2)
    without = replace(facts, calls=tuple(replace(call, dropped=()) for call in facts.calls))
    assert _at_the_turn(facts) - _at_the_turn(without) == sum(counted)


def _at_the_turn(facts: StepFacts) -> int:
    """Bytes outside the graphs when the last call's backward begins, with everything kept."""
    program = join(facts, (0, 0)).program
    backward = len(program.forward)
    return sum(b.nbytes for b in program.buffers if b.first <= backward <= b.last and b.name.startswith(OUTSIDE))
