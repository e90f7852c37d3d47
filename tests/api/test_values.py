"""explain() of models that read values while they run: planned graph by graph, as training compiles them, or said to be not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphoffload
from graphoffload.api import explanation
from graphoffload.errors import ConfigError, PartialPlanWarning
from graphoffload.facts.plan import Plan
from graphoffload.runtime import registry
from graphoffload.units import parse_size

OPTIONS: dict[str, Any] = {"policy": "offload", "inner": "aot_eager", "min_tensor_bytes": 0}
READS = {
    "item": lambda h, mask: h * float(mask.sum().item()),
    "if": lambda h, mask: h * 2 if mask.sum() > 0 else h,
    "mask": lambda h, mask: h[mask[:, 0]],
    "masked_select": lambda h, mask: torch.masked_select(h, mask).reshape(-1, 8),
    "nonzero": lambda h, mask: h[torch.nonzero(mask[:, 0])[:, 0]],
    "tolist": lambda h, mask: torch.cat([h[:count] for count in mask.sum(1).tolist()]),
    "tensor of tensors": lambda h, mask: h[: int(torch.tensor([mask[0].sum(), mask[1].sum()]).max())],
    "written": lambda h, mask: h[: int(torch.zeros(3, dtype=torch.long).index_put_((mask.sum(1)[:1] // 4,), mask.sum())[2])],
    "drawn": lambda h, mask: h * 2 if torch.rand([]) < 2 else h,
}
OFTEN = ("item", "drawn")
"""With parameters that have values. The others of an input every run has with parameters that have none, which takes more."""


class Reads(nn.Module):
    """Two layers, and between them something that reads a value, of the input `mask` or of the activation itself."""

    def __init__(self, read: str, *, own: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.own = nn.Linear(8, 8), nn.Linear(8, 8), own
        self.register_buffer("steps", torch.zeros(()))
        self.read = READS[read]

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.first(x).tanh()
        self.steps += 1
        h = self.read(h, h > -2 if self.own else mask)
        return self.second(h.sin()).sum()  # type: ignore[no-any-return]


def inputs() -> tuple[Tensor, Tensor]:
    return torch.ones(4, 8, requires_grad=True), torch.ones(4, 8, dtype=torch.bool)


def saved(plans: tuple[Plan, ...]) -> list[list[tuple[Any, ...]]]:
    return [[(t.op, t.shape, plan.action(t.name)) for t in plan.saved.tensors] for plan in plans]


def trained(model: nn.Module, args: tuple[Tensor, ...]) -> tuple[Plan, ...]:
    torch._dynamo.reset()
    registry.forget()
    graphoffload.offload(model, **OPTIONS)
    model(*args).backward()
    return graphoffload.last_plans()


@pytest.mark.parametrize(
    ("read", "own"),
    [
        pytest.param(read, own, marks=[pytest.mark.long] * (not own and read not in OFTEN))
        for read in READS
        for own in (False, True)
    ],
)
def test_a_model_that_reads_values_is_planned_as_training_compiles_it(read: str, own: bool) -> None:
    """Every graph; the caller's tensors and random numbers stay as they are. own: it reads an activation, no input."""
    torch._dynamo.reset()
    model, args = Reads(read, own=own), inputs()
    state = torch.get_rng_state()
    report = graphoffload.explain(model, **OPTIONS)(*args)
    assert len(report.plans) >= 2
    assert model.steps == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert bool(report.notes) == (own and read != "drawn")
    assert saved(report.plans) == saved(trained(model, args))


@pytest.mark.parametrize("read", [read for read in READS if read != "drawn"])
def test_parameters_without_values_are_enough_where_inputs_have_some(read: str) -> None:
    """A model on the meta device, its mask on the CPU."""
    torch._dynamo.reset()
    model, args = Reads(read), inputs()
    assert saved(graphoffload.explain(model.to("meta"), **OPTIONS)(args[0].to("meta"), args[1]).plans) == saved(
        trained(Reads(read), args)
    )


@pytest.mark.parametrize("read", ["item", "mask", "masked_select"])
def test_a_value_that_is_not_known_ends_the_plan_aloud(read: str) -> None:
    """What comes before it is planned; a warning and the report name the place and the remedy."""
    torch._dynamo.reset()
    args = inputs()
    with pytest.warns(PartialPlanWarning, match="planned a part"):
        report = graphoffload.explain(Reads(read, own=True).to("meta"), **OPTIONS)(*args)
    (plan,) = report.plans
    assert [tensor.op for tensor in plan.saved.tensors] == ["aten.tanh.default"]
    for part in ("test_values.py:", "not known", "cpu, meta", "last_plans()"):
        assert part in str(report)


def test_a_value_that_is_not_known_before_any_graph_is_an_error() -> None:
    torch._dynamo.reset()
    with pytest.raises(ConfigError, match=r"plans nothing.*test_values\.py"):
        graphoffload.explain(lambda x: x.sin() if x.sum().item() > 0 else x, **OPTIONS)(torch.ones(4, device="meta"))


def test_captured_values_are_planned_in_one_graph() -> None:
    """As Dynamo does where it is told to; the graph has sizes that only the step will know."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        for read in ("item", "nonzero"):
            (plan,) = graphoffload.explain(Reads(read), **OPTIONS)(*inputs()).plans
            assert plan.saved.tensors


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_vision_language_model_is_planned_as_training_compiles_it(device: str) -> None:
    """Qwen2-VL reads its image grid and where the images stand among the tokens; with values for inputs, not for parameters."""
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    text = {"vocab_size": 200, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "rope_parameters": rope, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4}
    config = transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=150, video_token_id=151, vision_start_token_id=152,
        vision_end_token_id=153,
    )  # fmt: skip
    ids = torch.randint(0, 100, (1, 16))
    ids[0, 3:9] = torch.tensor([152, 150, 150, 150, 150, 153])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(16, 96), "labels": ids,
             "image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": (ids == 150).int(),
             "use_cache": False}  # fmt: skip
    torch._dynamo.reset()
    with torch.device(device):
        model = transformers.Qwen2VLForConditionalGeneration(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PartialPlanWarning)
        report = graphoffload.explain(model, **OPTIONS)(**given)
    assert len(report.plans) > 5
    assert not report.notes
    if device == "cpu":
        torch._dynamo.reset()
        registry.forget()
        model.compile(backend="graphoffload", options=OPTIONS)
        model(**given).loss.backward()
        assert saved(report.plans) == saved(graphoffload.last_plans())


def test_a_place_is_the_users_wherever_in_the_package_the_error_was_raised() -> None:
    """Not only frames of the package that explain() is in are ours."""
    with pytest.raises(ConfigError) as raised:
        parse_size("much", field="device_budget")
    assert explanation._place(raised.value).startswith("test_values.py:")


class How:
    """How a weight is to be read."""

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale


class Quantized(nn.Parameter):
    """A weight of bytes and, beside it, how they are to be read, as bitsandbytes' Params4bit has it."""

    how: How


class Adapted(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = Quantized(torch.randint(-127, 127, (width, width), dtype=torch.int8), requires_grad=False)
        self.base.how = How(torch.rand(width, 1))
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base.float() * self.base.how.scale
        return torch.tanh(x @ weight + self.up(self.down(x)))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_a_parameter_carries_is_there(device: str) -> None:
    """A class of parameters with attributes of its own is planned as training compiles it, also without values."""
    model, x = nn.Sequential(Adapted(32), Adapted(32)), torch.randn(64, 32)
    options: dict[str, Any] = {"hardware": "h200-sxm", "policy": "offload", "min_tensor_bytes": 1, "inner": "aot_eager"}
    with torch.device(device):
        shown = nn.Sequential(Adapted(32), Adapted(32))
    report = graphoffload.explain(shown, **options)(x.to(device))
    registry.forget()
    graphoffload.reset_stats()
    torch.compile(model, backend=graphoffload.OffloadBackend(**options))(x).sum().backward()
    (plan,) = graphoffload.last_plans()
    assert report.plans[0].saved == plan.saved
    assert report.offloaded_bytes == graphoffload.stats()["d2h_bytes"] > 0


class Flexible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.into(x).chunk(3, -1))
        return self.out(flex_attention(q, k, v, block_mask=mask).transpose(1, 2).flatten(-2))  # type: ignore[union-attr]


def test_flex_attention_is_planned_without_a_gpu() -> None:
    """On a CPU it has no backward, and says so before anything is compiled; a plan for a GPU needs none there."""
    from torch.nn.attention.flex_attention import create_block_mask

    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu")
    model, x = Flexible(), torch.randn(2, 256, 64)
    report = graphoffload.explain(model, policy="offload", hardware="h200-sxm", min_tensor_bytes=1)(x, mask)
    assert report.offloaded_bytes >= 4 * x.nbytes, "the input's product, and what attention gave"
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        torch.compile(model, backend="eager")(x, mask)
