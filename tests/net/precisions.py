"""Precisions: autocast, pure 16 bits, a scaled loss, weights of 4 bits, products of 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from net.dense import ONE, decoder
from net.small import Decoder, tokens
from net.step import OwnStep
from net.table import Built, architecture


class Autocast(OwnStep):
    """A step as a trainer takes it: weights in float32, forward under autocast, perhaps a scaled loss."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, scale: float = 1.0) -> None:
        super().__init__()
        self.model, self.dtype, self.scale = model, dtype, scale

    def parts(self) -> list[nn.Module]:
        return [self.model]

    def step(self, **inputs: Any) -> Tensor:
        device = next(self.parameters()).device.type
        with torch.autocast(device, dtype=self.dtype):
            loss: Tensor = self.model(**inputs)["loss"]
        if self.scale == 1.0:
            loss.backward()
            return loss
        scaler = torch.amp.GradScaler(device, init_scale=self.scale)
        optimizer = torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.5)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return loss


@architecture("autocast-bf16", "precision, bfloat16 by autocast", precision="bfloat16", fast=True)
def autocast_bf16() -> Built:
    return Autocast(Decoder(), torch.bfloat16), tokens()


@architecture("autocast-fp16-scaled", "precision, float16 by autocast, scaled loss", precision="float16")
def autocast_fp16() -> Built:
    return Autocast(Decoder(layers=1), torch.float16, scale=256.0), tokens()


class Inside(nn.Module):
    """Autocast inside of what is compiled."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        with torch.autocast(next(self.parameters()).device.type, dtype=torch.bfloat16):
            return self.model(**inputs)


@architecture("autocast-bf16-inside", "precision, bfloat16 by autocast inside of the graph", precision="bfloat16")
def autocast_inside() -> Built:
    return Inside(Decoder(layers=1)), tokens()


@architecture("llama-autocast", "precision, a Llama of transformers under autocast", precision="bfloat16")
def llama_autocast() -> Built:
    model, inputs = decoder("LlamaConfig", **ONE)
    return Autocast(model, torch.bfloat16), inputs


@architecture("bf16", "precision, all in bfloat16", precision="bfloat16")
def bf16() -> Built:
    return Decoder().bfloat16(), tokens()


@architecture("fp16", "precision, all in float16", precision="float16")
def fp16() -> Built:
    return Decoder(layers=1).half(), tokens()


# A frozen base and trained matrices of low rank.


class Adapted(nn.Module):
    """A frozen linear and a trained pair of low rank in float32, which is computed in the input's type."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5), nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a.to(x.dtype)), self.b.to(x.dtype))


def frozen(model: nn.Module) -> nn.Module:
    """Only what adapters add is trained."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.rpartition(".")[2] in ("a", "b"))
    return model


@architecture("lora-bf16", "precision, adapter in float32 on a frozen base in bfloat16", precision="bfloat16")
def lora_bf16() -> Built:
    model = Decoder(make=lambda n, m: Adapted(nn.Linear(n, m, bias=False), n, m)).bfloat16()
    for module in model.modules():
        if isinstance(module, Adapted):
            module.a.data, module.b.data = module.a.data.float(), module.b.data.float()
    return frozen(model), tokens()


@architecture("lora-bf16-peft", "adapter of peft in float32 on a base in bfloat16", needs=("peft",), precision="bfloat16")
def lora_bf16_peft() -> Built:
    import peft

    model, inputs = decoder("LlamaConfig", **ONE)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"])
    return peft.get_peft_model(model.bfloat16(), config), inputs


GROUP = 16
"""Weights that share a scale."""


def dequantized(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Two weights a byte, in (rows, columns / 2), and a scale for each group of a row: the weights, in (rows, columns)."""
    low, high = (packed & 15).to(torch.int8) - 8, (packed >> 4).to(torch.int8) - 8
    codes = torch.stack((low, high), -1).flatten(1).to(dtype)
    return (codes.unflatten(1, (-1, GROUP)) * scales.to(dtype).unsqueeze(-1)).flatten(1)


class Dequantize(torch.autograd.Function):
    """A product with packed weights that keeps the packed ones, and unpacks them again for the input's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(packed, scales)
        return x @ dequantized(packed, scales, x.dtype).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        packed, scales = ctx.saved_tensors
        return grads[0] @ dequantized(packed, scales, grads[0].dtype), None, None


class Linear4(nn.Module):
    """A frozen linear of 4 bits a weight; its packed weights are parameters without gradients, as those of the packages are."""

    def __init__(self, inputs: int, outputs: int, *, function: bool) -> None:
        super().__init__()
        self.function = function
        weight = (torch.randn(outputs, inputs) / inputs**0.5).unflatten(1, (-1, GROUP))
        scales = weight.abs().amax(-1) / 7
        codes = ((weight / scales.unsqueeze(-1)).round().clamp(-8, 7) + 8).to(torch.uint8).flatten(1)
        self.packed = nn.Parameter(codes[:, ::2] | (codes[:, 1::2] << 4), requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.function:
            out: Tensor = Dequantize.apply(x, self.packed, self.scales)
            return out
        return x @ dequantized(self.packed, self.scales, x.dtype).t()


def quantized(*, function: bool, **fields: Any) -> nn.Module:
    """Adapters on linears of 4 bits."""
    return frozen(Decoder(make=lambda n, m: Adapted(Linear4(n, m, function=function), n, m), **fields))


@architecture("qlora", "adapter on weights of 4 bits, unpacked in the graph", fast=True)
def qlora() -> Built:
    return quantized(function=False, layers=1), tokens()


@architecture("qlora-function", "adapter on weights of 4 bits, unpacked twice by a function of its own")
def qlora_function() -> Built:
    return quantized(function=True), tokens()


@architecture("qlora-bitsandbytes", "adapter on NF4 weights of bitsandbytes", needs=("bitsandbytes",))
def qlora_bitsandbytes() -> Built:
    import bitsandbytes

    def make(inputs: int, outputs: int) -> nn.Module:
        base = bitsandbytes.nn.Linear4bit(inputs, outputs, bias=False, compute_dtype=torch.float32, quant_type="nf4")
        return Adapted(base.to("cpu"), inputs, outputs)

    return frozen(Decoder(layers=1, width=64, make=make)), tokens()


@architecture("qlora-torchao", "adapter on 8-bit weights of torchao", needs=("torchao",))
def qlora_torchao() -> Built:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    def make(inputs: int, outputs: int) -> nn.Module:
        base = nn.Sequential(nn.Linear(inputs, outputs, bias=False))
        quantize_(base, Int8WeightOnlyConfig())
        return Adapted(base[0], inputs, outputs)

    return frozen(Decoder(layers=1, make=make)), tokens()


# Products of 8 bits.

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
Scaled = Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]


def scaled(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x in 8 bits, and the scale (of no dimensions) that brings it back."""
    most = torch.finfo(dtype).max
    scale = x.detach().abs().amax().float().clamp(min=1e-12) / most
    return (x.float() / scale).clamp(-most, most).to(dtype), scale


def product(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """left @ right.T, both in 8 bits with their scales."""
    (a, scale_a), (b, scale_b) = left, right
    return torch._scaled_mm(a.contiguous(), b.contiguous().t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype)


class Product8(torch.autograd.Function):
    """A product in e4m3 whose gradients are in e5m2, with a scale for each tensor; what it keeps has one byte an element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        small, wide = scaled(x.flatten(0, -2), FORWARD), scaled(weight, FORWARD)
        ctx.save_for_backward(*small, *wide)
        return product(small, wide, x.dtype).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        small, scale_x, wide, scale_w = ctx.saved_tensors
        grad, scale = scaled(grads[0].flatten(0, -2), BACKWARD)
        dtype = grads[0].dtype
        dx = product((grad, scale), (wide.t(), scale_w), dtype).unflatten(0, grads[0].shape[:-1])
        return dx, product((grad.t(), scale), (small.t(), scale_x), dtype)


class Linear8(nn.Module):
    """A linear computed in 8 bits."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Product8.apply(x, self.weight)
        return out


@architecture("fp8", "precision, products in float8 with a scale for each tensor", precision="float8")
def fp8() -> Built:
    return Decoder(layers=1, make=Linear8), tokens()


@architecture("fp8-bf16", "precision, products in float8 between values in bfloat16", precision="float8")
def fp8_bf16() -> Built:
    return Decoder(layers=1, make=Linear8).bfloat16(), tokens()


@architecture("fp8-torchao", "precision, products in float8 by torchao", needs=("torchao",), precision="float8")
def fp8_torchao() -> Built:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = Decoder(layers=1)
    convert_to_float8_training(model.trunk.layers, config=Float8LinearConfig(emulate=True))
    return model, tokens()
