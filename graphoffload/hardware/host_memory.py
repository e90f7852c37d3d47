"""Memory of the host: the total, and the part that this process could still take.

    machine (psutil)                           total 256 GiB    available 200 GiB
      └─ container (control group)             limit  64 GiB    available  40 GiB       the least of each column counts
           └─ job (control group)              limit  48 GiB    available  44 GiB

`psutil` reports the machine alone, so the control groups are read from /sys/fs/cgroup. The answer is out of date as soon as
another process allocates memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from graphoffload.log import log

_TABLE, _ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class HostRam:
    """Bytes of memory: the total, and those available without swapping. Files in the page cache count as available."""

    total_bytes: int
    available_bytes: int


def machine() -> HostRam:
    """The memory of the whole machine. Without psutil all of it counts as available."""
    try:
        import psutil
    except ImportError:
        log.debug("psutil is not installed: all of the host's memory counts as available")
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return HostRam(total, total)
    found = psutil.virtual_memory()
    return HostRam(int(found.total), int(found.available))


def for_this_process() -> HostRam:
    """The memory that the machine and every control group around this process leave to it."""
    found = [machine(), *control_groups(_TABLE, _ROOT)]
    return HostRam(min(ram.total_bytes for ram in found), min(ram.available_bytes for ram in found))


def control_groups(table: Path, root: Path) -> Iterator[HostRam]:
    """Limit and available memory of this process's control group and of every one around it, versions 1 and 2.

    In a container the table may name the host's path, of which only the root is mounted. Missing folders are skipped.
    """
    for line in _text(table).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        folder = base / path.strip("/")
        for place in (folder, *folder.parents):
            for name in ("memory.limit_in_bytes",) if controllers else ("memory.max", "memory.high"):
                text = _text(place / name)
                if text.isdigit():
                    yield HostRam(int(text), max(0, int(text) - _in_use(place, first_version=bool(controllers))))
            if place == base:
                break


def _in_use(place: Path, *, first_version: bool) -> int:
    """Bytes charged to a control group that the kernel cannot reclaim, so without the files in its page cache."""
    charged = _text(place / ("memory.usage_in_bytes" if first_version else "memory.current"))
    prefix = "total_" if first_version else ""
    cached = {f"{prefix}active_file", f"{prefix}inactive_file", "slab_reclaimable"}
    counts = (line.split() for line in _text(place / "memory.stat").splitlines())
    reclaimable = sum(int(count[1]) for count in counts if len(count) == 2 and count[0] in cached)
    return max(0, int(charged) - reclaimable) if charged.isdigit() else 0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
