"""What makes room for long sequences: MLPs in slices, adapters on a frozen base. Both against the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from graphoffload.bench import adapters, variants
from graphoffload.bench.measure import Session
from graphoffload.bench.models import Workload, build
from graphoffload.bench.packages import NotMeasurable
from graphoffload.bench.variants import Eligible, apply, layers_of, parse
from graphoffload.errors import ConfigError


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """graphoffload has its graphs run by AOTAutograd's eager backend; small tensors count."""
    ours = variants.our_options

    def with_eager_graphs(*args: Any) -> dict[str, Any]:
        return {"inner": "aot_eager", "min_tensor_bytes": 0, **ours(*args)}

    monkeypatch.setattr(variants, "our_options", with_eager_graphs)
    torch._dynamo.reset()


def gradients(workload: Workload, name: str) -> list[torch.Tensor]:
    session = Session(workload, apply(parse(name), workload, Eligible()))
    session.step()
    return session.gradients()


def model(name: str = "llama3-1b", sizes: dict[str, int] | None = None) -> Workload:
    return build(name, "cpu", sizes, tiny=True, dtype=torch.float64)


# MLPs in slices


@pytest.mark.parametrize("name", ["llama3-1b", "llama3-8b-lora", "small", "vit"])
@pytest.mark.parametrize("tokens", [5, 24, 1000])
def test_gradients_of_a_tiled_mlp_are_the_plain_ones(name: str, tokens: int) -> None:
    """In float64 to rounding: with a last slice that is shorter, and where one slice is all."""
    plain, tiled = gradients(model(name), "eager"), gradients(model(name), f"tiled:{tokens}/eager")
    for a, b in zip(plain, tiled, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "again"), [("tiled:24/eager", [16, 24, 24]), ("tiled:24/hf-checkpoint", [24, 24, 16, 24, 24])]
)
def test_an_mlp_never_sees_more_than_its_slice(name: str, again: list[int]) -> None:
    """In forward and again in backward, slice by slice; in a layer that is checkpointed itself, all but the last once more."""
    workload = model()
    context = apply(parse(name), workload, Eligible())
    seen: list[int] = []
    layer: Any = layers_of(workload)[0]
    layer.mlp.mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    Session(workload, context).step()
    assert seen == [24, 24, 16, *again]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["tiled:24/offload:all", "per-block/tiled:24/offload:all"])
def test_a_tiled_mlp_is_compiled_like_any_other_model(name: str) -> None:
    sizes = {"layers": 1}
    for a, b in zip(gradients(model(sizes=sizes), "eager"), gradients(model(sizes=sizes), name), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_names_of_tiled_variants() -> None:
    variant = parse("tiled/per-block/hf-checkpoint")
    assert (variant.kind, variant.per_block, variant.tile) == ("hf-checkpoint", True, 8192)
    assert parse("over:peak(tiled:16/hf-checkpoint-offload)").relative_to == "tiled:16/hf-checkpoint-offload"
    with pytest.raises(ConfigError, match="unknown variant 'nothing'"):
        parse("tiled/nothing")
    with pytest.raises(NotMeasurable, match="'tiled/eager': no layer of unet has an mlp"):
        apply(parse("tiled/eager"), build("unet", "cpu", tiny=True), Eligible())


# Adapters


@pytest.fixture(params=[16, 4])
def bits(request: pytest.FixtureRequest) -> int:
    if request.param == 4:
        pytest.importorskip("bitsandbytes")
    return int(request.param)


def test_adapters_alone_are_trained(bits: int) -> None:
    """On every linear of the layers, in the model's dtype; with 4 bits a base of half a byte a weight."""
    workload = build("llama3-8b-lora", "cpu", {"bits": bits}, tiny=True)
    parameters = dict(workload.module.named_parameters())
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    assert trained == {name for name in parameters if ".lora_" in name}
    assert len(trained) == 2 * len(adapters.LINEARS) * workload.sizes["layers"]
    assert {parameters[name].dtype for name in trained} == {torch.bfloat16}
    up = parameters["model.layers.0.mlp.up_proj.base_layer.weight"]
    assert up.untyped_storage().nbytes() == workload.sizes["dim"] * workload.sizes["hidden"] * bits // 8
    workload.loss().backward()
    assert all(parameters[name].grad.abs().sum() > 0 for name in trained)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "name", ["hf-checkpoint", "tiled:24/hf-checkpoint", pytest.param("offload:all", marks=pytest.mark.slow)]
)
def test_gradients_of_adapters(bits: int, name: str) -> None:
    found = []
    for variant in ("eager", name):  # bitsandbytes unpacks no float64
        workload = build("llama3-8b-lora", "cpu", {"bits": bits, "layers": 1}, tiny=True, dtype=torch.float32)
        found.append(gradients(workload, variant))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_complaints_of_adapters() -> None:
    with pytest.raises(ConfigError, match="bits 8 of a frozen base: there are 4 and 16"):
        build("llama3-8b-lora", "cpu", {"bits": 8}, tiny=True)
    assert adapters.adapted(nn.ModuleDict({"q_proj": nn.Linear(4, 4)}), rank=2).q_proj.base_layer.weight.requires_grad is False
