"""Several processes at once on one GPU: all compile side by side, and whoever measures time stops the others.

    python -m graphoffload bench together --out DIR moe unet encdec,layers=4 gpt2,layers=12 vit,layers=12
    python -m graphoffload bench together --out DIR stack32k@checkpoint@over:12.1GB stack32k@over:20GB@slowdown:0.1
    python -m graphoffload bench together --out DIR --table perf-maxing-llama3-1b --table perf-maxing-qwen3-1.7b
    python examples/pareto.py --model stack32k --gather DIR --out pareto                     # one table and figure of it

Each argument is a process (process.py): a model, changed sizes, `steps` where it takes more or fewer than the others, and
variants (bench --list), each measured in turns with that process's own keep-all, --at-once of them sharing its steps. Without
variants: full checkpointing, and graphoffload with a budget of its measured peak. Every process has its own caches, so that a
stopped one holds no lock that another needs; the hardware's profile is measured before and copied. Memory is everybody's: no
more processes than the GPU holds keep-all steps. With --gpus they are dealt out over several GPUs of a host, and --at-a-time
says how many GPUs may measure, and so copy, at once: links to one host's memory are shared.
"""

from __future__ import annotations

import argparse
import contextlib
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

import torch
from filelock import FileLock, Timeout

from graphoffload.analysis.fusion import kind_of
from graphoffload.analysis.timing import kernel_times, signature
from graphoffload.bench import catalogue, measure
from graphoffload.bench.options import add_result_options, add_step_options, keep_results
from graphoffload.bench.process import FORM, parse_process
from graphoffload.bench.run_options import Options
from graphoffload.bench.runner import Runner
from graphoffload.cache_files import cache_dir
from graphoffload.compiler import trial as trials
from graphoffload.errors import ConfigError
from graphoffload.torch_internals.patching import replaced

LAUNCHED_S = 3.0
"""What a stopped process has launched takes so long at most: a step of a long sequence in eager."""

_POLL_S = 0.005


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """The only process of those named in `folder` that runs."""
    with FileLock(folder / "lock", poll_interval=_POLL_S):
        others = [int(path.name) for path in folder.iterdir() if path.name.isdigit() and int(path.name) != os.getpid()]
        try:
            for process in others:
                _send(process, signal.SIGSTOP)
            time.sleep(LAUNCHED_S if others else 0.0)
            yield
        finally:
            _return_unused_memory()
            for process in others:
                _send(process, signal.SIGCONT)


@contextlib.contextmanager
def named(folder: Path) -> Iterator[None]:
    """This process is one of those in `folder`, so that others can stop it."""
    mine = folder / str(os.getpid())
    mine.touch()
    try:
        yield
    finally:
        mine.unlink()


def _return_unused_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _alone(folder: Path, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with alone(folder):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            return function(*args, **kwargs)

    return run


def _alone_for_new(folder: Path, timer: Callable[..., Any]) -> Callable[..., Any]:
    """Alone where a kernel is timed that was not asked for before; plans ask for the same ones many times."""
    asked: set[str | None] = {None}
    timed = _alone(folder, timer)

    def run(graphs: Any, *args: Any) -> Any:
        graphs = tuple(graphs)
        names = {signature(node) for graph in graphs for node in graph.nodes if kind_of(node, fuses=True) == "kernel"}
        new = names - asked
        asked.update(names)
        return (timed if new else timer)(graphs, *args)

    return run


def _in_a_slot(folder: Path, count: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """`count` processes at once run it, on whatever GPUs they are; none waits while it keeps its own GPU's others running."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            locks = [FileLock(folder / f"slot{number}", blocking=False) for number in range(count)]
            while not any(_taken(lock, stack) for lock in locks):
                time.sleep(_POLL_S)
            return function(*args, **kwargs)

    return run


def _taken(lock: FileLock, stack: contextlib.ExitStack) -> bool:
    try:
        stack.enter_context(lock)
    except Timeout:
        return False
    return True


def _with_memory(in_turns: Callable[..., None]) -> Callable[..., None]:
    """One step of each side first: others may have run in between, and what torch's allocator held was given back."""

    @functools.wraps(in_turns)
    def run(lanes: Any, baseline: Any, *args: Any, **kwargs: Any) -> None:
        for side in (baseline, *(session for _, session in lanes)):
            if side is not None:
                side.step()
        in_turns(lanes, baseline, *args, **kwargs)

    return run


def measure_one(text: str, number: int, folder: Path, given: argparse.Namespace) -> None:
    """One process of those that run at once."""
    in_turns = _alone(folder, _in_a_slot(given.out, given.at_a_time, _with_memory(measure.in_turns)))
    process = parse_process(text)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = Options(
        given.steps, given.block, limit_s=given.limit_s, tiny=given.tiny, out=given.out / f"{number}-{process.model}",
        commit=given.commit, command=given.command,
    )  # fmt: skip
    runner = Runner(process.model, device, process.fill(options), in_turns)
    with named(folder), replaced(trials, kernel_times=_alone_for_new(folder, kernel_times)):
        process.measure(runner, given.at_once)
        runner.finish()


def arguments(parser: argparse.ArgumentParser) -> None:
    """The tool's options."""
    parser.add_argument("models", nargs="*", metavar=FORM)
    parser.add_argument("--table", action="append", default=[], metavar="NAME", help="the processes of a table as well")
    add_step_options(parser)
    parser.add_argument("--at-once", type=int, default=1, help="variants of a process that take turns with one keep-all")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that the processes are dealt out over, in turn")
    parser.add_argument("--at-a-time", type=int, default=2, help="of them, how many measure at once")
    parser.add_argument("--limit-s", type=float, default=170.0, help="skip what has not begun by then")
    parser.add_argument("--wall-s", type=float, default=None, help="end what still runs after so long; what it wrote stays")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, where memory is not measured")
    parser.add_argument("--out", type=Path, default=Path("together"), help="folder for every sample, and each process's caches")
    add_result_options(parser)
    parser.add_argument("--folder", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--command", default="", help=argparse.SUPPRESS)


def start(given: argparse.Namespace) -> int:
    """One process for each model; or, where --folder names those that run beside it, one of them."""
    if given.folder is not None:
        measure_one(given.models[0], given.number, given.folder, given)
        return 0
    given.models += [text for name in given.table for text in catalogue.find(name).texts(tiny=given.tiny)]
    if not given.models:
        raise ConfigError("give processes, or --table NAME; `bench table --list` has the names.")
    for text in given.models:
        parse_process(text)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    if given.gpus > len(visible):
        raise ConfigError(f"--gpus {given.gpus}: {len(visible)} are visible")
    deadline = time.monotonic() + given.wall_s if given.wall_s is not None else None
    given.out.mkdir(parents=True, exist_ok=True)
    with keep_results(given):
        subprocess.run([sys.executable, "-m", "graphoffload", "hardware"], check=True)  # not here: a context takes memory
        cache_dir().mkdir(parents=True, exist_ok=True)
        for gpu in range(given.gpus):  # a run that was ended has left the ids of its processes, which may be others' by now
            shutil.rmtree(given.out / f"running{gpu}", ignore_errors=True)
        running = [_begun(number, text, visible, given) for number, text in enumerate(given.models)]
        return max(_ended(process, text, deadline) for process, text in zip(running, given.models, strict=True))


def _ended(process: subprocess.Popen[bytes], text: str, deadline: float | None) -> int:
    """The process's exit status; one that runs past the deadline is ended, and fails."""
    try:
        return process.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        print(f"{text}: ended after --wall-s; what it wrote until then stays", flush=True)
        process.kill()
        process.wait()
        return 1


def _begun(number: int, text: str, visible: list[str], given: argparse.Namespace) -> subprocess.Popen[bytes]:
    """One of the processes, with caches of its own."""
    gpu = number % given.gpus
    folder = given.out / f"running{gpu}"
    folder.mkdir(exist_ok=True)
    cache = given.out / f"cache{number}"
    shutil.copytree(cache_dir(), cache / "graphoffload", dirs_exist_ok=True)
    own = {"GRAPHOFFLOAD_CACHE_DIR": str(cache / "graphoffload"), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    own |= {"CUDA_VISIBLE_DEVICES": visible[gpu]} if given.gpus > 1 else {}
    rest = ["--steps", given.steps, "--block", given.block, "--at-once", given.at_once, "--at-a-time", given.at_a_time]
    rest += ["--limit-s", given.limit_s, "--out", given.out, "--folder", folder, "--number", number]
    rest += ["--commit", given.commit, "--command", given.command_line] + ["--tiny"] * given.tiny
    command = [sys.executable, "-m", "graphoffload", "bench", "together", text, *map(str, rest)]
    return subprocess.Popen(command, env={**os.environ, **own})
