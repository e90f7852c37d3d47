"""An offloaded tensor as a state machine: every way that its table allows, and none beside."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graphoffload.errors import RuntimeStateError
from graphoffload.runtime import offloaded_tensors as entries
from graphoffload.runtime.offloaded_tensors import TRANSITIONS, HostCopy, OffloadedTensor, State
from graphoffload.runtime.pinned.pool import POOL
from graphoffload.runtime.registry import RunPlan
from graphoffload.testing.lazy_streams import LazyEvent, LazyStreams

ALLOWED = [(event, before, after) for event, ways in TRANSITIONS.items() for before, after in ways.items()]
FORBIDDEN = [(event, state) for event, ways in TRANSITIONS.items() for state in State if state not in ways]

HOLD_A_SOURCE = {State.NEW, State.COPYING, State.RELEASE_PENDING, State.STAYING, State.RESIDENT, State.LENT}
HOLD_A_TARGET = {State.PREFETCHED, State.RELOADING, State.LENT, State.HANDING_OVER}
HOLD_A_HOST_COPY = {State.COPYING, State.RELEASE_PENDING, State.ON_HOST, State.PREFETCHED, State.RELOADING}
STAY = {State.STAYING, State.RESIDENT, State.LENT, State.HANDING_OVER, State.HANDED_OVER}


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> LazyStreams:
    found = LazyStreams()
    found.stream = "current"
    monkeypatch.setattr(entries, "streams_of", lambda device: found)
    return found


def new(source: Tensor | None = None) -> OffloadedTensor:
    run = RunPlan(None, "machine")
    x = torch.ones(64) if source is None else source
    return OffloadedTensor(x, run.layout(x, 0), run, 0)


def made_by(tensor: OffloadedTensor, name: str) -> LazyEvent:
    assert isinstance(tensor.streams, LazyStreams)
    return tensor.streams.made(name)


def _start_copy(tensor: OffloadedTensor) -> None:
    tensor.start_copy()
    tensor.host = HostCopy(POOL.acquire(256, pin=False))
    tensor.host.written = made_by(tensor, "written")


def _copy_back(y: Tensor, tensor: OffloadedTensor) -> None:
    assert tensor.host is not None
    tensor.host.read, tensor.stream = made_by(tensor, "read"), "owner"


def _start_reload(tensor: OffloadedTensor) -> None:
    y = torch.zeros(64)
    tensor.start_reload(y)
    _copy_back(y, tensor)


EVENTS: dict[str, Callable[[OffloadedTensor], Any]] = {
    "start_copy": _start_copy,
    "release": lambda tensor: tensor.release(),
    "leave_release_pending": lambda tensor: tensor.leave_release_pending("owner"),
    "settle": lambda tensor: tensor.settle(),
    "prefetch": lambda tensor: tensor.prefetch(torch.zeros(64), _copy_back),
    "take_prefetched": lambda tensor: tensor.take_prefetched(),
    "drop_prefetched": lambda tensor: tensor.drop_prefetched(),
    "start_reload": _start_reload,
    "let_stay": lambda tensor: tensor.let_stay("owner"),
    "become_resident": lambda tensor: tensor.become_resident(7),
    "lend": lambda tensor: tensor.lend(torch.zeros(64)),
    "hand_over": lambda tensor: tensor.hand_over(torch.zeros(64)),
    "wait": lambda tensor: tensor.wait(),
    "close": lambda tensor: tensor.close(),
}


def _ways() -> dict[State, list[str]]:
    """To each state, the shortest way from NEW."""
    found: dict[State, list[str]] = {State.NEW: []}
    todo = [State.NEW]
    for state in todo:
        for event, before, after in ALLOWED:
            if before is state and after not in found:
                found[after] = [*found[state], event]
                todo.append(after)
    return found


WAYS = _ways()


def in_state(state: State, source: Tensor | None = None) -> OffloadedTensor:
    tensor = new(source)
    for event in WAYS[state]:
        EVENTS[event](tensor)
    assert tensor.state is state
    return tensor


def check(tensor: OffloadedTensor) -> None:
    """What it holds follows from its state."""
    state = tensor.state
    assert (tensor.source is not None) == (state in HOLD_A_SOURCE)
    assert (tensor.target is not None) == (state in HOLD_A_TARGET)
    assert (tensor.host is not None) == (state in HOLD_A_HOST_COPY)
    assert tensor.stays == (state in STAY)
    assert tensor.in_flight == (state in (State.COPYING, State.RELEASE_PENDING))
    assert tensor.settled == (state is not State.NEW and state not in HOLD_A_SOURCE | HOLD_A_TARGET)


def finish(tensor: OffloadedTensor) -> None:
    if tensor.state is not State.CLOSED:
        tensor.close()
    check(tensor)


def test_every_state_is_reached_and_every_event_has_a_test() -> None:
    assert set(WAYS) == set(State)
    assert set(EVENTS) == set(TRANSITIONS)
    assert {state for ways in TRANSITIONS.values() for state in ways} == set(State) - {State.CLOSED}
    assert all(State.NEW not in ways.values() for ways in TRANSITIONS.values())


@pytest.mark.parametrize(("event", "before", "after"), ALLOWED, ids=lambda value: getattr(value, "words", value))
def test_an_allowed_transition(streams: LazyStreams, event: str, before: State, after: State) -> None:
    """It leads where the table says, and the tensor holds what it should."""
    in_use = POOL.snapshot().in_use_bytes
    tensor = in_state(before)
    check(tensor)
    EVENTS[event](tensor)
    assert tensor.state is after
    check(tensor)
    finish(tensor)
    assert POOL.snapshot().in_use_bytes == in_use


@pytest.mark.parametrize(("event", "state"), FORBIDDEN, ids=lambda value: getattr(value, "words", value))
def test_a_forbidden_transition(streams: LazyStreams, event: str, state: State) -> None:
    """The error names the tensor, the state that it is in, and the states that the event is for; nothing changes."""
    tensor = in_state(state)
    held = tensor.source, tensor.target, tensor.host, list(streams.waits)
    with pytest.raises(RuntimeStateError) as info:
        EVENTS[event](tensor)
    text = str(info.value)
    assert text.startswith(f"tensor 0: {event} leads from ")
    assert f"but this tensor is {state.words} (plan machine)" in text
    for before, after in TRANSITIONS[event].items():
        assert f"{before.words} to {after.words}" in text
    assert tensor.state is state
    assert (tensor.source, tensor.target, tensor.host, streams.waits) == held
    finish(tensor)


LETS_GO = {
    ("release", State.COPYING): "current waits for written",
    ("settle", State.RELEASE_PENDING): "owner waits for written",
    ("drop_prefetched", State.PREFETCHED): "current waits for read",
    ("start_reload", State.RELOADING): "owner waits for read",
    ("wait", State.RELOADING): "current waits for read",
    ("close", State.COPYING): "current waits for written",
    ("close", State.RELEASE_PENDING): "owner waits for written",
    ("close", State.PREFETCHED): "current waits for read",
    ("close", State.RELOADING): "owner waits for read",
}
"""Who waits for which copy in an event that lets memory go; a prefetched target is the current stream's."""


@pytest.mark.parametrize(("event", "before", "after"), ALLOWED, ids=lambda value: getattr(value, "words", value))
def test_no_memory_goes_before_its_copy(streams: LazyStreams, event: str, before: State, after: State) -> None:
    """A wait that fails changes nothing, so the event can come again; the copies of what stays are on no other stream."""
    tensor = in_state(before)
    streams.waits.clear()
    waits = LETS_GO.get((event, before))
    if waits is not None:
        held = tensor.source, tensor.target, tensor.host
        streams.refuses = KeyError("interrupted")
        with pytest.raises(KeyError):
            EVENTS[event](tensor)
        assert tensor.state is before
        assert (tensor.source, tensor.target, tensor.host) == held
    EVENTS[event](tensor)
    assert streams.waits == ([] if waits is None else [waits])
    finish(tensor)


def test_a_copy_that_fails_is_no_prefetch(streams: LazyStreams) -> None:
    """The target is let go with the error; a copy that raised is not under way."""
    tensor = in_state(State.ON_HOST)

    def fails(y: Tensor, tensor: OffloadedTensor) -> None:
        raise KeyError("interrupted")

    with pytest.raises(KeyError):
        tensor.prefetch(torch.zeros(64), fails)
    assert tensor.state is State.ON_HOST
    check(tensor)
    finish(tensor)


def test_a_source_whose_stream_waited_for_a_later_copy(streams: LazyStreams) -> None:
    """Copies to the host are made in their order: nothing more is to be waited for, and the source is returned."""
    x = torch.ones(64)
    tensor = in_state(State.RELEASE_PENDING, x)
    assert tensor.settle(waited=True) is x
    assert streams.waits == []
    finish(tensor)


@pytest.mark.parametrize("copied_back", [False, True])
def test_a_buffer_goes_back_with_the_event_of_its_last_copy(streams: LazyStreams, copied_back: bool) -> None:
    """Whoever gets it next has to wait for that."""
    tensor = in_state(State.ON_HOST)
    if copied_back:
        _start_reload(tensor)
        tensor.wait()
    assert tensor.host is not None
    buffer = tensor.host.buffer
    assert buffer is not None
    tensor.close()
    assert buffer.last_copy.name == ("read" if copied_back else "written")
    buffer.last_copy = None


def test_nobody_else_changes_a_state() -> None:
    """The methods of OffloadedTensor alone do, and with it what a state holds."""
    runtime = Path(entries.__file__).parent
    states = {"state", "source", "target"}
    found = [
        f"{path.name}:{node.lineno}"
        for path in sorted(runtime.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in states
        and path != Path(entries.__file__)
    ]  # fmt: skip
    assert found == []


def test_the_picture_has_every_event() -> None:
    text = entries.__doc__ or ""
    assert [event for event in TRANSITIONS if event not in text] == []
    assert [state for state in State if not all(word in text for word in state.words.split())] == []
