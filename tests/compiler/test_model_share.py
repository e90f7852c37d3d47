"""How much of its model a graph has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphoffload.compiler.model_share import share_of_its_model


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))


def test_one_block_of_four() -> None:
    model = Model()
    first = list(model.layers[0].parameters())
    assert share_of_its_model([*first, torch.rand(2, 8), 3]) == pytest.approx(64 / (80 + 4 * 64))
    model.embedding.requires_grad_(False)
    assert share_of_its_model(first) == 1 / 4
    wrapped = nn.Sequential(model, nn.Linear(8, 16, bias=False))
    assert share_of_its_model(first) == pytest.approx(64 / (4 * 64 + 128)), "of the outermost module"
    assert share_of_its_model(wrapped.parameters()) == 1


def test_what_is_in_no_module_has_no_model() -> None:
    model, other = Model(), Model()
    assert share_of_its_model([nn.Parameter(torch.rand(2))]) == 1
    assert share_of_its_model([torch.rand(2)]) == 1
    assert share_of_its_model(model.parameters()) == 1, "another model is another one"
    assert len(other.layers) == 4


def test_parameters_of_two_models() -> None:
    """A graph of both has both; one that shares a block has a part of each."""
    model, other = Model(), Model()
    assert share_of_its_model([*model.parameters(), *other.parameters()]) == 1
    other.layers[0] = model.layers[0]
    assert share_of_its_model(model.layers[0].parameters()) == pytest.approx(64 / (2 * 80 + 7 * 64))


def test_parameters_without_a_shape() -> None:
    """Those of a lazy module, in the same model or elsewhere, are none yet."""
    model, elsewhere = Model(), nn.LazyLinear(3)
    model.head = nn.LazyLinear(3)
    assert share_of_its_model(model.layers[0].parameters()) == pytest.approx(64 / (80 + 4 * 64))
    assert elsewhere.weight is not None
