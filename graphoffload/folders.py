"""Where files are kept between processes."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Folder for plans, kernel times and hardware profiles: GRAPHOFFLOAD_CACHE_DIR, else the user's cache folder."""
    configured = os.environ.get("GRAPHOFFLOAD_CACHE_DIR")
    if configured:
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphoffload"
