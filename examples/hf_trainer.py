"""Fine-tune with transformers.Trainer: train, evaluate, save, with the activations of attention and MLP on the host.

    pip install ".[examples]"                     # in a checkout
    python examples/hf_trainer.py                 # all parameters
    python examples/hf_trainer.py --lora          # a LoRA adapter; needs peft

The one line that matters stands before the Trainer: `model.compile(backend="graphoffload", options=...)`. It compiles in
place, so the Trainer, evaluation and save_pretrained see the model they know. Trainer's own argument
`torch_compile_backend="graphoffload"` does not work: accelerate refuses every backend that it does not list. Nothing is
downloaded: a tiny Llama with random weights learns bytes of Python's standard library.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import graphoffload


class Bytes(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Windows of `context` bytes of the standard library's modules: real text that is on every machine."""

    def __init__(self, files: Sequence[Path], windows: int, context: int) -> None:
        data = b"".join(file.read_bytes() for file in files)[: windows * context]
        self.rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).long().view(-1, context)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def build(args: argparse.Namespace) -> Any:
    """A Llama over bytes; with --lora its linears are frozen and only an adapter of rank 8 learns."""
    config = LlamaConfig(
        hidden_size=args.width,
        intermediate_size=args.width * 7 // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=args.context,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    if not args.lora:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.05))


def load(folder: str, args: argparse.Namespace) -> Any:
    """The saved model, as anyone would load it; an adapter goes on the base that it was trained on."""
    if not args.lora:
        return AutoModelForCausalLM.from_pretrained(folder)
    from peft import PeftModel

    torch.manual_seed(0)
    base = build(argparse.Namespace(**{**vars(args), "lora": False}))
    return PeftModel.from_pretrained(base, folder)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Defaults take under a minute on a laptop."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=16 if gpu else 2)
    parser.add_argument("--width", type=int, default=1024 if gpu else 64)
    parser.add_argument("--context", type=int, default=2048 if gpu else 128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2, help="microbatches a step")
    parser.add_argument("--lora", action="store_true", help="train a LoRA adapter (needs peft)")
    inner = "inductor" if gpu else "aot_eager"  # for so small a model, most of a minute would go to the C++ compiler
    parser.add_argument("--inner", default=inner, choices=["inductor", "aot_eager"])
    args = parser.parse_args(argv)
    if args.lora and importlib.util.find_spec("peft") is None:
        parser.error("--lora needs peft, which is not installed here: pip install peft, or run without --lora")
    return args


def trainer_of(model: Any, args: argparse.Namespace, folder: str) -> Trainer:
    """Trainer as usual; it is told nothing about compilation."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    arguments = TrainingArguments(
        folder,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=args.batch,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=1e-2 if args.lora else 3e-3,
        logging_steps=max(1, args.steps // 6),
        eval_strategy="steps",
        eval_steps=max(1, args.steps // 2),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        seed=0,
    )
    rows = args.steps * args.batch * args.accumulate
    train, held_out = Bytes(files[:-20], rows, args.context), Bytes(files[-20:], 4 * args.batch, args.context)
    return Trainer(model, arguments, train_dataset=train, eval_dataset=held_out)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, evaluate, save, load again. Returns the evaluation losses: before, after, and of what was loaded."""
    args = parse(argv)
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # so small a model is as fast on one thread, and far faster on a busy machine
    start = time.perf_counter()
    torch.manual_seed(0)
    model = build(args)
    model.compile(
        backend="graphoffload",
        options={
            "policy": {"*.self_attn*": "offload", "*.mlp*": "offload"},
            "min_tensor_bytes": "1MiB" if torch.cuda.is_available() else "64KiB",
            "inner": args.inner,
        },
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(model, args, folder)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
        print(graphoffload.OffloadReport(plans=tuple(graphoffload.last_plans())))
        stats = graphoffload.stats()
        trainer.model.save_pretrained(folder)
        loaded = trainer_of(load(folder, args), args, folder).evaluate()["eval_loss"]
    print(f"evaluation loss {before:.4f} -> {after:.4f} in {args.steps} steps; saved and loaded again {loaded:.4f}")
    print(f"offloaded {stats['d2h_bytes']} bytes in {stats['offloads']} copies, reloaded {stats['h2d_bytes']} bytes")
    if not math.isclose(after, loaded, rel_tol=1e-2 if torch.cuda.is_available() else 1e-4):
        raise SystemExit(f"what was saved is not what was trained: evaluation loss {loaded:.6f} instead of {after:.6f}")
    print(f"{time.perf_counter() - start:.0f} s in all, compilation included")
    return {"before": before, "after": after, "loaded": loaded, "offloads": stats["offloads"]}


if __name__ == "__main__":
    main()
