"""What is offloaded is never the caller's own memory: Inductor leaves out copies that nothing saves, and a handle is saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import graphoffload
from graphoffload.runtime.entries import OffloadedTensor

WEIGHT = torch.nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))


def copies_an_input(x: Tensor) -> Tensor:
    return (x.clone() @ WEIGHT).sin()


def copies_and_writes(x: Tensor) -> Tensor:
    c = x.clone()
    x.mul_(2.0)
    return (c @ WEIGHT).sin()


def copies_an_output(x: Tensor) -> tuple[Tensor, Tensor]:
    h = (x @ WEIGHT).relu()
    return h.clone(), h @ WEIGHT


def copies_of_views(x: Tensor) -> tuple[Tensor, Tensor]:
    h = (x @ WEIGHT).sin()
    return h, (h.t().clone().reshape(32, 128).clone().view(64, 64) @ WEIGHT).cos()


@pytest.fixture
def sources() -> Iterator[list[Tensor]]:
    """Everything that is offloaded, held: an address that a release has freed may soon be an output's, and that is right."""
    found: list[Tensor] = []
    original = OffloadedTensor.__init__

    def noting(entry: OffloadedTensor, source: Tensor, *arguments: Any) -> None:
        found.append(source)
        original(entry, source, *arguments)

    with mock.patch.object(OffloadedTensor, "__init__", noting):
        yield found


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("function", [copies_an_input, copies_and_writes, copies_an_output, copies_of_views])
def test_sources_are_the_graphs_own(sources: list[Tensor], function: Callable[..., Any], inner: str) -> None:
    """Nor is anything in their place wrong: operation by operation, gradients do not see what the caller writes to its input.

    (Inductor saves the input itself in its copy's place, with graphoffload or without.)
    """
    torch._dynamo.reset()
    backend = graphoffload.OffloadBackend(policy="offload", min_tensor_bytes=0, inner=inner)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    ours, theirs = x.clone(), x.clone()
    outputs = torch.compile(function, backend=backend)(ours)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    callers = {ours.data_ptr(), WEIGHT.data_ptr(), *(output.data_ptr() for output in outputs)}
    assert sources or (function is copies_an_output and inner == "inductor")  # Inductor computes that one again
    assert not callers & {source.data_ptr() for source in sources}
    if inner == "inductor" or function not in (copies_an_input, copies_and_writes):
        return
    ours.zero_()
    (found,) = torch.autograd.grad(outputs[0].square().sum(), [WEIGHT])
    (expected,) = torch.autograd.grad(function(theirs).square().sum(), [WEIGHT])
    torch.testing.assert_close(found, expected)
