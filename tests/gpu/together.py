"""Several models at once on one GPU: all compile side by side, and whoever measures time stops the others.

    python3 tests/gpu/together.py --out DIR moe unet encdec,layers=4 gpt2,layers=12 vit,layers=12

For each: keep-all, full checkpointing, and graphoffload with a budget of checkpointing's measured peak. Every process
has its own caches, so that a stopped one holds no lock that another needs; the hardware's profile is measured before
and copied.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """The only process of those named in `folder` that runs."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        others = [int(path.name) for path in folder.iterdir() if path.name.isdigit() and int(path.name) != os.getpid()]
        try:
            for process in others:
                _send(process, signal.SIGSTOP)
            time.sleep(0.3)  # what they have launched ends
            yield
        finally:
            for process in others:
                _send(process, signal.SIGCONT)


def _send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _alone(folder: Path, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        import torch

        with alone(folder):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            return function(*args, **kwargs)

    return run


def measure_one(text: str, folder: Path, given: argparse.Namespace) -> None:
    """One model in this process."""
    import torch
    from gpu import measure
    from gpu.runner import Options, Runner

    from graphoffload import pipeline

    pipeline.kernel_times = _alone(folder, pipeline.kernel_times)
    measure.alternate = _alone(folder, measure.alternate)
    model, *sizes = text.split(",")
    changed = {name: int(value) for name, value in (size.split("=") for size in sizes)}
    out = given.out / text.replace(",", "-").replace("=", "")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = Options(given.steps, 5, limit_s=given.limit_s, tiny=given.tiny, sizes=changed or None, out=out)
    runner = Runner(model, device, options)
    (folder / str(os.getpid())).touch()
    try:
        runner.start()
        row = runner.run("checkpoint")
        if row.peak_bytes is not None:
            runner.run(f"over:{row.peak_bytes}")
        runner.finish()
    finally:
        (folder / str(os.getpid())).unlink()


def main() -> int:
    """The command line; without --folder, one process for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL[,SIZE=N...]")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--limit-s", type=float, default=170.0)
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, where memory is not measured")
    parser.add_argument("--out", type=Path, default=Path("together"))
    parser.add_argument("--folder", type=Path, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.folder is not None:
        measure_one(given.models[0], given.folder, given)
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "graphoffload", "hardware"], cwd=ROOT, check=True)
    from graphoffload.folders import cache_dir

    folder = given.out / "running"
    folder.mkdir(exist_ok=True)
    running = []
    for number, model in enumerate(given.models):
        cache = given.out / f"cache{number}"
        shutil.copytree(cache_dir(), cache / "graphoffload", dirs_exist_ok=True)
        own = {"GRAPHOFFLOAD_CACHE_DIR": str(cache / "graphoffload"), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
        tiny = ["--tiny"] if given.tiny else []
        rest = [
            *tiny,
            "--steps",
            str(given.steps),
            "--limit-s",
            str(given.limit_s),
            "--out",
            str(given.out),
            "--folder",
            str(folder),
        ]
        running.append(subprocess.Popen([sys.executable, __file__, model, *rest], env={**os.environ, **own}))
    return max(process.wait() for process in running)


if __name__ == "__main__":
    raise SystemExit(main())
