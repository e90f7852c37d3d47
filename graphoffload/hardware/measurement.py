"""Measures a device once and keeps the result on disk: copies each way, matmuls, a kernel alone and during copies.

    resolve_hardware("measure", "cuda:0")   measured once (about 2 s), cached on disk under a lock
    resolve_hardware("h200-sxm", "cpu")     a named profile, for a GPU of another machine
    resolve_hardware(profile, ...)          a profile of the user's own

A copy of n bytes takes latency + n / bandwidth. The latency is that of a line fitted to copies of several sizes, on an idle
device. The rate in each direction is that of copies beside kernels, which is lower (decision 39). Rates are too low if another
process uses the device or the link during the measurement, and too high if other GPUs of the host use the link later. Ranks of
one host therefore measure at the same time (compiler/link.py): they start each of PHASES together and copy for a while. Their
rates are those of copies in the middle of that time, while all ranks copy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import itertools
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from graphoffload.cache_files import cache_dir, write_whole
from graphoffload.errors import ConfigError, HardwareWarning, warn
from graphoffload.hardware import numa
from graphoffload.hardware.profile import PROFILES, HardwareProfile
from graphoffload.units import format_bytes

PHASES = ("d2h", "h2d", "both")
"""What ranks that measure together do at the same time: copies in each direction, then in both."""
Start = Callable[[str], None]
"""Called before a phase; returns when all ranks are about to begin it."""
_Lane = tuple[Callable[[], Any], Any, list[tuple[float, Any]]]
"""What is launched over and over, its stream, and of each launch when it was and its event."""
_MEASURE_BYTES = 256 * 2**20
_COPY_S = 0.3
_HEAT_S, _PRODUCTS = 0.6, 20
_IN_FLIGHT = 3
_EDITION = 5  # edition of the measurement: files of older editions are not read


def resolve_hardware(spec: str | HardwareProfile, device: object = "cpu") -> HardwareProfile:
    """The profile for plans on `device` ("cuda:0", a torch.device).

    Args:
        spec: "measure", a name in PROFILES, or a profile. On a device other than CUDA "measure" means the cpu profile.

    Raises:
        ConfigError: `spec` is an unknown name.
    """
    if isinstance(spec, HardwareProfile):
        return spec
    if spec == "measure":
        kind, _, index = str(device).partition(":")
        return measure(int(index or 0)) if kind == "cuda" else PROFILES["cpu"]
    if isinstance(spec, str) and spec in PROFILES:
        return PROFILES[spec]
    known = ["measure", *PROFILES]
    near = difflib.get_close_matches(str(spec), known, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"hardware={spec!r} is unknown; known: {', '.join(known)}, or a HardwareProfile.{hint}")


def fit_link(samples: list[tuple[int, float]]) -> tuple[float, float]:
    """(latency_s, bytes_per_s) of the line through measured (nbytes, seconds), by least squares of the relative error.

    The line has two unknowns, so at least two sizes are needed. A negative intercept is noise and becomes 0.
    """
    weights = [1.0 / seconds**2 for _, seconds in samples]
    total = sum(weights)
    mean_n = sum(w * n for w, (n, _) in zip(weights, samples, strict=True)) / total
    mean_s = sum(w * s for w, (_, s) in zip(weights, samples, strict=True)) / total
    covariance = sum(w * (n - mean_n) * (s - mean_s) for w, (n, s) in zip(weights, samples, strict=True))
    variance = sum(w * (n - mean_n) ** 2 for w, (n, _) in zip(weights, samples, strict=True))
    seconds_per_byte = covariance / variance
    if seconds_per_byte <= 0:
        raise ValueError(f"copy times do not grow with size: {samples}")
    return max(0.0, mean_s - seconds_per_byte * mean_n), 1.0 / seconds_per_byte


def cache_path(device_name: str, torch_version: str, ranks: int = 1) -> Path:
    """The file of a measured profile, in `cache_dir`: one for each device name, torch version and number of `ranks` that
    measure at the same time."""
    safe = re.sub(r"[^A-Za-z0-9.+_-]+", "-", f"{device_name}-{torch_version}")
    together = f"-{ranks}-ranks" if ranks > 1 else ""
    return cache_dir() / f"hardware-{_EDITION}-{safe}{together}.json"


def kept(path: Path) -> HardwareProfile | None:
    """The profile at `path`; None where there is none that can be read."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return HardwareProfile.from_json(path.read_text())
    return None


def cached(path: Path, make: Callable[[], HardwareProfile]) -> HardwareProfile:
    """The profile at `path`, or the result of `make()`, which is written there.

    A file lock makes processes take turns, and no reader sees half a file. A file that does not parse is measured again. On a
    file system without locks several processes may measure. A warning says if the cache cannot be written.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, NotImplementedError):  # a folder that cannot be written, or no locks
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(path.with_suffix(".lock")))
        profile = kept(path)
        if profile is None:
            profile = make()
            keep(path, profile)
        return profile


def keep(path: Path, profile: HardwareProfile) -> None:
    """Write a measured profile, with a warning where it cannot be written."""
    try:
        write_whole(path, profile.to_json())
    except OSError as error:
        text = f"measured hardware cannot be cached at {path} ({error}); it is measured anew in every process."
        warn(HardwareWarning, text)


def measure(device_index: int = 0) -> HardwareProfile:
    """Measure a CUDA device, or read an earlier measurement. This takes 2 s and at most a quarter of the free memory.

    If too little memory is free, nothing is allocated, and the nearest named profile is used with a HardwareWarning.
    """
    import torch

    path = cache_path(torch.cuda.get_device_name(device_index), str(torch.__version__))
    return cached(path, lambda: _measure(torch, device_index))


def measure_with_others(device_index: int, ranks: int, start: Start) -> HardwareProfile:
    """Measure a CUDA device while other processes measure theirs. Nothing is read from disk or written there.

    Args:
        ranks: how many processes measure. start: called before each of PHASES; waits for the others.
    """
    import torch

    return dataclasses.replace(_measure(torch, device_index, start), measured_by_ranks=ranks)


def _fallback(name: str, memory_bytes: int, reason: str) -> HardwareProfile:
    """The named profile that is most similar to this device."""
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    near = [key for key in PROFILES if key != "cpu" and words & set(key.split("-"))]
    key = min(near or [key for key in PROFILES if key != "cpu"], key=lambda k: abs(PROFILES[k].memory_bytes - memory_bytes))
    warn(HardwareWarning, f"{name} was not measured ({reason}); planning uses the figures of {key!r}. Set hardware= to choose.")
    return dataclasses.replace(PROFILES[key], memory_bytes=memory_bytes, source="datasheet")


def _measure(torch: Any, index: int, start: Start | None = None) -> HardwareProfile:
    """The profile of a device, from copies and kernels run on it. Allocates at most a quarter of the free memory."""
    properties = torch.cuda.get_device_properties(index)
    from graphoffload.torch_internals.fake_tensors import outside_all_modes

    # This may be called while a graph is traced: under a fake-tensor mode only Python would be timed.
    with outside_all_modes(), torch.no_grad(), torch.cuda.device(index):
        free_bytes, memory_bytes = torch.cuda.mem_get_info()
        size_bytes = min(_MEASURE_BYTES, 2 ** (max(1, free_bytes // 16).bit_length() - 1))
        if size_bytes < 16 * 2**20:
            return _fallback(properties.name, memory_bytes, f"only {format_bytes(free_bytes)} of it is free")
        try:
            with numa.on_node_of(index):
                host = [torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            return _measure_with(torch, properties.name, memory_bytes, host, start)
        except (RuntimeError, ValueError) as error:
            return _fallback(properties.name, memory_bytes, f"measuring failed: {str(error).splitlines()[0]}")
        finally:
            torch.cuda.empty_cache()


def _measure_with(torch: Any, name: str, memory_bytes: int, host: list[Any], start: Start | None) -> HardwareProfile:
    size_bytes = host[0].nbytes
    device = [torch.empty(size_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    sizes = [n for n in (2**20, 2**22, 2**24, 2**26, size_bytes) if n <= size_bytes]

    def copy_s(target: Any, source: Any) -> float:
        return _seconds(torch, lambda: target.copy_(source, non_blocking=True))

    to_host = [(n, copy_s(host[0][:n], device[0][:n])) for n in dict.fromkeys(sizes)]
    to_device = [(n, copy_s(device[1][:n], host[1][:n])) for n in dict.fromkeys(sizes)]
    (d2h_latency_s, _), (h2d_latency_s, _) = fit_link(to_host), fit_link(to_device)
    ways = {"d2h": (host[0], device[0]), "h2d": (device[1], host[1])}
    beside = _kernels(torch, device)
    d2h_rate, h2d_rate = (_sustained(torch, [ways[phase]], phase, start, beside)[0] for phase in PHASES[:2])
    del beside  # with its memory

    return HardwareProfile(
        name=name,
        source="measured",
        memory_bytes=memory_bytes,
        d2h_bytes_per_s=d2h_rate,
        h2d_bytes_per_s=h2d_rate,
        both_ways_bytes_per_s=sum(_sustained(torch, list(ways.values()), "both", start)),
        copy_latency_s=(d2h_latency_s + h2d_latency_s) / 2,
        compute_slowdown_while_copying=_slowdown_while_copying(torch, host, device, torch.cuda.Stream()),
        matmul_flops_per_s=tuple((dtype, _matmul_rate(torch, dtype)) for dtype in ("bfloat16", "float16", "float32")),
        device_bandwidth_bytes_per_s=2 * size_bytes / _seconds(torch, lambda: device[0].copy_(device[1])),
        kernel_launch_s=_launch_s(torch),
    )


def _kernels(torch: Any, device: list[Any]) -> Callable[[], None]:
    """Some of what a step computes: products of matrices, and a sum that is bound by device memory. 1 ms on an H200.

    The sum is of what copies read, into what they write, so that it takes no memory of its own.
    """
    left, right, product = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    values, out = (each.view(torch.bfloat16) for each in device)

    def kernels() -> None:
        for _ in range(3):
            torch.mm(left, right, out=product)
        torch.add(values, values, out=out)

    return kernels


def _sustained(
    torch: Any, ways: list[tuple[Any, Any]], phase: str, start: Start | None, beside: Callable[[], None] | None = None
) -> list[float]:
    """Bytes a second of each (target, source), copied over and over for a while on a stream of its own; `beside` runs as well,
    on the current stream: cuBLAS keeps 32 MiB for each stream that it was ever used on.

    Of the copies that begin in the middle half of that time the median counts: ranks that measure together begin and end
    some milliseconds apart, and unlike a disturbance their copies are to be in the figure.
    """
    work: list[Callable[[], Any]] = [functools.partial(target.copy_, source, non_blocking=True) for target, source in ways]
    lanes: list[_Lane] = [(launch, torch.cuda.Stream(), []) for launch in work]
    if beside is not None:
        lanes.append((beside, torch.cuda.current_stream(), []))
    torch.cuda.synchronize()
    if start is not None:
        start(phase)
    begin_s = time.monotonic()
    while (now_s := time.monotonic() - begin_s) < _COPY_S or any(len(marks) <= 2 * _IN_FLIGHT for *_, marks in lanes):
        for launch, stream, marks in lanes:
            if len(marks) > _IN_FLIGHT and not marks[-_IN_FLIGHT][1].query():
                continue
            with torch.cuda.stream(stream):
                launch()
                marks.append((now_s, torch.cuda.Event(enable_timing=True)))
                marks[-1][1].record()
    torch.cuda.synchronize()
    return [target.nbytes / _middle_s(marks, now_s) for (target, _), (_, _, marks) in zip(ways, lanes, strict=False)]


def _middle_s(marks: list[tuple[float, Any]], whole_s: float) -> float:
    """The median time from mark to mark, of those set in the middle half; of all but the first where these are none."""
    times = [(at, float(before.elapsed_time(mark)) / 1e3) for (_, before), (at, mark) in itertools.pairwise(marks)]
    middle = [seconds for at, seconds in times if 0.25 * whole_s <= at <= 0.75 * whole_s]
    return statistics.median(middle or [seconds for _, seconds in times[1:]])


def _seconds(torch: Any, work: Callable[[], Any], repeats: int = 5) -> float:
    """The least device time of `work` over a few runs, since a disturbance can only make a run longer."""
    return min([_once_s(torch, work) for _ in range(repeats + 1)][1:])


def _once_s(torch: Any, work: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _matmul_rate(torch: Any, dtype: str, edge: int = 4096) -> float:
    """FLOP/s that products of large square matrices keep up, with random operands (zeros run faster than real data).

    A product after an idle moment is 10 to 15 % faster on an H200: the clock falls within half a second of products.
    """
    left, right = (torch.randn(edge, edge, device="cuda", dtype=getattr(torch, dtype)) for _ in range(2))

    def products() -> None:
        for _ in range(_PRODUCTS):
            left @ right

    laps, begin_s = list[float](), time.monotonic()
    while time.monotonic() - begin_s < _HEAT_S or len(laps) < 2:
        laps.append(_once_s(torch, products))
    return _PRODUCTS * 2.0 * edge**3 / statistics.median(laps[len(laps) // 2 :])


def _slowdown_while_copying(torch: Any, host: list[Any], device: list[Any], side: Any) -> float:
    """The fraction by which a kernel takes longer while copies run in both directions; 0.0 if noise makes it negative.

    The kernel is bound by device memory, which the copies use as well. Kernels that only read or only write lose more (12 and
    16 % on an H100, where this one loses 3.7), convolutions and norms less. A matmul would measure the clock instead, which
    falls by 10 % and more while matmuls run.
    """
    left, right, out = (torch.zeros(host[0].nbytes // 4, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    rounds = max(4, int(0.02 / _seconds(torch, lambda: torch.add(left, right, out=out))))

    def kernels() -> None:
        for _ in range(rounds):
            torch.add(left, right, out=out)

    pairs = ((host[0], device[0]), (device[1], host[1]))
    alone, beside = [], []
    for turn in range(10):
        target, source = pairs[turn % 2]
        alone.append(_once_s(torch, kernels))
        copies = 2 + int(3.0 * alone[-1] * 50e9 / target.nbytes)
        with torch.cuda.stream(side):
            for _ in range(copies):
                target.copy_(source, non_blocking=True)
        beside.append(_once_s(torch, kernels))
        torch.cuda.synchronize()
    return max(0.0, sum(sorted(beside[2:])[1:-1]) / sum(sorted(alone[2:])[1:-1]) - 1.0)


def _launch_s(torch: Any) -> float:
    """Time between two tiny kernels that are already queued, so that the host's speed has no influence."""
    tiny = torch.zeros(1, device="cuda")

    def kernels() -> None:
        for _ in range(100):
            tiny.add_(1)

    from graphoffload.torch_internals.streams import busy_wait

    kernels()
    busy_wait(20_000_000)
    return _once_s(torch, kernels) / 100
