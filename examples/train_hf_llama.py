"""Train a Hugging Face Llama, built from a configuration, with the attention's and the MLP's activations on the host.

    python examples/train_hf_llama.py
    python examples/train_hf_llama.py --layers 16 --width 2048 --context 4096      # on a GPU

Nothing is downloaded and nothing of the model is edited. With a model from the hub the only line that changes is the one
that makes it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import graphoffload


def build(args: argparse.Namespace) -> LlamaForCausalLM:
    """A Llama with grouped-query attention (two query heads share a key head) and random weights."""
    config = LlamaConfig(
        hidden_size=args.width,
        intermediate_size=args.width * 7 // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=max(1, args.heads // 2),
        vocab_size=args.vocabulary,
        max_position_embeddings=args.context,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    return model.to(args.device, torch.bfloat16 if args.device == "cuda" else torch.float32)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Defaults take under a minute on a laptop."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=8 if gpu else 3)
    parser.add_argument("--width", type=int, default=2048 if gpu else 128)
    parser.add_argument("--heads", type=int, default=16 if gpu else 4)
    parser.add_argument("--context", type=int, default=2048 if gpu else 128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=32000 if gpu else 512)
    parser.add_argument("--inner", default="inductor", choices=["inductor", "aot_eager"])
    args = parser.parse_args(argv)
    args.device = "cuda" if gpu else "cpu"
    return args


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train on one batch that is to be learnt by heart. Returns the losses and step times (seconds)."""
    args = parse(argv)
    if args.device == "cpu":
        torch.set_num_threads(1)  # so small a model is as fast on one thread, and far faster on a busy machine
    torch.manual_seed(0)
    model = build(args)
    model.compile(
        backend="graphoffload",
        options={
            "policy": {"*.self_attn": "offload", "*.mlp": "offload", "*norm*": "recompute"},
            "min_tensor_bytes": "1MiB" if args.device == "cuda" else "64KiB",
            "inner": args.inner,
        },
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(args.vocabulary, (args.batch, args.context), device=args.device)
    losses, times = [], []
    for step in range(args.steps):
        start = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        times.append(time.perf_counter() - start)
        if step == 0:
            print(graphoffload.OffloadReport(plans=tuple(graphoffload.last_plans())))
        if step % 5 == 0 or step == args.steps - 1:
            print(f"step {step:3d}  loss {losses[-1]:.4f}  {1000 * times[-1]:.1f} ms{'  (compiles)' if step == 0 else ''}")
    print(f"host memory held for activations: {graphoffload.host_memory().held_bytes} bytes")
    if args.device == "cuda":
        print(f"peak {torch.cuda.max_memory_allocated() / 1e9:.2f} GB allocated")
    return {"losses": losses, "times_s": times}


if __name__ == "__main__":
    main()
