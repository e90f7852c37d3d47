"""python -m graphoffload estimate: memory and speed of a language model from its configuration alone."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from graphoffload.analysis.costs import node_costs
from graphoffload.analysis.fusion import fusion_of
from graphoffload.api.eager_work import EagerWork, seconds_of
from graphoffload.api.explained_step import Sharding
from graphoffload.api.values import Values
from graphoffload.cli.command_line import main
from graphoffload.errors import ConfigError
from graphoffload.hardware.profile import PROFILES
from graphoffload.integrations.estimate import Estimate, Recorded, Training, estimated, model_of, recorded, repeated_blocks

transformers = pytest.importorskip("transformers")

WIDTH, WORDS, LAYERS, TOKENS = 2048, 4096, 3, 2048
CARD = "l40s"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama's config.json."""
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=16, vocab_size=WORDS,
        num_key_value_heads=4, max_position_embeddings=TOKENS, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    path = tmp_path_factory.mktemp("small")
    config.save_pretrained(path)
    return path


def small(folder: Path, card: str = CARD, **options: Any) -> Estimate:
    training = Training(config=str(folder), tokens=TOKENS, **options)
    return estimated(recorded(model_of(training), training, card), card)


@pytest.fixture(scope="module")
def step(folder: Path) -> Recorded:
    """One that all parameters learn in, on one card."""
    training = Training(config=str(folder), tokens=TOKENS)
    return recorded(model_of(training), training, CARD)


@pytest.fixture(scope="module")
def full(step: Recorded) -> Estimate:
    """Of that step."""
    return estimated(step, CARD)


def test_memory_and_speed(folder: Path, full: Estimate) -> None:
    """At least parameters, state, gradients and logits; no faster than the card computes the model's products."""
    model = model_of(Training(config=str(folder)))
    assert len(model.blocks) == LAYERS
    block = WIDTH * (2 * WIDTH + 2 * WIDTH // 4 + 3 * 4 * WIDTH)
    matrices = LAYERS * block + WORDS * WIDTH
    assert matrices + WORDS * WIDTH < model.parameter_count < 1.01 * (matrices + WORDS * WIDTH)
    logits = TOKENS * WORDS * 4
    assert full.keep_bytes is not None
    assert full.keep_bytes > 2 * 3 * model.parameter_count + logits
    assert full.keep_fits
    assert full.slowdown == 0.0
    assert full.tokens_per_s == full.keep_tokens_per_s
    floor_s = 6 * matrices * TOKENS / PROFILES[CARD].matmul_rate_flops_per_s("bfloat16")
    assert full.tokens_per_s is not None
    assert floor_s < TOKENS / full.tokens_per_s < 3 * floor_s


def test_adapters_take_less(folder: Path, full: Estimate) -> None:
    """LoRA has neither gradients nor state of the frozen parameters."""
    pytest.importorskip("peft")
    lora = small(folder, lora=8)
    assert full.keep_bytes is not None
    assert lora.keep_bytes is not None
    model = model_of(Training(config=str(folder), lora=8))
    assert 0 < model.trained_count < 0.1 * model.parameter_count
    state = 2 * 2 * (model.parameter_count - model.trained_count)
    assert full.keep_bytes - state < lora.keep_bytes < full.keep_bytes - state / 2, "adapters save activations of their own"


def test_sharded_parameters_take_less(folder: Path, full: Estimate) -> None:
    """With FSDP what is divided is less by seven eighths, and what is gathered comes back."""
    shared = small(folder, gpus=8)
    model = model_of(Training(config=str(folder)))
    assert full.keep_bytes is not None
    assert shared.keep_bytes is not None
    less = full.keep_bytes - shared.keep_bytes
    assert 0 < less < 2 * 4 * model.parameter_count * 7 / 8
    assert shared.tokens_per_s is not None
    assert full.tokens_per_s is not None
    assert full.tokens_per_s < shared.tokens_per_s < 8.8 * full.tokens_per_s, "the optimizer's time is divided as well"
    assert Sharding(8, 100).left_out(800) == 700
    assert Sharding(8, 100).left_out(801) == 700


def test_a_card_that_is_too_small_has_the_least(folder: Path, monkeypatch: pytest.MonkeyPatch, full: Estimate) -> None:
    """Parameters and state alone are more than it has: said at once, with what would do."""
    monkeypatch.setitem(PROFILES, "tiny", replace(PROFILES[CARD], name="tiny", memory_bytes=256 * 2**20))
    found = small(folder, "tiny")
    assert found.plan_bytes is None
    assert found.tokens_per_s is None
    assert found.budget_bytes is not None
    assert found.least_bytes is not None
    assert full.keep_bytes is not None
    assert found.budget_bytes < found.least_bytes <= full.keep_bytes


@pytest.mark.long
def test_one_record_serves_all_cards(folder: Path, monkeypatch: pytest.MonkeyPatch, full: Estimate) -> None:
    """A card that is planned with others has the figures that it has alone, to the last one: where everything fits, where
    something is offloaded or computed again, where the link is slower, and where nothing fits."""
    assert full.keep_bytes is not None
    tight = round(0.97 * full.keep_bytes) + 512 * 2**20  # the margin that is left free
    for name, like, memory_bytes in (
        ("tight", "h100-sxm", tight), ("slow", "a100-40g", tight), ("tiny", CARD, 256 * 2**20),
    ):  # fmt: skip
        monkeypatch.setitem(PROFILES, name, replace(PROFILES[like], name=name, memory_bytes=memory_bytes))
    cards = ("tight", CARD, "slow", "tiny")
    alone = [full if card == CARD else small(folder, card) for card in cards]
    training = Training(config=str(folder), tokens=TOKENS)
    step = recorded(model_of(training), training, cards[1])  # another one than that of `full`
    assert [estimated(step, card) for card in (*cards, cards[0])] == [*alone, alone[0]]
    done = [one.offloaded_bytes + one.recomputed_bytes for one in alone]
    assert [nbytes > 0 for nbytes in done] == [True, False, True, False]
    assert alone[3].plan_bytes is None
    assert len({one.tokens_per_s for one in alone}) == len(cards)


def test_memory_does_not_depend_on_garbage(folder: Path, full: Estimate) -> None:
    """What tracing leaves in cycles holds tensors until it is collected, which may be seldom, as in all tests, or often."""
    before = gc.get_threshold()
    gc.set_threshold(50, 2, 2)
    try:
        assert small(folder) == full
    finally:
        gc.set_threshold(*before)


def test_repeated_blocks() -> None:
    """The items of the outermost lists of one class; lists inside of a block, and of several classes, are not looked at."""

    def block() -> Any:
        return torch.nn.ModuleDict({"experts": torch.nn.ModuleList([torch.nn.Linear(1, 1) for _ in range(2)])})

    mixed = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.ReLU()])
    layers = torch.nn.ModuleList([block(), block()])
    model = torch.nn.ModuleDict({"body": torch.nn.ModuleDict({"layers": layers}), "mixed": mixed})
    assert list(repeated_blocks(model)) == list(layers)


@pytest.mark.parametrize(
    ("options", "part"),
    [({"batch": 0}, "batch=0"), ({"tokens": -1}, "tokens=-1"), ({"gpus": 0}, "gpus=0"), ({"lora": 0}, "lora=0")],
)
def test_bad_numbers(options: dict[str, int], part: str) -> None:
    """Each is named."""
    with pytest.raises(ConfigError, match=part):
        Training(config="x", **options)


def test_bad_configurations(folder: Path, tmp_path: Path, step: Recorded) -> None:
    """Not there, no language model, no such card, no such dtype: what and what instead."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ConfigError, match=r"causal language models.*python -m graphoffload explain"):
        model_of(Training(config=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"no configuration '/no/such/folder'.*config\.json"):
        model_of(Training(config="/no/such/folder"))
    with pytest.raises(ConfigError, match="bf17"):
        model_of(Training(config=str(folder), dtype="bf17"))
    training = Training(config=str(folder))
    with pytest.raises(ConfigError, match=r"'h300' is no profile; known: h200-sxm"):
        recorded(model_of(training), training, "h300")
    with pytest.raises(ConfigError, match=r"'h300' is no profile; known: h200-sxm"):
        estimated(step, "h300")


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str], full: Estimate) -> None:
    """A line a card; JSON with the same numbers; what does not fit has status 2."""
    given = ["estimate", str(folder / "config.json"), "--tokens", str(TOKENS), "--cards", CARD]
    assert main(given) == 0
    out = capsys.readouterr().out
    assert "plain torch.compile fits" in out
    assert f"{full.tokens_per_s:.0f}" in out
    assert main([*given, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["keep_bytes"] == full.keep_bytes
    assert main(["estimate", str(folder), "--batch", "4096", "--tokens", str(TOKENS), "--cards", "rtx-4090"]) == 2
    assert "does not fit: " in capsys.readouterr().out


def test_eager_operations_have_times() -> None:
    """By FLOPs or by bytes, whichever takes longer; views none; what writes to its input as well."""
    hardware = PROFILES["h200-sxm"]
    eager = EagerWork()
    values = Values(eager=eager)
    with values.readable():
        x = values.fake(torch.empty(1024, 1024, dtype=torch.bfloat16, device="meta"))
        eager.taken()
        product = x @ x
        by_flops = seconds_of(eager.taken(), hardware)
        product.view(-1).t().unsqueeze(0)
        assert eager.taken() == ()
        product.add_(1.0)
        in_place = seconds_of(eager.taken(), hardware)
        product.float()
        widened = eager.taken()
    nbytes = x.numel() * 2
    launch = hardware.kernel_launch_s
    assert by_flops == pytest.approx(2 * 1024**3 / hardware.matmul_rate_flops_per_s("bfloat16") + launch)
    assert in_place == pytest.approx(2 * nbytes / hardware.device_bandwidth_bytes_per_s + launch)
    for card in (hardware, PROFILES["l40s"]):
        expected = 3 * nbytes / card.device_bandwidth_bytes_per_s + launch
        assert seconds_of(widened, card) == pytest.approx(expected), "priced for any card"


@pytest.mark.parametrize("causal", [True, False])
def test_eager_attention_takes_what_it_takes_in_a_graph(causal: bool) -> None:
    """Attention between graphs, such as after a break: causal ones compute half, at attention's share of a product's rate."""
    hardware = PROFILES["h200-sxm"]
    eager = EagerWork()
    values = Values(eager=eager)
    batch, heads, rows, width = 1, 8, 4096, 128

    def attention(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=causal)

    x = values.fake(torch.empty(batch, heads, rows, width, dtype=torch.bfloat16, device="meta"))
    with values.readable():
        eager.taken()
        attention(x)
        between = seconds_of(eager.taken(), hardware)
    graph = make_fx(attention, tracing_mode="fake")(torch.empty(batch, heads, rows, width, dtype=torch.bfloat16)).graph
    inside = sum(cost.time_s for cost in node_costs(fusion_of(graph, fuses=True), hardware))
    flops = 4 * batch * heads * rows**2 * width / (2 if causal else 1)
    assert between == pytest.approx(inside, rel=1e-6)
    assert between > flops / hardware.matmul_rate_flops_per_s("bfloat16")
