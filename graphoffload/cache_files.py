"""Where files are kept between processes, and how they are written."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


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
