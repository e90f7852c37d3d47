"""Would it fit, and how fast would it be? Plans a training step for a GPU that need not be there, without running it.

    python examples/explain_plan.py
    python examples/explain_plan.py --hardware a100-80g --device-budget 30GiB --layers 12
    python examples/explain_plan.py --max-slowdown 0.02

The model is made on the meta device: billions of parameters take no memory, and nothing is computed. Times come from the
hardware's datasheet; on the GPU itself, where they are measured, plans are better.
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
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Print the report and write it as JSON. Returns the report and the path of the file."""
    args = parse(argv)
    with torch.device("meta"):
        model = GPT(args.layers, args.width, args.heads, args.context).to(torch.bfloat16)
        tokens = torch.zeros(args.batch, args.context, dtype=torch.int64)
    asked = {"device_budget": args.device_budget} if args.max_slowdown is None else {"max_slowdown": args.max_slowdown}
    config = graphoffload.OffloadConfig(hardware=args.hardware, **asked)
    report = graphoffload.explain(model, config)(tokens, tokens)
    print(report)
    path = Path(tempfile.mkdtemp(prefix="graphoffload-")) / "report.json"
    path.write_text(report.to_json())
    print(f"as JSON: {path}")
    return {"report": report, "path": path}


if __name__ == "__main__":
    main()
