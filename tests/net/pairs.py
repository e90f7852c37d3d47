"""An encoder and a decoder of text."""

from __future__ import annotations

import functools
from typing import Any

from net.table import Built, architecture, hf, ids

BART: dict[str, Any] = {
    "vocab_size": 128, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64, "dropout": 0.0,
    "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "forced_eos_token_id": 2,
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4,
    "dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0,
}  # fmt: skip


def translator(config: str, model: str, **fields: Any) -> Built:
    """A model from source to target; the last tokens of one source are padding."""
    made = hf(model)(hf(config)(**fields))
    source = ids(2, 12)
    mask = source.new_ones(2, 12)
    mask[1, 9:] = 0
    return made, {"input_ids": source, "attention_mask": mask, "labels": ids(2, 10)}


PAIRS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "bart": ("encoder and decoder", "BartConfig", "BartForConditionalGeneration", BART),
    "marian": ("encoder and decoder", "MarianConfig", "MarianMTModel", BART),
    "pegasus": ("encoder and decoder, norms first", "PegasusConfig", "PegasusForConditionalGeneration", BART),
    "m2m-100": ("encoder and decoder, sinusoidal positions", "M2M100Config", "M2M100ForConditionalGeneration", BART),
    "longt5": (
        "encoder with local attention, decoder", "LongT5Config", "LongT5ForConditionalGeneration",
        {**T5, "local_radius": 3},
    ),
    "switch": (
        "encoder and decoder with experts", "SwitchTransformersConfig", "SwitchTransformersForConditionalGeneration",
        {**T5, "num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "expert_capacity": 16},
    ),
}  # fmt: skip

for _name, (_kind, _config, _model, _fields) in PAIRS.items():
    architecture(_name, _kind)(functools.partial(translator, _config, _model, **_fields))


@architecture("t5", "encoder and decoder, relative positions, dropout 0.1", random=True)
def t5() -> Built:
    return translator("T5Config", "T5ForConditionalGeneration", **{**T5, "dropout_rate": 0.1})
