"""Steps on a CPU with lazy streams (graphoffload/testing/lazy_streams.py), and what they leave behind.

    with lazy_streams() as lazy:
        step()
    lazy.complaints

With `overwrite`, a source is filled with ones (NaN) when it is released: a copy that is still to come reads that.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor

from graphoffload.compiler.step_runs import _PLANNER, OVERRIDE
from graphoffload.runtime import host_memory, release_hook
from graphoffload.runtime.handles import ENTRIES
from graphoffload.runtime.pinned.pool import POOL
from graphoffload.runtime.step import between_graphs as between
from graphoffload.runtime.step.calls import LATEST, STEPS
from graphoffload.runtime.streams import copy_streams as streams
from graphoffload.testing.lazy_streams import LazyStreams

CPU = torch.device("cpu")


def overwrite(source: Tensor, name: str) -> None:
    """Whoever gets a released source's memory writes to it."""
    source.untyped_storage().fill_(0xFF)


@contextlib.contextmanager
def lazy_streams() -> Iterator[LazyStreams]:
    """Every offload on the CPU goes through lazy streams; sources are overwritten when released, buffers when given back."""
    lazy = LazyStreams()
    with (
        mock.patch.dict(streams._STREAMS, {CPU: lazy}),
        mock.patch("graphoffload.runtime.pinned.slabs._page_lock", return_value=False),
        mock.patch.object(POOL, "poison", True),
        release_hook(overwrite),
    ):
        yield lazy
        lazy.finish()


@pytest.fixture(scope="module", autouse=True)
def once() -> Iterator[None]:
    """For a file that imports this and clean_slate: models with the same options are compiled once, in whichever test is first.

    torch takes equal backends for the same one, so that a model hits what an equal one was compiled to, without any limit here.
    """
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=10_000):
        yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def clean_slate() -> None:
    """In place of the one for all tests: what is compiled stays, the random state does not."""
    torch.manual_seed(0)


@pytest.fixture
def afresh() -> Iterator[None]:
    """For a test that compiles something else out of the same options, by a variable or a patch, or looks at the plan made."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def learned() -> Iterator[None]:
    """For a file that imports this: graphs join no step. What one leaves to the next is learned (step/between_graphs.py), as
    for graphs that cannot be traced again."""
    with mock.patch("graphoffload.compiler.backend.may_join", return_value=False):
        yield


def forget_steps() -> None:
    """This thread has run nothing, and nobody has asked for another goal."""
    between._TRACKS.of.clear()
    STEPS.runs.clear()
    STEPS.alive.clear()
    STEPS.call = None
    LATEST.clear()
    _PLANNER.known.clear()
    _PLANNER.last.clear()
    _PLANNER.went_as_planned.clear()
    _PLANNER.irregular, _PLANNER.warned = 0, False
    OVERRIDE.options, OVERRIDE.configs, OVERRIDE.version = {}, frozenset(), 0


@contextlib.contextmanager
def lazy_steps() -> Iterator[LazyStreams]:
    """The same for a test of whole training steps: nothing of one is left for the next, and no copy ran on free memory."""
    forget_steps()
    with lazy_streams() as lazy:
        yield lazy
        forget_steps()
        gc.collect()
        ENTRIES.sweep()
    assert lazy.complaints == []
    assert host_memory().in_use_bytes == 0
