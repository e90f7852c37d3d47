"""What the device and its link to the host can do: the numbers a plan stands on.

    resolve_hardware("measure", "cuda:0")   measured once (about 2 s), cached on disk under a lock
    resolve_hardware("h200-sxm", "cpu")     a named profile, for a GPU that is not there
    resolve_hardware(profile, ...)          your own

A copy of n bytes takes latency + n / bandwidth: one straight line through what is measured. Compute rates are what large
kernels achieve; "datasheet" profiles are the datasheet's peak times the share that such kernels usually achieve (ACHIEVED).
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import fcntl
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from graphoffload.errors import ConfigError, HardwareWarning, warn
from graphoffload.cache_files import cache_dir, write_whole
from graphoffload.units import format_bytes, parse_size

Direction = Literal["d2h", "h2d"]
Source = Literal["measured", "datasheet", "cpu"]
ACHIEVED = 0.7
LINK_ACHIEVED = 0.86
BANDWIDTH_ACHIEVED = 0.85
_MEASURE_BYTES = 256 * 2**20
_EDITION = 2  # of what is measured: older files are not read


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """One device with its link to the host.

    Attributes:
        source: "measured" on this device, "datasheet" (derated peak figures), or "cpu" (nothing to hide copies behind).
        memory_bytes: of the device.
        d2h_bytes_per_s, h2d_bytes_per_s: one direction alone, one GPU alone, large copies.
        duplex_factor: what is left of each direction while both run.
        copy_latency_s: constant part of a copy's time.
        compute_slowdown_while_copying: 0.02: compute that overlaps a copy takes 2 % longer.
        matmul_flops_per_s: (dtype, achieved rate) pairs.
        device_bandwidth_bytes_per_s: device memory, reads plus writes.
        kernel_launch_s: least time between two kernels.
        links_shared_by: GPUs that draw on this link at the same time; each gets that share of it.
    """

    name: str
    source: Source
    memory_bytes: int
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    duplex_factor: float = 0.87
    copy_latency_s: float = 3e-6
    compute_slowdown_while_copying: float = 0.02
    matmul_flops_per_s: tuple[tuple[str, float], ...] = ()
    device_bandwidth_bytes_per_s: float = 1e12
    kernel_launch_s: float = 3e-6
    links_shared_by: int = 1

    def __post_init__(self) -> None:
        for field in ("memory_bytes", "d2h_bytes_per_s", "h2d_bytes_per_s", "device_bandwidth_bytes_per_s", "links_shared_by"):
            if not getattr(self, field) > 0:
                raise ConfigError(f"hardware {self.name!r}: {field}={getattr(self, field)!r} must be above 0.")
        for field in ("copy_latency_s", "compute_slowdown_while_copying", "kernel_launch_s"):
            if not getattr(self, field) >= 0:
                raise ConfigError(f"hardware {self.name!r}: {field}={getattr(self, field)!r} must be at least 0.")
        if not 0 < self.duplex_factor <= 1:
            raise ConfigError(f"hardware {self.name!r}: duplex_factor={self.duplex_factor!r} must be in (0, 1].")

    def copy_time_s(self, nbytes: int, direction: Direction) -> float:
        """Time of one copy that has its direction for itself."""
        return self.copy_latency_s + nbytes / self.copy_rate_bytes_per_s(direction)

    def copy_rate_bytes_per_s(self, direction: Direction) -> float:
        """Of large copies that have their direction for themselves, beside the other GPUs on the link."""
        return (self.d2h_bytes_per_s if direction == "d2h" else self.h2d_bytes_per_s) / self.links_shared_by

    def matmul_rate_flops_per_s(self, dtype: str) -> float:
        """Achieved matmul rate of a dtype such as "bfloat16"; the slowest known one for a dtype that is not listed."""
        rates = dict(self.matmul_flops_per_s)
        if not rates:
            raise ConfigError(f"hardware {self.name!r} has no matmul rates; give matmul_flops_per_s=((dtype, rate), ...).")
        return rates.get(dtype, min(rates.values()))

    def scaled(self, *, link: float = 1.0) -> HardwareProfile:
        """The same device with its link's bandwidth, both ways, times `link`."""
        if not link > 0:
            raise ConfigError(f"scaled(link={link!r}): the factor must be above 0.")
        name = self.name if link == 1.0 else f"{self.name} (link x {link:g})"
        return dataclasses.replace(
            self, name=name, d2h_bytes_per_s=self.d2h_bytes_per_s * link, h2d_bytes_per_s=self.h2d_bytes_per_s * link
        )

    def table_lines(self) -> list[str]:
        """For people, one figure a line: what it is, its value with its unit, and where it comes from."""
        both = ("d2h_bytes_per_s", "h2d_bytes_per_s")
        rows = [("memory", format_bytes(self.memory_bytes), _origin(self, "memory_bytes"))]
        rows += [(n[:3].upper(), f"{getattr(self, n) / 1e9:.1f} GB/s", _origin(self, n, LINK_ACHIEVED)) for n in both]
        shared = f"{self.links_shared_by} GPUs" if self.links_shared_by > 1 else "nobody else"
        rows += [
            ("link shared with", shared, "assumed" if self.links_shared_by == 1 else "as given"),
            ("both directions at once", f"x {self.duplex_factor:.2f} each", _origin(self, "duplex_factor")),
            ("copy latency", f"{self.copy_latency_s * 1e6:.1f} us", _origin(self, "copy_latency_s")),
            ("compute beside a copy", f"{self.compute_slowdown_while_copying * 100:+.1f} % time",
             _origin(self, "compute_slowdown_while_copying")),
            *((f"matmul {dtype}", f"{rate / 1e12:.3g} TFLOP/s", _origin(self, "matmul_flops_per_s", ACHIEVED))
              for dtype, rate in self.matmul_flops_per_s),
            ("device memory bandwidth", f"{self.device_bandwidth_bytes_per_s / 1e9:.0f} GB/s",
             _origin(self, "device_bandwidth_bytes_per_s", BANDWIDTH_ACHIEVED)),
            ("kernel launch", f"{self.kernel_launch_s * 1e6:.1f} us", _origin(self, "kernel_launch_s")),
        ]  # fmt: skip
        return [f"{self.name} [{self.source}]", *(f"  {what:<25}{value:<16}{origin}" for what, value, origin in rows)]

    def to_json(self) -> str:
        """All fields; from_json reads it back."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> HardwareProfile:
        """Inverse of to_json."""
        data = json.loads(text)
        data["matmul_flops_per_s"] = tuple((str(dtype), float(rate)) for dtype, rate in data["matmul_flops_per_s"])
        return cls(**data)


def _datasheet(
    name: str, memory_gib: int, link_gb: float, half_tflops: float, single_tflops: float, memory_gb_per_s: float
) -> HardwareProfile:
    """A profile from peak figures: PCIe, dense 16-bit and float32 matmul in TFLOP/s (float32 without TF32, torch's default)."""
    return HardwareProfile(
        name=name,
        source="datasheet",
        memory_bytes=parse_size(f"{memory_gib}GiB", field="memory_bytes"),
        d2h_bytes_per_s=link_gb * 1e9 * LINK_ACHIEVED,
        h2d_bytes_per_s=link_gb * 1e9 * LINK_ACHIEVED,
        matmul_flops_per_s=tuple(
            (dtype, peak * 1e12 * ACHIEVED)
            for dtype, peak in (("bfloat16", half_tflops), ("float16", half_tflops), ("float32", single_tflops))
        ),
        device_bandwidth_bytes_per_s=memory_gb_per_s * 1e9 * BANDWIDTH_ACHIEVED,
    )


PROFILES: dict[str, HardwareProfile] = {
    profile.name: profile
    for profile in (
        dataclasses.replace(
            _datasheet("h200-sxm", 139, 64, 989, 67, 4800),
            source="measured",
            d2h_bytes_per_s=55.3e9,
            h2d_bytes_per_s=55.5e9,
            matmul_flops_per_s=(("bfloat16", 770e12), ("float16", 750e12), ("float32", 51e12)),
            device_bandwidth_bytes_per_s=4.1e12,
        ),
        _datasheet("h100-sxm", 79, 64, 989, 67, 3350),
        _datasheet("a100-80g", 79, 32, 312, 19.5, 2039),
        _datasheet("a100-40g", 39, 32, 312, 19.5, 1555),
        _datasheet("l40s", 44, 32, 362, 91.6, 864),
        _datasheet("rtx-4090", 23, 32, 165, 82.6, 1008),
        HardwareProfile(
            name="cpu",
            source="cpu",
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            d2h_bytes_per_s=10e9,
            h2d_bytes_per_s=10e9,
            duplex_factor=0.5,
            copy_latency_s=1e-6,
            compute_slowdown_while_copying=1.0,
            matmul_flops_per_s=(("bfloat16", 1e11), ("float16", 1e11), ("float32", 1e11)),
            device_bandwidth_bytes_per_s=10e9,
            kernel_launch_s=1e-6,
        ),
    )
}


def _origin(profile: HardwareProfile, field: str, share: float = 1.0) -> str:
    """Where a profile's figure comes from; `share` is what large kernels or copies achieve of a datasheet's peak."""
    if profile.source == "cpu":
        return "this machine" if field == "memory_bytes" else "assumed: nothing is hidden behind a CPU"
    named = profile.name in PROFILES
    defaults = {item.name: item.default for item in dataclasses.fields(HardwareProfile)}
    if (named or profile.source == "datasheet") and getattr(profile, field) == defaults[field]:
        return "default, as on an H200"
    if profile.source == "measured":
        return "measured on such a device" if named else "measured on this device"
    return f"datasheet x {share:g}" if share < 1.0 else "datasheet"


def resolve_hardware(spec: str | HardwareProfile, device: object = "cpu") -> HardwareProfile:
    """The profile a plan for `device` ("cuda:0", a torch.device) shall use.

    Args:
        spec: "measure", a name in PROFILES, or a profile. On a device that is not CUDA "measure" gives the cpu profile.

    Raises:
        ConfigError: `spec` is no known name.
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
    """(latency_s, bytes_per_s) of the line through measured (nbytes, seconds), least squares of the relative error.

    Two unknowns: at least two sizes. A negative intercept (noise) is clipped to 0.
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


def cache_path(device_name: str, torch_version: str) -> Path:
    """Where a measured profile is kept: one file in `cache_dir` a device name and torch version."""
    safe = re.sub(r"[^A-Za-z0-9.+_-]+", "-", f"{device_name}-{torch_version}")
    return cache_dir() / f"hardware-{_EDITION}-{safe}.json"


def cached(path: Path, make: Callable[[], HardwareProfile]) -> HardwareProfile:
    """The profile at `path`, or `make()` written there. Processes take turns (fcntl lock), readers never see half a file.

    A file that does not parse is measured again. Without locks several processes may measure; a cache that cannot be written is
    done without: a warning.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # no place for it, or a file system that knows no locks
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(held.enter_context(open(path.with_suffix(".lock"), "a")), fcntl.LOCK_EX)
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            return HardwareProfile.from_json(path.read_text())
        profile = make()
        try:
            write_whole(path, profile.to_json())
        except OSError as error:
            text = f"measured hardware cannot be cached at {path} ({error}); it is measured anew in every process."
            warn(HardwareWarning, text)
        return profile


def measure(device_index: int = 0) -> HardwareProfile:
    """Measure a CUDA device (2 s, a quarter of what is free, buffers of 256 MiB), or read what was measured before.

    With too little free memory to measure in, nothing is allocated and the nearest named profile is used: a HardwareWarning.
    """
    import torch

    path = cache_path(torch.cuda.get_device_name(device_index), str(torch.__version__))
    return cached(path, lambda: _measure(torch, device_index))


def _fallback(name: str, memory_bytes: int, reason: str) -> HardwareProfile:
    """The named profile most like this device."""
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    near = [key for key in PROFILES if key != "cpu" and words & set(key.split("-"))]
    key = min(near or [key for key in PROFILES if key != "cpu"], key=lambda k: abs(PROFILES[k].memory_bytes - memory_bytes))
    warn(HardwareWarning, f"{name} was not measured ({reason}); planning uses the figures of {key!r}. Set hardware= to choose.")
    return dataclasses.replace(PROFILES[key], memory_bytes=memory_bytes, source="datasheet")


def _measure(torch: Any, index: int) -> HardwareProfile:
    """The profile of a device by running copies and kernels on it. Never asks for more than a quarter of what is free."""
    properties = torch.cuda.get_device_properties(index)
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils._python_dispatch import _disable_current_modes

    # Called while a graph is traced: under a fake-tensor mode only Python would be timed.
    with unset_fake_temporarily(), _disable_current_modes(), torch.no_grad(), torch.cuda.device(index):
        free_bytes, memory_bytes = torch.cuda.mem_get_info()
        size_bytes = min(_MEASURE_BYTES, 2 ** (max(1, free_bytes // 16).bit_length() - 1))
        if size_bytes < 16 * 2**20:
            return _fallback(properties.name, memory_bytes, f"only {format_bytes(free_bytes)} of it is free")
        try:
            return _measure_with(torch, properties.name, memory_bytes, size_bytes)
        except (RuntimeError, ValueError) as error:
            return _fallback(properties.name, memory_bytes, f"measuring failed: {str(error).splitlines()[0]}")
        finally:
            torch.cuda.empty_cache()


def _measure_with(torch: Any, name: str, memory_bytes: int, size_bytes: int) -> HardwareProfile:
    host = [torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(size_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    sizes = [n for n in (2**20, 2**22, 2**24, 2**26, size_bytes) if n <= size_bytes]

    def copy_s(target: Any, source: Any) -> float:
        return _seconds(torch, lambda: target.copy_(source, non_blocking=True))

    to_host = [(n, copy_s(host[0][:n], device[0][:n])) for n in dict.fromkeys(sizes)]
    to_device = [(n, copy_s(device[1][:n], host[1][:n])) for n in dict.fromkeys(sizes)]
    (d2h_latency_s, d2h_rate), (h2d_latency_s, h2d_rate) = fit_link(to_host), fit_link(to_device)
    side = torch.cuda.Stream()

    def both_ways() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            host[0].copy_(device[0], non_blocking=True)
        device[1].copy_(host[1], non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)

    duplex = (size_bytes / d2h_rate + size_bytes / h2d_rate) / 2 / _seconds(torch, both_ways)
    return HardwareProfile(
        name=name,
        source="measured",
        memory_bytes=memory_bytes,
        d2h_bytes_per_s=d2h_rate,
        h2d_bytes_per_s=h2d_rate,
        duplex_factor=min(1.0, duplex),
        copy_latency_s=(d2h_latency_s + h2d_latency_s) / 2,
        compute_slowdown_while_copying=_slowdown_while_copying(torch, host, device, side),
        matmul_flops_per_s=tuple((dtype, _matmul_rate(torch, dtype)) for dtype in ("bfloat16", "float16", "float32")),
        device_bandwidth_bytes_per_s=2 * size_bytes / _seconds(torch, lambda: device[0].copy_(device[1])),
        kernel_launch_s=_launch_s(torch),
    )


def _seconds(torch: Any, work: Callable[[], Any], repeats: int = 5) -> float:
    """Least device time of `work` over a few runs: what disturbs a run only ever makes it longer."""
    return min([_once_s(torch, work) for _ in range(repeats + 1)][1:])


def _once_s(torch: Any, work: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _matmul_rate(torch: Any, dtype: str, edge: int = 4096) -> float:
    """FLOP/s of a large square matmul with random operands (zeros run faster than real data)."""
    left, right = (torch.randn(edge, edge, device="cuda", dtype=getattr(torch, dtype)) for _ in range(2))
    return 2.0 * edge**3 / _seconds(torch, lambda: left @ right)


def _slowdown_while_copying(torch: Any, host: list[Any], device: list[Any], side: Any) -> float:
    """How much longer a kernel takes while copies run beside it, over both directions; 0.0 when noise says less.

    The kernel is bound by device memory, which is what copies share with it: the most that any kernel can lose. Matmuls would
    say more about the clock, which falls by 10 % and more while they run.
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
    """Time between two tiny kernels that are queued already, so that the host's own pace does not show."""
    tiny = torch.zeros(1, device="cuda")

    def kernels() -> None:
        for _ in range(100):
            tiny.add_(1)

    kernels()
    torch.cuda._sleep(20_000_000)
    return _once_s(torch, kernels) / 100
