"""Attributes that are something else for a while: torch has no hook there, or a measurement looks inside.

Nothing here is torch's own, so this works with every release.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_ABSENT = object()


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of a module, class or instance, and put back what was there, be it set or inherited."""
    own = getattr(owner, "__dict__", None)
    before = {name: getattr(owner, name) if own is None else own.get(name, _ABSENT) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
