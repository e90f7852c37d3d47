"""What goes to the host of products in 8 bits; that gradients are right is shown by the net itself."""

from __future__ import annotations

import math

import graphoffload
from graphoffload.runtime import registry
from net.precisions import Linear8
from net.small import Decoder, tokens
from net.step import take


def test_float8_takes_a_byte_an_element_on_the_host() -> None:
    """Saved values in float8 go with one byte an element, and scales of no dimensions with four."""
    model, inputs = Decoder(layers=1, make=Linear8), tokens()
    registry.forget()
    model.compile(backend=graphoffload.OffloadBackend(inner="aot_eager", policy="offload", min_tensor_bytes=0))
    graphoffload.reset_stats()
    take(model, inputs)
    [plan] = registry.last_plans()
    small = [tensor for tensor in plan.saved.tensors if "float8" in str(tensor.dtype)]
    scales = [tensor for tensor in plan.saved.tensors if tensor.shape == ()]
    assert len(small) >= 5  # the input and the weight of products
    assert all(tensor.nbytes == math.prod(tensor.shape) and tensor.eligible for tensor in small)
    assert scales
    assert graphoffload.stats()["d2h_bytes"] == plan.offloaded_bytes
    offloaded = [decision for decision in plan.decisions if decision.action == "offload"]
    assert graphoffload.stats()["offloads"] == graphoffload.stats()["reloads"] == len(offloaded)
