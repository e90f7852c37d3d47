"""State spaces, linear recurrences, and hybrids with attention."""

from __future__ import annotations

from net.dense import decoder, without
from net.table import Built, architecture


@architecture("mamba", "state space", fast=True)
def mamba() -> Built:
    return decoder(
        "MambaConfig", tokens=8, vocab_size=128, hidden_size=32, state_size=4, num_hidden_layers=1, time_step_rank=4,
        use_cache=False, use_mambapy=False,
    )  # fmt: skip


@architecture("falcon-mamba", "state space, normed")
def falcon_mamba() -> Built:
    return decoder(
        "FalconMambaConfig", tokens=8, vocab_size=128, hidden_size=32, state_size=4, num_hidden_layers=1, time_step_rank=4,
        use_cache=False, use_mambapy=False,
    )  # fmt: skip


@architecture("mamba2", "state space in chunks")
def mamba2() -> Built:
    return decoder(
        "Mamba2Config", tokens=32, vocab_size=128, hidden_size=32, state_size=8, num_hidden_layers=1, num_heads=4, head_dim=16,
        n_groups=1, chunk_size=16, use_cache=False,
    )  # fmt: skip


@architecture("jamba", "state space, attention and experts")
def jamba() -> Built:
    sizes = without(
        "max_position_embeddings", num_experts=2, num_experts_per_tok=1, attn_layer_period=2, attn_layer_offset=1,
        expert_layer_period=2, expert_layer_offset=1, mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False,
    )  # fmt: skip
    return decoder("JambaConfig", tokens=8, **sizes)


@architecture("bamba", "state space in chunks, and attention")
def bamba() -> Built:
    sizes = without(
        attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8,
    )  # fmt: skip
    return decoder("BambaConfig", **sizes)


@architecture("zamba2", "state space in chunks, shared attention blocks")
def zamba2() -> Built:
    sizes = without(
        num_hidden_layers=3, layers_block_type=["mamba", "hybrid", "mamba"], hybrid_layer_ids=[1], mamba_d_state=8,
        mamba_headdim=16, n_mamba_heads=4, mamba_ngroups=1, chunk_size=8, num_mem_blocks=1, use_mem_rope=True, adapter_rank=4,
        use_mem_eff_path=False,
        attention_hidden_size=64, attention_head_dim=16,
    )  # fmt: skip
    return decoder("Zamba2Config", **sizes)


@architecture("recurrent-gemma", "gated linear recurrence, and attention")
def recurrent_gemma() -> Built:
    return decoder(
        "RecurrentGemmaConfig", tokens=8,
        **without("max_position_embeddings", num_hidden_layers=3, lru_width=32, attention_window_size=8, conv1d_width=4),
    )  # fmt: skip


@architecture("rwkv", "linear attention")
def rwkv() -> Built:
    return decoder(
        "RwkvConfig", tokens=8, vocab_size=128, hidden_size=32, num_hidden_layers=1, context_length=16, use_cache=False
    )


@architecture("qwen3-next", "gated delta rule, and attention, with experts")
def qwen3_next() -> Built:
    return decoder(
        "Qwen3NextConfig", tokens=8,
        **without(
            head_dim=8, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
            layer_types=["linear_attention", "full_attention"],
        ),
    )  # fmt: skip


@architecture("falcon-h1", "state space and attention side by side")
def falcon_h1() -> Built:
    sizes = without(
        mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8, head_dim=8,
    )  # fmt: skip
    return decoder("FalconH1Config", **sizes)
