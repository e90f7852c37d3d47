"""What is compiled after Dynamo is done, or after another goal was set."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import graphoffload
from graphoffload.compiler.dispatch import GRAPHS
from graphoffload.testing.attention import HIDDEN
from tests.runtime.stepping import OPTIONS, PLENTY, Whole, batch, compiled, fresh, lazy, step

__all__ = ["lazy"]


@pytest.mark.usefixtures("lazy")
def test_a_goal_holds_for_shapes_that_come_later() -> None:
    """Blocks compiled one by one look at what is asked for now; so does a graph that is planned alone."""
    model = Whole()
    model.compile(backend=graphoffload.OffloadBackend(**{**OPTIONS, "device_budget": PLENTY}), dynamic=False)

    def peak(rows: int) -> tuple[int, int]:
        model(torch.randn(rows, HIDDEN, requires_grad=True)).square().sum().backward()
        found = graphoffload.last_plans()[-1].prediction
        return found.predicted_peak_bytes, found.keep_peak_bytes

    kept, most = peak(256)
    assert kept == most
    budget = most * 4 // 5
    graphoffload.set_budget(budget)
    assert peak(256)[0] <= budget
    now, most = peak(264)
    assert now <= budget < most
    graphoffload.set_budget(PLENTY)
    now, most = peak(272)
    assert now == most


@pytest.mark.usefixtures("lazy")
def test_other_threads_train_while_a_graph_is_traced_again() -> None:
    """Compiled code that another thread calls asks the process whether it is being traced."""
    model = compiled(fresh(), PLENTY)
    step(model, batch())
    other = torch.compile(nn.Linear(4, 4), backend="aot_eager", dynamic=False)
    other(torch.ones(2, 4))
    graph = next(iter(GRAPHS.values()))
    failed: list[BaseException] = []

    def train() -> None:
        try:
            other(torch.ones(2, 4)).sum().backward()
        except BaseException as error:
            failed.append(error)

    with graph.again.traced():
        assert torch.compiler.is_compiling()

        def function(x: Tensor) -> Tensor:
            thread = threading.Thread(target=train)
            thread.start()
            thread.join()
            return x * 2

        make_fx(function)(torch.ones(2))
    assert not failed
    assert not torch.compiler.is_compiling()
