"""The order of calls on side streams, on a machine without any: streams and events write down what is asked of them."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from graphoffload.errors import RuntimeStateError
from graphoffload.runtime import copy_hook, handles, ops, reset_stats, stats, trace_stalls
from graphoffload.runtime import offloaded_tensors as entries
from graphoffload.runtime.handles import ENTRIES
from graphoffload.runtime.layouts import Layout
from graphoffload.runtime.pinned.pool import POOL
from graphoffload.runtime.registry import RunPlan, run_plan
from graphoffload.runtime.streams import copy_streams as streams
from graphoffload.runtime.streams import memcpy
from graphoffload.runtime.streams.copy_times import LARGE_BYTES, CopyTimes
from graphoffload.runtime.streams.memcpy import find_memcpy
from graphoffload.testing.lazy_streams import LazyStreams
from graphoffload.torch_internals import streams as internals
from graphoffload.torch_internals.storages import expired as is_expired

DEVICE = torch.device("cuda", 1)
ENTRY = types.SimpleNamespace(name="a of layer0")
OPS = torch.ops.graphoffload


class World:
    """What a device would be asked, in order; `current` is the current stream's id, `device` the current device."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.made: list[str] = []
        self.current, self.device, self.events = 0, 1, 0
        self.refuses = 0

    def stream(self, device: Any = None, **id: int) -> Any:
        """torch.cuda.Stream: of the pool, or by id."""
        name = f"compute{id['stream_id']}" if id else ("d2h", "h2d", "reading")[len(self.made)]
        if not id:
            self.made.append(name)
        return types.SimpleNamespace(
            name=name, cuda_stream=7 + len(self.made), synchronize=lambda: self.log.append(f"synchronize {name}")
        )

    def event(self, enable_timing: bool = False) -> Any:
        """torch.cuda.Event; a timed one is reached a millisecond after the one made before it."""
        name, at_ms = f"{'t' if enable_timing else 'e'}{self.events}", float(self.events)
        self.events += 1
        return types.SimpleNamespace(
            name=name,
            seen_by=None,
            cuda_event=1000 + self.events,
            at_ms=at_ms,
            elapsed_time=lambda end: end.at_ms - at_ms,
            synchronize=lambda: None,
            record=lambda stream: self.log.append(f"record {name} on {stream.name}"),
            wait=lambda stream: self.log.append(f"{stream.name} waits {name}"),
        )

    @contextlib.contextmanager
    def switch(self, stream: Any) -> Iterator[None]:
        """torch.cuda.stream."""
        self.log.append(f"enter {stream.name}")
        try:
            yield
        finally:
            self.log.append(f"leave {stream.name}")

    def whole(self, target: int, source: int, nbytes: int, kind: int, *streams_and_events: int) -> int:
        """The compiled copy."""
        self.log.append(f"whole {kind} {nbytes} {streams_and_events}")
        return self.refuses

    def memcpy(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> int:
        """The driver's copy."""
        self.log.append(f"memcpy {kind} {nbytes} on {stream}")
        return self.refuses


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(torch.cuda, "Stream", world.stream)
    monkeypatch.setattr(streams, "Event", world.event)
    monkeypatch.setattr(torch.cuda, "Event", world.event)
    monkeypatch.setattr(torch.cuda, "stream", world.switch)
    monkeypatch.setattr(internals, "current_stream", lambda index: (world.current, index, 1))
    monkeypatch.setattr(internals, "current_device", lambda: world.device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(streams, "find_memcpy", lambda: world.memcpy)
    monkeypatch.setattr(streams, "find_copy", lambda: None)
    return world


def by_torch() -> None:
    """Torch's own copy, which is not asked for in most tests."""
    raise AssertionError("copied by torch")


def test_a_block_is_copied_without_a_switch(world: World) -> None:
    """Compute so far, then the event of the buffer's last copy, then the copy on its own stream, then its event."""
    side = streams.DeviceStreams(DEVICE)
    done = side.copy("d2h", ENTRY, (None, side.event()), by_torch, (1, 2, 96))
    assert world.log == [
        "record e1 on compute0",
        "d2h waits e1",
        "d2h waits e0",
        "memcpy 2 96 on 8",
        f"record {done.name} on d2h",
    ]
    side.compute_waits(done)
    assert world.log[-1] == f"compute0 waits {done.name}"


@pytest.mark.parametrize("nbytes", [LARGE_BYTES, LARGE_BYTES - 1])
def test_large_copies_are_timed_where_someone_asks(world: World, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Between two events on the copy's stream, and with nothing else between them, though there is a compiled copy."""
    monkeypatch.setattr(streams, "find_copy", lambda: world.whole)
    side = streams.DeviceStreams(DEVICE)
    done = side.event()
    side.recycle(done)
    world.log.clear()
    side.times = CopyTimes()
    side.copy("h2d", ENTRY, (), by_torch, (1, 2, nbytes))
    at = next(index for index, line in enumerate(world.log) if line.startswith("memcpy"))
    timed = [line.split()[1].startswith("t") for line in (world.log[at - 1], world.log[at + 1])]
    assert timed == [nbytes == LARGE_BYTES] * 2
    assert all(line.endswith("on h2d") for line in (world.log[at - 1], world.log[at + 1]) if nbytes == LARGE_BYTES)
    assert len(side.times._copies) == (nbytes == LARGE_BYTES)
    side.times = None
    world.log.clear()
    side.copy("h2d", ENTRY, (), by_torch, (1, 2, nbytes))
    assert world.log[-1].startswith("whole")


def test_a_compiled_copy_is_given_all_that_it_depends_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute's stream and the side stream, the events of what is issued and of the copy, and those that nobody waited for."""
    monkeypatch.setattr(streams, "find_copy", lambda: world.whole)
    side = streams.DeviceStreams(DEVICE)
    world.current = 3
    seen, unseen = side.event(), side.event()
    side.compute_waits_for("release", ENTRY, seen)
    world.log.clear()
    done = side.copy("d2h", ENTRY, (None, seen, unseen), by_torch, (1, 2, 96))
    issued = side.event()
    compute, d2h = side.compute().cuda_stream, side.d2h.cuda_stream
    assert world.log[-1] == f"whole 2 96 {(compute, d2h, issued.raw, done.raw, unseen.raw)}"
    assert len({seen.raw, unseen.raw, issued.raw, done.raw}) == 4
    assert [line for line in world.log if "waits" in line] == []


def test_a_compiled_copy_that_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The side stream is waited for, and the error names the tensor."""
    monkeypatch.setattr(streams, "find_copy", lambda: world.whole)
    side, world.refuses = streams.DeviceStreams(DEVICE), 700
    with pytest.raises(RuntimeStateError, match=r"a of layer0: the h2d copy of 96 bytes was refused \(CUDA error 700\)"):
        side.copy("h2d", ENTRY, (), by_torch, (1, 2, 96))
    assert world.log[-1] == "synchronize h2d"


@pytest.mark.parametrize("compiled", [False, True])
def test_a_refusal_that_an_earlier_fault_causes_is_torchs_own_error(
    compiled: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kernel's fault everything is refused, and the tensor that is copied next is not to blame."""
    monkeypatch.setattr(streams, "find_copy", lambda: world.whole if compiled else None)
    forgotten: list[int] = []
    monkeypatch.setattr(streams, "forget_last_error", lambda: forgotten.append(1))
    side, world.refuses = streams.DeviceStreams(DEVICE), 710

    def fault() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    side.h2d.synchronize = fault
    with pytest.raises(RuntimeError, match="device-side assert"):
        side.copy("h2d", ENTRY, (), by_torch, (1, 2, 96))
    assert forgotten


COMPANY: dict[str, Any] = {
    "hooks": lambda: copy_hook(lambda *_: None),
    "a profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "a log": lambda: mock.patch.object(streams.log, "isEnabledFor", return_value=True),
}


@pytest.mark.parametrize("why", ["another device is current", "not one block", "something first", "captured", *COMPANY])
def test_what_is_no_plain_copy_is_issued_call_by_call(why: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled copy knows no streams but two, and nobody beside."""
    monkeypatch.setattr(streams, "find_copy", lambda: world.whole)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: why == "captured")
    side = streams.DeviceStreams(DEVICE, captured=why == "captured")
    world.device = 0 if why == "another device is current" else 1
    block = None if why == "not one block" else (1, 2, 96)
    first = (lambda: None) if why == "something first" else None
    with COMPANY[why]() if why in COMPANY else contextlib.nullcontext():
        side.copy("h2d", ENTRY, (), lambda: None, block, first=first)
    assert not [line for line in world.log if line.startswith("whole")]
    assert world.log[-1].startswith("record")
    world.log.clear()
    if why not in ("another device is current", "captured"):
        side.copy("h2d", ENTRY, (), by_torch, (1, 2, 96))
        assert [line for line in world.log if line.startswith("whole")], "the next one is plain again"


def test_what_compute_waited_for_is_not_waited_for_twice(world: World) -> None:
    """What is recorded on compute later comes behind it. Not so on another stream, nor once the event is a later copy's."""
    side = streams.DeviceStreams(DEVICE)
    copied = side.copy("d2h", ENTRY, (), by_torch, (1, 2, 96))
    side.compute_waits_for("release", ENTRY, copied)

    def waits_for_it() -> bool:
        world.log.clear()
        back = side.copy("h2d", ENTRY, (copied,), by_torch, (2, 1, 96))
        assert back is not copied
        assert len([line for line in world.log if line.startswith("h2d waits")]) in (1, 2)
        return f"h2d waits {copied.name}" in world.log

    assert not waits_for_it()
    world.current = 3
    assert waits_for_it()
    world.current = 0
    side.recycle(copied)
    while side.copy("d2h", ENTRY, (), by_torch, (1, 2, 96)) is not copied:
        pass
    assert waits_for_it()


def test_directions_have_their_own_streams(world: World) -> None:
    """The reload's copy is on the H2D stream, host to device."""
    streams.DeviceStreams(DEVICE).copy("h2d", ENTRY, (), by_torch, (1, 2, 96))
    assert world.log[2] == "memcpy 1 96 on 9"


def test_compute_is_the_callers_stream_at_each_call(world: World) -> None:
    """A user's `with torch.cuda.stream(...)` around one call and not the next."""
    side = streams.DeviceStreams(DEVICE)
    for world.current in (3, 0, 3):
        side.copy("d2h", ENTRY, (), by_torch, (1, 2, 96))
    assert [line.split()[-1] for line in world.log if line.startswith("record") and "compute" in line] == [
        "compute3", "compute0", "compute3",
    ]  # fmt: skip


@pytest.mark.parametrize("why", ["another device is current", "no runtime library", "not one block"])
def test_torchs_copy_runs_inside_a_switch(world: World, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda.stream puts stream and device back; the order is the same."""
    if why == "no runtime library":
        monkeypatch.setattr(streams, "find_memcpy", lambda: None)
    side = streams.DeviceStreams(DEVICE)
    world.device = 0 if why == "another device is current" else 1
    block = None if why == "not one block" else (1, 2, 96)
    side.copy("h2d", ENTRY, (), lambda: world.log.append("copy_"), block)
    assert world.log == ["record e0 on compute0", "h2d waits e0", "enter h2d", "copy_", "leave h2d", "record e0 on h2d"]


def test_hooks_run_on_the_side_stream_around_the_same_copy(world: World) -> None:
    """Delays in tests of races do not change how the copy is made."""
    side = streams.DeviceStreams(DEVICE)
    with copy_hook(lambda direction, when, name: world.log.append(f"{direction} {when} {name}")):
        side.copy("d2h", ENTRY, (), by_torch, (1, 2, 96))
    assert world.log[2:9] == [
        "enter d2h", "d2h before a of layer0", "leave d2h", "memcpy 2 96 on 8",
        "enter d2h", "d2h after a of layer0", "leave d2h",
    ]  # fmt: skip


def test_an_error_leaves_no_copy_behind(world: World) -> None:
    """Whoever owns source and target may free them as soon as the error is out."""
    side = streams.DeviceStreams(DEVICE)
    world.refuses = 700
    with pytest.raises(RuntimeStateError, match="d2h copy of 96 bytes was refused"):
        side.copy("d2h", ENTRY, (), by_torch, (1, 2, 96))
    assert world.log[-1] == "synchronize d2h"

    def fails() -> None:
        raise KeyError("interrupted")

    with pytest.raises(KeyError):
        side.copy("h2d", ENTRY, (), fails, None)
    assert world.log[-2:] == ["leave h2d", "synchronize h2d"]


def test_many_streams_are_not_kept(world: World) -> None:
    """External streams may have any id."""
    side = streams.DeviceStreams(DEVICE)
    for world.current in range(1000):
        assert side.compute().name == f"compute{world.current}"
    assert len(side._compute) <= 64


def test_no_runtime_library_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU build, a library that is not loaded: torch's own copies serve."""
    find = find_memcpy.__wrapped__
    monkeypatch.setattr(memcpy, "_runtime_library", memcpy._runtime_library.__wrapped__)  # this build's may be loaded
    monkeypatch.setattr(torch.version, "cuda", None)
    assert find() is None
    monkeypatch.setattr(torch.version, "cuda", "4711.0")
    assert find() is None


def test_stalls_are_timed_when_asked_for(world: World) -> None:
    """Two timing events around each wait and one behind each copy; nothing of it outside of the block."""
    side = streams.DeviceStreams(DEVICE)
    reset_stats()
    counted = stats()
    with trace_stalls() as stalls:
        done = side.copy("h2d", ENTRY, (), by_torch, (1, 2, 96))
        side.compute_waits_for("wait", ENTRY, done)
        side.compute_waits_for("release", ENTRY, side.event())
    assert world.log[3:8] == [
        "record e0 on h2d", "record t1 on h2d", "record t2 on compute0", "compute0 waits e0", "record t3 on compute0",
    ]  # fmt: skip
    assert (stalls.wait_ms, stalls.release_ms) == (1.0, 1.0)
    assert stalls.by_tensor_ms == {"a of layer0": 2.0}
    assert stalls.early_ms == {"a of layer0": 2.0}
    assert stats()["stall_ms_by_tensor"] == {"a of layer0": 2.0}
    assert {key: stats()[key] - value for key, value in counted.items() if stats()[key] != value} == {
        "release_stall_us": 1000, "wait_stall_us": 1000,
    }  # fmt: skip
    world.log.clear()
    side.compute_waits_for("wait", ENTRY, done)
    assert world.log == ["compute0 waits e0"]


def test_stalls_before_an_error_are_added_up(world: World) -> None:
    """What was timed until then."""
    side = streams.DeviceStreams(DEVICE)
    with contextlib.suppress(KeyError), trace_stalls() as stalls:
        side.compute_waits_for("wait", ENTRY, side.copy("h2d", ENTRY, (), by_torch, (1, 2, 96)))
        raise KeyError
    assert stalls.wait_ms == 1.0


def test_stalls_without_side_streams() -> None:
    """On a CPU copies are synchronous: nothing waits, nothing is recorded."""
    x = torch.randn(8)
    with trace_stalls() as stalls:
        back(forward(x, "stalls"), x, "stalls")
    assert (stalls.by_tensor_ms, stalls.wait_ms) == ({}, 0.0)


def test_copies_are_ranges_under_a_profiler(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """With the tensor's name; emit_nvtx makes NVTX ranges of the same. And a line each when debugging."""
    side = streams.DeviceStreams(DEVICE)
    with torch.autograd.profiler.profile() as profiler:
        side.copy("d2h", ENTRY, (), by_torch, (1, 2, 96))
    side.copy("d2h", ENTRY, (), by_torch, (1, 2, 96))
    assert [e.count for e in profiler.key_averages() if e.key == "graphoffload::d2h a of layer0"] == [1]
    assert "memcpy 2 96 on 8" in world.log
    with caplog.at_level("DEBUG", "graphoffload"):
        side.copy("h2d", ENTRY, (), by_torch, (1, 2, 96))
    assert "h2d of a of layer0 starts: 96 bytes" in caplog.text
    assert len([line for line in world.log if line.startswith("memcpy")]) == 3


def forward(x: Tensor, plan: str, id: int = 0) -> Tensor:
    handle = OPS.offload(x, plan, id)
    OPS.release(x, handle, plan, id)
    return handle


def back(handle: Tensor, like: Tensor, plan: str, id: int = 0) -> Tensor:
    y = OPS.reload(handle, plan, id, like.shape, like.stride(), like.dtype)
    OPS.wait(y, handle, plan, id)
    return y


def test_layouts_are_remembered_only_while_they_hold() -> None:
    """The same transfer with another shape, other strides, another type, a gap: each comes back as it was."""
    base = torch.randn(6, 8)
    tensors = [base, base[:4], base.t(), base.double(), base[:, :3], base[2:, 4:], torch.randn(2, 3, 4, 5).movedim(1, 3), base]
    for x in (*tensors, *reversed(tensors)):
        y = back(forward(x, "layouts"), x, "layouts")
        assert y.stride() == x.stride()
        assert torch.equal(y, x)
        assert torch.equal(OPS.reload(forward(x, "layouts"), "layouts", 0, x.shape, x.contiguous().stride(), x.dtype), x)
    assert set(run_plan("layouts").layouts) == {0}


def test_layout_names_the_strides_of_the_host_copy() -> None:
    """A dense source keeps its strides; one with gaps is packed."""
    x = torch.randn(6, 8)
    assert (Layout(x.t()).stride, Layout(x.t()).dense) == ((1, 8), True)
    assert (Layout(x[:, :3]).stride, Layout(x[:, :3]).dense) == ((3, 1), False)
    layout = RunPlan(None, "k").layout(x, 0)
    assert layout.returns_as_it_lies([6, 8], [8, 1])
    assert layout.returns_as_it_lies([6, 8], [1, 6]) is False
    assert layout.returns_as_it_lies([8, 6], [6, 1]) is None


@pytest.mark.parametrize("where", ["digest", "acquire", "copy", "add"])
def test_an_offload_that_fails_holds_nothing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever raises, the buffer goes back, no entry stays, and the next offload works."""
    ENTRIES.sweep()
    x, living, before = torch.randn(64), len(ENTRIES), POOL.snapshot().in_use_bytes
    forward(x, "fails")

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyError("interrupted")

    with monkeypatch.context() as patch:
        if where == "digest":
            patch.setattr(run_plan("fails"), "checksum", True)
            patch.setattr(ops, "digest", interrupted)
        elif where == "acquire":
            patch.setattr(POOL, "acquire", interrupted)
        elif where == "copy":
            patch.setattr(ops, "_flat", interrupted)
        else:
            patch.setattr(ENTRIES, "add", interrupted)
        with pytest.raises(KeyError):
            forward(x, "fails")
    ENTRIES.sweep()
    assert len(ENTRIES) == living
    assert POOL.snapshot().in_use_bytes == before
    assert torch.equal(back(forward(x, "fails"), x, "fails"), x)


def test_a_reload_that_fails_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward that is interrupted in a copy, and then runs again (retain_graph)."""
    x = torch.randn(64)
    handle = forward(x, "again")
    with monkeypatch.context() as patch:
        patch.setattr(ops, "_copy_to_device", lambda *_, **__: (_ for _ in ()).throw(KeyError("interrupted")))
        with pytest.raises(KeyError):
            back(handle, x, "again")
    assert torch.equal(back(handle, x, "again"), x)


def side_streams(monkeypatch: pytest.MonkeyPatch) -> LazyStreams:
    """For the CPU; what is page-locked is not."""
    side = LazyStreams()
    monkeypatch.setattr(ops, "streams_of", lambda device: side)
    monkeypatch.setattr(entries, "streams_of", lambda device: side)
    monkeypatch.setattr("graphoffload.runtime.pinned.slabs._page_lock", lambda *_, **__: False)
    return side


def test_what_a_stopped_backward_was_copying_to_goes_back_to_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever clears up may compute on another stream: waiting there would not keep the allocator from reusing the memory."""
    side = side_streams(monkeypatch)
    x = torch.randn(64)
    handle = forward(x, "left")
    OPS.reload(handle, "left", 0, x.shape, x.stride(), x.dtype)
    side.stream = "another"
    del handle
    ENTRIES.sweep()
    assert side.waits == ["compute waits for d2h of tensor 0", "compute waits for h2d of tensor 0"]


def test_a_copy_that_is_refused_leaves_the_event_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer may go back while the last copy of its last user is under way: whoever gets it next has to wait for that."""
    side_streams(monkeypatch)
    buffer = POOL.acquire(256, pin=True)
    buffer.last_copy = before = types.SimpleNamespace(query=lambda: False, synchronize=lambda: None)
    POOL.give_back(buffer)
    with monkeypatch.context() as patch:
        patch.setattr(ops, "copy_to_host", lambda *_: (_ for _ in ()).throw(KeyError("interrupted")))
        with pytest.raises(KeyError):
            forward(torch.randn(64), "refused")
    assert POOL.acquire(256, pin=True) is buffer
    assert buffer.last_copy is before
    buffer.last_copy = None
    POOL.give_back(buffer)


def test_a_second_backward_waits_for_the_copy_of_a_stopped_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its target's memory is about to be free, and the first copy may still be writing to it."""
    side = side_streams(monkeypatch)
    x = torch.randn(64)
    handle = forward(x, "stopped")
    first = OPS.reload(handle, "stopped", 0, x.shape, x.stride(), x.dtype)
    assert side.waits == ["compute waits for d2h of tensor 0"]
    second = OPS.reload(handle, "stopped", 0, x.shape, x.stride(), x.dtype)
    assert side.waits == ["compute waits for d2h of tensor 0", "compute waits for h2d of tensor 0"]
    with pytest.raises(RuntimeStateError, match="wait was given memory"):
        OPS.wait(first, handle, "stopped", 0)
    OPS.wait(second, handle, "stopped", 0)
    assert torch.equal(second, x)


def test_plans_do_not_sweep_each_other_but_after_a_backward_or_a_dropped_forward() -> None:
    """With a plan for every block, looking at all handles at each block's start would cost more than the copies."""
    x = torch.randn(64)
    ready = [forward(x, "block0") for _ in range(4)]  # a miss in the pool would sweep all
    del ready
    ENTRIES.sweep()
    ENTRIES.reloaded = False
    living = len(ENTRIES)
    handles = [forward(x, f"block{block}") for block in range(3)]
    handles[0] = handles[1] = torch.empty(0)
    handles[1] = forward(x, "block1")
    assert len(ENTRIES) == living + 3, "its own predecessor went, and no other: what came last was alive"
    handles[1] = torch.empty(0)
    handles[0] = forward(x, "block3")
    assert len(ENTRIES) == living + 2, "what came last was dropped: a forward that stopped"
    handles[2] = torch.empty(0)
    back(handles[0], x, "block3")
    handles[1] = forward(x, "block1")
    assert len(ENTRIES) == living + 2, "a backward ran: block2 went"
    del handles
    ENTRIES.sweep()


def test_many_calls_of_a_plan_do_not_look_at_all_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eighty equal blocks share a plan: each would look at those of all before it."""
    asked = list[int]()

    def expired(identity: int) -> bool:
        asked.append(identity)
        return is_expired(identity)

    x = torch.randn(64)
    ready = [forward(x, "deep") for _ in range(44)]  # a miss in the pool would sweep all
    del ready
    ENTRIES.sweep()
    ENTRIES.reloaded = False
    ready = [forward(x, "deep") for _ in range(40)]
    monkeypatch.setattr(handles, "expired", expired)
    ready.append(forward(x, "deep"))
    assert len(asked) <= 3
    living = len(ENTRIES)
    ready[0] = torch.empty(0)
    ready[1] = torch.empty(0)
    ready.append(forward(x, "deep"))
    assert len(ENTRIES) == living - 2 + 1, "a forward of its own that was dropped"
    del ready
    ENTRIES.sweep()


def test_what_is_in_flight_survives_a_reset() -> None:
    """Its release still comes: a count from zero would be negative from then on, and the peak too small."""
    reset_stats()
    x = torch.randn(64)
    handle = OPS.offload(x, "reset", 0)
    reset_stats()
    assert (stats()["inflight_bytes"], stats()["inflight_peak_bytes"], stats()["offloads"]) == (256, 256, 0)
    OPS.release(x, handle, "reset", 0)
    assert stats()["inflight_bytes"] == 0
    del handle
    ENTRIES.sweep()


def test_threads_offload_side_by_side() -> None:
    """Pipeline stages or data-parallel replicas in threads of one process."""
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            x = torch.full((32 + number,), float(number))
            for _ in range(200):
                handles = [forward(x, f"thread{number % 2}", id) for id in range(3)]
                for id, handle in enumerate(handles):
                    assert torch.equal(back(handle, x, f"thread{number % 2}", id), x)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    ENTRIES.sweep()
