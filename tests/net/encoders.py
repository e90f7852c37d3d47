"""Encoders of text."""

from __future__ import annotations

import functools
from typing import Any

from net.table import Built, architecture, hf, ids

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
STILL: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def masked(config: str, model: str = "", **fields: Any) -> Built:
    """A masked language model; the last tokens of one sequence are padding."""
    made = hf(model or config.replace("Config", "ForMaskedLM"))(hf(config)(**fields))
    words = ids(2, 16)
    mask = words.new_ones(2, 16)
    mask[1, 12:] = 0
    return made, {"input_ids": words, "attention_mask": mask, "labels": words.clone()}


MASKED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "roberta": ("encoder", "RobertaConfig", {**SIZES, **STILL}),
    "deberta": (
        "encoder, disentangled attention",
        "DebertaConfig",
        {**SIZES, **STILL, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    ),
    "deberta-v2": (
        "encoder, disentangled attention",
        "DebertaV2Config",
        {
            **SIZES,
            **STILL,
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_buckets": 8,
            "norm_rel_ebd": "layer_norm",
        },
    ),
    "electra": ("encoder, factored embedding", "ElectraConfig", {**SIZES, **STILL, "embedding_size": 16}),
    "albert": (
        "encoder, one layer's weights for all",
        "AlbertConfig",
        {**SIZES, **STILL, "embedding_size": 16, "num_hidden_layers": 2},
    ),
    "distilbert": (
        "encoder",
        "DistilBertConfig",
        {
            "vocab_size": 128,
            "dim": 32,
            "hidden_dim": 64,
            "n_layers": 1,
            "n_heads": 4,
            "max_position_embeddings": 64,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    "modernbert": (
        "encoder, local and global attention",
        "ModernBertConfig",
        {
            **SIZES,
            "num_hidden_layers": 2,
            "local_attention": 8,
            "global_attn_every_n_layers": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "reference_compile": False,
        },
    ),
    "mpnet": ("encoder, relative positions", "MPNetConfig", {**SIZES, **STILL}),
    "fnet": (
        "encoder, Fourier transform instead of attention",
        "FNetConfig",
        {
            "vocab_size": 128,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "max_position_embeddings": 64,
            "hidden_dropout_prob": 0.0,
        },
    ),
    "convbert": (
        "encoder, dynamic convolutions",
        "ConvBertConfig",
        {**SIZES, **STILL, "embedding_size": 16, "conv_kernel_size": 3},
    ),
}

for _name, (_kind, _config, _fields) in MASKED.items():
    architecture(_name, _kind)(functools.partial(masked, _config, **_fields))


@architecture("bert", "encoder, dropout 0.1", random=True)
def bert() -> Built:
    return masked("BertConfig", **SIZES)


@architecture("xlnet", "encoder, two streams")
def xlnet() -> Built:
    config = hf("XLNetConfig")(vocab_size=128, d_model=32, n_layer=1, n_head=4, d_inner=64, dropout=0.0, use_mems_train=False)
    words = ids(2, 12)
    return hf("XLNetLMHeadModel")(config), {"input_ids": words, "labels": words.clone()}
