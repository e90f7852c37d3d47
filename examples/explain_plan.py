"""What would be kept, recomputed and offloaded, and what would it cost? Plans without training, on any machine.

    python examples/explain_plan.py
    python examples/explain_plan.py --hardware a100-80g --device-budget 600MiB

The model is traced with small real tensors here; the plan speaks of the hardware that is named, which need not be there.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import graphoffload


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The hardware to plan for, and what to ask of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default="h200-sxm")
    parser.add_argument("--policy", default="offload")
    parser.add_argument("--device-budget", help='such as "600MiB"; the planner then decides')
    parser.add_argument("--layers", type=int, default=4)
    return parser.parse_args(argv)


class Model(nn.Module):
    """An encoder over (batch, context, 256) to one number: its loss."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(256, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x)).square().mean()


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Print the report and write it as JSON. Returns the report and the path of the file."""
    args = parse(argv)
    torch.manual_seed(0)
    options: dict[str, Any] = {"hardware": args.hardware, "policy": args.policy, "min_tensor_bytes": "64KiB"}
    if args.device_budget:
        options |= {"device_budget": args.device_budget, "policy": "auto"}
    config = graphoffload.OffloadConfig(**options)
    report = graphoffload.explain(Model(args.layers), config)(torch.randn(8, 256, 256))
    print(report)
    path = Path(tempfile.mkdtemp(prefix="graphoffload-")) / "report.json"
    path.write_text(report.to_json())
    print(f"as JSON: {path}")
    return {"report": report, "path": path}


if __name__ == "__main__":
    main()
