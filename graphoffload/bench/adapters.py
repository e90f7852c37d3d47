"""Adapters on a frozen base: what a step of LoRA or QLoRA trains.

    adapted(model, rank=32, bits=16)    LoRA: peft's adapters on every linear of the layers, the base frozen as it is
    adapted(model, rank=32, bits=4)     QLoRA: the same on NF4 weights of bitsandbytes, half a byte and a scale each 64

Nothing is loaded, so the base has random weights: with 4 bits random codes of one scale, which are never quantized from
anything. Both matrices of an adapter are random, since the first one's gradient is zero where the second one is. Adapters have
the base's dtype; peft would make them float32 where it is asked to, and cast every input to that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from graphoffload.bench.packages import needed
from graphoffload.errors import ConfigError

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""What Unsloth's published context lengths have adapters on."""

BLOCK = 64  # weights that share a scale
SCALE = 0.03  # of all blocks: products are about as large as with a model's own initialization


def adapted(model: Any, *, rank: int, bits: int = 16) -> Any:
    """The same model of Transformers, in place, with adapters of this rank and everything else frozen.

    Raises:
        ConfigError: neither 4 nor 16 bits. NotMeasurable: peft, or for 4 bits bitsandbytes, is not installed.
    """
    if bits not in (4, 16):
        raise ConfigError(f"bits {bits} of a frozen base: there are 4 and 16")
    peft = needed("peft", "peft")
    if bits == 4:
        _in_four_bits(model)
    model.requires_grad_(False)
    config = peft.LoraConfig(r=rank, lora_alpha=rank, lora_dropout=0.0, target_modules=list(LINEARS), init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    return model


def _in_four_bits(model: Any) -> None:
    """Every linear that gets an adapter becomes one of bitsandbytes. Its bfloat16 weights go before the next one's come."""
    bitsandbytes = needed("bitsandbytes", "bitsandbytes")
    for parent in list(model.modules()):
        for name, linear in list(parent.named_children()):
            if name in LINEARS and isinstance(linear, nn.Linear):
                setattr(parent, name, _four_bit_linear(bitsandbytes, linear))
    model.is_loaded_in_4bit = True  # which is how peft knows


def _four_bit_linear(bitsandbytes: Any, linear: nn.Linear) -> nn.Module:
    device, dtype, shape = linear.weight.device, linear.weight.dtype, linear.weight.shape
    codes = torch.randint(0, 256, (shape.numel() // 2, 1), dtype=torch.uint8, device=device)
    scales = torch.full((shape.numel() // BLOCK,), SCALE, dtype=torch.float32, device=device)
    state = bitsandbytes.functional.QuantState(
        absmax=scales, shape=shape, code=_nf4(bitsandbytes, device), blocksize=BLOCK, quant_type="nf4", dtype=dtype
    )
    made: nn.Module = bitsandbytes.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=dtype, quant_type="nf4", device="meta"
    )
    made.weight = bitsandbytes.nn.Params4bit(
        codes, requires_grad=False, quant_state=state, blocksize=BLOCK, compress_statistics=False, quant_type="nf4",
        module=made, bnb_quantized=True,
    )  # fmt: skip
    made.quant_state = state
    return made


def _nf4(bitsandbytes: Any, device: torch.device) -> Tensor:
    """The 16 values that a code stands for; made on the CPU, since it is normalized there."""
    with torch.device("cpu"):
        values: Tensor = bitsandbytes.functional.get_4bit_type("nf4", device="cpu").float()
    return values.to(device)
