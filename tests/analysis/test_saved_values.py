"""What is saved and may not be offloaded."""

from __future__ import annotations

import torch
import torch._inductor.inductor_prims  # it registers the operation
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

from graphoffload.analysis.saved_values import _refusal


def test_seeds_are_not_offloaded() -> None:
    """Inductor reads a seed where its number is drawn, which may be after the copy's release."""
    graph = Graph()
    seeds = graph.call_function(torch.ops.prims.inductor_seeds.default, (2, torch.device("cpu")))
    product = graph.call_function(torch.ops.aten.mul.Tensor, (seeds, seeds))
    with FakeTensorMode():
        seeds.meta["val"] = product.meta["val"] = torch.empty(2, dtype=torch.int64)
    assert _refusal(seeds) == "is random-number state"
    assert _refusal(product) == ""
