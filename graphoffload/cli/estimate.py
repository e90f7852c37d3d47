"""What training a language model of Hugging Face takes on GPUs that are not here: what fits on which card, and how fast.

    python -m graphoffload estimate config.json --tokens 8192 --optimizer adamw
    python -m graphoffload estimate meta-llama/Llama-3.1-8B --tokens 8192 --lora 16 --cards rtx-4090 l40s
    python -m graphoffload estimate config.json --gpus 8 --cards h100-sxm --json

From the configuration alone: no weights, no GPU. The blocks are compiled one by one, as trainers do. Their step is recorded
once and planned for each card. Tokens a second count the optimizer, and with --gpus what FSDP sends between GPUs. Times are
those of profiles (python -m graphoffload hardware --list), of which h200-sxm is measured and all others are datasheets.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from graphoffload.cli.output import DONE, OVER_BUDGET, print_lines
from graphoffload.compiler.optimizer_state import NAMES
from graphoffload.hardware.profile import PROFILES
from graphoffload.integrations.estimate import Estimate, Model, Training, estimated, model_of, recorded
from graphoffload.units import format_bytes

_CARDS = [name for name in PROFILES if name != "cpu"]


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("config", help="a model's name on the hub, a folder, or a config.json")
    parser.add_argument("--batch", type=int, default=1, help="sequences a GPU and step (default: 1)")
    parser.add_argument("--tokens", type=int, default=4096, help="of one sequence (default: 4096)")
    parser.add_argument("--gpus", type=int, default=1, help="that share parameters, gradients and optimizer state (FSDP)")
    parser.add_argument("--optimizer", default="adamw", metavar="NAME", help=f"one of {', '.join(NAMES)} (default: adamw)")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank on all linears; else everything")
    parser.add_argument("--dtype", default="bfloat16", help="of parameters and activations (default: bfloat16)")
    parser.add_argument("--cards", nargs="+", default=_CARDS, metavar="NAME", help=f"of {', '.join(_CARDS)} (default: all)")
    parser.add_argument("--json", action="store_true", help="print the estimates as JSON")


def start(args: argparse.Namespace) -> int:
    """Print one line a card; returns the exit status, OVER_BUDGET where no card can train it."""
    named = {field.name for field in dataclasses.fields(Training)}
    training = Training(**{name: value for name, value in vars(args).items() if name in named})
    found: list[Estimate] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("building the model without its weights")
        model = model_of(training)
        progress.update(task, description="following one step with fake tensors")
        step = recorded(model, training, args.cards[0])
        for at, card in enumerate(args.cards):
            progress.update(task, description=f"planning for {card} ({at + 1} of {len(args.cards)})")
            found.append(estimated(step, card))
    if args.json:
        print_lines(json.dumps([dataclasses.asdict(one) for one in found], indent=2))
    else:
        print_lines(*_lines(model, training, found))
    return DONE if any(one.plan_bytes is not None for one in found) else OVER_BUDGET


def _lines(model: Model, training: Training, found: list[Estimate]) -> list[str]:
    trained = "" if training.lora is None else f", of which {_count(model.trained_count)} learn (LoRA, rank {training.lora})"
    shared = f", {training.gpus} GPUs with FSDP" if training.gpus > 1 else ""
    lines = [
        f"{model.name}: {_count(model.parameter_count)} parameters{trained}, {training.dtype}, {training.optimizer}, "
        f"{training.batch} x {training.tokens} tokens a GPU{shared}",
        "",
        f"{'card':<10} {'device':>10} {'keep-all':>11} {'planned':>11} {'slowdown':>9} {'tokens/s':>9}  what to do",
    ]
    lines.extend(_line(one) for one in found)
    return [*lines, "", "Memory of one GPU, everything counted; tokens of all GPUs. Times are those of profiles."]


def _line(one: Estimate) -> str:
    start = f"{one.card:<10} {format_bytes(one.device_bytes):>10}"
    if one.plan_bytes is None or one.keep_bytes is None or one.tokens_per_s is None or one.slowdown is None:
        least = "" if one.least_bytes is None else f": {format_bytes(one.least_bytes)} are the least"
        return f"{start} {'-':>11} {'-':>11} {'-':>9} {'-':>9}  does not fit{least}"
    done = [
        f"{word} {format_bytes(nbytes)}"
        for word, nbytes in (("offloads", one.offloaded_bytes), ("recomputes", one.recomputed_bytes))
        if nbytes
    ]
    doing = "plain torch.compile fits" if one.keep_fits else ", ".join(done) or "keeps everything"
    sizes = f"{format_bytes(one.keep_bytes):>11} {format_bytes(one.plan_bytes):>11}"
    return f"{start} {sizes} {one.slowdown:>+8.1%} {one.tokens_per_s:>9.0f}  {doing}"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"
