"""torchtitan's configurations by their names, with what a plan needs; skipped where torchtitan is not installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import graphoffload
from graphoffload.errors import ConfigError
from graphoffload.integrations import switch

pytest.importorskip("torchtitan")
pytest.importorskip("triton", reason="torchtitan imports it")
manager = pytest.importorskip("torchtitan.config.manager")

MODULE = "graphoffload.integrations.torchtitan"


@pytest.fixture(autouse=True)
def _off() -> Iterator[None]:
    yield
    switch.uninstall()
    torch._dynamo.reset()


def test_a_configuration_by_name() -> None:
    """As torchtitan's command line finds it; what is given there wins."""
    parse = manager.ConfigManager().parse_args
    config = parse(["--module", MODULE, "--config", "llama3_debugmodel"])
    assert config.compile.enable
    assert "model" in config.compile.components
    assert config.compile.backend == "inductor"
    assert config.activation_checkpoint is None
    assert config.training.disable_cuda_graphs
    assert config.training.local_batch_size == 8, "everything else is torchtitan's"
    assert switch.is_on()
    given = parse(["--module", MODULE, "--config", "qwen3_debugmodel", "--compile.components", "loss"])
    assert given.compile.components == ["loss"]


def test_a_configuration_that_is_not_there() -> None:
    """torchtitan names those that are."""
    with pytest.raises(ValueError, match="'llama3_9b' not found") as info:
        manager.ConfigManager().parse_args(["--module", MODULE, "--config", "llama3_9b"])
    assert "llama3_8b" in str(info.value)
    assert "qwen3" in str(info.value)


def test_an_old_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name and the releases that work."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.2.2")
    with pytest.raises(ConfigError, match=r"torchtitan 0\.2\.2 is too old: this integration needs 0\.3"):
        manager.ConfigManager().parse_args(["--module", MODULE, "--config", "llama3_debugmodel"])


def test_its_blocks_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of its own, compiled by its own function, has the gradients of the same without a compile."""
    from torchtitan.distributed import compile as titans

    monkeypatch.setenv("GRAPHOFFLOAD_POLICY", "offload")
    monkeypatch.setenv("GRAPHOFFLOAD_MIN_TENSOR_BYTES", "1")
    monkeypatch.setenv("GRAPHOFFLOAD_INNER", "aot_eager")
    config = manager.ConfigManager().parse_args(["--module", MODULE, "--config", "llama3_debugmodel"])

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({str(at): nn.Sequential(nn.Linear(8, 8), nn.GELU()) for at in range(2)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers.values():
                x = x + layer(x)
            return x

    class Dense(nn.Module):
        """What torchtitan hands to compile is a module of its own code, no bare Sequential."""

        def __init__(self, inside: nn.Module) -> None:
            super().__init__()
            self.inside = inside

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inside(x)

    torch.manual_seed(0)
    model = Blocks()
    model.layers = nn.ModuleDict({name: Dense(layer) for name, layer in model.layers.items()})
    x = torch.randn(4, 8)
    model(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()

    class Dims:
        tp_enabled = False

    titans.apply_compile(model, compile_config=config.compile, parallel_dims=Dims())
    graphoffload.reset_stats()
    model(x).sum().backward()
    assert graphoffload.stats()["offloads"] > 0
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
