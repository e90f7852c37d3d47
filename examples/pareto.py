"""Step time against memory: every method on one model, measured in one run, each point with its gradients checked.

    python examples/pareto.py --tiny --out /tmp/pareto                              # a CPU: shows that it runs
    python examples/pareto.py --model llama4k --steps 30 --out pareto               # on a GPU; minutes for each method
    python examples/pareto.py --model stack32k --methods ours --budgets 6 --out pareto
    python examples/pareto.py --model stack32k --gather DIR --out pareto            # of what `bench together` measured

Methods: keep-all, full and selective checkpointing, activation_memory_budget, save_on_cpu, torch's own offload pass, and
graphoffload at budgets between full checkpointing's peak and keep-all's and at a few slowdowns, with the lower bound of each
plan dashed. Writes pareto_MODEL.csv, the full numbers as JSON, and pareto_MODEL.png where matplotlib is installed. Result files
of such a run, for a page's tables: python -m graphoffload bench export pareto --into docs/results
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from graphoffload.bench.figure import draw
from graphoffload.bench.measure import Row
from graphoffload.bench.models import MODELS
from graphoffload.bench.results import row_record
from graphoffload.bench.run_options import Options
from graphoffload.bench.runner import Runner

PEERS = ("checkpoint", "selective", "budget:0.8", "budget:0.5", "budget:0.2", "budget:0.0", "save_on_cpu", "torch-offload")
SLOWDOWNS = (0.0, 0.02, 0.05, 0.10)
COLUMNS = (
    "variant", "status", "step_ms", "ratio", "ratio_low", "ratio_high", "peak_bytes", "predicted_peak_bytes", "predicted_ms",
    "bound_ratio", "gradient_error", "offloaded_bytes", "recomputed_bytes",
)  # fmt: skip


def budgets(keep_bytes: int, least_bytes: int, count: int) -> list[int]:
    """`count` peaks over static, evenly from just under keep-all down to `least_bytes`."""
    step = (keep_bytes - least_bytes) / max(count, 1)
    return [round(keep_bytes - step * number) for number in range(1, count + 1)]


def write_csv(rows: list[Row], path: Path) -> None:
    """All points, as result files have them."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(row_record(row) for row in rows)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="small")
    parser.add_argument("--methods", choices=("all", "peers", "ours"), default="all")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), help="which of the other methods")
    parser.add_argument("--budgets", type=int, default=10, help="how many budgets for graphoffload")
    parser.add_argument("--least", type=float, default=None, help="lowest peak over static in GB; else full checkpointing's")
    parser.add_argument("--slowdowns", nargs="*", type=float, default=list(SLOWDOWNS))
    parser.add_argument("--steps", type=int, default=30, help="measured steps a side")
    parser.add_argument("--block", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=3600.0, help="skip what has not begun by then")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, where memory is not measured")
    parser.add_argument("--out", type=Path, default=Path("pareto"))
    parser.add_argument("--gather", type=Path, default=None, metavar="DIR", help="the rows of all DIR/*/MODEL.json instead")
    return parser.parse_args(argv)


def measure(given: argparse.Namespace) -> Runner:
    """All methods, one after another; a failure is a point as well."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = Options(
        steps=given.steps, block=given.block, limit_s=given.limit_s, tiny=given.tiny, out=given.out,
        dtype=torch.float32 if device == "cpu" else None,
    )  # fmt: skip
    runner = Runner(given.model, device, options)
    runner.start()
    least = int(given.least * 1e9) if given.least is not None else None
    if given.methods in ("all", "peers"):
        for name in given.peers:
            row = runner.run(name)
            if name == "checkpoint" and least is None:
                least = row.peak_bytes
    if given.methods in ("all", "ours"):
        for name in our_names(runner, given, least):
            runner.run(name)
    runner.finish()
    return runner


def our_names(runner: Runner, given: argparse.Namespace, least: int | None) -> list[str]:
    """Variants of graphoffload: budgets between keep-all's peak and the least, and slowdowns."""
    keep = runner.rows[0].peak_bytes
    if keep is None or not torch.cuda.is_available():  # a CPU's peak is counted, not allocated: no budget of a process
        return ["offload:all+min_tensor_bytes=0", *(f"slowdown:{s}" for s in given.slowdowns)]
    if least is None:
        least = runner.run("checkpoint").peak_bytes or keep // 3
    return [*(f"over:{nbytes}" for nbytes in budgets(keep, least, given.budgets)), *(f"slowdown:{s}" for s in given.slowdowns)]


def gather(folder: Path, model: str) -> tuple[list[Row], dict[str, Any]]:
    """Rows and facts of several processes that measured one model, each beside its own keep-all: the first's is shown, as it
    alternated with the variants.

    Raises:
        SystemExit: there are none.
    """
    rows: list[Row] = []
    kept: list[Row] = []
    facts: dict[str, Any] = {}
    for path in sorted(folder.glob(f"*/{model}*.json")):
        facts = json.loads(path.read_text())
        found = [Row.from_dict(row) for row in facts.pop("rows")]
        kept += [row for row in found if row.variant.startswith("keep-all")]
        rows += [row for row in found if not row.variant.startswith("keep-all")]
    if not kept:
        raise SystemExit(f"no {model}.json in any folder of {folder}")
    in_turns = next((row.baseline for row in rows if row.baseline), kept[0].samples)
    return [replace(kept[0], variant="keep-all", samples=in_turns), *rows], facts  # what ran before may have had company


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write, draw; 1 when a gradient was wrong."""
    given = arguments(argv)
    given.out.mkdir(parents=True, exist_ok=True)
    if given.gather is not None:
        rows, facts = gather(given.gather, given.model)
    else:
        runner = measure(given)
        rows, facts = runner.rows, runner.facts
    path = given.out / f"pareto_{given.model}.csv"
    write_csv(rows, path)
    print(f"\nwrote {path}")
    picture = given.out / f"pareto_{given.model}.png"
    if draw([row_record(row) for row in rows], f"{given.model}: {facts.get('device', 'cpu')}", picture):
        print(f"wrote {picture}")
    elif rows[0].peak_bytes is None:
        print("no figure: peak memory is not measured on a CPU")
    else:
        print("no figure: pip install matplotlib")
    wrong = [row.variant for row in rows if row.status.startswith("WRONG")]
    if wrong:
        print(f"WRONG GRADIENTS: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
