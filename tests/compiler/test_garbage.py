"""What planning leaves holds nothing of the frames that called it."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from lazy import LazyStreams, afresh, clean_slate, once

from graphoffload.compiler.garbage import collected
from graphoffload.runtime.step.calls import STEPS, StepRun
from tests.runtime.stepping import lazy

__all__ = ["afresh", "clean_slate", "lazy", "once"]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def refused(first: ValueError | None = None) -> None:
    """Like a planner that tries a second way and raises the better error: a local of a frame that its traceback has."""
    try:
        raise ValueError("no plan")
    except ValueError as error:
        if first is not None:
            raise first from None
        refused(error)


def planning(collects: bool) -> None:
    with collected(CPU) if collects else contextlib.nullcontext():
        try:
            refused()
        except ValueError:
            return


def forward(x: torch.Tensor, collects: bool) -> weakref.ref[torch.Tensor]:
    planning(collects)
    return weakref.ref(x.clone())


def step(collects: bool) -> bool:
    """Whether an activation that a step had is still there after it."""
    x = torch.zeros(4)
    forward(x, collects)
    own = weakref.ref(x)
    del x
    return own() is not None


def test_frames_below_planning_are_free(lazy: LazyStreams) -> None:
    run = STEPS.start(CPU, lambda streams: StepRun(streams, recording=False))
    assert run.streams is not None
    assert step(collects=False), "the frames of an error that was caught hold those that called them"
    assert not step(collects=True)
