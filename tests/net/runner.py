"""Run the net: every architecture in a process of its own, with limits of time and memory; results go to a file as they come.

    PYTHONPATH=tests python -m net.runner                                     all of it (hours on two cores)
    PYTHONPATH=tests python -m net.runner --inner aot_eager --only llama gpt2
    PYTHONPATH=tests python -m net.runner --missing                           what the result file does not have yet
    PYTHONPATH=tests python -m net.page                                       the result file as docs/models.md

Processes are forked from one that has imported torch and transformers, where there is no GPU. A way that does not end within
the limit is "timeout"; the process is killed, and the ways after it run in another one.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import logging
import multiprocessing
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "net.json"
INNERS = ("aot_eager", "inductor")
MEMORY_BYTES = 8 << 30
CHANGED = (" padded", " dynamic")
"""Behind the name of a row: Inductor pads each product, all sizes are symbols (on_gpu.py)."""
LIMIT_S = {"aot_eager": 120.0, "inductor": 300.0}
"""For one way: its compile, two steps, and what is compared."""


def work(name: str, inner: str, device: str, ways: list[str], pipe: Any) -> None:
    """The process of one architecture: sends (way, outcome) for plain torch.compile and each way, then None."""
    if device == "cpu":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    import torch

    from net.judge import begin, examine
    from net.table import everything

    logging.getLogger("graphoffload").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    case, said = begin(everything()[name], inner, device)
    pipe.send(("plain", said))
    for way in ways if case is not None else []:
        pipe.send((way, examine(case, way)))
    pipe.send(None)


def judged(name: str, inner: str, device: str, ways: list[str], limit_s: float) -> dict[str, Any]:
    """All outcomes of one architecture under one inner compiler."""
    found: dict[str, Any] = {}
    left = list(ways)
    while True:
        ended = one_process(name, inner, device, left, limit_s, found)
        if ended is None or "plain" not in found:
            break
        found[left.pop(0)] = ended
        if not left:
            break
    return found


def one_process(
    name: str, inner: str, device: str, left: list[str], limit_s: float, found: dict[str, Any]
) -> dict[str, Any] | None:
    """Run the ways in `left` and take out those that ended; returns the outcome of one that did not, None where all did."""
    context = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(name, inner, device, list(left), theirs))
    process.start()
    theirs.close()
    try:
        while True:
            if not ours.poll(limit_s):
                outcome = {"outcome": "timeout", "why": f"did not end within {limit_s:.0f} s"}
                break
            message = ours.recv()
            if message is None:
                return None
            way, outcome = message
            found[way] = outcome
            if way != "plain":
                left.remove(way)
    except EOFError:
        process.join()
        outcome = {"outcome": "error", "why": f"the process ended with exit status {process.exitcode}"}
    finally:
        process.kill()
        process.join()
    if "plain" not in found:
        found["plain"] = outcome
        return None
    return outcome


def load(path: Path) -> dict[str, Any]:
    """The result file, or an empty one."""
    return json.loads(path.read_text()) if path.exists() else {"rows": {}}


def store(path: Path, results: dict[str, Any]) -> None:
    """Write the result file, rows in the order of the table."""
    from net.table import everything

    order = list(everything())
    rows = results["rows"]
    results["rows"] = {name: rows[name] for name in sorted(rows, key=lambda name: (order.index(plain_name(name)), name))}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, default=float) + "\n")


def plain_name(label: str) -> str:
    """The architecture of a row."""
    return next((label.removesuffix(changed) for changed in CHANGED if label.endswith(changed)), label)


def wanted(options: argparse.Namespace, results: dict[str, Any]) -> list[tuple[str, str]]:
    """(architecture, inner) to run, in order."""
    from net.table import everything

    for name in options.only or ():
        if name not in everything():
            raise SystemExit(f"no architecture {name!r}; known: {', '.join(everything())}")
    pairs = [(name, inner) for inner in options.inner for name in (options.only or everything())]
    return [(n, i) for n, i in pairs if not (options.missing and i in results["rows"].get(n, {}))]


def environment(device: str) -> str:
    """What a row holds for."""
    import torch

    versions = [f"torch {torch.__version__}"]
    for package in ("transformers", "peft", "diffusers", "timm", "bitsandbytes", "torchao"):
        with contextlib.suppress(ImportError):
            versions.append(f"{package} {__import__(package).__version__}")
    return f"{datetime.date.today().isoformat()}, {device}, {', '.join(versions)}"


def main(arguments: list[str] | None = None) -> int:
    """The command line; exit status 1 where something is wrong under graphoffload that plain torch.compile does."""
    from net.judge import WAYS
    from net.table import everything

    parser = argparse.ArgumentParser(prog="python -m net.runner", description="Run the net of architectures.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these architectures alone")
    parser.add_argument("--inner", nargs="+", choices=INNERS, default=list(INNERS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--missing", action="store_true", help="leave out what the result file has")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--limit-s", type=float, help="seconds for one way")
    options = parser.parse_args(arguments)
    everything()
    if options.device == "cpu":
        multiprocessing.get_context("forkserver").set_forkserver_preload(["net.warm"])
    failed = 0
    pairs = wanted(options, load(options.results))
    for number, (name, inner) in enumerate(pairs, 1):
        began = time.perf_counter()
        row = judged(name, inner, options.device, list(options.ways), options.limit_s or LIMIT_S[inner])
        results = load(options.results)
        results["command"] = "PYTHONPATH=.:tests python -m net.runner"
        results["rows"].setdefault(name, {})[inner] = {"ran": environment(options.device), **row}
        store(options.results, results)
        bad = [way for way in options.ways if row.get(way, {}).get("outcome") in ("wrong", "error", "timeout")]
        failed += bool(bad)
        words = " ".join(f"{way}:{outcome['outcome']}" for way, outcome in row.items())
        print(f"[{number}/{len(pairs)}] {name} {inner} {time.perf_counter() - began:.0f} s  {words}", flush=True)
        for way, outcome in row.items():
            if "why" in outcome:
                print(f"    {way}: {outcome['why']}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
