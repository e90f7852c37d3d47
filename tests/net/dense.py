"""Dense decoders."""

from __future__ import annotations

import functools
from typing import Any

from net.table import Built, architecture, hf, ids

SMALL: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
"""What most configs of decoders call their sizes."""
ONE = {**SMALL, "num_hidden_layers": 1}


def without(*names: str, **others: Any) -> dict[str, Any]:
    """SMALL less some names, with others."""
    return {**{name: value for name, value in SMALL.items() if name not in names}, **others}


def decoder(config: str, model: str = "", *, batch: int = 2, tokens: int = 16, **fields: Any) -> Built:
    """A causal language model by its config's name, and token ids that are its labels too."""
    made = hf(model or config.replace("Config", "ForCausalLM"))(hf(config)(**fields))
    words = ids(batch, tokens)
    return made, {"input_ids": words, "labels": words.clone()}


@architecture("llama", "dense decoder")
def llama() -> Built:
    return decoder("LlamaConfig", **SMALL)


@architecture("gpt2", "dense decoder, dropout 0.1", random=True)
def gpt2() -> Built:
    return decoder(
        "GPT2Config", "GPT2LMHeadModel", vocab_size=128, n_embd=32, n_layer=2, n_head=4, n_positions=64, use_cache=False
    )


LIKE_LLAMA: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2": ("dense decoder, biases", "Qwen2Config", SMALL),
    "qwen3": ("dense decoder, normed heads", "Qwen3Config", {**SMALL, "head_dim": 8}),
    "mistral": ("dense decoder, sliding window", "MistralConfig", {**ONE, "sliding_window": 6}),
    "gemma": ("dense decoder", "GemmaConfig", {**ONE, "head_dim": 8}),
    "gemma2": (
        "dense decoder, sliding and full windows, soft caps",
        "Gemma2Config",
        {**SMALL, "head_dim": 8, "sliding_window": 6},
    ),
    "gemma3": ("dense decoder, sliding windows", "Gemma3TextConfig", {**SMALL, "head_dim": 8, "sliding_window": 6}),
    "phi3": ("dense decoder, fused projections", "Phi3Config", ONE),
    "phi": ("dense decoder, parallel blocks", "PhiConfig", ONE),
    "stablelm": ("dense decoder, partial rotary", "StableLmConfig", ONE),
    "olmo2": ("dense decoder, norms after", "Olmo2Config", ONE),
    "cohere": ("dense decoder, parallel blocks", "CohereConfig", ONE),
    "granite": ("dense decoder, scaled residuals", "GraniteConfig", ONE),
    "glm4": ("dense decoder, sandwich norms", "Glm4Config", {**ONE, "head_dim": 8, "pad_token_id": 0}),
    "starcoder2": ("dense decoder, sliding window", "Starcoder2Config", {**ONE, "sliding_window": 6}),
    "smollm3": ("dense decoder, layers without positions", "SmolLM3Config", ONE),
    "nemotron": ("dense decoder, squared ReLU", "NemotronConfig", ONE),
}
"""What an architecture is, its config, and the config's fields."""

MODELS = {"gemma3": "Gemma3ForCausalLM"}

for _name, (_kind, _config, _fields) in LIKE_LLAMA.items():
    architecture(_name, _kind)(functools.partial(decoder, _config, MODELS.get(_name, ""), **_fields))


@architecture("llama-cache", "dense decoder that returns its keys and values")
def llama_cache() -> Built:
    return decoder("LlamaConfig", **without(num_hidden_layers=1, use_cache=True))


@architecture("llama-checkpointed", "dense decoder under gradient checkpointing")
def llama_checkpointed() -> Built:
    model, inputs = decoder("LlamaConfig", **SMALL)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, inputs


@architecture("gpt-neox", "dense decoder, parallel blocks")
def gpt_neox() -> Built:
    return decoder("GPTNeoXConfig", **without("num_key_value_heads", num_hidden_layers=1))


@architecture("opt", "dense decoder, learned positions, dropout 0.1", random=True)
def opt() -> Built:
    return decoder(
        "OPTConfig",
        **without(
            "intermediate_size", "num_key_value_heads", num_hidden_layers=1, ffn_dim=64, word_embed_proj_dim=32, dropout=0.1
        ),
    )


@architecture("bloom", "dense decoder, ALiBi")
def bloom() -> Built:
    return decoder("BloomConfig", vocab_size=128, hidden_size=32, n_layer=1, n_head=4, use_cache=False)


@architecture("falcon", "dense decoder, one head of keys")
def falcon() -> Built:
    return decoder("FalconConfig", **without("num_key_value_heads", "intermediate_size", num_hidden_layers=1), multi_query=True)
