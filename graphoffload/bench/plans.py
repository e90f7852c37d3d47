"""One model planned for an H200, on the H200 or on a laptop, and how far two such plans are apart.

    python -m graphoffload bench plans --model llama4k --write here.json         # on each machine
    python -m graphoffload bench plans --compare here.json there.json

Without a GPU the model is made on the meta device. The plan keeps everything and, with --over, meets a budget.
"""

from __future__ import annotations

import argparse
import collections
import json
from pathlib import Path
from typing import Any

import torch

from graphoffload.api.introspect import explain
from graphoffload.bench import where
from graphoffload.bench.models import MODELS, build
from graphoffload.errors import ConfigError
from graphoffload.units import parse_size


def write(model: str, path: Path, over: str) -> None:
    """The reports of keep-all and of a budget, as JSON."""
    device = torch.device("cuda" if torch.cuda.is_available() else "meta")
    workload = build(model, device)
    inputs: dict[str, Any] = {**workload.batch, **workload.constants}
    with where.watch_plans() as found:
        keep = explain(workload.module, hardware="h200-sxm", policy="keep", reserve=0)(**inputs)
    program, _, timeline = found[-1]
    step = program.step_name(timeline.peak_step)
    print(f"keep-all's peak: {timeline.peak_bytes} bytes, {program.static_bytes} static, at {step}")
    where.show("alive there", where.predicted_live(found[-1]), 6)
    reports = {"keep": json.loads(keep.to_json())}
    if over:
        budget = keep.keep_peak_bytes - parse_size(over, field="over")
        plan = explain(workload.module, hardware="h200-sxm", device_budget=budget, reserve=0)(**inputs)
        reports["budget"] = json.loads(plan.to_json())
    path.write_text(json.dumps(reports))


def by_module(report: dict[str, Any]) -> dict[str, int]:
    """Saved bytes by module path."""
    found: dict[str, int] = collections.Counter()
    for plan in report["plans"]:
        for tensor in plan["saved"]["tensors"]:
            found[tensor["module"]] += tensor["nbytes"] or 0
    return found


def compare(left: Path, right: Path) -> int:
    """Print what differs by more than 1 % of a module's saved bytes, and the peaks; 1 when anything does."""
    here, there = (json.loads(path.read_text()) for path in (left, right))
    failed = 0
    for name in here:
        a, b = here[name]["derived"], there[name]["derived"]
        print(
            name,
            {
                key: (a[key], b[key])
                for key in ("keep_peak_bytes", "predicted_peak_bytes", "offloaded_bytes", "recomputed_bytes")
            },
        )
        modules, others = by_module(here[name]), by_module(there[name])
        if name != "keep":
            continue
        for module in sorted({*modules, *others}):
            x, y = modules.get(module, 0), others.get(module, 0)
            if abs(x - y) > 0.01 * max(x, y):
                failed = 1
                print(f"  {module}: {x} and {y} bytes")
    return failed


def arguments(parser: argparse.ArgumentParser) -> None:
    """The tool's options."""
    parser.add_argument("--model", choices=sorted(MODELS), default="llama4k")
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--over", default="", help="a second plan, with a budget this much below keep-all's peak")
    parser.add_argument("--compare", nargs=2, type=Path, metavar="FILE")


def start(given: argparse.Namespace) -> int:
    """Plan and write, or compare; 1 where two plans differ.

    Raises:
        ConfigError: neither was asked for.
    """
    if given.compare:
        return compare(*given.compare)
    if given.write is None:
        raise ConfigError("give --write FILE, or --compare with two of such files.")
    write(given.model, given.write, given.over)
    return 0
