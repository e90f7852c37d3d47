"""Models of timm, which needs torchvision: where that has no build for the installed torch they are skipped."""

from __future__ import annotations

import functools
from typing import Any

import torch

from graphoffload.testing.case import weighted_loss
from net.table import Built, architecture

NEEDS = ("timm",)


class Scored(torch.nn.Module):
    """A model of timm with a loss on its scores."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": weighted_loss(self.model(image))}


def scored(name: str, size: int, **fields: Any) -> Built:
    """A model by its name in timm, and images of a size."""
    import timm

    return Scored(timm.create_model(name, pretrained=False, num_classes=4, **fields)), {"image": torch.randn(2, 3, size, size)}


TRANSFORMER = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 1, "num_heads": 4}
MODELS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "timm-vit": ("image transformer", "vit_tiny_patch16_224", 16, TRANSFORMER),
    "timm-eva02": ("image transformer, rotary positions, gated", "eva02_tiny_patch14_224", 16, TRANSFORMER),
    "timm-xcit": ("image transformer, attention between channels", "xcit_nano_12_p16_224", 32, {"img_size": 32, "depth": 1}),
    "timm-mixer": ("image network of MLPs", "mixer_s32_224", 64, {"img_size": 64}),
    "timm-mobilenet-v3": ("convolutions, squeeze and excitation", "mobilenetv3_small_050", 32, {"drop_rate": 0.0}),
    "timm-efficientnet": ("convolutions, squeeze and excitation", "efficientnet_b0", 32, {"drop_rate": 0.0}),
    "timm-convnext": ("convolutions, depthwise", "convnext_atto", 32, {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 32)}),
    "timm-nfnet": ("convolutions with standardised weights", "nf_resnet26", 32, {}),
}

for _name, (_kind, _model, _size, _fields) in MODELS.items():
    architecture(_name, _kind, needs=NEEDS)(functools.partial(scored, _model, _size, **_fields))
