"""explain() and the decorator as a user calls them: what they refuse, and what they leave behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphoffload
from graphoffload.errors import ConfigError
from graphoffload.facts.plan import Plan
from graphoffload.runtime import registry


def look(rows: int, module: torch.nn.Module) -> Plan:
    """explain()'s plan for so many rows."""
    (plan,) = graphoffload.explain(module, policy="offload", inner="aot_eager", min_tensor_bytes=0)(torch.empty(rows, 8)).plans
    return plan


@pytest.mark.parametrize("isolated", [True, False], ids=["isolated", "forgotten"])
def test_explain_leaves_nothing_to_a_later_compile(isolated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for Dynamo's count, which gives up at eight and runs the model in eager, nor sizes to compare with."""
    if not isolated:  # torch before 2.13
        plain = torch.compile
        monkeypatch.setattr(
            torch, "compile", lambda model, *, backend, dynamic=None: plain(model, backend=backend, dynamic=dynamic)
        )
    torch._dynamo.reset()
    module = Tanhs()
    sizes = [look(rows, module).saved.tensors[0].shape for rows in (16, 32, 64, 64, 64, 64, 64, 64, 64, 64)]
    assert sizes[:4] == [(16, 8), (32, 8), (64, 8), (64, 8)]
    graphoffload.offload(module, policy="offload", inner="aot_eager", min_tensor_bytes=0)
    before = graphoffload.stats()["offloads"]
    module(torch.randn(24, 8)).sum().backward()
    assert graphoffload.stats()["offloads"] > before
    assert graphoffload.last_plans()[-1].saved.tensors[0].shape == (24, 8)


class Tanhs(torch.nn.Module):
    """Two layers with something to save between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x).tanh())
        return out


def test_last_plans_are_of_what_was_compiled() -> None:
    """A look is no plan of the training: its report has it, and what is compiled before and behind is all that is listed."""
    torch._dynamo.reset()
    registry.forget()
    module = Tanhs()
    explained = look(16, module)
    assert graphoffload.last_plans() == ()
    assert registry.of_key(explained.key) == explained
    graphoffload.offload(module, **OPTIONS)
    module(torch.randn(16, 8)).sum().backward()
    (trained,) = graphoffload.last_plans()
    assert look(24, Tanhs()).transfers
    assert graphoffload.last_plans() == (trained,)


OPTIONS: dict[str, Any] = {"policy": "offload", "inner": "aot_eager", "min_tensor_bytes": 0}


class NoModule:
    """A class that is none of a model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: graphoffload.explain(Tanhs(), graphoffload.OffloadConfig(), policy="keep"), "['policy']"),
        (lambda: graphoffload.explain(Tanhs(), "40GiB"), "config='40GiB'"),
        (lambda: graphoffload.explain(3), "int"),
        (lambda: graphoffload.tune(Tanhs(), lambda: None, graphoffload.OffloadConfig(), policy="keep"), "['policy']"),
        (lambda: graphoffload.OffloadBackend({"policy": "keep"}), "dict"),  # type: ignore[arg-type]
        (lambda: graphoffload.OffloadPartitioner("40GiB"), "config='40GiB'"),  # type: ignore[arg-type]
        (lambda: graphoffload.offload(NoModule), "the class NoModule"),
        (lambda: graphoffload.offload(torch.compile(Tanhs(), backend="aot_eager")), "_orig_mod"),
        (lambda: graphoffload.partition_fn(None, (), config=graphoffload.OffloadConfig()), "OffloadPartitioner(config)"),
    ],
)
def test_what_would_be_ignored_is_refused(call: Callable[[], object], part: str) -> None:
    """At once, and by name: none of these would change anything."""
    with pytest.raises(ConfigError) as info:
        call()
    assert part in str(info.value)


def test_a_model_that_needs_values_nobody_gave_cannot_be_explained() -> None:
    """The error says why, not torch's."""
    module = Tanhs()
    with pytest.raises(ConfigError, match="last_plans"):
        graphoffload.explain(lambda x: module(x) if x.sum().item() > 0 else x, **OPTIONS)(torch.ones(4, 8, device="meta"))


def test_an_empty_report_says_why() -> None:
    """Under no_grad nothing is planned."""
    with torch.no_grad():
        report = graphoffload.explain(Tanhs(), **OPTIONS)(torch.ones(4, 8))
    assert not report.plans
    assert "no_grad" in str(report)


def test_the_partitioner_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the backend does, where nobody gives it a configuration."""
    monkeypatch.setenv("GRAPHOFFLOAD_POLICY", "offload")
    assert graphoffload.OffloadPartitioner().config == graphoffload.OffloadBackend().config
    assert graphoffload.OffloadPartitioner().config.policy == "offload"


class Net(nn.Sequential):
    """A class of the user's whose forward is torch's, as many models have them."""


@graphoffload.offload(policy="offload", min_tensor_bytes=0, inner="aot_eager")
class Decorated(nn.Sequential):
    """Likewise."""


@pytest.mark.parametrize("kind", [nn.Sequential, Net, Decorated])
def test_forwards_of_torch_nn_are_compiled_where_they_are_inherited(kind: type[nn.Sequential]) -> None:
    """Dynamo skips a frame by where its code is, not by whose class it is: 20 steps went by and nothing was offloaded."""
    model = kind(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    if kind is not Decorated:
        graphoffload.offload(model, policy="offload", min_tensor_bytes=0, inner="aot_eager")
    before = graphoffload.stats()["offloads"]
    model(torch.randn(4, 16)).sum().backward()
    assert graphoffload.stats()["offloads"] > before
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_generators_are_refused() -> None:
    """torch.compile leaves them in eager, without a word."""

    def parts(x: Tensor) -> Iterator[Tensor]:
        yield x.sin()

    with pytest.raises(ConfigError, match="a generator or coroutine"):
        graphoffload.offload(parts)
