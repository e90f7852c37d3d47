"""Tables that others publish, and ours beside them, each by name: what is run, and the figures that were published.

    find("perf-maxing-llama3-1b").texts()        processes for `bench together` and `bench table` (process.py)

A published figure is the author's, on the author's machine and stack; it is shown beside what was measured and decides nothing.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from graphoffload.bench.process import Process, parse_process
from graphoffload.errors import ConfigError
from graphoffload.units import parse_size


@dataclass(frozen=True)
class Figure:
    """What was published for a variant: its ratio to the author's own keep-all, or where there is none what was said."""

    ratio: float | None = None
    said: str = ""


@dataclass(frozen=True)
class Table:
    """A named table.

    Attributes:
        processes: what runs, as text (process.py); several for more than one size, or to compile side by side.
        source: where the published figures are from. published: those by variant, "TOKENS@VARIANT" where sizes differ.
        keep: what the author's keep-all has allocated in all.
    """

    name: str
    about: str
    source: str
    processes: tuple[str, ...]
    published: dict[str, Figure] = field(default_factory=dict)
    keep: str = ""

    def texts(self, *, tiny: bool = False, sizes: dict[str, int] | None = None) -> tuple[str, ...]:
        """The processes, with single sizes changed.

        Tiny ones have sizes of their own, budgets in bytes become shares, and small tensors may be offloaded.
        """
        found = []
        for text in self.processes:
            first, *variants = text.split("@")
            model, *changes = first.split(",")
            named = dict(change.split("=") for change in changes)
            if tiny:
                named = {name: value for name, value in named.items() if not value.isdecimal()}
                variants = [self._share(variant) for variant in variants]
            named |= {name: str(size) for name, size in (sizes or {}).items()}
            found.append("@".join((",".join((model, *(f"{name}={value}" for name, value in named.items()))), *variants)))
        return tuple(dict.fromkeys(found))

    def _share(self, variant: str) -> str:
        variant = variant.replace("offload:all+", "offload:all+min_tensor_bytes=0+")
        if not variant.startswith("total:"):
            return variant
        share = parse_size(variant.removeprefix("total:"), field="total") / parse_size(self.keep, field="keep")
        return f"over:{100 * share:.0f}%"

    def parsed(self) -> list[Process]:
        """The processes as they run in real size."""
        return [parse_process(text) for text in self.texts()]

    def figure(self, process: Process, variant: str) -> Figure:
        """What was published for a variant of a process; an empty figure where nothing was."""
        name = "keep" if variant == "keep-all" else variant
        sized = f"{process.sizes.get('tokens')}@{name}"
        return self.published.get(sized) or self.published.get(name) or Figure()


_MAXING = "torchtitan's auto_perf_maxing (open pull requests #3798 to #4636), one H100, ratios to its own keep-all"
_TRAINED = "optimizer=adamw,precision=cast"
_FIXED = "@selective@checkpoint"
_8B = "qwen3-8b,batch=1,chunk=4096,{tokens},baseline=hf-checkpoint"
_HF = (
    "@per-block/over:peak(hf-checkpoint)@hf-checkpoint-offload@per-block/over:peak(hf-checkpoint-offload)"
    "@per-block/hf-checkpoint"
)
_TRL = "@deepspeed-checkpoint@trl-offload@per-block/over:peak(trl-offload)@unsloth-checkpoint"
_MODULES = ("attn_norm", "core_attn", "attn_proj", "qkv_linear", "mlp_norm", "expert_fc1", "moe_act")
_FRACTIONS = (0.25, 0.5)
_BY_HAND = (
    *(f'offload:all+offload_modules=["{name}"]' for name in _MODULES),
    *(f"offload:all+offload_fraction={share}" for share in _FRACTIONS),
)
_BLOCKS = "@per-block/checkpoint@per-block/over:peak(per-block/checkpoint)"
_BY_BLOCKS = ("vit", "convnext", "gpt2", "encdec", "unet", "stack32k")
_BUDGETS = tuple(f"budget:0.{tenth}" for tenth in range(1, 10))


def _and_ours(variants: Iterable[str]) -> list[str]:
    """Each variant, and then a plan with its measured peak as the budget."""
    return [name for variant in variants for name in (variant, f"over:peak({variant})")]


TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        Table(
            "perf-maxing-llama3-1b", "Llama3-1B's step with AdamW in all of 21.39, 22.07 and 24.35 GB", _MAXING,
            (f"llama3-1b,{_TRAINED}@total:21.39GB@total:22.07GB@total:24.35GB{_FIXED}",),
            {
                "total:21.39GB": Figure(1.149), "total:22.07GB": Figure(1.122), "total:24.35GB": Figure(1.063),
                "keep": Figure(1.0, "32.23 GB"), "selective": Figure(1.073, "24.88 GB"),
            },
            keep="32.23GB",
        ),
        Table(
            "perf-maxing-qwen3-1.7b", "Qwen3-1.7B's step with AdamW in all of 29.49, 30.32 and 33.76 GB", _MAXING,
            (f"qwen3-1.7b,{_TRAINED}@total:29.49GB@total:30.32GB@total:33.76GB{_FIXED}",),
            {
                "total:29.49GB": Figure(1.143), "total:30.32GB": Figure(1.107), "total:33.76GB": Figure(1.102),
                "keep": Figure(1.0, "46.96 GB"),
            },
            keep="46.96GB",
        ),
        Table(
            "hf-qwen3-8b", "Qwen3-8B with Transformers' gradient checkpointing, with and without offload, at its peaks",
            "accelerate #4175 (FSDP2, 24 layers, another model: checkpoint 24.73 GB 1.38 s, with offload 24.73 GB 1.86 s)",
            (f"{_8B.format(tokens='tokens=16384')}{_HF}@per-block/over:peak(per-block/hf-checkpoint)@over:peak(hf-checkpoint)",),
            {"hf-checkpoint": Figure(said="1.38 s"), "hf-checkpoint-offload": Figure(said="1.86 s")},
        ),
        Table(
            "trl-qwen3-8b", "Qwen3-8B with what axolotl and TRL offer, each at its peak", "axolotl #3776, 8192 tokens",
            tuple(f"{_8B.format(tokens=f'tokens={tokens}')}{_HF}{_TRL}" for tokens in (8192, 16384)),
            {
                "8192@hf-checkpoint": Figure(said="2677.7 ms"), "8192@hf-checkpoint-offload": Figure(said="2665.9 ms"),
                "8192@trl-offload": Figure(said="4956 ms, twice the memory"),
            },
        ),
        Table(
            "torchtune-llama3.2-3b", "Llama 3.2 3B, loss in chunks, compiled, checkpointed and offloaded",
            "torchtune's ladder, A100, 2 x 4096 tokens, optimizer in backward where it offloads; ratios by tokens/s",
            ("llama3.2-3b,batch=2,tokens=4096,chunk=512,optimizer=adamw@checkpoint@over:peak(checkpoint)"
             "@compiled/hf-checkpoint-offload@hf-checkpoint-offload@over:peak(hf-checkpoint-offload)",),
            {
                "keep": Figure(1.0, "42.9 GiB"), "checkpoint": Figure(9174 / 7210, "24.9 GiB"),
                "hf-checkpoint-offload": Figure(9174 / 7301, "21.8 GiB"),
            },
        ),
        Table(
            "nets", "Nets of many kinds at the peaks of their checkpointed blocks, compiled block by block or whole",
            "nothing",
            (
                *(f"{model},baseline=per-block/keep{_BLOCKS}" for model in _BY_BLOCKS),
                f"llama4k,baseline=per-block/keep{_BLOCKS}@per-block/over:8.6GB@per-block/over:11.5GB@per-block/over:16GB",
                *(f"{model}@checkpoint@over:peak(checkpoint)" for model in ("whisper", "qwen3-moe", "encdec")),
            ),
        ),
        Table(
            "module-choices", "Megatron's modules to offload, by name and by fraction, and a plan at the peak of each",
            "Megatron-LM #1752: 0.3 % for 99.8 to 100 % of the bytes",
            tuple("@".join(("llama3-1b,precision=cast", *_and_ours(_BY_HAND[half::2]))) for half in (0, 1)),
        ),
        Table(
            "memory-budget", "torch's activation_memory_budget from 0.1 to 0.9, and a plan at the peak of each",
            "pytorch #197838: that budget is neither kept nor monotone",
            tuple("@".join(("llama3-1b,precision=cast", *_and_ours(_BUDGETS[third::3]))) for third in (0, 1, 2)),
        ),
        Table(
            "jax-llama3-1b", "The same Llama in JAX under policies of jax.checkpoint, and a plan at the peak of each",
            "nothing; JAX runs here",
            ("@".join(("llama3-1b", *_and_ours(("jax:nothing", "jax:offload", "jax:dots")), "jax:everything")),),
        ),
    )
}  # fmt: skip

LENGTHS_FROM = "[Unsloth](https://unsloth.ai/docs/basics/unsloth-benchmarks)"
_LENGTHS = {
    12: (21_848, 932), 16: (40_724, 2_551), 24: (78_475, 5_789), 40: (153_977, 12_264), 48: (191_728, 15_502),
    80: (342_733, 28_454),
}  # fmt: skip
PUBLISHED_LENGTHS: dict[str, dict[str, int]] = {
    "longest-llama3-8b-lora,bits=4" + (f",gib={gib}" if gib != 80 else ""): {
        "Unsloth": theirs, "Hugging Face and FlashAttention 2": others
    }
    for gib, (theirs, others) in _LENGTHS.items()
}  # fmt: skip
"""By the subject of examples/longest.py: Llama 3.1 8B, QLoRA of rank 32 on all linears, batch 1, cards of so many GB."""


def find(name: str) -> Table:
    """The table of that name.

    Raises:
        ConfigError: there is none; the message lists them.
    """
    if name not in TABLES:
        near = difflib.get_close_matches(name, TABLES, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"unknown table {name!r}; there are: {', '.join(TABLES)}.{hint}")
    return TABLES[name]


def described() -> str:
    """Every table in a few lines, for people."""
    lines = []
    for table in TABLES.values():
        lines += [table.name, f"    {table.about}", f"    published: {table.source}"]
        lines += [f"    {re.sub('@', ' @', text)}" for text in table.processes]
    return "\n".join(lines)
