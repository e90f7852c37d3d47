"""Two GPUs that are not there, for the command line: the first is on NUMA node 1, of the second nothing is known."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from graphoffload.hardware import measurement, numa
from graphoffload.hardware.profile import PROFILES, HardwareProfile

ALONE = dataclasses.replace(PROFILES["h200-sxm"], name="NVIDIA X", copy_latency_s=4e-6, both_ways_bytes_per_s=90e9)


@contextlib.contextmanager
def made_up_gpus(folder: Path, d2h_bytes_per_s: float = ALONE.d2h_bytes_per_s) -> Iterator[list[int]]:
    """Indices of devices that were measured; `folder` takes the cache and a tree of /sys."""
    asked: list[int] = []
    devices = [types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x9A, pci_device_id=0), types.SimpleNamespace()]
    node = folder / "bus/pci/devices/0000:9a:00.0"
    node.mkdir(parents=True, exist_ok=True)
    (node / "numa_node").write_text("1\n")
    (node / "local_cpulist").write_text("4-7\n")

    def measured(module: Any, index: int, start: Callable[[str], None] | None = None) -> HardwareProfile:
        asked.append(index)
        for phase in measurement.PHASES if start is not None else ():
            start(phase)
        return dataclasses.replace(ALONE, d2h_bytes_per_s=d2h_bytes_per_s)

    with (
        mock.patch.dict("os.environ", GRAPHOFFLOAD_CACHE_DIR=str(folder / "cache")),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "device_count", return_value=len(devices)),
        mock.patch.object(torch.cuda, "get_device_name", return_value=ALONE.name),
        mock.patch.object(torch.cuda, "get_device_properties", devices.__getitem__),
        mock.patch.object(numa, "SYSTEM", folder),
        mock.patch.object(measurement, "_measure", measured),
    ):
        yield asked
