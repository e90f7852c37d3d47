"""Memory of the host: how much there is, and how much of it a process could still take.

The operating system answers for the machine (`psutil`), and each control group around the process for its container or job:
`psutil` does not see those. The least of all counts.
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
    """Bytes of memory: all there is, and what can be had without swapping, files in the page cache included."""

    total_bytes: int
    available_bytes: int


def machine() -> HostRam:
    """What the operating system says of the whole machine. Without psutil all of it counts as available."""
    try:
        import psutil
    except ImportError:
        log.debug("psutil is not installed: all of the host's memory counts as available")
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return HostRam(total, total)
    found = psutil.virtual_memory()
    return HostRam(int(found.total), int(found.available))


def for_this_process() -> HostRam:
    """What the machine and every control group around this process leave to it."""
    found = [machine(), *control_groups(_TABLE, _ROOT)]
    return HostRam(min(ram.total_bytes for ram in found), min(ram.available_bytes for ram in found))


def control_groups(table: Path, root: Path) -> Iterator[HostRam]:
    """Limit, and what is left of it, of this process's control group and of every one around it, versions 1 and 2.

    In a container the table may name the host's path, of which only the root is mounted: missing folders are passed over.
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
    """Bytes charged to a control group that the kernel cannot take back: without the files in its page cache."""
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
