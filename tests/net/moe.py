"""Mixtures of experts: routed, with grouped products, latent attention, sinks, shared experts."""

from __future__ import annotations

import functools
from typing import Any

from net.dense import ONE, SMALL, decoder, without
from net.table import Built, architecture

EXPERTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3-moe": (
        "experts, grouped products", "Qwen3MoeConfig",
        {**ONE, "head_dim": 8, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen2-moe": (
        "experts and a shared one", "Qwen2MoeConfig",
        {**ONE, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "olmoe": ("experts, normed heads", "OlmoeConfig", {**ONE, "num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek-v3": (
        "experts in groups, latent attention (MLA)", "DeepseekV3Config",
        {
            **ONE, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1,
            "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 0, "q_lora_rank": 16,
            "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        },
    ),
    "gpt-oss": (
        "experts with biases, sinks, sliding windows", "GptOssConfig",
        {**SMALL, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    ),
    "granite-moe": ("experts, scaled residuals", "GraniteMoeConfig", {**ONE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4": (
        "experts, chunked attention, complex rotary", "Llama4TextConfig",
        {
            **ONE, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 64,
            "attention_chunk_size": 8, "interleave_moe_layer_step": 1,
        },
    ),
    "glm4-moe": (
        "experts in groups", "Glm4MoeConfig",
        {
            **ONE, "head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1,
            "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 0,
        },
    ),
}  # fmt: skip

MODELS = {"llama4": "Llama4ForCausalLM"}

for _name, (_kind, _config, _fields) in EXPERTS.items():
    architecture(_name, _kind)(functools.partial(decoder, _config, MODELS.get(_name, ""), **_fields))


@architecture("mixtral", "experts, grouped products", fast=True)
def mixtral() -> Built:
    return decoder(
        "MixtralConfig", **without(num_hidden_layers=1, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    )


@architecture("mixtral-eager-experts", "experts, a loop over them")
def mixtral_eager_experts() -> Built:
    model, inputs = decoder("MixtralConfig", **without(num_hidden_layers=1, num_local_experts=4, num_experts_per_tok=2))
    model.set_experts_implementation("eager")
    return model, inputs
