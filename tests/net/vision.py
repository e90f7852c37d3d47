"""Vision: classes or maps from images."""

from __future__ import annotations

import functools
from typing import Any

import torch

from net.table import Built, architecture, hf

VIT: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 16,
    "patch_size": 4, "num_labels": 4,
}  # fmt: skip


def classifier(config: str, model: str = "", *, size: int = 16, batch: int = 2, **fields: Any) -> Built:
    """An image classifier."""
    made = hf(model or config.replace("Config", "ForImageClassification"))(hf(config)(**fields))
    return made, {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.arange(batch) % 4}


STAGES = {"num_labels": 4}
CLASSIFIERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deit": ("image transformer", "DeiTConfig", VIT),
    "beit": ("image transformer, relative positions", "BeitConfig", {**VIT, "use_relative_position_bias": True}),
    "dinov2": ("image transformer, scaled layers", "Dinov2Config", VIT),
    "swin": (
        "image transformer in shifted windows",
        "SwinConfig",
        {
            **STAGES,
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 1],
            "num_heads": [2, 4],
            "window_size": 2,
            "drop_path_rate": 0.0,
        },
    ),
    "swinv2": (
        "image transformer in shifted windows, cosine attention",
        "Swinv2Config",
        {
            **STAGES,
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [2, 4],
            "window_size": 2,
            "drop_path_rate": 0.0,
        },
    ),
    "convnext": (
        "convolutions, depthwise",
        "ConvNextConfig",
        {**STAGES, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    ),
    "convnextv2": (
        "convolutions, response norm",
        "ConvNextV2Config",
        {**STAGES, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    ),
    "resnet": (
        "convolutions, batch norm",
        "ResNetConfig",
        {**STAGES, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    ),
    "regnet": (
        "convolutions in groups, batch norm",
        "RegNetConfig",
        {**STAGES, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
    ),
    "segformer": (
        "image transformer, pyramid",
        "SegformerConfig",
        {
            **STAGES,
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [8, 16],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "hidden_dropout_prob": 0.0,
            "drop_path_rate": 0.0,
            "classifier_dropout_prob": 0.0,
        },
    ),
    "pvt": (
        "image transformer, pyramid",
        "PvtConfig",
        {
            **STAGES,
            "image_size": 32,
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [8, 8, 16, 16],
            "num_attention_heads": [1, 1, 2, 2],
            "mlp_ratios": [2, 2, 2, 2],
            "sequence_reduction_ratios": [4, 2, 2, 1],
            "drop_path_rate": 0.0,
        },
    ),
    "poolformer": (
        "image network, pooling instead of attention",
        "PoolFormerConfig",
        {
            **STAGES,
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "hidden_sizes": [8, 16],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "padding": [2, 1],
            "drop_path_rate": 0.0,
        },
    ),
    "levit": (
        "convolutions and attention, batch norm",
        "LevitConfig",
        {
            **STAGES,
            "image_size": 32,
            "hidden_sizes": [16, 16, 16],
            "num_attention_heads": [2, 2, 2],
            "depths": [1, 1, 1],
            "key_dim": [4, 4, 4],
            "drop_path_rate": 0,
        },
    ),
    "focalnet": (
        "image network, focal modulation",
        "FocalNetConfig",
        {
            **STAGES,
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "focal_levels": [1, 1],
            "focal_windows": [3, 3],
            "drop_path_rate": 0.0,
        },
    ),
}
LARGER = {
    "pvt": 32,
    "levit": 32,
    "resnet": 32,
    "regnet": 32,
    "poolformer": 32,
    "segformer": 32,
    "convnext": 32,
    "convnextv2": 32,
}

for _name, (_kind, _config, _fields) in CLASSIFIERS.items():
    architecture(_name, _kind)(functools.partial(classifier, _config, size=LARGER.get(_name, 16), **_fields))


@architecture("vit", "image transformer")
def vit() -> Built:
    return classifier("ViTConfig", **VIT)


@architecture("mobilenet-v2", "convolutions, inverted bottlenecks, dropout", random=True)
def mobilenet_v2() -> Built:
    return classifier(
        "MobileNetV2Config", size=32, num_labels=4, depth_multiplier=0.25, min_depth=4, depth_divisible_by=4,
        finegrained_output=False, classifier_dropout_prob=0.1,
    )  # fmt: skip


@architecture("segformer-maps", "image transformer, a class for each pixel")
def segformer_maps() -> Built:
    fields = {**CLASSIFIERS["segformer"][2], "decoder_hidden_size": 16}
    model = hf("SegformerForSemanticSegmentation")(hf("SegformerConfig")(**fields))
    return model, {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(0, 4, (2, 32, 32))}


@architecture("vit-mae", "image transformer, masked and restored")
def vit_mae() -> Built:
    fields = {name: value for name, value in VIT.items() if name != "num_labels"}
    config = hf("ViTMAEConfig")(
        **fields,
        decoder_hidden_size=16,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=32,
    )
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16), "noise": torch.rand(2, 16)}
    return hf("ViTMAEForPreTraining")(config), inputs


@architecture("videomae", "video transformer")
def videomae() -> Built:
    config = hf("VideoMAEConfig")(**{**VIT, "num_hidden_layers": 1}, num_frames=4, tubelet_size=2)
    model = hf("VideoMAEForVideoClassification")(config)
    return model, {"pixel_values": torch.randn(2, 4, 3, 16, 16), "labels": torch.tensor([0, 1])}
