"""Switches for tests: delays of copies, memory overwritten after release, clones on the device as copies, timed stalls.

None of them is active in plain training. Each is one attribute that the hot path compares with None.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from graphoffload.runtime.streams.stalls import Stalls

CopyHook = Callable[[str, str, str], None]
ReleaseHook = Callable[[torch.Tensor, str], None]


class _Hooks:
    """The active hooks of this process."""

    __slots__ = ("copy", "release", "stalls", "twin")

    def __init__(self) -> None:
        self.copy: CopyHook | None = None
        self.release: ReleaseHook | None = None
        self.stalls: Stalls | None = None
        self.twin = False


ACTIVE = _Hooks()


@contextlib.contextmanager
def switched(attribute: str, value: Any) -> Iterator[None]:
    """One switch set to `value` for the code inside."""
    before = getattr(ACTIVE, attribute)
    setattr(ACTIVE, attribute, value)
    try:
        yield
    finally:
        setattr(ACTIVE, attribute, before)


def copy_hook(hook: CopyHook) -> contextlib.AbstractContextManager[None]:
    """Call `hook(direction, when, name)` before and after every copy, with the side stream current.

    direction is "d2h" or "h2d", when is "before" or "after", name is the tensor's.
    """
    return switched("copy", hook)


def release_hook(hook: ReleaseHook) -> contextlib.AbstractContextManager[None]:
    """Call `hook(source, name)` right after a source was released, on the compute stream."""
    return switched("release", hook)


def twin_copies() -> contextlib.AbstractContextManager[None]:
    """Replace every copy to the host by a synchronous clone on the device, in the same rewritten graphs.

    Only the copies differ between a run with the switch and one without, so gradients must be equal to the bit.
    """
    return switched("twin", True)
