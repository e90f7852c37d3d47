"""Detection: boxes and classes from images. The losses match boxes by an assignment problem, outside of the graphs."""

from __future__ import annotations

from typing import Any

import torch

from net.table import Built, architecture, hf

RESNET: dict[str, Any] = {
    "embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "layer_type": "basic",
    "out_features": ["stage2", "stage3", "stage4"],
}  # fmt: skip


def boxes() -> list[dict[str, torch.Tensor]]:
    """Labels of two images."""
    corners = torch.tensor([[0.3, 0.3, 0.2, 0.2], [0.6, 0.5, 0.3, 0.4]])
    return [
        {"class_labels": torch.tensor([0, 1]), "boxes": corners},
        {"class_labels": torch.tensor([2]), "boxes": corners[:1] + 0.05},
    ]


DETR: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_queries": 5, "dropout": 0.0, "use_timm_backbone": False, "num_labels": 3,
}  # fmt: skip


@architecture("detr", "detection, encoder and decoder, matched boxes in the loss")
def detr() -> Built:
    backbone = hf("ResNetConfig")(**{**RESNET, "out_features": ["stage4"]})
    config = hf("DetrConfig")(**DETR, backbone_config=backbone, backbone=None, use_pretrained_backbone=False)
    inputs = {"pixel_values": torch.randn(2, 3, 64, 64), "labels": boxes()}
    return hf("DetrForObjectDetection")(config), inputs


@architecture("detr-outputs", "detection, encoder and decoder")
def detr_outputs() -> Built:
    model, inputs = detr()
    return model, {"pixel_values": inputs["pixel_values"]}


@architecture("conditional-detr", "detection, conditional cross attention")
def conditional_detr() -> Built:
    backbone = hf("ResNetConfig")(**{**RESNET, "out_features": ["stage4"]})
    config = hf("ConditionalDetrConfig")(**DETR, backbone_config=backbone, backbone=None, use_pretrained_backbone=False)
    return hf("ConditionalDetrForObjectDetection")(config), {"pixel_values": torch.randn(2, 3, 64, 64)}


@architecture("deformable-detr", "detection, deformable attention")
def deformable_detr() -> Built:
    backbone = hf("ResNetConfig")(**RESNET)
    config = hf("DeformableDetrConfig")(
        **{**DETR, "num_queries": 6, "decoder_layers": 2}, num_feature_levels=3, backbone_config=backbone, backbone=None,
        use_pretrained_backbone=False, disable_custom_kernels=True,
    )  # fmt: skip
    return hf("DeformableDetrForObjectDetection")(config), {"pixel_values": torch.randn(2, 3, 64, 64)}


@architecture("rt-detr", "detection in real time, top-k queries")
def rt_detr() -> Built:
    backbone = hf("RTDetrResNetConfig")(**RESNET)
    config = hf("RTDetrConfig")(
        backbone_config=backbone, encoder_hidden_dim=16, encoder_in_channels=[8, 16, 16], feat_strides=[8, 16, 32],
        encoder_layers=1, encoder_ffn_dim=32, encoder_attention_heads=2, d_model=16, num_queries=5,
        decoder_in_channels=[16, 16, 16], decoder_ffn_dim=32, num_feature_levels=3, decoder_n_points=2, decoder_layers=1,
        decoder_attention_heads=2, num_denoising=0, dropout=0.0, num_labels=3, anchor_image_size=None, hidden_expansion=0.5,
    )  # fmt: skip
    return hf("RTDetrForObjectDetection")(config), {"pixel_values": torch.randn(2, 3, 64, 64)}


@architecture("yolos", "detection by an image transformer")
def yolos() -> Built:
    config = hf("YolosConfig")(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, image_size=[16, 16], patch_size=4,
        num_detection_tokens=4, num_labels=3,
    )  # fmt: skip
    return hf("YolosForObjectDetection")(config), {"pixel_values": torch.randn(2, 3, 16, 16)}
