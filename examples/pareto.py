"""Step time against memory: every method on one model, measured in one run, each point with its gradients checked.

    python examples/pareto.py --tiny --out /tmp/pareto                              # a CPU: shows that it runs
    python examples/pareto.py --model llama4k --steps 30 --out pareto               # on a GPU; minutes for each method
    python examples/pareto.py --model stack32k --methods ours --budgets 6 --out pareto

Methods: keep-all, full and selective checkpointing, activation_memory_budget, save_on_cpu, torch's own offload pass, and
graphoffload at budgets between full checkpointing's peak and keep-all's and at a few slowdowns, with the lower bound of each
plan dashed. Writes pareto_MODEL.csv, the full numbers as JSON, and pareto_MODEL.png where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the measuring tools are the tests' own

from gpu.measure import Row  # noqa: E402
from gpu.models import MODELS  # noqa: E402
from gpu.runner import Options, Runner  # noqa: E402

PEERS = ("checkpoint", "selective", "budget:0.8", "budget:0.5", "budget:0.2", "budget:0.0", "save_on_cpu", "torch-offload")
SLOWDOWNS = (0.0, 0.02, 0.05, 0.10)
COLUMNS = (
    "method", "status", "step_ms", "ratio", "ratio_low", "ratio_high", "peak_over_static_bytes", "predicted_peak_bytes",
    "predicted_ms", "bound_ratio", "gradient_error", "offloaded_bytes", "recomputed_bytes",
)  # fmt: skip


def budgets(keep_bytes: int, least_bytes: int, count: int) -> list[int]:
    """`count` peaks over static, evenly from just under keep-all down to `least_bytes`."""
    step = (keep_bytes - least_bytes) / max(count, 1)
    return [round(keep_bytes - step * number) for number in range(1, count + 1)]


def record(row: Row) -> dict[str, Any]:
    """One line of the CSV."""
    plans = row.ours.get("plans") or []
    bounds = [plan["lower_bound_slowdown"] for plan in plans]
    static = (row.samples[-1].static_bytes or 0) if row.samples else 0
    low, high = row.ratio_interval or (None, None)
    return {
        "method": row.variant,
        "status": row.status,
        "step_ms": row.step_ms,
        "ratio": 1.0 if row.variant.startswith("keep-all") else row.ratio,
        "ratio_low": low,
        "ratio_high": high,
        "peak_over_static_bytes": row.peak_bytes,
        "predicted_peak_bytes": max((p["prediction"]["predicted_peak_bytes"] for p in plans), default=static) - static or None,
        "predicted_ms": sum(p["prediction"]["predicted_time_s"] for p in plans) * 1e3 or None,
        "bound_ratio": 1.0 + max(bounds) if bounds and None not in bounds else None,
        "gradient_error": row.gradient_error,
        "offloaded_bytes": sum(p["offloaded_bytes"] for p in plans),
        "recomputed_bytes": sum(p["recomputed_bytes"] for p in plans),
    }


def write_csv(rows: list[Row], path: Path) -> None:
    """All points."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(record(row) for row in rows)


def _family(method: str) -> str:
    if method.startswith(("over", "slowdown", "ours")):
        return "graphoffload"
    return "activation_memory_budget" if method.startswith("budget") else method


def draw(rows: list[Row], title: str, path: Path) -> bool:
    """The figure: peak over static against step time relative to keep-all. False where there is nothing or no way to draw."""
    points = [record(row) for row in rows if row.samples and row.peak_bytes and row.status.startswith("ok")]
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    if not points:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6))
    families: dict[str, list[dict[str, Any]]] = {}
    for point in points:
        if point["ratio"] is not None:
            families.setdefault(_family(point["method"]), []).append(point)
    for family, members in families.items():
        members.sort(key=lambda p: p["peak_over_static_bytes"])
        x, y = [p["peak_over_static_bytes"] / 1e9 for p in members], [(p["ratio"] - 1) * 100 for p in members]
        if family == "graphoffload":
            axes.plot(x, y, "o-", color="tab:red", label=family, zorder=3)
            bound = [(p["peak_over_static_bytes"] / 1e9, (p["bound_ratio"] - 1) * 100) for p in members if p["bound_ratio"]]
            if bound:
                axes.plot(*zip(*bound, strict=True), "--", color="tab:red", alpha=0.6, label="lower bound (LP)")
        else:
            axes.plot(x, y, "s", label=family)
    axes.set_yscale("symlog", linthresh=5)
    axes.set_xlabel("peak over static, GB")
    axes.set_ylabel("step time over keep-all, %")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
    return True


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
    if keep is None:
        return ["ours-keep", "offload:all+min_tensor_bytes=0"]  # no memory to budget on a CPU
    if least is None:
        least = runner.run("checkpoint").peak_bytes or keep // 3
    return [*(f"over:{nbytes}" for nbytes in budgets(keep, least, given.budgets)), *(f"slowdown:{s}" for s in given.slowdowns)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write, draw; 1 when a gradient was wrong."""
    given = arguments(argv)
    given.out.mkdir(parents=True, exist_ok=True)
    runner = measure(given)
    path = given.out / f"pareto_{given.model}.csv"
    write_csv(runner.rows, path)
    print(f"\nwrote {path}")
    picture = given.out / f"pareto_{given.model}.png"
    if draw(runner.rows, f"{given.model}: {runner.facts.get('device', 'cpu')}", picture):
        print(f"wrote {picture}")
    elif runner.rows[0].peak_bytes is None:
        print("no figure: peak memory is not measured on a CPU")
    else:
        print("no figure: pip install matplotlib")
    wrong = [row.variant for row in runner.rows if row.status.startswith("WRONG")]
    if wrong:
        print(f"WRONG GRADIENTS: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
