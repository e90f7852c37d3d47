"""One device with its link to the host, as a value: the numbers that every plan uses.

    copy of n bytes       latency + n / bandwidth               64 MiB at 55 GB/s: 1.2 ms
    matmul                FLOPs / achieved rate of the dtype
    memory-bound kernel   bytes / device bandwidth

Rates are those that large kernels achieve. A "datasheet" profile is the datasheet's peak times the share that large kernels
usually achieve (ACHIEVED). Rates are too high for kernels that do not fill the device.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from graphoffload.errors import ConfigError
from graphoffload.hardware import host_memory
from graphoffload.units import format_bytes, parse_size

Direction = Literal["d2h", "h2d"]
Source = Literal["measured", "datasheet", "cpu"]
LINK_RATES = ("d2h_bytes_per_s", "h2d_bytes_per_s", "both_ways_bytes_per_s")
ACHIEVED = 0.7
LINK_ACHIEVED = 0.86
BANDWIDTH_ACHIEVED = 0.85
_ABOVE_ZERO = (
    "memory_bytes", "d2h_bytes_per_s", "h2d_bytes_per_s", "device_bandwidth_bytes_per_s", "peer_bytes_per_s", "links_shared_by",
    "measured_by_ranks",
)  # fmt: skip
_OF_THE_DEVICE = ("memory_bytes", "device_bandwidth_bytes_per_s", "peer_bytes_per_s")
_TIMES = ("compute_slowdown_while_copying", "kernel_launch_s", "collective_latency_s")
_AT_LEAST_ZERO = (
    "copy_latency_s", "compute_slowdown_while_copying", "kernel_launch_s", "collective_latency_s", "both_ways_bytes_per_s",
    "host_s_per_copy",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """One device with its link to the host.

    Attributes:
        source: "measured" on this device, "datasheet" (derated peak figures), or "cpu" (copies overlap with nothing).
        memory_bytes: memory of the device.
        d2h_bytes_per_s, h2d_bytes_per_s: rate of large copies in one direction alone, by one GPU alone; where it was measured,
            beside kernels, and by several ranks while all of them copy in that direction.
        copy_latency_s: constant part of a copy's time.
        compute_slowdown_while_copying: with 0.02, compute that overlaps with a copy takes 2 % longer.
        matmul_flops_per_s: (dtype, achieved rate) pairs.
        device_bandwidth_bytes_per_s: bandwidth of device memory, reads plus writes.
        kernel_launch_s: the least time between two kernels.
        peer_bytes_per_s: rate at which a device sends to the other devices of its host in a collective.
        collective_latency_s: constant part of a collective's time.
        links_shared_by: number of GPUs that use this link at the same time; each gets an equal share.
        both_ways_bytes_per_s: rate of copies in both directions at once, added up; 0: not known. No plan uses it.
        measured_by_ranks: processes of this host that copied at the same time while the link was measured.
        host_s_per_copy: for how long compute stands still for each tensor that goes to the host and comes back, since the host
            is the limit and issues both copies; 0: it is ahead of the device.
    """

    name: str
    source: Source
    memory_bytes: int
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    copy_latency_s: float = 3e-6
    compute_slowdown_while_copying: float = 0.02
    matmul_flops_per_s: tuple[tuple[str, float], ...] = ()
    device_bandwidth_bytes_per_s: float = 1e12
    kernel_launch_s: float = 3e-6
    peer_bytes_per_s: float = 300e9
    collective_latency_s: float = 15e-6
    links_shared_by: int = 1
    both_ways_bytes_per_s: float = 0.0
    measured_by_ranks: int = 1
    host_s_per_copy: float = 0.0

    def __post_init__(self) -> None:
        for field in _ABOVE_ZERO:
            if not getattr(self, field) > 0:
                raise ConfigError(f"hardware {self.name!r}: {field}={getattr(self, field)!r} must be above 0.")
        for field in _AT_LEAST_ZERO:
            if not getattr(self, field) >= 0:
                raise ConfigError(f"hardware {self.name!r}: {field}={getattr(self, field)!r} must be at least 0.")

    def copy_time_s(self, nbytes: int, direction: Direction) -> float:
        """Time of one copy while no other copy runs in its direction."""
        return self.copy_latency_s + nbytes / self.copy_rate_bytes_per_s(direction)

    def copy_rate_bytes_per_s(self, direction: Direction) -> float:
        """Rate of a large copy while no other copy of this GPU runs in its direction, and all GPUs use the link."""
        return (self.d2h_bytes_per_s if direction == "d2h" else self.h2d_bytes_per_s) / self.links_shared_by

    @property
    def copy_rates(self) -> tuple[float, float]:
        """copy_rate_bytes_per_s to the host and back."""
        return self.copy_rate_bytes_per_s("d2h"), self.copy_rate_bytes_per_s("h2d")

    def no_faster(self, d2h: float, h2d: float) -> HardwareProfile:
        """The same device with copies no faster than these rates, as copy_rates has them."""
        shared = self.links_shared_by
        return dataclasses.replace(
            self,
            d2h_bytes_per_s=min(d2h * shared, self.d2h_bytes_per_s),
            h2d_bytes_per_s=min(h2d * shared, self.h2d_bytes_per_s),
        )

    def matmul_rate_flops_per_s(self, dtype: str) -> float:
        """Achieved matmul rate of a dtype such as "bfloat16"; the slowest known rate for a dtype that is not listed."""
        rates = dict(self.matmul_flops_per_s)
        if not rates:
            raise ConfigError(f"hardware {self.name!r} has no matmul rates; give matmul_flops_per_s=((dtype, rate), ...).")
        return rates.get(dtype, min(rates.values()))

    def scaled(self, *, link: float = 1.0) -> HardwareProfile:
        """The same device with the link's bandwidth multiplied by `link` in both directions."""
        if not link > 0:
            raise ConfigError(f"scaled(link={link!r}): the factor must be above 0.")
        name = self.name if link == 1.0 else f"{self.name} (link x {link:g})"
        rates = {field: getattr(self, field) * link for field in LINK_RATES}
        return dataclasses.replace(self, name=name, **rates)

    def table_lines(self) -> list[str]:
        """A table for people with one figure on each line: its name, its value with the unit, and its origin."""
        both = ("d2h_bytes_per_s", "h2d_bytes_per_s")
        rows = [("memory", format_bytes(self.memory_bytes), _origin(self, "memory_bytes"))]
        rows += [(n[:3].upper(), f"{getattr(self, n) / 1e9:.1f} GB/s", _origin(self, n, LINK_ACHIEVED)) for n in both]
        if self.both_ways_bytes_per_s:
            rows.append(("both ways at once", f"{self.both_ways_bytes_per_s / 1e9:.1f} GB/s", _origin(self, LINK_RATES[-1])))
        if self.source == "measured" and self.name not in PROFILES:
            together = (f"{self.measured_by_ranks} local ranks", "all at once")
            rows.append(("link measured by", *(together if self.measured_by_ranks > 1 else ("1 local rank", "alone"))))
        if self.links_shared_by > 1:
            rows.append(("link shared with", f"{self.links_shared_by} GPUs", "as given"))
        elif self.measured_by_ranks == 1:
            rows.append(("link shared with", "nobody else", "assumed"))
        rows += [
            ("copy latency", f"{self.copy_latency_s * 1e6:.1f} us", _origin(self, "copy_latency_s")),
            ("compute beside a copy", f"{self.compute_slowdown_while_copying * 100:+.1f} % time",
             _origin(self, "compute_slowdown_while_copying")),
            *((f"matmul {dtype}", f"{rate / 1e12:.3g} TFLOP/s", _origin(self, "matmul_flops_per_s", ACHIEVED))
              for dtype, rate in self.matmul_flops_per_s),
            ("device memory bandwidth", f"{self.device_bandwidth_bytes_per_s / 1e9:.0f} GB/s",
             _origin(self, "device_bandwidth_bytes_per_s", BANDWIDTH_ACHIEVED)),
            ("kernel launch", f"{self.kernel_launch_s * 1e6:.1f} us", _origin(self, "kernel_launch_s")),
            ("collectives", f"{self.peer_bytes_per_s / 1e9:.1f} GB/s", _origin(self, "peer_bytes_per_s", ACHIEVED)),
            ("collective's latency", f"{self.collective_latency_s * 1e6:.1f} us", _origin(self, "collective_latency_s")),
        ]  # fmt: skip
        return [f"{self.name} [{self.source}]", *(f"  {what:<25}{value:<16}{origin}" for what, value, origin in rows)]

    def slowest(self, others: Iterable[HardwareProfile]) -> HardwareProfile:
        """This device with the link of the slowest of all these profiles, and all other figures of the slowest device of
        its name."""
        every = [self, *others]
        alike = [profile for profile in every if profile.name == self.name]
        rates = {field: min(getattr(profile, field) for profile in every) for field in LINK_RATES}
        rates |= {field: min(getattr(profile, field) for profile in alike) for field in _OF_THE_DEVICE}
        times = {field: max(getattr(profile, field) for profile in alike) for field in _TIMES}
        times["copy_latency_s"] = max(profile.copy_latency_s for profile in every)
        known = [dict(profile.matmul_flops_per_s) for profile in alike]
        matmuls = tuple((dtype, min(each.get(dtype, rate) for each in known)) for dtype, rate in self.matmul_flops_per_s)
        return dataclasses.replace(self, matmul_flops_per_s=matmuls, **rates, **times)

    def to_json(self) -> str:
        """All fields; from_json reads it back."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> HardwareProfile:
        """Inverse of to_json. Unknown fields of an older release are ignored."""
        known = {field.name for field in dataclasses.fields(cls)}
        data = {name: value for name, value in json.loads(text).items() if name in known}
        data["matmul_flops_per_s"] = tuple((str(dtype), float(rate)) for dtype, rate in data["matmul_flops_per_s"])
        return cls(**data)


def _datasheet(
    name: str, memory_gib: int, link_gb: float, half_tflops: float, single_tflops: float, memory_gb_per_s: float, peer_gb: float
) -> HardwareProfile:
    """A profile from peak figures: PCIe and the link to other devices in GB/s in one direction, dense 16-bit and float32 matmul
    in TFLOP/s (without TF32, torch's default)."""
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
        peer_bytes_per_s=peer_gb * 1e9 * ACHIEVED,
    )


PROFILES: dict[str, HardwareProfile] = {
    profile.name: profile
    for profile in (
        dataclasses.replace(
            _datasheet("h200-sxm", 139, 64, 989, 67, 4800, 450),
            source="measured",
            d2h_bytes_per_s=55.3e9,
            h2d_bytes_per_s=55.5e9,
            matmul_flops_per_s=(("bfloat16", 670e12), ("float16", 650e12), ("float32", 51e12)),
            device_bandwidth_bytes_per_s=4.1e12,
        ),
        _datasheet("h100-sxm", 79, 64, 989, 67, 3350, 450),
        _datasheet("a100-80g", 79, 32, 312, 19.5, 2039, 300),
        _datasheet("a100-40g", 39, 32, 312, 19.5, 1555, 300),
        _datasheet("l40s", 44, 32, 362, 91.6, 864, 32),
        _datasheet("rtx-4090", 23, 32, 165, 82.6, 1008, 32),
        HardwareProfile(
            name="cpu",
            source="cpu",
            memory_bytes=host_memory.machine().total_bytes,
            d2h_bytes_per_s=10e9,
            h2d_bytes_per_s=10e9,
            copy_latency_s=1e-6,
            compute_slowdown_while_copying=1.0,
            matmul_flops_per_s=(("bfloat16", 1e11), ("float16", 1e11), ("float32", 1e11)),
            device_bandwidth_bytes_per_s=10e9,
            kernel_launch_s=1e-6,
            peer_bytes_per_s=1e9,
            collective_latency_s=100e-6,
        ),
    )
}


def _origin(profile: HardwareProfile, field: str, share: float = 1.0) -> str:
    """The origin of a profile's figure; `share` is the part of a datasheet's peak that large kernels or copies achieve."""
    if profile.source == "cpu":
        return "this machine" if field == "memory_bytes" else "assumed: copies overlap with nothing on a CPU"
    named = profile.name in PROFILES
    defaults = {item.name: item.default for item in dataclasses.fields(HardwareProfile)}
    if (named or profile.source == "datasheet") and getattr(profile, field) == defaults[field]:
        return "default, as on an H200"
    if profile.source == "measured":
        return "measured on such a device" if named else "measured on this device"
    return f"datasheet x {share:g}" if share < 1.0 else "datasheet"
