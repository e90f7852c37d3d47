"""Measure variants of one model on one GPU.

    python3 tests/gpu/bench.py --model llama4k --variants keep,offload:5.8GB,offload:all --steps 10 --out DIR
    python3 tests/gpu/bench.py --model stack32k --variants 'over:12.1GB' 'ours:{"policy": "offload"}' --steps 30
    python3 tests/gpu/bench.py --model small --tiny --variants keep,budget:0.5,checkpoint    # a CPU does this

Names are explained by --list. Sizes of a model can be changed: --size tokens=8192 batch=2.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("PYTHONUNBUFFERED", "1")

import torch  # noqa: E402
from gpu import variants  # noqa: E402
from gpu.models import MODELS  # noqa: E402
from gpu.runner import Options, Runner  # noqa: E402


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="small")
    parser.add_argument("--variants", nargs="+", default=["keep"], help="names, separated by spaces or commas")
    parser.add_argument("--list", action="store_true", help="explain the names of variants and exit")
    parser.add_argument("--steps", type=int, default=10, help="measured steps a side")
    parser.add_argument("--block", type=int, default=5, help="steps before the other side has its turn")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--solo", action="store_true", help="one model in memory at a time; the baseline before and after")
    parser.add_argument("--limit-s", type=float, default=540.0, help="skip what has not begun by then")
    parser.add_argument("--variant-limit-s", type=float, default=200.0, help="a variant that takes longer is a hang")
    parser.add_argument("--tolerance", type=float, default=None, help="whole-gradient error that is still rounding")
    parser.add_argument("--trace", action="store_true", help="profile one step of each variant of graphoffload")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--size", nargs="*", default=[], metavar="NAME=N", help="change single sizes of the model")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default=None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=None, help="folder for JSON and traces")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run; 0 when every variant ran and every gradient was right."""
    given = arguments(argv)
    if given.list:
        print(variants.__doc__)
        return 0
    names = [name for text in given.variants for name in variants.split_names(text)]
    for name in names:
        variants.parse(name)
    options = Options(
        steps=given.steps, block=given.block, warm_up=given.warm_up, solo=given.solo, limit_s=given.limit_s,
        variant_limit_s=given.variant_limit_s, tolerance=given.tolerance, trace=given.trace, tiny=given.tiny,
        sizes={key: int(value) for key, value in (pair.split("=") for pair in given.size)},
        dtype=getattr(torch, given.dtype) if given.dtype else None, out=given.out,
    )  # fmt: skip
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
    runner = Runner(given.model, given.device, options)
    runner.start()
    for name in names:
        runner.run(name)
    runner.finish()
    return 0 if all(row.status.startswith("ok") for row in runner.rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
