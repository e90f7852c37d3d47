"""Host time of the four ops, one by one, without a model around them.

    python3 tests/gpu/op_cost.py                 on whatever device there is
    python3 tests/gpu/op_cost.py --profile       functions by own time as well
    python3 tests/gpu/op_cost.py --in small --share 0.1   in real steps of a model (models.py), a tenth of its bytes offloaded

Tensors are small, so that copies never hold the host up: what is timed is Python, torch's dispatcher and the driver's calls. On
a CPU the side streams are stand-ins that do nothing, so that the same code runs as on a GPU, less the driver. In a real step
other work evicts code and data from the processor's caches between two ops.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import ctypes
import gc
import itertools
import pstats
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402

from graphoffload import inner_compile  # noqa: E402
from graphoffload.runtime import ops, streams  # noqa: E402

OPS = ("offload", "release", "reload", "wait")
PLAN = "0" * 64


class NoStream:
    """Stands in for DeviceStreams on a device without streams: the copies run at once."""

    index = -1

    def copy(self, direction: str, entry: Any, after: tuple[Any, ...], run: Any, block: Any = None) -> Any:
        """Copy at once, by one C function where the copy is of one block, as on a GPU."""
        if block is None:
            run()
        else:
            ctypes.memmove(*block)
        return self

    def compute(self) -> Any:
        """Whom the caller's work is issued to."""
        return self

    def compute_waits(self, event: Any) -> None:
        """Nothing to wait for."""

    def compute_waits_for(self, op: str, entry: Any, event: Any) -> None:
        """Nothing to wait for."""

    def recycle(self, event: Any) -> None:
        """Nothing to keep."""


@contextlib.contextmanager
def stand_in(device: torch.device) -> Iterator[None]:
    """Side streams that do nothing, on a CPU; the real ones on a GPU."""
    if device.type == "cuda":
        yield
        return
    driver = types.SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    with mock.patch.dict(streams._STREAMS, {device: NoStream()}), mock.patch("torch.cuda.cudart", return_value=driver):
        yield


def step(tensors: list[torch.Tensor], spent: dict[str, list[float]]) -> None:
    """One forward and backward of ops alone; appends microseconds a call."""
    offload, release, reload, wait = (getattr(ops.KERNELS, name) for name in OPS)
    clock = time.perf_counter_ns
    handles, targets = [], []
    for id, x in enumerate(tensors):
        start = clock()
        handle = offload(x, PLAN, id)
        spent["offload"].append((clock() - start) / 1e3)
        handles.append(handle)
    for id, x in enumerate(tensors):
        start = clock()
        release(x, handles[id], PLAN, id)
        spent["release"].append((clock() - start) / 1e3)
    for id, x in enumerate(tensors):
        start = clock()
        y = reload(handles[id], PLAN, id, x.shape, x.stride(), x.dtype)
        spent["reload"].append((clock() - start) / 1e3)
        targets.append(y)
    for id, y in enumerate(targets):
        start = clock()
        wait(y, handles[id], PLAN, id)
        spent["wait"].append((clock() - start) / 1e3)


def host_times(device: torch.device, *, count: int = 12, steps: int = 50, nbytes: int = 4096) -> dict[str, list[float]]:
    """Microseconds of every call by op, after warm-up. The first offload of a step also closes the last step's entries."""
    tensors = [torch.zeros(nbytes // 256, 64, device=device) for _ in range(count)]
    spent: dict[str, list[float]] = {name: [] for name in OPS}
    with stand_in(device), torch.no_grad():
        for number in range(steps + 5):
            if number == 5:
                for values in spent.values():
                    values.clear()
            step(tensors, spent)
            if device.type == "cuda":
                torch.cuda.synchronize()
        ops.ENTRIES.sweep()
    return spent


@contextlib.contextmanager
def timing_calls(spent: dict[str, list[float]], *, direct: bool) -> Iterator[None]:
    """Append microseconds of each op that compiled code calls meanwhile, either directly or by torch.ops; no others."""
    clock = time.perf_counter_ns

    def timed(kernel: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            start = clock()
            result = kernel(*arguments)
            into.append((clock() - start) / 1e3)
            return result

        return run

    with contextlib.ExitStack() as stack:
        for name in OPS:
            owner, attribute = (ops.KERNELS, name) if direct else (getattr(torch.ops.graphoffload, name), "default")
            stack.enter_context(mock.patch.object(owner, attribute, timed(getattr(owner, attribute), spent[name])))
        yield


def in_steps(model: str, share: float, *, direct: bool, steps: int) -> tuple[dict[str, list[float]], float]:
    """Microseconds of every call by op, and those that a step takes the host more than keep-all's, divided by its ops.

    The two are of different steps: the clock itself is not in the second.
    """
    from gpu import measure
    from gpu.models import build
    from gpu.variants import Eligible, apply, parse

    torch._dynamo.reset()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sessions = []
    for variant in ("keep", f"offload:all+offload_fraction={share}+min_tensor_bytes=0"):
        workload = build(model, device, tiny=device == "cpu")
        session = measure.Session(workload, apply(parse(variant), workload, Eligible()))
        with mock.patch.object(inner_compile, "direct_calls", inner_compile.direct_calls if direct else contextlib.nullcontext):
            measure.warm_up(session)
        sessions.append(session)
    keep, ours = sessions
    host_ms: tuple[list[float], list[float]] = ([], [])
    for _ in range(steps):
        for session, values in zip(sessions, host_ms, strict=True):
            values.append(session.step().host_ms)
    spent: dict[str, list[float]] = {name: [] for name in OPS}
    with timing_calls(spent, direct=direct):
        for _ in range(steps):
            keep.step()
            ours.step()
    extra_ms = statistics.median(host_ms[1]) - statistics.median(host_ms[0])
    for session in sessions:
        session.close()
    return spent, extra_ms * 1e3 * steps / sum(map(len, spent.values()))


def show(spent: dict[str, list[float]]) -> None:
    """A line an op, and one for all calls together."""
    for name, values in (*spent.items(), ("all", list(itertools.chain(*spent.values())))):
        ordered = sorted(values)
        print(f"{name:8} median {statistics.median(values):6.2f} us   mean {statistics.mean(values):6.2f}   "
              f"p90 {ordered[len(ordered) * 9 // 10]:6.2f}   {len(values)} calls")  # fmt: skip


def mean_of_ops(spent: dict[str, list[float]]) -> float:
    """Microseconds an op at the median of each kind, over the four kinds."""
    return statistics.mean(statistics.median(values) for values in spent.values())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--in", dest="model")
    parser.add_argument("--share", type=float, default=0.1)
    given = parser.parse_args()
    gc.disable()
    if given.model:
        for direct in (True, False):
            spent, extra_us = in_steps(given.model, given.share, direct=direct, steps=given.steps)
            print(f"{given.model}, {'directly' if direct else 'by torch.ops'}: a step takes the host {extra_us:+.1f} us an op")
            show(spent)
        return
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    spent = host_times(device, steps=given.steps)
    show(spent)
    print(f"mean of the four medians {mean_of_ops(spent):6.2f} us")
    if given.profile:
        with cProfile.Profile() as profiler:
            host_times(device, steps=given.steps)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
