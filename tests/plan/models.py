"""The models that tests/plan/recordings.py records: real sizes, on the meta device, each traced on a CPU in a minute or less.

`MODELS` has a function by name that returns a module and the keywords of its forward. What graphoffload/bench measures
has the sizes that it is measured in; the others have those of a well-known release, with fewer layers where layers repeat.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from graphoffload.bench import models as bench
from graphoffload.bench import nets

Built = tuple[nn.Module, dict[str, Any]]
H200, H100, A100 = "h200-sxm", "h100-sxm", "a100-80g"


def meta(build: Callable[..., Built]) -> Callable[..., Built]:
    """Run a function with parameters in bf16 on the meta device."""

    @functools.wraps(build)
    def wrapped(*args: Any, **named: Any) -> Built:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("meta"):
                return build(*args, **named)
        finally:
            torch.set_default_dtype(before)

    return wrapped


def ids(*shape: int) -> Tensor:
    """Tokens, which only their shape is known of."""
    return torch.zeros(*shape, dtype=torch.int64)


@meta
def language_model(name: str, batch: int, tokens: int, **fields: Any) -> Built:
    """A causal or masked model of transformers, its config's fields, and labels."""
    import transformers

    config = getattr(transformers, f"{name}Config")(vocab_size=32000, **fields)
    suffix = "ForMaskedLM" if name == "Bert" else "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{name}{suffix}")(config).train()
    return model, {"input_ids": ids(batch, tokens), "labels": ids(batch, tokens)}


@meta
def with_pixels(name: str, shape: tuple[int, ...], **fields: Any) -> Built:
    """An image classifier of transformers."""
    import transformers

    config = getattr(transformers, f"{name}Config")(num_labels=1000, **fields)
    model = getattr(transformers, f"{name}ForImageClassification")(config).train()
    return model, {"pixel_values": torch.zeros(shape), "labels": ids(shape[0])}


@meta
def sequence_to_sequence(batch: int, source: int, target: int, **fields: Any) -> Built:
    """T5."""
    import transformers

    model = transformers.T5ForConditionalGeneration(transformers.T5Config(use_cache=False, **fields)).train()
    return model, {"input_ids": ids(batch, source), "labels": ids(batch, target)}


@meta
def speech(batch: int, **fields: Any) -> Built:
    """Whisper: 30 s of audio in, text out."""
    import transformers

    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(use_cache=False, **fields)).train()
    return model, {"input_features": torch.zeros(batch, 80, 3000), "labels": ids(batch, 448)}


def measured(name: str, **sizes: int) -> Built:
    """A model of graphoffload/bench in the sizes that it is measured in, but for `sizes`."""
    workload = bench.build(name, "meta", sizes)
    return workload.module, {**workload.batch, **workload.constants}


@meta
def llama_block(batch: int, tokens: int, dim: int, hidden: int, heads: int) -> Built:
    """One block alone, as it is compiled where blocks are compiled one by one."""
    turn = torch.zeros(tokens, dim // heads)
    block = nets.LlamaBlock(dim, hidden, heads, heads // 4)
    return block, {"x": torch.zeros(batch, tokens, dim, requires_grad=True), "cos": turn, "sin": turn}


@meta
def transformer_block(batch: int, tokens: int, dim: int, heads: int) -> Built:
    """torch's own encoder layer alone."""
    layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, batch_first=True, norm_first=True)
    return layer, {"src": torch.zeros(batch, tokens, dim, requires_grad=True)}


@meta
def conv_block(batch: int, width: int, size: int) -> Built:
    """One residual block of a UNet."""
    return nets.ResidualConv(width, 2 * width), {"x": torch.zeros(batch, width, size, size, requires_grad=True)}


@meta
def perceptron(rows: int, width: int, layers: int) -> Built:
    """Linear layers with GELU between them."""
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*parts), {"input": torch.zeros(rows, width)}


LLAMA = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 8, "num_attention_heads": 32}
MODELS: dict[str, tuple[str, Callable[[], Built]]] = {
    "llama8l": (H100, lambda: language_model("Llama", 2, 4096, use_cache=False, **LLAMA)),
    "llama8l-cache": (H100, lambda: language_model("Llama", 2, 4096, use_cache=True, **LLAMA)),
    "llama-block": (H200, lambda: llama_block(4, 4096, 4096, 14336, 32)),
    "transformer-block": (A100, lambda: transformer_block(32, 1024, 1024, 16)),
    "conv-block": (A100, lambda: conv_block(16, 128, 256)),
    "perceptron": (H100, lambda: perceptron(65536, 2048, 4)),
    "llama4k": (H200, lambda: measured("llama4k")),
    "small": (H100, lambda: measured("small")),
    "longllama": (H200, lambda: measured("longllama")),
    "gpt2": (H200, lambda: measured("gpt2", layers=12)),
    "vit": (H200, lambda: measured("vit", layers=12)),
    "unet": (H200, lambda: measured("unet")),
    "encdec": (H200, lambda: measured("encdec", layers=3)),
    "moe": (H200, lambda: measured("moe")),
    "qwen3": (H100, lambda: language_model(
        "Qwen3", 2, 4096, use_cache=False, hidden_size=2048, intermediate_size=6144, num_hidden_layers=6,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128)),
    "mixtral": (H200, lambda: language_model(
        "Mixtral", 2, 2048, use_cache=False, hidden_size=1024, intermediate_size=3584, num_hidden_layers=4,
        num_attention_heads=16, num_key_value_heads=4, num_local_experts=8)),
    "gemma2": (H200, lambda: language_model(
        "Gemma2", 2, 4096, use_cache=False, hidden_size=2304, intermediate_size=9216, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, head_dim=256)),
    "mamba2": (H100, lambda: language_model(
        "Mamba2", 4, 2048, use_cache=False, hidden_size=1024, num_hidden_layers=4, state_size=128, num_heads=32, head_dim=64,
        n_groups=1)),
    "bert": (A100, lambda: language_model(
        "Bert", 32, 512, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=16)),
    "whisper": (H100, lambda: speech(
        16, d_model=1024, encoder_layers=4, decoder_layers=4, encoder_attention_heads=16, decoder_attention_heads=16,
        encoder_ffn_dim=4096, decoder_ffn_dim=4096)),
    "resnet50": (A100, lambda: with_pixels("ResNet", (256, 3, 224, 224))),
    "convnext": (A100, lambda: with_pixels("ConvNext", (64, 3, 224, 224))),
}  # fmt: skip
"""By name, the hardware profile whose times are recorded, and the model."""
