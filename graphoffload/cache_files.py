"""Where files are kept between processes, and how they are written."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from filelock import FileLock, Timeout


def cache_dir() -> Path:
    """Folder for plans, kernel times and hardware profiles: GRAPHOFFLOAD_CACHE_DIR, else the user's cache folder."""
    configured = os.environ.get("GRAPHOFFLOAD_CACHE_DIR")
    if configured:
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphoffload"


def write_whole(path: Path, text: str) -> Path:
    """Write a file of which nobody reads half: aside, then renamed. Its folder is made if it is not there; returns the path.

    Raises:
        OSError: it cannot be written; nothing of it is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        aside.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    return path


def keep_newest(folder: Path, *, files: int, nbytes: int) -> None:
    """Delete the files of a folder that were written longest ago until it has at most so many files and bytes.

    One process at a time; the others pass. What cannot be read or deleted stays: nothing is raised.
    """
    with contextlib.suppress(OSError, NotImplementedError, Timeout), FileLock(folder.with_suffix(".lock"), blocking=False):
        for path in _too_old(folder, files, nbytes):
            with contextlib.suppress(OSError):
                path.unlink()


def _too_old(folder: Path, files: int, nbytes: int) -> list[Path]:
    found: list[tuple[int, int, Path]] = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # another process deleted it
            status = path.stat()
            found.append((status.st_mtime_ns, status.st_size, path))
    kept_bytes, old = 0, []
    for number, (_, size, path) in enumerate(sorted(found, reverse=True), start=1):
        kept_bytes += size
        if number > files or kept_bytes > nbytes:
            old.append(path)
    return old
