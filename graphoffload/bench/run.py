"""Measure variants of one model on one GPU, each beside compiled keep-all. The tool that runs where none is named.

    python -m graphoffload bench --model llama4k --variants keep,offload:5.8GB,offload:all --steps 10 --out DIR
    python -m graphoffload bench --model stack32k --variants 'over:12.1GB' 'ours:{"policy": "offload"}' --steps 30
    python -m graphoffload bench --model small --tiny --variants keep,budget:0.5,checkpoint    # a CPU does this

Names of variants are explained by --list. Sizes of a model can be changed: --size tokens=8192 batch=2. A step has an optimizer
with --optimizer adamw, and mixed precision with --precision amp or cast (recipe.py). What others publish is in `bench table`.
Exit status: 1 where a variant failed or a gradient was wrong.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from graphoffload.bench import variants
from graphoffload.bench.models import MODELS
from graphoffload.bench.options import add_model_options, add_recipe_options, add_result_options, add_step_options, keep_results
from graphoffload.bench.recipe import Recipe
from graphoffload.bench.run_options import WARM_UP, Options
from graphoffload.bench.runner import Runner
from graphoffload.report.progress import progress_bar


def arguments(parser: argparse.ArgumentParser) -> None:
    """The tool's options."""
    parser.add_argument("--model", choices=sorted(MODELS), default="small")
    parser.add_argument("--variants", nargs="+", default=["keep"], help="names, separated by spaces or commas")
    parser.add_argument("--list", action="store_true", help="explain the names of variants and exit")
    add_model_options(parser)
    add_step_options(parser)
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help=f"steps before those measured (default: {WARM_UP})")
    parser.add_argument("--solo", action="store_true", help="one model in memory at a time; the baseline before and after")
    parser.add_argument("--limit-s", type=float, default=540.0, help="skip what has not begun by then")
    parser.add_argument("--variant-limit-s", type=float, default=200.0, help="a variant that takes longer is a hang")
    parser.add_argument("--tolerance", type=float, default=None, help="whole-gradient error that is still rounding")
    parser.add_argument("--trace", action="store_true", help="profile one step of each variant of graphoffload")
    add_recipe_options(parser)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=None, help="folder for every sample as JSON, and traces")
    add_result_options(parser)


def start(given: argparse.Namespace) -> int:
    """Run; 0 when every variant ran and every gradient was right."""
    if given.list:
        print(variants.__doc__)
        return 0
    names = [name for text in given.variants for name in variants.split_names(text)]
    for name in names:
        variants.parse(name)
    options = Options(
        steps=given.steps, block=given.block, warm_up=given.warm_up, solo=given.solo, limit_s=given.limit_s,
        variant_limit_s=given.variant_limit_s, tolerance=given.tolerance, trace=given.trace, tiny=given.tiny,
        sizes=dict(given.size), dtype=getattr(torch, given.dtype) if given.dtype else None, out=given.out,
        recipe=Recipe(given.optimizer, given.precision), commit=given.commit, command=given.command_line,
    )  # fmt: skip
    with keep_results(given):
        runner = Runner(given.model, given.device, options)
        with progress_bar(f"bench {given.model}", 1 + len(names)) as runner.bar:
            runner.start()
            for name in names:
                runner.run(name)
        runner.finish()
    return 0 if all(row.status.startswith("ok") for row in runner.rows) else 1
