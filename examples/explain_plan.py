"""Would it fit, and how fast would it be? Plans a training step for a GPU that need not be there, without running it.

    python examples/explain_plan.py
    python examples/explain_plan.py --hardware a100-80g --device-budget 30GiB --layers 12
    python examples/explain_plan.py --max-slowdown 0.02

The model is made on the meta device: billions of parameters take no memory, and nothing is computed. Times come from the
hardware's datasheet; on the GPU itself, where they are measured, plans are better. The same from the command line, which calls
`build` and has every option of the configuration:

    python -m graphoffload explain examples/explain_plan.py:build --hardware h200-sxm --device-budget 10GiB --out pictures
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from train_gpt import GPT

import graphoffload


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The hardware to plan for, what to ask of it, and the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default="h200-sxm")
    parser.add_argument("--device-budget", default="10GiB", help='such as "40GiB"')
    parser.add_argument("--max-slowdown", type=float, help="such as 0.02; instead of a budget")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--out", help="folder for the report and its pictures; a new one where none is named")
    return parser.parse_args(argv)


def build(
    layers: int = 8, width: int = 4096, heads: int = 32, context: int = 4096, batch: int = 4
) -> tuple[Any, tuple[Any, ...]]:
    """The model and the arguments of one training step, on the meta device."""
    with torch.device("meta"):
        model = GPT(layers, width, heads, context).to(torch.bfloat16)
        tokens = torch.zeros(batch, context, dtype=torch.int64)
    return model, (tokens, tokens)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Print the report, write it as JSON and draw the predicted step. Returns the report and the path of the JSON file."""
    args = parse(argv)
    model, inputs = build(args.layers, args.width, args.heads, args.context, args.batch)
    asked = {"device_budget": args.device_budget} if args.max_slowdown is None else {"max_slowdown": args.max_slowdown}
    config = graphoffload.OffloadConfig(hardware=args.hardware, **asked)
    report = graphoffload.explain(model, config)(*inputs)
    print(report)
    folder = Path(args.out or tempfile.mkdtemp(prefix="graphoffload-"))
    for picture in report.save_pictures(folder):
        print(f"picture: {picture}")
    path = folder / "report.json"
    path.write_text(report.to_json())
    print(f"as JSON: {path}")
    return {"report": report, "path": path}


if __name__ == "__main__":
    main()
