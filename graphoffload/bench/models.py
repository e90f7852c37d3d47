"""The models that are measured, by name, each in its real size and in one that a CPU trains in a second.

    workload = build("llama4k", "cuda")           HF LlamaForCausalLM, 8 layers, batch 4 x 4096, bf16, sdpa
    workload = build("stack32k", "cuda", {"tokens": 16384})
    loss = workload.loss()                        one forward; loss.backward() is the rest of the step

The two Llamas share their sizes: hidden 4096, MLP 14336, 32 heads of which 8 for keys and values, vocabulary 32000.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from graphoffload.bench import nets
from graphoffload.bench.adapters import adapted
from graphoffload.bench.recipe import LOW, PLAIN, Recipe, cast_where_used
from graphoffload.errors import ConfigError

Sizes = dict[str, int]
IGNORED = -100  # a target that cross entropy leaves out


@dataclass(slots=True)
class Workload:
    """A module in training mode with one batch; `loss()` is a forward through whatever the module is compiled with.

    Attributes:
        blocks: lists of modules that full checkpointing wraps, by their path.
        random: forward draws random numbers, so eager and compiled runs differ.
        recipe: the optimizer of its steps, and in what precision they compute.
    """

    name: str
    module: nn.Module
    batch: dict[str, Tensor]
    sizes: Sizes
    blocks: tuple[str, ...] = ("layers",)
    random: bool = False
    hugging_face: bool = False
    constants: dict[str, Any] = field(default_factory=dict)
    recipe: Recipe = PLAIN

    def loss(self) -> Tensor:
        """Forward; a Hugging Face output keeps only its loss, so the logits are dropped before backward."""
        device = next(iter(self.batch.values())).device
        with self.recipe.forward_context(device):
            output = self.module(**self.batch, **self.constants)
        loss: Tensor = output.loss if self.hugging_face else output
        return loss

    @property
    def tokens(self) -> int:
        """Samples that one step trains on: tokens, or images."""
        leading = next(iter(self.batch.values()))
        return leading.numel() if leading.dtype == torch.int64 else leading.shape[0]


@dataclass(frozen=True)
class Spec:
    """How to make a workload: real and tiny sizes, and a function of (sizes, device)."""

    make: Callable[[Sizes, torch.device], Workload]
    real: Sizes
    tiny: Sizes
    dtype: torch.dtype = torch.bfloat16


def _ids(batch: int, tokens: int, vocab: int, device: torch.device, seed: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (batch, tokens), generator=generator, device="cpu").to(device)


def _floats(*shape: int, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    return values.to(device, torch.get_default_dtype())


def _hf_llama(s: Sizes, device: torch.device) -> Workload:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _hf_decoder(LlamaConfig, LlamaForCausalLM, s, device)


def _lora(s: Sizes, device: torch.device) -> Workload:
    workload = _hf_llama(s, device)
    adapted(workload.module, rank=s["rank"], bits=s["bits"])
    return workload


def _hf_qwen(s: Sizes, device: torch.device) -> Workload:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _hf_decoder(Qwen3Config, Qwen3ForCausalLM, s, device, head_dim=s["dim"] // s["heads"])


def transformers_llama(s: Sizes) -> nn.Module:
    """LlamaForCausalLM of these sizes, on the device that is current."""
    from transformers import LlamaConfig, LlamaForCausalLM

    module: nn.Module = LlamaForCausalLM(_hf_config(LlamaConfig, s))
    return module


def _hf_config(make: Any, s: Sizes, **more: int) -> Any:
    """A configuration by its class, which takes more keywords than its type says."""
    return make(
        vocab_size=s["vocab"], hidden_size=s["dim"], intermediate_size=s["hidden"], num_hidden_layers=s["layers"],
        num_attention_heads=s["heads"], num_key_value_heads=s["kv_heads"], max_position_embeddings=s["tokens"],
        tie_word_embeddings=bool(s.get("tied")), use_cache=False, attn_implementation="sdpa", **more,
    )  # fmt: skip


def _hf_decoder(make: Any, model: Any, s: Sizes, device: torch.device, **more: int) -> Workload:
    """A decoder of Transformers by its configuration's class and its own."""
    config = _hf_config(make, s, **more)
    ids = _ids(s["batch"], s["tokens"], s["vocab"], device)
    return Workload(
        "", model(config), {"input_ids": ids, "labels": ids}, s, blocks=("model.layers",), hugging_face=True,
        constants={"use_cache": False},
    )  # fmt: skip


def _hf_gpt2(s: Sizes, device: torch.device) -> Workload:
    from transformers import GPT2Config, GPT2LMHeadModel

    make: Any = GPT2Config
    config = make(
        vocab_size=s["vocab"], n_embd=s["dim"], n_layer=s["layers"], n_head=s["heads"], n_positions=s["tokens"],
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, use_cache=False, attn_implementation="sdpa",
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    ids = _ids(s["batch"], s["tokens"], s["vocab"], device)
    return Workload(
        "", GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}, s, blocks=("transformer.h",), hugging_face=True,
        random=True, constants={"use_cache": False},
    )  # fmt: skip


def _hf_moe(s: Sizes, device: torch.device) -> Workload:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    workload = _hf_decoder(
        Qwen3MoeConfig, Qwen3MoeForCausalLM, s, device, head_dim=s["head_dim"], moe_intermediate_size=s["expert"],
        num_experts=s["experts"], num_experts_per_tok=s["chosen"],
    )  # fmt: skip
    without_mask(workload.module)
    return workload


def _hf_whisper(s: Sizes, device: torch.device) -> Workload:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=s["dim"], encoder_layers=s["layers"], decoder_layers=s["layers"], encoder_attention_heads=s["heads"],
        decoder_attention_heads=s["heads"], encoder_ffn_dim=4 * s["dim"], decoder_ffn_dim=4 * s["dim"],
        num_mel_bins=s["mels"], max_source_positions=s["frames"] // 2, vocab_size=s["vocab"], use_cache=False, dropout=0.0,
    )  # fmt: skip
    batch = {
        "input_features": _floats(s["batch"], s["mels"], s["frames"], device=device, seed=3),
        "labels": _ids(s["batch"], s["tokens"], s["vocab"], device),
    }
    blocks = ("model.encoder.layers", "model.decoder.layers")
    return Workload("", WhisperForConditionalGeneration(config), batch, s, blocks=blocks, hugging_face=True)


def _convnext(s: Sizes, device: torch.device) -> Workload:
    images, labels = _images(s, device)
    sizes = {key: s[key] for key in ("width", "middle", "classes")}
    blocks = tuple(f"stage{number}" for number in range(4))
    return Workload("", nets.ConvNeXt(**sizes), {"images": images, "labels": labels}, s, blocks=blocks)


def _stack(s: Sizes, device: torch.device) -> Workload:
    sizes = {key: value for key, value in s.items() if key != "batch"}
    return Workload("", nets.LlamaStack(**sizes), {"ids": _ids(s["batch"], s["tokens"], s["vocab"], device)}, s)


def _images(s: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
    """A batch of square images, and a class of each."""
    labels = _ids(1, s["batch"], s["classes"], device)[0]
    return _floats(s["batch"], 3, s["image"], s["image"], device=device, seed=3), labels


def _vit(s: Sizes, device: torch.device) -> Workload:
    images, labels = _images(s, device)
    sizes = {key: value for key, value in s.items() if key != "batch"}
    return Workload("", nets.VisionTransformer(**sizes), {"images": images, "labels": labels}, s)


def _unet(s: Sizes, device: torch.device) -> Workload:
    shape = (s["batch"], 3, s["image"], s["image"])
    batch = {"images": _floats(*shape, device=device, seed=3), "noise": _floats(*shape, device=device, seed=4)}
    return Workload("", nets.UNet(width=s["width"], levels=s["levels"]), batch, s, blocks=("down", "middle", "up"))


def _encdec(s: Sizes, device: torch.device) -> Workload:
    batch = {
        "source": _ids(s["batch"], s["tokens"], s["vocab"], device, seed=5),
        "target": _ids(s["batch"], s["tokens"], s["vocab"], device, seed=6),
    }
    sizes = {key: value for key, value in s.items() if key != "batch"}
    return Workload("", nets.EncoderDecoder(**sizes), batch, s, blocks=("encoder", "decoder"))


class ChunkedLoss(nn.Module):
    """A Hugging Face causal model that returns its loss alone, taken `chunk` tokens at a time; 0: of all tokens at once.

    A chunk's logits are made again in backward, those of all tokens are not. The model's own forward makes all logits at once
    and returns them, so that backward is also given a gradient of zeros for them: at 131072 tokens and 32000 words 8.4 GB
    each, whatever the method.
    """

    def __init__(self, model: Any, chunk: int) -> None:
        super().__init__()
        self.model, self.chunk = model, chunk

    def forward(self, input_ids: Tensor, labels: Tensor, **options: Any) -> Tensor:
        """Mean cross entropy of (batch, tokens) on the next token; the last token has none."""
        hidden = self.model.base_model(input_ids=input_ids, **options).last_hidden_state
        targets = torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)), dim=1)
        if not self.chunk:
            return self._summed(hidden, targets) / labels[:, 1:].numel()
        parts = zip(hidden.split(self.chunk, dim=1), targets.split(self.chunk, dim=1), strict=True)
        total: Any = sum(checkpoint(self._summed, part, target, use_reentrant=False) for part, target in parts)
        result: Tensor = total / labels[:, 1:].numel()
        return result

    def _summed(self, hidden: Tensor, target: Tensor) -> Tensor:
        logits = self.model.get_output_embeddings()(hidden).float()
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum", ignore_index=IGNORED)


def without_mask(model: Any) -> None:
    """Give a Transformers model its own scaled dot product attention, always without a mask: causal, no padding, no packing."""
    import transformers
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        return sdpa_attention_forward(module, query, key, value, None, **options)

    transformers.AttentionInterface.register("sdpa_without_mask", attend)  # of a name it knows no mask for, none is made
    model.set_attn_implementation("sdpa_without_mask")


def lengthened(workload: Workload, chunk: int) -> Workload:
    """A Hugging Face workload for long sequences: no mask, and its loss `chunk` tokens at a time (0: as the model takes it)."""
    without_mask(workload.module)
    if not chunk:
        return workload
    blocks = tuple(f"model.{path}" for path in workload.blocks)
    return replace(workload, module=ChunkedLoss(workload.module, chunk), blocks=blocks, hugging_face=False)


def _trained(make: Callable[[Sizes, torch.device], Workload]) -> Callable[[Sizes, torch.device], Workload]:
    """As a trainer calls it: no mask, and the loss is all that the model returns; `chunk` tokens of it at a time, 0: all."""

    def made(sizes: Sizes, device: torch.device) -> Workload:
        workload = make(sizes, device)
        without_mask(workload.module)
        blocks = tuple(f"model.{path}" for path in workload.blocks)
        return replace(workload, module=ChunkedLoss(workload.module, sizes["chunk"]), blocks=blocks, hugging_face=False)

    return made


def _long(make: Callable[[Sizes, torch.device], Workload]) -> Callable[[Sizes, torch.device], Workload]:
    return lambda sizes, device: lengthened(make(sizes, device), sizes["chunk"])


_LLAMA = {"layers": 8, "dim": 4096, "hidden": 14336, "heads": 32, "kv_heads": 8, "vocab": 32000}
_TINY = {"layers": 2, "dim": 64, "hidden": 128, "heads": 4, "kv_heads": 2, "vocab": 256, "batch": 2, "tokens": 64}
_TINY_LM = {**_TINY, "tied": 1, "chunk": 0}
_TINY_GPT = {"layers": 2, "dim": 64, "heads": 4, "vocab": 256, "batch": 2, "tokens": 64}
_TINY_LORA = {**_TINY, "rank": 4, "bits": 16}
_4X2K = {"batch": 4, "tokens": 2048, "chunk": 0}
_SMALL = {"layers": 4, "dim": 1024, "hidden": 3584, "heads": 16, "kv_heads": 4, "vocab": 8192, "batch": 4, "tokens": 2048}

MODELS: dict[str, Spec] = {
    "llama4k": Spec(_hf_llama, {**_LLAMA, "batch": 4, "tokens": 4096}, _TINY),
    "stack32k": Spec(_stack, {**_LLAMA, "batch": 1, "tokens": 32768}, _TINY),
    "qwen": Spec(_hf_qwen, {**_LLAMA, "batch": 1, "tokens": 8192}, _TINY),
    "longllama": Spec(
        _long(_hf_llama), {**_LLAMA, "batch": 1, "tokens": 65536, "chunk": 8192}, {**_TINY, "chunk": 24}
    ),
    "small": Spec(_stack, _SMALL, _TINY),
    "gpt2": Spec(
        _hf_gpt2, {"layers": 24, "dim": 1024, "heads": 16, "vocab": 50304, "batch": 16, "tokens": 1024}, _TINY_GPT
    ),
    "vit": Spec(
        _vit,
        {"layers": 24, "dim": 1024, "heads": 16, "image": 224, "patch": 14, "classes": 1000, "batch": 64},
        {"layers": 2, "dim": 32, "heads": 2, "image": 32, "patch": 8, "classes": 10, "batch": 4},
    ),
    "unet": Spec(
        _unet,
        {"width": 128, "levels": 4, "image": 256, "batch": 16},
        {"width": 16, "levels": 2, "image": 16, "batch": 2},
    ),
    "encdec": Spec(
        _encdec, {"layers": 6, "dim": 2048, "heads": 16, "vocab": 32000, "batch": 8, "tokens": 2048}, _TINY_GPT
    ),
    "convnext": Spec(
        _convnext,
        {"width": 192, "middle": 27, "image": 224, "classes": 1000, "batch": 64},
        {"width": 8, "middle": 3, "image": 64, "classes": 10, "batch": 2},
    ),
    "whisper": Spec(
        _hf_whisper,
        {"layers": 12, "dim": 1280, "heads": 20, "mels": 128, "frames": 3000, "vocab": 51865, "batch": 16, "tokens": 440},
        {"layers": 2, "dim": 64, "heads": 4, "mels": 16, "frames": 64, "vocab": 51865, "batch": 2, "tokens": 12},
    ),
    "qwen3-moe": Spec(
        _hf_moe,
        {"layers": 6, "dim": 2048, "hidden": 6144, "expert": 768, "experts": 32, "chosen": 8, "heads": 32, "kv_heads": 4,
         "head_dim": 128, "vocab": 32000, "batch": 2, "tokens": 4096},
        {**_TINY, "expert": 48, "experts": 4, "chosen": 2, "head_dim": 16},
    ),
    "moe": Spec(_stack, {**_SMALL, "dim": 2048, "hidden": 2048, "experts": 8, "batch": 4}, {**_TINY, "experts": 3}),
    "llama3-1b": Spec(
        _trained(_hf_llama),
        {"layers": 16, "dim": 2048, "hidden": 8192, "heads": 32, "kv_heads": 8, "vocab": 128256, "tied": 1, **_4X2K},
        _TINY_LM,
    ),
    "llama3.2-3b": Spec(
        _trained(_hf_llama),
        {"layers": 28, "dim": 3072, "hidden": 8192, "heads": 24, "kv_heads": 8, "vocab": 128256, "tied": 1, **_4X2K},
        _TINY_LM,
    ),
    "llama3-8b-lora": Spec(
        _lora, {**_LLAMA, "layers": 32, "vocab": 128256, "rank": 32, "bits": 16, "batch": 1, "tokens": 16384}, _TINY_LORA
    ),
    "qwen3-1.7b": Spec(
        _trained(_hf_qwen),
        {"layers": 28, "dim": 2048, "hidden": 6144, "heads": 16, "kv_heads": 8, "vocab": 151936, "tied": 1, **_4X2K},
        _TINY_LM,
    ),
    "qwen3-8b": Spec(
        _trained(_hf_qwen),
        {"layers": 36, "dim": 4096, "hidden": 12288, "heads": 32, "kv_heads": 8, "vocab": 151936, "tied": 0, **_4X2K},
        {**_TINY_LM, "tied": 0},
    ),
}  # fmt: skip


@contextlib.contextmanager
def _defaults(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def build(
    name: str,
    device: torch.device | str,
    sizes: Sizes | None = None,
    *,
    tiny: bool = False,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    recipe: Recipe = PLAIN,
) -> Workload:
    """The workload `name` with parameters drawn from `seed` on `device`; `sizes` override single sizes.

    `dtype` is of the parameters; mixed precision makes them float32.

    Raises:
        ConfigError: an unknown name or size; the message lists the known ones.
    """
    if name not in MODELS:
        raise ConfigError(f"unknown model {name!r}; known: {', '.join(MODELS)}")
    spec = MODELS[name]
    chosen = dict(spec.tiny if tiny else spec.real)
    unknown = (sizes or {}).keys() - chosen.keys()
    if unknown:
        raise ConfigError(f"{name} has no size {sorted(unknown)}; it has {sorted(chosen)}")
    chosen.update(sizes or {})
    device = torch.device(device)
    torch.manual_seed(seed)
    low = LOW if recipe.precision == "cast" else torch.float32
    with _defaults(low if recipe.mixed else dtype or spec.dtype, device):
        workload = spec.make(chosen, device)
    workload.name, workload.recipe = name, recipe
    workload.module.train()
    if recipe.precision == "cast":
        cast_where_used(workload.module)
    return workload
