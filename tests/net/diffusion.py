"""Diffusion: a U-Net and transformers that take noise from an image. The first ones are of diffusers, the last two are ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from graphoffload.testing.case import weighted_loss
from net.table import Built, architecture


class Denoised(nn.Module):
    """A denoiser of diffusers with a mean square loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, noise: Tensor, **inputs: Any) -> dict[str, Tensor]:
        sample = self.model(**inputs).sample
        return {"loss": nn.functional.mse_loss(sample[:, : noise.shape[1]], noise)}


@architecture("unet-2d-condition", "diffusion, U-Net with cross attention", needs=("diffusers",))
def unet() -> Built:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(8, 16), layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16, attention_head_dim=4, norm_num_groups=4,
    )  # fmt: skip
    inputs = {"sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 40])}
    return Denoised(model), {**inputs, "encoder_hidden_states": torch.randn(2, 5, 16), "noise": torch.randn(2, 4, 8, 8)}


@architecture("unet-2d", "diffusion, U-Net", needs=("diffusers",))
def unet_2d() -> Built:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4, norm_num_groups=4,
    )  # fmt: skip
    inputs = {"sample": torch.randn(2, 3, 8, 8), "timestep": torch.tensor([3, 40])}
    return Denoised(model), {**inputs, "noise": torch.randn(2, 3, 8, 8)}


@architecture("dit", "diffusion, transformer with modulated norms", random=True, needs=("diffusers",))
def dit() -> Built:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=1, sample_size=8, patch_size=2,
        num_embeds_ada_norm=10, norm_num_groups=4,
    )  # fmt: skip
    inputs = {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 40]), "class_labels": torch.tensor([1, 2])}
    return Denoised(model), {**inputs, "noise": torch.randn(2, 4, 8, 8)}


@architecture("sd3", "diffusion, transformer over image and text together", needs=("diffusers",))
def sd3() -> Built:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=16, caption_projection_dim=32, pooled_projection_dim=16, out_channels=4, pos_embed_max_size=8,
    )  # fmt: skip
    inputs = {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 40])}
    texts = {"encoder_hidden_states": torch.randn(2, 5, 16), "pooled_projections": torch.randn(2, 16)}
    return Denoised(model), {**inputs, **texts, "noise": torch.randn(2, 4, 8, 8)}


@architecture("autoencoder-kl", "diffusion, autoencoder of images", needs=("diffusers",))
def autoencoder() -> Built:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(8, 16), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4, norm_num_groups=4, sample_size=16, layers_per_block=1,
    )  # fmt: skip
    return Denoised(model), {"sample": torch.randn(2, 3, 16, 16), "noise": torch.randn(2, 3, 16, 16)}


class Modulated(nn.Module):
    """A transformer block whose norms are shifted, scaled and gated by the condition."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(dim, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).unsqueeze(1).chunk(6, dim=-1)
        q, k, v = self.qkv(self.norm1(x) * (1 + scale1) + shift1).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate1 * self.out(attended)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """Patches, modulated blocks, patches back."""

    def __init__(self, dim: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Conv2d(4, dim, 2, 2)
        self.time, self.label = nn.Linear(8, dim), nn.Embedding(10, dim)
        self.blocks = nn.ModuleList(Modulated(dim, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 16)

    def forward(self, image: Tensor, step: Tensor, label: Tensor) -> dict[str, Tensor]:
        angles = step.to(image.dtype)[:, None] * torch.exp(-torch.arange(4, device=step.device, dtype=image.dtype))
        condition = self.time(torch.cat((angles.sin(), angles.cos()), -1)) + self.label(label)
        x = self.embed(image).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, condition)
        return {"loss": weighted_loss(self.head(self.norm(x)))}


@architecture("dit-plain", "diffusion, transformer with modulated norms, in plain torch", fast=True)
def dit_plain() -> Built:
    return DiT(), {"image": torch.randn(2, 4, 8, 8), "step": torch.tensor([3, 40]), "label": torch.tensor([1, 2])}


class Residual(nn.Module):
    """Two convolutions with group norms, the condition added between them, and attention among pixels."""

    def __init__(self, inputs: int, outputs: int, condition: int, *, attends: bool = False) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.condition, self.skip = nn.Linear(condition, outputs), nn.Conv2d(inputs, outputs, 1)
        self.attention = nn.MultiheadAttention(outputs, 2, batch_first=True) if attends else None

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        y = self.conv1(nn.functional.silu(self.norm1(x))) + self.condition(condition)[:, :, None, None]
        y = self.skip(x) + self.conv2(nn.functional.silu(self.norm2(y)))
        if self.attention is None:
            return y
        pixels = y.flatten(2).transpose(1, 2)
        return y + self.attention(pixels, pixels, pixels, need_weights=False)[0].transpose(1, 2).unflatten(2, y.shape[2:])


class UNet(nn.Module):
    """Down twice, up twice; each resolution's result is joined to what comes up."""

    def __init__(self, dim: int = 8, condition: int = 16) -> None:
        super().__init__()
        self.time, self.first, self.last = nn.Linear(8, condition), nn.Conv2d(4, dim, 3, padding=1), nn.Conv2d(dim, 4, 1)
        self.down = nn.ModuleList(Residual(dim * n, dim * m, condition) for n, m in ((1, 1), (1, 2)))
        self.middle = Residual(2 * dim, 2 * dim, condition, attends=True)
        self.up = nn.ModuleList(Residual(dim * n, dim * m, condition) for n, m in ((4, 1), (2, 1)))

    def forward(self, image: Tensor, step: Tensor, noise: Tensor) -> dict[str, Tensor]:
        angles = step.to(image.dtype)[:, None] * torch.exp(-torch.arange(4, device=step.device, dtype=image.dtype))
        condition = self.time(torch.cat((angles.sin(), angles.cos()), -1))
        x, joined = self.first(image), []
        for block in self.down:
            x = block(x, condition)
            joined.append(x)
            x = nn.functional.avg_pool2d(x, 2)
        x = self.middle(x, condition)
        for block in self.up:
            x = nn.functional.interpolate(x, scale_factor=2.0)
            x = block(torch.cat((x, joined.pop()), 1), condition)
        return {"loss": nn.functional.mse_loss(self.last(x), noise)}


@architecture("unet-plain", "diffusion, U-Net with skips and attention, in plain torch")
def unet_plain() -> Built:
    inputs = {"image": torch.randn(2, 4, 8, 8), "step": torch.tensor([3, 40])}
    return UNet(), {**inputs, "noise": torch.randn(2, 4, 8, 8)}
