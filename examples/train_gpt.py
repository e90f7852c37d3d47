"""Train a byte-level GPT on the sources of Python's standard library, with offloaded activations.

    python examples/train_gpt.py
    python examples/train_gpt.py --policy auto --device-budget 40GiB --layers 24 --width 2048     # on a GPU

The one line that matters is `model.compile(backend="graphoffload", options=...)`. Before training, one step is taken with
everything kept and one with the plan, from the same weights and the same batch, and their gradients are compared.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

import graphoffload

CONSOLE = Console(soft_wrap=True, highlight=False)
# Offload and keep-all differ under Inductor by fusion only, that is by rounding; anything larger is a bug.
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


class Attention(nn.Module):
    """Causal self attention, (batch, context, width) to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        q, k, v = self.qkv(x).view(batch, context, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, context, width))


class Block(nn.Module):
    """Attention and MLP, each with its norm before it and a residual around it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Bytes to the loss of predicting the next byte. The head shares its weight with the embedding."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.positions = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def corpus(at_most_bytes: int = 8_000_000) -> Tensor:
    """The standard library's own modules as one run of bytes: real text that is on every machine."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)[:at_most_bytes]), dtype=torch.uint8)


def batch_of(data: Tensor, args: argparse.Namespace, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, (batch, context) int64 each; the same for the same step."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(data) - args.context - 1, (args.batch,), generator=generator)
    rows = torch.stack([data[s : s + args.context + 1] for s in starts.tolist()]).long().to(args.device)
    return rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """One forward, under autocast where the dtype is bfloat16."""
    with torch.autocast(tokens.device.type, dtype=dtype, enabled=dtype != torch.float32):
        loss: Tensor = model(tokens, targets)
    return loss


def gradients(model: nn.Module, args: argparse.Namespace, data: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one step from a fixed seed; the model's own gradients are cleared again."""
    torch.manual_seed(0)
    loss = loss_of(model, *batch_of(data, args, 0), args.dtype)
    loss.backward()
    grads = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.item(), grads


def compare(ours: dict[str, Tensor], kept: dict[str, Tensor]) -> tuple[float, float]:
    """Largest absolute difference of any gradient element, and the relative error of the whole gradient as one vector."""
    if ours.keys() != kept.keys():
        raise SystemExit(f"gradients are missing for {sorted(ours.keys() ^ kept.keys())}")
    largest = max((ours[name] - kept[name]).abs().max().item() for name in kept)
    error = sum((ours[name].double() - kept[name].double()).square().sum().item() for name in kept)
    size = sum(kept[name].double().square().sum().item() for name in kept)
    return largest, (error / size) ** 0.5


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Command line to options of the backend."""
    options: dict[str, Any] = {"policy": args.policy, "inner": args.inner, "min_tensor_bytes": args.min_tensor_bytes}
    if args.device_budget:
        options["device_budget"] = args.device_budget
    if args.max_slowdown is not None:
        options["max_slowdown"] = args.max_slowdown
    return options


def train(model: nn.Module, args: argparse.Namespace, data: Tensor) -> tuple[list[float], list[float]]:
    """Losses and step times (seconds). The first step compiles nothing any more: the comparison did."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    losses: list[float] = []
    times: list[float] = []
    shown = TextColumn("loss {task.fields[loss]:.3f}")
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), shown, TimeElapsedColumn())
    with Progress(*columns, console=CONSOLE) as progress:
        task = progress.add_task("", total=args.steps, loss=float("nan"))
        for step in range(args.steps):
            start = time.perf_counter()
            loss = loss_of(model, *batch_of(data, args, step), args.dtype)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())  # waits for the device
            times.append(time.perf_counter() - start)
            progress.update(task, advance=1, loss=losses[-1])
            if step % max(1, args.steps // 8) == 0 or step == args.steps - 1:
                progress.console.print(f"step {step:4d}  loss {losses[-1]:.4f}  {1000 * times[-1]:.1f} ms")
    return losses, times


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Defaults take under a minute on a laptop; on a GPU the model is a hundred times as large."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100 if gpu else 60)
    parser.add_argument("--layers", type=int, default=12 if gpu else 4)
    parser.add_argument("--width", type=int, default=1024 if gpu else 128)
    parser.add_argument("--heads", type=int, default=16 if gpu else 4)
    parser.add_argument("--context", type=int, default=2048 if gpu else 128)
    parser.add_argument("--batch", type=int, default=8 if gpu else 4)
    parser.add_argument("--lr", type=float, default=3e-4 if gpu else 2e-3)
    parser.add_argument("--policy", default="offload", help="auto, keep, offload or recompute; nothing is short on a CPU")
    parser.add_argument("--device-budget", help='such as "40GiB" or "80%%"; with --policy auto')
    parser.add_argument("--max-slowdown", type=float, help="such as 0.02; with --policy auto")
    parser.add_argument("--min-tensor-bytes", type=int, default=2**20 if gpu else 2**15)
    parser.add_argument("--inner", default="inductor", choices=["inductor", "aot_eager"])
    args = parser.parse_args(argv)
    if args.device_budget or args.max_slowdown is not None:
        args.policy = "auto"
    args.device = "cuda" if gpu else "cpu"
    args.dtype = torch.bfloat16 if gpu else torch.float32
    return args


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Compare gradients, train, print. Returns losses, step times (seconds) and both gradient errors."""
    args = parse(argv)
    if args.device == "cpu":
        torch.set_num_threads(1)  # so small a model is as fast on one thread, and far faster on a busy machine
    torch.manual_seed(0)
    data = corpus()
    model = GPT(args.layers, args.width, args.heads, args.context).to(args.device)
    parameters = sum(p.numel() for p in model.parameters())
    CONSOLE.print(f"{parameters / 1e6:.1f} M parameters, {len(data) / 1e6:.1f} MB of text, {args.device}, {args.inner}")

    keep_all = copy.deepcopy(model)  # before compile: a copy of a compiled model is not compiled
    keep_all.compile(backend="graphoffload", options={"policy": "keep", "inner": args.inner})
    kept_loss, kept = gradients(keep_all, args, data)
    del keep_all

    model.compile(backend="graphoffload", options=options_of(args))
    loss, ours = gradients(model, args, data)
    print(graphoffload.OffloadReport(plans=tuple(graphoffload.last_plans()[-1:])))
    largest, relative = compare(ours, kept)
    verdict = "equal to the bit" if largest == 0.0 else f"within rounding ({ROUNDING[args.dtype]:.0e})"
    if relative > ROUNDING[args.dtype]:
        raise SystemExit(f"gradients differ from keep-all: max {largest:.3e}, relative {relative:.3e}; {loss=} {kept_loss=}")
    CONSOLE.print(f"gradients against keep-all: max abs difference {largest:.3e}, relative error {relative:.3e}: {verdict}")
    del ours, kept

    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, times = train(model, args, data)
    typical = sorted(times)[len(times) // 2]
    CONSOLE.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps, median {1000 * typical:.1f} ms a step")
    if args.device == "cuda":
        CONSOLE.print(f"peak {torch.cuda.max_memory_allocated() / 1e9:.2f} GB allocated")
    return {"losses": losses, "times_s": times, "max_abs_error": largest, "relative_error": relative}


if __name__ == "__main__":
    main()
