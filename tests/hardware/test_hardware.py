"""Profiles: names, arithmetic, the disk cache and the line fitted through copy times. No device needed."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import re
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from graphoffload.analysis import timing
from graphoffload.analysis.timing import repeats_of
from graphoffload.errors import ConfigError, HardwareWarning
from graphoffload.hardware import measurement as hardware
from graphoffload.hardware.measurement import cache_path, cached, fit_link, resolve_hardware
from graphoffload.hardware.profile import PROFILES, HardwareProfile
from graphoffload.torch_internals import allocator


def test_names_resolve_and_unknown_ones_name_the_nearest() -> None:
    assert resolve_hardware("h100-sxm", "cuda:3") is PROFILES["h100-sxm"]
    assert resolve_hardware(PROFILES["l40s"], "cpu") is PROFILES["l40s"]
    assert resolve_hardware("measure", "cpu").source == "cpu"
    with pytest.raises(ConfigError, match=r"'h200-smx' is unknown; known: .*a100-40g.*Did you mean 'h200-sxm'"):
        resolve_hardware("h200-smx", "cpu")


def test_copy_time_agrees_with_the_measured_h200_by_size() -> None:
    """GB/s by size as measured; 1 MiB and above within 5 %."""
    for nbytes, measured_gb_per_s in ((2**20, 48.0), (4 * 2**20, 53.5), (16 * 2**20, 54.5)):
        rate = nbytes / PROFILES["h200-sxm"].copy_time_s(nbytes, "d2h") / 1e9
        assert rate == pytest.approx(measured_gb_per_s, rel=0.05), nbytes


def test_sharing_and_scaling_cost_what_they_say() -> None:
    toy = partial(HardwareProfile, name="x", source="datasheet", memory_bytes=1, d2h_bytes_per_s=10, h2d_bytes_per_s=20)
    profile = toy(copy_latency_s=1.0)
    assert (profile.copy_time_s(100, "d2h"), profile.copy_time_s(100, "h2d")) == (11.0, 6.0)
    half = profile.scaled(link=0.5)
    assert (half.copy_time_s(100, "d2h"), half.copy_time_s(100, "h2d")) == (21.0, 11.0)
    assert half != profile
    assert profile.scaled(link=1.0) == profile
    assert toy(copy_latency_s=0.0, links_shared_by=4).copy_time_s(100, "d2h") == 40.0


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_json_round_trip_and_table(name: str) -> None:
    profile = PROFILES[name]
    assert HardwareProfile.from_json(profile.to_json()) == profile
    assert hash(profile) == hash(HardwareProfile.from_json(profile.to_json()))
    lines = profile.table_lines()
    assert lines[0] == f"{name} [{profile.source}]"
    assert any("GB/s" in line for line in lines)


def test_every_figure_has_a_unit_and_a_source() -> None:
    """Where a number comes from differs: measured, of the datasheet less what kernels lose, a default, assumed."""

    def rows(profile: HardwareProfile) -> dict[str, str]:
        lines = [re.split(r"  +", line.strip()) for line in profile.table_lines()[1:]]
        assert all(len(line) == 3 for line in lines), lines
        return {what: f"{value}, {origin}" for what, value, origin in lines}

    named, a100, cpu = rows(PROFILES["h200-sxm"]), rows(PROFILES["a100-80g"]), rows(PROFILES["cpu"])
    assert named["D2H"] == "55.3 GB/s, measured on such a device"
    assert named["copy latency"] == "3.0 us, default, as on an H200"
    assert a100["D2H"] == "27.5 GB/s, datasheet x 0.86"
    assert a100["matmul bfloat16"] == "218 TFLOP/s, datasheet x 0.7"
    assert a100["device memory bandwidth"] == "1733 GB/s, datasheet x 0.85"
    assert a100["memory"] == "79.0 GiB, datasheet"
    assert cpu["memory"].endswith(", this machine")
    assert cpu["H2D"] == "10.0 GB/s, assumed: copies overlap with nothing on a CPU"
    mine = dataclasses.replace(PROFILES["h200-sxm"], name="NVIDIA H200", copy_latency_s=3e-6, links_shared_by=2)
    assert rows(mine)["copy latency"] == "3.0 us, measured on this device"
    assert rows(mine)["link shared with"] == "2 GPUs, as given"


@pytest.mark.parametrize("change", [{"d2h_bytes_per_s": 0.0}, {"copy_latency_s": -1.0}, {"links_shared_by": 0}])
def test_numbers_that_no_device_has_are_refused(change: dict[str, float]) -> None:
    numbers: dict[str, float] = {"memory_bytes": 1, "d2h_bytes_per_s": 1.0, "h2d_bytes_per_s": 1.0} | change
    with pytest.raises(ConfigError, match=next(iter(change))):
        HardwareProfile(name="x", source="datasheet", **numbers)  # type: ignore[arg-type]


def test_a_stored_profile_of_an_earlier_release_is_read() -> None:
    """Files on disk may have fields that no profile has any more."""
    stored = {**json.loads(PROFILES["l40s"].to_json()), "duplex_factor": 0.87}
    assert HardwareProfile.from_json(json.dumps(stored)) == PROFILES["l40s"]


def test_fit_recovers_latency_and_bandwidth_and_never_a_negative_latency() -> None:
    samples = [(n, 5e-6 + n / 50e9) for n in (2**20, 2**22, 2**26)]
    latency_s, rate = fit_link(samples)
    assert latency_s == pytest.approx(5e-6)
    assert rate == pytest.approx(50e9)
    assert fit_link([(100, 0.9), (200, 2.1)])[0] == 0.0
    with pytest.raises(ValueError, match="do not grow"):
        fit_link([(100, 2.0), (200, 1.0)])


def test_cache_measures_once_among_threads_and_again_when_the_file_is_broken(tmp_path: Path) -> None:
    path, calls = tmp_path / "deep" / "hardware-x.json", []

    def make() -> HardwareProfile:
        calls.append(1)
        return PROFILES["l40s"]

    threads = [threading.Thread(target=cached, args=(path, make)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert cached(path, make) == PROFILES["l40s"]
    assert len(calls) == 1
    path.write_text("{")
    assert cached(path, make) == PROFILES["l40s"]
    assert len(calls) == 2
    assert [p.suffix for p in path.parent.iterdir() if p.suffix not in (".json", ".lock")] == [], "no half-written file is left"


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(HardwareWarning, match="cannot be cached"):
        assert cached(tmp_path / "file" / "x.json", lambda: PROFILES["l40s"]) is PROFILES["l40s"]


@pytest.mark.parametrize("refused", ["lock", "rename"])
def test_a_folder_that_knows_no_locks_or_is_full(refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Network file systems may refuse the lock, full ones the file: measured all the same, and nothing is left half-written."""

    def fails(*_: Any) -> None:
        raise OSError(errno.ENOLCK if refused == "lock" else errno.ENOSPC, "refused")

    path = tmp_path / "x.json"
    monkeypatch.setattr(*((FileLock, "acquire", fails) if refused == "lock" else (os, "replace", fails)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert cached(path, lambda: PROFILES["l40s"]) is PROFILES["l40s"]
    assert [item.category for item in caught] == ([] if refused == "lock" else [HardwareWarning])
    assert path.exists() == (refused == "lock")
    assert {p.suffix for p in tmp_path.iterdir()} <= {".json", ".lock"}


def test_cache_path_holds_device_and_torch_and_honours_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GRAPHOFFLOAD_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cache_path("NVIDIA H200/x", "2.13.0+cpu")
    assert path == tmp_path / "graphoffload" / "hardware-5-NVIDIA-H200-x-2.13.0+cpu.json"
    assert cache_path("NVIDIA H200/x", "2.13.0+cpu", 4).name == "hardware-5-NVIDIA-H200-x-2.13.0+cpu-4-ranks.json"
    monkeypatch.setenv("GRAPHOFFLOAD_CACHE_DIR", str(tmp_path / "own"))
    assert cache_path("x", "y").parent == tmp_path / "own"


def test_an_unmeasurable_device_falls_back_to_the_profile_of_its_name() -> None:
    with pytest.warns(HardwareWarning, match="figures of 'a100-40g'"):
        profile = hardware._fallback("NVIDIA A100-SXM4-40GB", 40 * 2**30, "only 1 MiB of it is free")
    assert profile.source == "datasheet"
    assert profile.memory_bytes == 40 * 2**30


class Device:
    """torch.cuda of a device whose copies share a rate: `rate(at)` bytes a second, at seconds since it was made."""

    def __init__(self, rate: Callable[[float], float]) -> None:
        self.rate, self.begin_s, self.copies = rate, time.monotonic(), 0
        self.cuda, self.Stream, self.main = self, Lane, Lane()
        self.current = self.main

    def current_stream(self) -> Lane:
        return self.main

    def now_s(self) -> float:
        return time.monotonic() - self.begin_s

    def Event(self, *, enable_timing: bool) -> Mark:
        return Mark(self)

    @contextlib.contextmanager
    def stream(self, lane: Lane) -> Iterator[None]:
        self.current = lane
        yield

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.current.free_s - self.now_s()))


class Lane:
    """A stream: when it is done with what was launched."""

    free_s = 0.0


class Mark:
    """An event."""

    def __init__(self, device: Device) -> None:
        self.device, self.at_s = device, 0.0

    def record(self) -> None:
        self.at_s = max(self.device.current.free_s, self.device.now_s())

    def query(self) -> bool:
        return self.device.now_s() >= self.at_s

    def elapsed_time(self, later: Mark) -> float:
        return 1e3 * (later.at_s - self.at_s)


class Memory:
    """What is copied."""

    nbytes = 10**8

    def __init__(self, device: Device) -> None:
        self.device = device

    def copy_(self, source: Memory, *, non_blocking: bool) -> None:
        assert non_blocking
        begin_s = max(self.device.current.free_s, self.device.now_s())
        self.device.current.free_s = begin_s + self.nbytes / self.device.rate(begin_s)
        self.device.copies += 1


@pytest.mark.parametrize("lanes", [1, 2])
def test_the_rate_is_that_of_copies_while_all_ranks_copy(lanes: int) -> None:
    """Another rank begins 60 ms later and ends 60 ms earlier; most copies are before and after that, and twice as fast."""
    device = Device(lambda at: 10e9 if 0.06 <= at < 0.24 else 20e9)
    begun: list[str] = []
    ways = [(Memory(device), Memory(device)) for _ in range(lanes)]
    found = hardware._sustained(device, ways, "both", begun.append)
    assert begun == ["both"]
    assert found == pytest.approx([10e9] * lanes, rel=0.1)
    assert device.copies <= lanes * 45, "launched only as fast as they are done"


@pytest.mark.parametrize("together", [False, True])
def test_the_figures_of_a_profile(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rates are those of copies that went on beside kernels, alone or with other ranks, which begin each phase together."""
    sustained = {"d2h": [36e9], "h2d": [43e9], "both": [20e9, 21e9]}
    begun: list[str] = []

    def measured(
        module: Any, ways: list[Any], phase: str, start: Callable[[str], None] | None, beside: Any = None
    ) -> list[float]:
        assert len(ways) == len(sustained[phase])
        assert (beside is kernels) == (phase != "both")
        if start is not None:
            start(phase)
        return sustained[phase]

    def seconds(module: Any, work: Callable[[], Any]) -> float:
        work()
        return next(times)

    copies = [4e-6 + n / 50e9 for n in (2**20, 2**22, 2**24)]
    times = iter([*copies, *copies, 1e-3])
    monkeypatch.setattr(hardware, "_sustained", measured)
    monkeypatch.setattr(hardware, "_seconds", seconds)
    kernels = object()
    for name, value in (
        ("_slowdown_while_copying", 0.05), ("_matmul_rate", 7e14), ("_launch_s", 2e-6), ("_kernels", kernels),
    ):  # fmt: skip
        monkeypatch.setattr(hardware, name, lambda *given, value=value: value)
    module = types.SimpleNamespace(
        empty=lambda nbytes, *, dtype, device: torch.empty(nbytes, dtype=dtype), uint8=torch.uint8,
        cuda=types.SimpleNamespace(Stream=Lane),
    )  # fmt: skip
    host = [torch.empty(2**24, dtype=torch.uint8) for _ in range(2)]
    found = hardware._measure_with(module, "NVIDIA X", 10**9, host, begun.append if together else None)
    rates = (found.d2h_bytes_per_s, found.h2d_bytes_per_s, found.both_ways_bytes_per_s)
    assert rates == pytest.approx((36e9, 43e9, 41e9), rel=1e-6)
    assert begun == (["d2h", "h2d", "both"] if together else [])
    assert found.copy_latency_s == pytest.approx(4e-6)
    assert found.device_bandwidth_bytes_per_s == 2 * 2**24 / 1e-3


def test_kernels_run_beside_copies_and_are_no_copies() -> None:
    """They are launched as long as copies are, a few at a time, on the current stream: cuBLAS has its workspace there."""
    device, launched = Device(lambda at: 10e9), list[float]()

    def kernels() -> None:
        assert device.current is device.main
        device.current.free_s = max(device.current.free_s, device.now_s()) + 0.01
        launched.append(device.now_s())

    found = hardware._sustained(device, [(Memory(device), Memory(device))], "d2h", None, kernels)
    assert found == pytest.approx([10e9], rel=0.1)
    assert 20 <= len(launched) <= 45
    assert launched[-1] > 0.2


def test_a_link_that_is_very_slow_ends() -> None:
    device = Device(lambda at: 5e8)
    assert hardware._sustained(device, [(Memory(device), Memory(device))], "d2h", None) == pytest.approx([5e8], rel=0.1)
    assert device.copies == 7, "enough for a median"


def test_the_slowest_of_several() -> None:
    """The link of all; kernels of devices of the same name alone."""
    one = dataclasses.replace(PROFILES["h200-sxm"], both_ways_bytes_per_s=90e9)
    same = dataclasses.replace(one, d2h_bytes_per_s=30e9, kernel_launch_s=9e-6, matmul_flops_per_s=(("bfloat16", 600e12),))
    link = {"d2h_bytes_per_s": 60e9, "h2d_bytes_per_s": 20e9, "both_ways_bytes_per_s": 41e9, "copy_latency_s": 7e-6}
    other = dataclasses.replace(PROFILES["l40s"], kernel_launch_s=1.0, **link)
    found = one.slowest([same, other])
    assert found == dataclasses.replace(
        one, d2h_bytes_per_s=30e9, h2d_bytes_per_s=20e9, both_ways_bytes_per_s=41e9, copy_latency_s=7e-6, kernel_launch_s=9e-6,
        matmul_flops_per_s=(("bfloat16", 600e12), *one.matmul_flops_per_s[1:]),
    )  # fmt: skip
    d2h = min(each.d2h_bytes_per_s for each in (one, same, other))
    assert all(each.slowest([]) == each for each in (one, same, other))
    assert {a.slowest([b, c]).d2h_bytes_per_s for a, b, c in itertools.permutations((one, same, other))} == {d2h}


def test_what_the_link_was_measured_with_is_said() -> None:
    four = dataclasses.replace(PROFILES["h200-sxm"], name="NVIDIA H200", both_ways_bytes_per_s=41e9, measured_by_ranks=4)
    said = "\n".join(four.table_lines())
    assert "link measured by         4 local ranks   all at once" in said
    assert "both ways at once        41.0 GB/s       measured on this device" in said
    assert "link shared with" not in said, "it is in the figures"
    assert four.scaled(link=0.5).both_ways_bytes_per_s == 20.5e9


@given(once_s=st.floats(1e-6, 100.0))
def test_timing_a_kernel_takes_a_second_at_most(once_s: float) -> None:
    """Behind the two runs that every kernel has. Nine times attention over 327680 tokens took more than four minutes."""
    repeats, between_s = repeats_of(once_s)
    assert repeats * (once_s + between_s) <= 1.0
    assert repeats == 9 or once_s > 0.01, "a short one is repeated as often as a median wants"
    assert repeats >= 1 or once_s >= 0.5, "one that is not repeated has run long enough to be timed by the clock"


def test_workspaces_one_after_the_other_are_not_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution's backward takes one for each gradient: 5 beside a result of 2, then 4 beside results of 2 + 3."""
    sizes = (2, 5, -5, 3, 4, -4, -2, -3)
    calls: list[str] = []
    monkeypatch.setattr(allocator, "start", lambda: not calls)
    monkeypatch.setattr(allocator, "stop", lambda index: [allocator.Change(at, n) for at, n in enumerate(sizes)])
    assert timing._most_allocated(lambda: calls.append("ran"), torch.device("cuda", 0)) == 9
    assert calls == ["ran"]
    assert timing._most_allocated(lambda: calls.append("ran"), torch.device("cuda", 0)) is None, "somebody else records"
    assert calls == ["ran"]
    assert allocator.most([]) == 0
