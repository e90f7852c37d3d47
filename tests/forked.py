"""Scripts in processes of their own that need not import torch again: it takes a process six seconds to begin.

Each is forked from a server that has imported torch and graphoffload, and has compiled nothing. What a fork shares with the
others is what these modules read when they are imported, and the seed of Python's hashes: where that matters, start a process.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parent.parent
IMPORTED = ["torch", "graphoffload", "torch._inductor.compile_fx"]


def python_path() -> str:
    """This checkout before whatever the tests were started with."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def server() -> multiprocessing.context.ForkServerContext:
    """Ready to fork; started by the first who asks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with mock.patch.dict(os.environ, PYTHONPATH=python_path()):
        multiprocessing.forkserver.ensure_running()
    return context


def begin(script: str, arguments: list[str], folder: str, environment: dict[str, str], printed: str) -> None:
    """What `python script arguments` does once torch is imported."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{printed}/{name}", os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    warnings.simplefilter("ignore", FutureWarning)
    runpy.run_path(script, run_name="__main__")


def run_script(
    script: Path, *arguments: str, folder: Path, environment: Mapping[str, str], limit_s: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """`python script arguments` in `folder` with exactly this environment. A process from scratch where there is a GPU.

    Raises:
        subprocess.TimeoutExpired: it takes longer than `limit_s`.
    """
    command = [sys.executable, "-W", "ignore::FutureWarning", str(script), *arguments]
    if torch.cuda.is_available():  # a device and forks do not go together
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit_s)
    context = server()
    with tempfile.TemporaryDirectory() as printed:
        process = context.Process(target=begin, args=(str(script), list(arguments), str(folder), dict(environment), printed))
        process.start()
        process.join(limit_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, limit_s)
        out, err = ((Path(printed) / name).read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(command, process.exitcode, out, err)
