"""Images and text: images in the token sequence, and two encoders that are compared."""

from __future__ import annotations

from typing import Any

import torch

from net.dense import ONE
from net.table import Built, architecture, hf, ids

VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
IMAGE = 100
"""The id that stands for a patch of an image."""


def sentence(patches: int, batch: int = 2, *, before: int = 3, after: int = 6, high: int = 90) -> torch.Tensor:
    """Token ids with the places of an image's patches in the middle."""
    image = torch.full((batch, patches), IMAGE)
    return torch.cat((ids(batch, before, high=high), image, ids(batch, after, high=high)), dim=1)


def asked(words: torch.Tensor) -> dict[str, torch.Tensor]:
    """Ids and labels; patches are not predicted."""
    return {"input_ids": words, "labels": words.masked_fill(words >= IMAGE, -100)}


@architecture("llava", "vision-language, patches in the sequence")
def llava() -> Built:
    config = hf("LlavaConfig")(
        vision_config=hf("CLIPVisionConfig")(**VISION, projection_dim=32), text_config=hf("LlamaConfig")(**ONE),
        image_token_index=IMAGE, image_token_id=IMAGE, image_seq_length=16, vision_feature_layer=-1,
    )  # fmt: skip
    return hf("LlavaForConditionalGeneration")(config), {**asked(sentence(16)), "pixel_values": torch.randn(2, 3, 16, 16)}


@architecture("paligemma", "vision-language, patches in the sequence, prefix attention")
def paligemma() -> Built:
    config = hf("PaliGemmaConfig")(
        vision_config=hf("SiglipVisionConfig")(**VISION, vision_use_head=False),
        text_config=hf("GemmaConfig")(**{**ONE, "head_dim": 8}), image_token_id=IMAGE, image_token_index=IMAGE,
        projection_dim=32, hidden_size=32,
    )  # fmt: skip
    words = sentence(16)
    inputs = {**asked(words), "pixel_values": torch.randn(2, 3, 16, 16), "token_type_ids": (words < IMAGE).long()}
    inputs["attention_mask"] = torch.ones_like(words)
    return hf("PaliGemmaForConditionalGeneration")(config), inputs


@architecture("idefics3", "vision-language, shuffled patches in the sequence (SmolVLM's kind)")
def idefics3() -> Built:
    config = hf("Idefics3Config")(
        vision_config={**VISION}, text_config=hf("LlamaConfig")(**ONE), image_token_id=IMAGE, scale_factor=2, use_cache=False,
        pad_token_id=0,
    )  # fmt: skip
    words = sentence(4)
    inputs = {**asked(words), "attention_mask": torch.ones_like(words), "pixel_values": torch.randn(2, 1, 3, 16, 16)}
    return hf("Idefics3ForConditionalGeneration")(config), inputs


@architecture("smolvlm", "vision-language, shuffled patches in the sequence")
def smolvlm() -> Built:
    config = hf("SmolVLMConfig")(
        vision_config={**VISION}, text_config=hf("LlamaConfig")(**ONE), image_token_id=IMAGE, scale_factor=2, use_cache=False,
        pad_token_id=0,
    )  # fmt: skip
    words = sentence(4)
    inputs = {**asked(words), "attention_mask": torch.ones_like(words), "pixel_values": torch.randn(2, 1, 3, 16, 16)}
    return hf("SmolVLMForConditionalGeneration")(config), inputs


def qwen(prefix: str, vision: dict[str, Any]) -> Built:
    """A Qwen with pictures: one of 4 x 4 patches in each of two sentences, merged two by two."""
    text = {**ONE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
    config = hf(f"{prefix}Config")(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=IMAGE + 1, vision_start_token_id=IMAGE + 2,
        vision_end_token_id=IMAGE + 3,
    )  # fmt: skip
    start = torch.full((2, 1), IMAGE + 2)
    patches = torch.full((2, 4), IMAGE)
    words = torch.cat((ids(2, 3, high=90), start, patches, start + 1, ids(2, 6, high=90)), dim=1)
    inputs = {
        **asked(words),
        "attention_mask": torch.ones_like(words),
        "pixel_values": torch.randn(32, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
        "mm_token_type_ids": (words == IMAGE).int(),
    }
    return hf(f"{prefix}ForConditionalGeneration")(config), inputs


@architecture("qwen2-vl", "vision-language, any resolution, rotary positions in three parts")
def qwen2_vl() -> Built:
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4}
    return qwen("Qwen2VL", {**vision, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3})


@architecture("qwen2.5-vl", "vision-language, any resolution, windows in the vision part")
def qwen2_5_vl() -> Built:
    vision = {"depth": 2, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 4, "intermediate_size": 64, "patch_size": 4}
    windows = {"window_size": 16, "fullatt_block_indexes": [1]}
    return qwen("Qwen2_5_VL", {**vision, **windows, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3})


@architecture("clip", "image and text encoders, contrastive loss")
def clip() -> Built:
    text = {
        "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "projection_dim": 16,
    }  # fmt: skip
    config = hf("CLIPConfig")(text_config=text, vision_config={**VISION, "projection_dim": 16}, projection_dim=16)
    words = ids(2, 10)
    words[:, -1] = 2
    inputs = {"input_ids": words, "pixel_values": torch.randn(2, 3, 16, 16), "return_loss": True}
    return hf("CLIPModel")(config), inputs


@architecture("siglip", "image and text encoders, sigmoid loss")
def siglip() -> Built:
    text = {
        "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "projection_size": 32,
    }  # fmt: skip
    config = hf("SiglipConfig")(text_config=text, vision_config=VISION)
    return hf("SiglipModel")(config), {"input_ids": ids(2, 10), "pixel_values": torch.randn(2, 3, 16, 16), "return_loss": True}


@architecture("vilt", "image and text in one encoder")
def vilt() -> Built:
    config = hf("ViltConfig")(
        **{**VISION, "num_channels": 3}, vocab_size=128, max_position_embeddings=32, max_image_length=-1, num_labels=3,
    )  # fmt: skip
    words = ids(2, 8)
    inputs = {"input_ids": words, "attention_mask": torch.ones_like(words), "pixel_values": torch.randn(2, 3, 16, 16)}
    inputs |= {"pixel_mask": torch.ones(2, 16, 16, dtype=torch.long), "labels": torch.rand(2, 3)}
    return hf("ViltForQuestionAnswering")(config), inputs


@architecture("blip", "image encoder, text decoder with cross attention")
def blip() -> Built:
    text = {
        "vocab_size": 128, "hidden_size": 32, "encoder_hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 4, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2, "pad_token_id": 0,
        "use_cache": False,
    }  # fmt: skip
    config = hf("BlipConfig")(text_config=text, vision_config=VISION, projection_dim=16)
    words = ids(2, 8)
    return hf("BlipForConditionalGeneration")(config), {
        "pixel_values": torch.randn(2, 3, 16, 16),
        "input_ids": words,
        "labels": words.clone(),
    }
