"""Speech: from a wave or its spectrum to classes, frames or text."""

from __future__ import annotations

from typing import Any

import torch

from net.table import Built, architecture, hf, ids

WAVE: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64,
    "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2, "hidden_dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0,
    "feat_proj_dropout": 0.0, "final_dropout": 0.0, "layerdrop": 0.0, "mask_time_prob": 0.0, "apply_spec_augment": False,
    "pad_token_id": 0,
}  # fmt: skip


def wave(config: str, model: str, **fields: Any) -> Built:
    """A classifier of sequences over a wave."""
    made = hf(model)(hf(config)(**{**WAVE, **fields}))
    return made, {"input_values": torch.randn(2, 800), "labels": torch.tensor([0, 1])}


@architecture("wav2vec2", "speech, convolutions and an encoder")
def wav2vec2() -> Built:
    return wave("Wav2Vec2Config", "Wav2Vec2ForSequenceClassification")


@architecture("wav2vec2-ctc", "speech, CTC loss")
def wav2vec2_ctc() -> Built:
    model, inputs = wave("Wav2Vec2Config", "Wav2Vec2ForCTC", ctc_zero_infinity=True)
    return model, {**inputs, "labels": ids(2, 5, high=32)}


@architecture("hubert", "speech, convolutions and an encoder")
def hubert() -> Built:
    return wave("HubertConfig", "HubertForSequenceClassification")


@architecture("wavlm", "speech, gated relative positions")
def wavlm() -> Built:
    return wave("WavLMConfig", "WavLMForSequenceClassification")


@architecture("sew", "speech, squeezed in time")
def sew() -> Built:
    return wave("SEWConfig", "SEWForSequenceClassification", squeeze_factor=2)


@architecture("unispeech-sat", "speech, convolutions and an encoder")
def unispeech_sat() -> Built:
    return wave("UniSpeechSatConfig", "UniSpeechSatForSequenceClassification")


@architecture("whisper", "speech to text, encoder and decoder")
def whisper() -> Built:
    config = hf("WhisperConfig")(
        vocab_size=128, num_mel_bins=8, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=20, max_target_positions=32,
        use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return hf("WhisperForConditionalGeneration")(config), {"input_features": torch.randn(2, 8, 40), "labels": ids(2, 10)}


@architecture("audio-spectrogram-transformer", "spectrum as an image")
def spectrogram() -> Built:
    config = hf("ASTConfig")(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, patch_size=4, max_length=24,
        num_mel_bins=16, frequency_stride=4, time_stride=4,
    )  # fmt: skip
    model = hf("ASTForAudioClassification")(config)
    return model, {"input_values": torch.randn(2, 24, 16), "labels": torch.tensor([0, 1])}


@architecture("speech-to-text", "spectrum to text, encoder and decoder")
def speech_to_text() -> Built:
    config = hf("Speech2TextConfig")(
        vocab_size=128, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, conv_channels=32, input_feat_per_channel=8, max_source_positions=64,
        max_target_positions=32, use_cache=False, dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    model = hf("Speech2TextForConditionalGeneration")(config)
    return model, {"input_features": torch.randn(2, 32, 8), "labels": ids(2, 10)}
