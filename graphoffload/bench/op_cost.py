"""Host time of the four ops, one by one, without a model around them.

    python -m graphoffload bench op-cost                          on whatever device there is
    python -m graphoffload bench op-cost --profile                functions by own time as well
    python -m graphoffload bench op-cost --in small --share 0.1   in real steps of a model, a tenth of its bytes offloaded:
                                                                  compiled copies, call by call from Python, by torch.ops

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
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from graphoffload.bench import measure, results
from graphoffload.bench.models import MODELS, build
from graphoffload.bench.options import add_result_options
from graphoffload.bench.variants import Eligible, apply, parse
from graphoffload.cache_files import write_whole
from graphoffload.compiler import inner_compile
from graphoffload.runtime import ops
from graphoffload.runtime.handles import ENTRIES
from graphoffload.runtime.streams import copy_streams as streams
from graphoffload.runtime.streams.protocol import Block, CopyEvent, CopyStreams, Named
from graphoffload.torch_internals import inductor
from graphoffload.torch_internals.patching import replaced

OPS = ("offload", "release", "reload", "wait")
PLAN = "0" * 64
ROUNDS = 6


@dataclass
class Found:
    """Microseconds of every call by op, and milliseconds of untimed steps: (keep-all's, ours), by the GPU and of the host."""

    way: str
    spent: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in OPS})
    step_ms: list[tuple[float, float]] = field(default_factory=list)
    host_ms: list[tuple[float, float]] = field(default_factory=list)

    def add(self, keep: Any, ours: Any) -> None:
        """One step of each."""
        self.step_ms.append((keep.step_ms, ours.step_ms))
        self.host_ms.append((keep.host_ms, ours.host_ms))

    def __str__(self) -> str:
        keep, ours = map(statistics.median, zip(*self.step_ms, strict=True))
        keep_host, host = map(statistics.median, zip(*self.host_ms, strict=True))
        calls = sum(map(len, self.spent.values())) / len(self.step_ms)
        return (
            f"{self.way}: a step takes {ours:.2f} ms (keep-all {keep:.2f}), of the host {host:.2f} (keep-all {keep_host:.2f}), "
            f"with {calls:.0f} ops: {(host - keep_host) * 1e3 / calls:.1f} us an op"
        )


class NoEvent(CopyEvent):
    """Of a copy that was made at once; of any moment."""

    def wait(self, stream: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """It was reached."""
        return True

    def elapsed_time(self, end: Any, /) -> float:
        """Nobody asks here."""
        return 0.0


class NoStreams(CopyStreams):
    """Stands in for DeviceStreams on a device without streams: the copies run at once."""

    def __init__(self) -> None:
        self.index = -1
        self.times = None
        self._event = NoEvent()

    def copy(
        self, direction: str, entry: Named, after: tuple[Any, ...], run: Callable[[], None], block: Block | None = None
    ) -> NoEvent:
        """Copy at once, by one C function where the copy is of one block, as on a GPU."""
        if block is None:
            run()
        else:
            ctypes.memmove(*block)
        return self._event

    def compute(self) -> Any:
        """Whom the caller's work is issued to."""
        return self

    def timed_event(self) -> NoEvent:
        """This moment."""
        return self._event

    def hold_compute(self) -> None:
        """Nothing to hold."""

    def compute_waits(self, event: Any) -> None:
        """Nothing to wait for."""

    def compute_waits_for(self, op: str, entry: Named, event: Any, compute: Any = None) -> None:
        """Nothing to wait for."""

    def recycle(self, event: CopyEvent | None) -> None:
        """Nothing to keep."""

    def capturing(self) -> bool:
        """Never."""
        return False

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def allocated_bytes(self) -> tuple[int, int]:
        """Not known."""
        return 0, 0

    def retries(self) -> int:
        """Nothing is ever short."""
        return 0

    def headroom_bytes(self) -> int:
        """Not known."""
        return 0


@contextlib.contextmanager
def stand_in(device: torch.device) -> Iterator[None]:
    """Side streams that do nothing, on a CPU; the real ones on a GPU."""
    if device.type == "cuda":
        yield
        return
    driver = types.SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    pretended = {**streams._STREAMS, device: NoStreams()}
    with replaced(streams, _STREAMS=pretended), replaced(torch.cuda, cudart=lambda: driver):
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
        ENTRIES.sweep()
    return spent


@contextlib.contextmanager
def copies_by(way: str) -> Iterator[None]:
    """Copies as one compiled call, as they are by default, or issued from Python call by call."""
    if way == "compiled" or not torch.cuda.is_available():
        yield
        return
    found: Any = streams.streams_of(torch.device("cuda", torch.cuda.current_device()))
    with replaced(found, _whole=None):
        yield
    found._events.clear()  # those made meanwhile have no address for the compiled copy


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
            stack.enter_context(replaced(owner, **{attribute: timed(getattr(owner, attribute), spent[name])}))
        yield


def sessions_of(model: str, share: float, *, direct: bool) -> tuple[Any, Any]:
    """Keep-all and a share of the bytes offloaded, ready to step; `direct`: compiled code calls the ops themselves."""
    torch.compiler.reset()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sessions = []
    for variant in ("keep", f"offload:all+offload_fraction={share}+min_tensor_bytes=0"):
        workload = build(model, device, tiny=device == "cpu")
        session = measure.Session(workload, apply(parse(variant), workload, Eligible()))
        with contextlib.ExitStack() as stack:
            if not direct:  # a compile cache would give the code that calls directly
                stack.enter_context(replaced(inner_compile, direct_calls=contextlib.nullcontext))
                stack.enter_context(inductor.config.patch(force_disable_caches=True))
            measure.warm_up(session)
        sessions.append(session)
    return sessions[0], sessions[1]


def in_steps(sessions: tuple[Any, Any], ways: tuple[str, ...], *, direct: bool, steps: int) -> Iterator[Found]:
    """What the ops cost in real steps; the ways take turns."""
    found = {way: Found(way) for way in ways}
    for _ in range(ROUNDS):
        for way, of_way in found.items():
            with copies_by(way):
                for _ in range(steps // ROUNDS):
                    of_way.add(*(session.step() for session in sessions))
                with timing_calls(of_way.spent, direct=direct):
                    for _ in range(steps // ROUNDS):
                        for session in sessions:
                            session.step()
    yield from found.values()


def show(spent: dict[str, list[float]]) -> None:
    """A line an op, and one for all calls together."""
    for name, values in (*spent.items(), ("all", list(itertools.chain(*spent.values())))):
        ordered = sorted(values)
        print(f"{name:8} median {statistics.median(values):6.2f} us   mean {statistics.mean(values):6.2f}   "
              f"p90 {ordered[len(ordered) * 9 // 10]:6.2f}   {len(values)} calls")  # fmt: skip


def mean_of_ops(spent: dict[str, list[float]]) -> float:
    """Microseconds an op at the median of each kind, over the four kinds."""
    return statistics.mean(statistics.median(values) for values in spent.values())


def record(way: str, spent: dict[str, list[float]], found: Found | None = None) -> dict[str, Any]:
    """A row of a result file: microseconds at the median of each op, of all calls, and the step's milliseconds."""
    calls = list(itertools.chain(*spent.values()))
    row: dict[str, Any] = {"variant": way, "calls": len(calls)}
    row |= {f"{name}_us": statistics.median(values) for name, values in spent.items()}
    row |= {"median_us": statistics.median(calls), "mean_us": statistics.mean(calls)}
    if found is not None:
        for name, pairs in (("step_ms", found.step_ms), ("host_ms", found.host_ms)):
            row[f"keep_{name}"], row[name] = map(statistics.median, zip(*pairs, strict=True))
    return row


def arguments(parser: argparse.ArgumentParser) -> None:
    """The tool's options."""
    parser.add_argument("--profile", action="store_true", help="functions by own time as well (of a loop of ops)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--in", dest="model", choices=sorted(MODELS), help="real steps of a model instead of a loop of ops")
    parser.add_argument("--share", type=float, default=0.1, help="of the model's bytes, offloaded (default: 0.1)")
    add_result_options(parser)


def start(given: argparse.Namespace) -> int:
    """Time the ops, print, and write a result file where one is asked for."""
    noted = results.circumstances(given.command_line, given.commit)
    gc.disable()
    try:
        rows = _in_steps(given) if given.model else _in_a_loop(given)
    finally:
        gc.enable()
    if given.results is not None:
        names = ("date", "device", "torch", "commit", "command")
        facts = {"share": given.share} if given.model else {}
        subject = f"op-cost-{given.model or 'loop'}"
        result = results.Result(
            subject=subject, kind="op-cost", rows=tuple(rows), facts=facts, **{name: noted[name] for name in names}
        )
        print(f"wrote {write_whole(given.results / result.folder / f'{subject}.json', result.to_json())}")
    return 0


def _in_steps(given: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for direct, ways in ((True, ("compiled", "call by call")), (False, ("by torch.ops",))):
        sessions = sessions_of(given.model, given.share, direct=direct)
        for found in in_steps(sessions, ways, direct=direct, steps=given.steps):
            print(found)
            show(found.spent)
            rows.append(record(f"real step, {found.way}", found.spent, found))
        for session in sessions:
            session.close()
    return rows


def _in_a_loop(given: argparse.Namespace) -> list[dict[str, Any]]:
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    spent = host_times(device, steps=given.steps)
    show(spent)
    print(f"mean of the four medians {mean_of_ops(spent):6.2f} us")
    if given.profile:
        with cProfile.Profile() as profiler:
            host_times(device, steps=given.steps)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
    return [record("loop, compiled copies", spent)]
