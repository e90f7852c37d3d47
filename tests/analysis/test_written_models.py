"""Predicted peaks of models of Transformers, in the sizes of a small card, against the code that Inductor writes for a GPU.

What a training step calls first is looked at: the whole model, or its first layer with what the model gives to it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from analysis.test_written_for_a_gpu import TOO_LOW, compared
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import graphoffload

pytestmark = pytest.mark.long
SIZES = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 2, "num_attention_heads": 16, "vocab_size": 32000}
GROUPED = {**SIZES, "num_key_value_heads": 8}
BLOOM = {"hidden_size": 1024, "n_layer": 2, "n_head": 16, "vocab_size": 32000}
LONG = {"n_layer": 2, "n_embd": 768, "n_head": 12, "n_positions": 2048, "vocab_size": 32000, "attn_implementation": "eager"}
WHOLE: dict[str, tuple[str, str, dict[str, Any], tuple[int, int]]] = {
    "capped scores": ("Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, "head_dim": 64}, (8, 1024)),
    "dropout": ("BertForMaskedLM", "BertConfig", SIZES, (16, 512)),
    "distances": ("BloomForCausalLM", "BloomConfig", BLOOM, (8, 1024)),
    "parallel": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SIZES, (8, 1024)),
    "unpadded": ("ModernBertForMaskedLM", "ModernBertConfig", {**SIZES, "pad_token_id": 0}, (8, 1024)),
}
LAYER: dict[str, tuple[str, str, dict[str, Any], tuple[int, int], str]] = {
    "two norms": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**GROUPED, "head_dim": 64}, (8, 1024), "model.layers.0"),
    "a mask of heads": ("DebertaV2ForMaskedLM", "DebertaV2Config", SIZES, (8, 512), "deberta.encoder.layer.0"),
    "plain attention": ("GPT2LMHeadModel", "GPT2Config", LONG, (4, 2048), "transformer.h.0"),
    "a window": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 256}, (8, 1024), "model.layers.0"),
}


class Called(nn.Module):
    """A module with the arguments of one call, whose tensors are given anew."""

    def __init__(self, module: nn.Module, arguments: Any) -> None:
        super().__init__()
        self.module, (self.leaves, self.form) = module, pytree.tree_flatten(arguments)
        self.tensors = [at for at, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]

    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors of that call, as leaves."""
        found = (self.leaves[at] for at in self.tensors)
        return tuple(value.detach().clone().requires_grad_(value.requires_grad) for value in found)

    def forward(self, *given: Tensor) -> Any:
        leaves = list(self.leaves)
        for at, value in zip(self.tensors, given, strict=True):
            leaves[at] = value
        args, keywords = pytree.tree_unflatten(leaves, self.form)
        with torch.autocast("cpu", torch.bfloat16):
            return self.module(*args, **keywords)


class Seen(Exception):
    """The call that is looked at was made."""


def first_call(kind: str, config: str, sizes: dict[str, Any], shape: tuple[int, int], path: str = "") -> Called:
    """What the first step of a language model calls at `path`."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes)).train()
    module, found = model.get_submodule(path), list[Any]()

    def noting(*args: Any, **keywords: Any) -> Any:
        found.append((args, keywords))
        raise Seen

    module.forward, ids = noting, torch.randint(1, 30000, shape)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(Seen):
        model(input_ids=ids, labels=ids, **({} if "Masked" in kind else {"use_cache": False}))
    del module.forward
    return Called(module, found[0])


def holds(called: Called, **goal: Any) -> None:
    """Under a plan the peak of a step, in its forward or in its backward, is what is predicted."""
    predicted, taken = map(max, zip(*compared(called, *called.inputs(), **goal), strict=True))
    assert TOO_LOW * taken <= predicted <= taken / TOO_LOW, (predicted, taken)


@pytest.mark.parametrize("name", WHOLE)
def test_a_model_takes_what_is_predicted(name: str) -> None:
    """With everything kept, and with a fifth of its activations computed again."""
    called = first_call(*WHOLE[name])
    holds(called)
    keep_bytes = graphoffload.explain(called, policy="keep", hardware="h100-sxm")(*called.inputs()).keep_peak_bytes
    static_bytes = sum(parameter.nbytes for parameter in called.parameters())
    budget = static_bytes + int(0.8 * (keep_bytes - static_bytes))
    holds(called, device_budget=budget, reserve=0, host_budget=0)


@pytest.mark.parametrize("name", LAYER)
@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_a_layer_takes_what_is_predicted(name: str, policy: str) -> None:
    holds(first_call(*LAYER[name]), policy=policy)
