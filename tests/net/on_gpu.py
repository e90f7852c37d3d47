"""The net on a GPU under Inductor: copies are delayed at random, released memory is overwritten, budgets are planned by what is
measured there.

    PYTHONPATH=.:tests python -m net.on_gpu --workers 14 --limit-s 600 --commit HASH      what the result file does not have yet
    PYTHONPATH=.:tests python -m net.on_gpu --only timm-eva02 swin --changed padded       Inductor pads every product
    PYTHONPATH=.:tests python -m net.on_gpu --changed dynamic                             all sizes are symbols
    PYTHONPATH=.:tests python -m net.page

Several processes take the next architecture each, and share out the GPUs that there are: tiny models keep one busy with little
but compiling. A process that dies is an outcome, and the next one goes on. One run at a time writes a result file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from net.runner import CHANGED, ROOT, environment, load, plain_name, store

RESULTS = ROOT / "docs" / "results" / "net-gpu.json"
WAYS = ("offload", "budget")
SILENCE_S = 200.0  # until a process that says nothing is ended
APART = 11
"""Neighbours in the table are alike: every so many is taken first, so that a run that is cut off has seen all kinds."""


def work(device: str, inner: str) -> None:
    """One process: takes names from its input, and writes an outcome a line."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        import torch

        from net import judge
        from net.table import everything

        logging.getLogger("graphoffload").setLevel(logging.WARNING)
        torch.set_num_threads(1)
        torch.backends.cudnn.allow_tf32 = False
        for line in sys.stdin:
            label = line.strip()
            name = plain_name(label)
            padded = torch._inductor.config.patch(force_shape_pad=label.endswith(" padded"))
            with padded, torch._dynamo.config.patch(assume_static_by_default=not label.endswith(" dynamic")):
                case, said = judge.begin(everything()[name], inner, device)
                _say(out, "plain", said)
                for way in WAYS if case is not None else ():
                    with disturbed(name, device) if way == "offload" else contextlib.nullcontext():
                        _say(out, way, judge.examine(case, way))
            _say(out, "", {})


@contextlib.contextmanager
def disturbed(name: str, device: str) -> Iterator[None]:
    """Copies are late, by another way for each architecture, and what they leave is overwritten."""
    if device == "cpu":
        yield
        return
    from gpu.races import RANDOM, SEEDS, disturbances

    with disturbances(RANDOM, seed=SEEDS[len(name) % len(SEEDS)]):
        yield


def _say(out: Any, way: str, outcome: dict[str, Any]) -> None:
    """One line; no way: the architecture is done."""
    out.write(json.dumps([way, outcome], default=float) + "\n")
    out.flush()


class Worker:
    """A process that is given one name after the other."""

    def __init__(self, number: int, options: argparse.Namespace) -> None:
        changes = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
        if options.gpus:
            changes["CUDA_VISIBLE_DEVICES"] = str(number % options.gpus)
        self.options, self.environment = options, {**os.environ, **changes}
        self.process: subprocess.Popen[str] | None = None
        self.lines: queue.Queue[str] = queue.Queue()

    def judged(self, label: str, ends: float) -> Iterator[tuple[str, dict[str, Any]]]:
        """The outcomes of one architecture, as they come; none more once the time is over."""
        if self.process is None or self.process.poll() is not None:
            self._start()
        process = self.process
        assert process is not None
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # a process that is gone says so by its output's end
            process.stdin.write(label + "\n")
            process.stdin.flush()
        last = time.monotonic()
        while time.monotonic() < ends:
            try:
                line = self.lines.get(timeout=1.0)
            except queue.Empty:
                if time.monotonic() - last > SILENCE_S:
                    self.end()
                    yield "process", {"outcome": "timeout", "why": f"said nothing for {SILENCE_S:.0f} s"}
                    return
                continue
            try:
                way, outcome = json.loads(line)
            except ValueError:  # nothing, or the part of a line that a process leaves
                self.end()
                yield "process", {"outcome": "error", "why": f"the process ended with exit status {process.returncode}"}
                return
            if not way:
                return
            last = time.monotonic()
            yield way, outcome

    def _start(self) -> None:
        where = ["--device", self.options.device, "--inner", self.options.inner]
        arguments = [sys.executable, "-m", "net.on_gpu", "--work", *where]
        self.process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=self.environment
        )
        self.lines = queue.Queue()
        threading.Thread(target=_pump, args=(self.process.stdout, self.lines), daemon=True).start()

    def end(self) -> None:
        """No more."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def _pump(output: Any, lines: queue.Queue[str]) -> None:
    for line in output:
        lines.put(line)
    lines.put("")


def labels(options: argparse.Namespace, known: dict[str, Any]) -> list[str]:
    """What is to be run, in order."""
    from net.table import everything

    names = options.only or [name for first in range(APART) for name in list(everything())[first::APART]]
    for name in names:
        if name not in everything():
            raise SystemExit(f"no architecture {name!r}; known: {', '.join(everything())}")
    found = [f"{name} {options.changed}" if options.changed else name for name in names]
    return found if options.only else [label for label in found if not is_whole(known.get(label, {}))]


def is_whole(row: dict[str, Any]) -> bool:
    """Whether nothing is left to run: a run that was cut off leaves rows without some of the ways."""
    return row.get("plain", {}).get("outcome") in ("error", "skipped") or "process" in row or all(way in row for way in WAYS)


def run(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """All outcomes by architecture, stored as they come."""
    import torch

    ends, lock = time.monotonic() + options.limit_s, threading.Lock()
    device = torch.cuda.get_device_name() if options.gpus else options.device
    ran = ", ".join(filter(None, (environment(device), options.commit)))
    jobs: queue.Queue[str] = queue.Queue()
    for label in labels(options, load(options.results)["rows"]):
        jobs.put(label)
    found: dict[str, dict[str, Any]] = {}

    def serve(number: int) -> None:
        worker = Worker(number, options)
        while time.monotonic() < ends:
            try:
                label = jobs.get_nowait()
            except queue.Empty:
                break
            for way, outcome in worker.judged(label, ends):
                with lock:
                    found.setdefault(label, {"ran": ran})[way] = outcome
                    results = {"command": "PYTHONPATH=.:tests python -m net.on_gpu", **load(options.results)}
                    if len(found[label]) >= len(results["rows"].get(label, {})):  # else it has less of it yet than is known
                        results["rows"][label] = found[label]
                    store(options.results, results)
        worker.end()

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(options.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command line; exit status 1 where something is wrong under graphoffload that plain torch.compile does."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m net.on_gpu", description="Run the net of architectures on a GPU.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these architectures, even if they are known")
    changed = [each.strip() for each in CHANGED]
    parser.add_argument("--changed", choices=changed, help="every product is padded; or all sizes are symbols")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--limit-s", type=float, default=3600.0, help="nothing is begun, or waited for, after so long")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--inner", default="inductor")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="", help="what the result file says was run")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.work:
        work(options.device, options.inner)
        return 0
    options.gpus = torch.cuda.device_count() if options.device != "cpu" else 0
    bad = 0
    for label, row in run(options).items():
        words = {way: outcome["outcome"] for way, outcome in row.items() if way != "ran"}
        failed = [way for way in (*WAYS, "process") if words.get(way) in ("wrong", "error", "timeout")]
        bad += bool(failed)
        print(label, *(f"{way}:{word}" for way, word in words.items()), flush=True)
        for way in failed:
            print(f"    {way}: {row[way]['why']}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
