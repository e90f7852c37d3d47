"""Loops of users for what comes after pretraining, and for other data than text; user_loops.py runs them.

dpo          preferences: LoRA's policy, and the same net without adapters as its reference     as a whole
diffusion    a denoiser with modulated norms, noise drawn on the device, an EMA copy            as a whole
speech       Whisper, float16 autocast with a GradScaler                                        by blocks
unfreeze     the head alone for some steps, then all of a vision transformer                    by blocks
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from gpu.user_parts import decoder, loader, pictures, trained, words
from gpu.user_runs import Case, Loop
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from graphoffload.bench.nets import EncoderBlock, VisionTransformer


def dpo(device: torch.device, tiny: bool) -> Loop:
    """Direct preference optimization: adapters of peft on a bfloat16 Llama, chosen and rejected answers in one batch; the
    reference is the same net with its adapters disabled, under no_grad. Likelihoods are of a token in the mean, since sums over
    2,048 of them drown in bfloat16's rounding. As a whole; the loss is eager."""
    import peft

    base = decoder("LlamaConfig", tiny)
    adapters = peft.LoraConfig(r=4 if tiny else 16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = peft.get_peft_model(base, adapters)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    batch, beta = words(device, base.config.vocab_size, *((4, 32) if tiny else (8, 2048))), 1.0

    def log_likelihoods(ids: Tensor) -> Tensor:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        return -F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)

    def step(number: int) -> tuple[float, float]:
        (ids,) = batch(number)
        with torch.autocast(device.type, torch.bfloat16):
            with torch.no_grad(), model.disable_adapter():
                reference = log_likelihoods(ids)
            chosen, rejected = (log_likelihoods(ids) - reference).chunk(2)
            loss = -F.logsigmoid(beta * (chosen - rejected)).mean()
        return trained(model, optimizer, loss)

    return Loop([model], step)


class Modulated(nn.Module):
    """A transformer block whose input and output a condition scales and shifts."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.block, self.modulation = EncoderBlock(dim, heads), nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift, gate = self.modulation(F.silu(condition)).unsqueeze(1).chunk(3, -1)
        result: Tensor = x + gate * self.block(x * (1 + scale) + shift)
        return result


class Denoiser(nn.Module):
    """The noise in images, from a time in [0, 1]."""

    def __init__(self, *, layers: int, dim: int, heads: int, image: int, patch: int) -> None:
        super().__init__()
        self.patches, self.patch = nn.Conv2d(3, dim, patch, patch), patch
        self.positions = nn.Parameter(torch.randn((image // patch) ** 2, dim) * 0.02)
        self.time = nn.Sequential(nn.Linear(1, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.layers = nn.ModuleList(Modulated(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 3 * patch**2)

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        x, condition = self.patches(images).flatten(2).transpose(1, 2) + self.positions, self.time(times[:, None])
        for layer in self.layers:
            x = layer(x, condition)
        return F.fold(self.head(self.norm(x)).transpose(1, 2), images.shape[-2:], self.patch, stride=self.patch)


def diffusion(device: torch.device, tiny: bool) -> Loop:
    """Times and noise drawn on the device in each step, bfloat16 autocast, AdamW, an EMA copy by torch; as a whole."""
    sizes = {"layers": 2, "dim": 32, "heads": 2, "patch": 4} if tiny else {"layers": 12, "dim": 1152, "heads": 16, "patch": 8}
    side = 16 if tiny else 256
    model = Denoiser(**sizes, image=side)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = pictures(device, 4 if tiny else 32, side, 10)

    def step(number: int) -> tuple[float, float]:
        images, _ = batch(number)
        times, noise = torch.rand(images.shape[0], device=device), torch.randn_like(images)
        weight = times[:, None, None, None]
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.mse_loss(model((1 - weight) * images + weight * noise, times).float(), noise - images)
        found = trained(model, optimizer, loss)
        average.update_parameters(model)
        return found

    return Loop([model], step)


def speech(device: torch.device, tiny: bool) -> Loop:
    """Whisper's medium width, float32 parameters, float16 autocast, GradScaler, clipping, AdamW; both halves by blocks."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    make: Any = WhisperConfig
    width, layers, heads = (64, 2, 4) if tiny else (1024, 8, 16)
    half = {"layers": layers, "attention_heads": heads, "ffn_dim": 4 * width}
    halves = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in half.items()}
    frames, vocabulary = (16, 256) if tiny else (1500, 51865)
    ids = {"vocab_size": vocabulary, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = make(d_model=width, max_source_positions=frames, **halves, **ids)
    model: Any = WhisperForConditionalGeneration(config).train()
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-5), torch.amp.GradScaler(device.type)
    rows, length = (2, 8) if tiny else (16, 224)

    def make_batch(_: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        spectra = torch.randn(rows, config.num_mel_bins, 2 * frames, generator=generator)
        return spectra, torch.randint(3, vocabulary, (rows, length), generator=generator)

    batch = loader(device, make_batch)

    def step(number: int) -> tuple[float, float]:
        spectra, labels = batch(number)
        with torch.autocast(device.type, torch.float16):
            loss = model(input_features=spectra, labels=labels, use_cache=False).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.item(), norm.item()

    return Loop([*model.model.encoder.layers, *model.model.decoder.layers], step)


def unfreeze(device: torch.device, tiny: bool) -> Loop:
    """The head alone for two steps, then all of a vision transformer, whose parameters the optimizer gets as a group of their
    own; bfloat16 autocast, AdamW; by blocks."""
    sizes = {"layers": 2, "dim": 32, "heads": 2} if tiny else {"layers": 16, "dim": 1024, "heads": 16}
    side, classes = (32, 10) if tiny else (224, 1000)
    model = VisionTransformer(**sizes, image=side, patch=8 if tiny else 14, classes=classes)
    rest = [p for name, p in model.named_parameters() if not name.startswith("head")]
    for parameter in rest:
        parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-3)
    batch = pictures(device, 4 if tiny else 64, side, classes)

    def step(number: int) -> tuple[float, float]:
        if number == UNFROZEN_IN:
            for parameter in rest:
                parameter.requires_grad_(True)
            optimizer.add_param_group({"params": rest, "lr": 1e-4})
        images, labels = batch(number)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(images, labels)
        return trained(model, optimizer, loss)

    return Loop(list(model.layers), step)


UNFROZEN_IN = 2
CASES = {
    "dpo": Case(dpo, needs=("transformers", "peft")),
    "diffusion": Case(diffusion),
    "speech": Case(speech, needs=("transformers",)),
    "unfreeze": Case(unfreeze),
}
