"""Memory that the model returns: named in the report with its modules, and a key-value cache with its remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphoffload
from graphoffload.errors import BudgetError

OPTIONS: dict[str, Any] = {"inner": "aot_eager", "hardware": "h200-sxm", "reserve": 0, "min_tensor_bytes": 0}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor, *, weights: bool = False) -> tuple[Tensor, ...]:
        q, k, v = (part(x).unflatten(-1, (4, -1)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        out = (scores @ v).transpose(1, 2).flatten(-2)
        return (out, scores) if weights else (out, k.sin(), v)


class Decoder(nn.Module):
    """Layers of attention; returns the loss, and on top what a decoder may return."""

    def __init__(self, returns: str, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"self_attn": Attention()}) for _ in range(layers))
        self.returns = returns

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        returned: list[Tensor] = []
        for layer in self.layers:
            out, *rest = layer["self_attn"](x, weights=self.returns == "weights")
            x = x + out
            returned += {"states": [x], "nothing": []}.get(self.returns, rest)
        return x.square().mean(), *returned


def explained(returns: str, *, layers: int = 3, **number: Any) -> graphoffload.OffloadReport:
    torch._dynamo.reset()
    with torch.device("meta"):
        model, x = Decoder(returns, layers), torch.empty(64, 64, 64)
    return graphoffload.explain(model, **OPTIONS, **number)(x)


def test_keys_and_values_are_named_as_a_cache() -> None:
    """With their bytes, in the notes and in the one line."""
    (plan,) = explained("cache").plans
    (note,) = [note for note in plan.notes if "outputs of the model hold" in note]
    assert "6.00 MiB in 7 tensors" in note
    assert "layers.*.self_attn" in note
    assert "use_cache=False" in note
    assert "key-value cache of 6.00 MiB: use_cache=False" in plan.summary


@pytest.mark.parametrize(("returns", "path"), [("weights", "layers.*.self_attn"), ("states", "no module")])
def test_other_results_are_named_without_that_remedy(returns: str, path: str) -> None:
    """Attention weights and hidden states: held as well, but no cache."""
    (plan,) = explained(returns).plans
    (note,) = [note for note in plan.notes if "outputs of the model hold" in note]
    assert f"is from {path}" in note
    assert "use_cache" not in note + plan.summary


def test_a_loss_alone_is_not_worth_a_word() -> None:
    (plan,) = explained("nothing").plans
    assert not [note for note in plan.notes if "outputs" in note]


def test_an_error_names_the_cache() -> None:
    with pytest.raises(BudgetError, match=r"key-value cache of 2\.00 MiB: use_cache=False"):
        explained("cache", layers=1, device_budget="4KiB")


@pytest.mark.parametrize("name", ["Llama", pytest.param("GPT2", marks=pytest.mark.long)])
def test_the_cache_of_a_transformers_model_is_found(name: str) -> None:
    """One graph; GPT2's breaks into several, which takes three times as long."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "Llama": {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                  "num_attention_heads": 4, "num_key_value_heads": 2},
        "GPT2": {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4},
    }  # fmt: skip
    with torch.device("meta"):
        model = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(
            getattr(transformers, f"{name}Config")(**sizes[name])
        )
        ids = torch.zeros(2, 32, dtype=torch.long)
    for use_cache in (True, False):
        torch._dynamo.reset()
        report = graphoffload.explain(model, **OPTIONS)(input_ids=ids, labels=ids, use_cache=use_cache)
        assert any("use_cache=False" in plan.summary for plan in report.plans) == use_cache
