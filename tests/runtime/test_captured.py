"""Transfers inside captured CUDA graphs, without a GPU: what a capture records is run again, as a replay would run it.

Lazy streams for captures record what they are given, and run nothing, as in a capture; `replay` runs a record again. The
memory of a capture is the same in every replay, so tensors are made once and written to.
"""

from __future__ import annotations

import gc
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch._inductor.utils import is_cudagraph_unsafe_fx_node
from torch._subclasses.fake_tensor import FakeTensorMode

import graphoffload
from graphoffload.compiler import inner_compile
from graphoffload.compiler.session import CompileSession
from graphoffload.errors import CaptureError, CudaGraphsWarning, HostMemoryError, RuntimeStateError
from graphoffload.facts.limits import Limits
from graphoffload.facts.plan import Decision, Plan, Transfer
from graphoffload.options.config import OffloadConfig
from graphoffload.passes.capture import make_capturable
from graphoffload.runtime import captured, ops, registry
from graphoffload.runtime.pinned.pool import POOL
from graphoffload.runtime.streams import copy_streams as streams
from graphoffload.testing import ZOO
from graphoffload.testing.lazy_streams import LazyStreams

CPU = torch.device("cpu")
OURS = torch.ops.graphoffload
KEY = "captured"
NBYTES = 64 * 4


def replay(record: list[Callable[[], None]]) -> None:
    for part in record:
        part()


@pytest.fixture
def side() -> Iterator[LazyStreams]:
    recorder = LazyStreams(for_captures=True)
    recorder.captures, recorder.headroom = True, 0
    driver = types.SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    with (
        mock.patch.dict(streams._STREAMS, {CPU: recorder}),
        mock.patch.dict(captured._LEDGERS, {CPU: captured.Ledger(CPU, recorder)}),
        mock.patch("torch.cuda.cudart", return_value=driver),
        mock.patch("torch.cuda.synchronize"),
        torch.no_grad(),
    ):
        yield recorder
        captured.give_back(KEY)
        captured.give_back("other")
        gc.collect()  # handles in the tracebacks of expected errors
        ops.ENTRIES.sweep()
        for copied in ops.ENTRIES._copied.pop((KEY, 0), ()):  # the latest of each tensor stay, as nobody tells when copies die
            ops.ENTRIES._close(copied)
        assert POOL.snapshot().in_use_bytes == 0
        POOL.release_idle()


class Captured:
    """A forward that offloads x, and the backward that reads it, each captured once."""

    def __init__(self, side: LazyStreams, id: int = 0, plan: str = KEY) -> None:
        self.x = torch.zeros(64)
        side.captures = True
        self.handle = OURS.offload_captured(self.x, plan, id)
        OURS.release_captured(self.x, self.handle, plan, id)
        self.forward = side.taken()
        replay(self.forward)  # torch replays a graph right after its capture
        self.static = self.handle.clone()  # a backward reads the handle itself, or a copy where it cannot know its address
        self.backward: list[Callable[[], None]] = []
        self.y = torch.zeros(0)

    def capture_backward(self, side: LazyStreams, handle: torch.Tensor | None = None) -> None:
        side.captures = True
        handle = self.handle if handle is None else handle
        self.y = OURS.reload_captured(handle, KEY, 0, (64,), (1,), torch.float32)
        OURS.wait_captured(self.y, handle, KEY, 0)
        self.backward = side.taken()

    def step(self, value: float) -> torch.Tensor:
        self.x.fill_(value)
        replay(self.forward)
        self.x.fill_(-1.0)  # the next part of the graph reuses it
        replay(self.backward)
        return self.y


def test_every_replay_copies_its_own_bytes(side: LazyStreams) -> None:
    """Both branches join; nothing is left in the runtime of tensors that belong to the graph."""
    both = Captured(side)
    both.capture_backward(side)
    assert len(side.joined) == 2
    for value in (1.0, 2.0, 3.0):
        assert torch.equal(both.step(value), torch.full((64,), value))
    (forward,) = captured._LEDGERS[CPU].forwards.values()
    (entry,) = forward.entries.values()
    assert entry.source is None
    assert entry.target is None


def test_captures_have_buffers_of_their_own(side: LazyStreams) -> None:
    """Two microbatches in flight are two captures: the first backward after the second forward reads the first's bytes."""
    one, two = Captured(side), Captured(side)
    one.capture_backward(side)
    two.capture_backward(side)
    one.x.fill_(1.0)
    two.x.fill_(2.0)
    replay(one.forward)
    replay(two.forward)
    for both, value in ((one, 1.0), (two, 2.0)):
        replay(both.backward)
        assert torch.equal(both.y, torch.full((64,), value))


class Several:
    """A forward that offloads three tensors, and the backward that reads them last first."""

    def __init__(self, side: LazyStreams) -> None:
        side.captures = True
        self.xs = [torch.zeros(64) for _ in range(3)]
        self.handles = [OURS.offload_captured(x, KEY, id) for id, x in enumerate(self.xs)]
        for id, (x, handle) in enumerate(zip(self.xs, self.handles, strict=True)):
            OURS.release_captured(x, handle, KEY, id)
        self.forward = side.taken()
        replay(self.forward)
        self.ys: dict[int, torch.Tensor] = {}
        self.capture_backward(side)

    def capture_backward(self, side: LazyStreams) -> None:
        for id in (2, 1, 0):
            self.ys[id] = OURS.reload_captured(self.handles[id], KEY, id, (64,), (1,), torch.float32)
        for id in (2, 1, 0):
            OURS.wait_captured(self.ys[id], self.handles[id], KEY, id)
        self.backward = side.taken()

    def run_forward(self, value: float) -> None:
        for id, x in enumerate(self.xs):
            x.fill_(value + id)
        replay(self.forward)

    def run_backward(self) -> list[float]:
        replay(self.backward)
        return [float(self.ys[id].mean()) for id in range(3)]


def test_transfers_of_a_capture_are_counted_and_compared_once(side: LazyStreams) -> None:
    """Each further kernel beside a small model's costs more than its copies; handles of one replay are of one number."""
    one, two = Several(side), Several(side)
    assert len(captured._LEDGERS[CPU].forwards) == 2
    assert [len(one.forward), len(one.backward)] == [6, 4], "a number for every handle, one comparison before three copies"
    numbers = [{int(handle) for handle in each.handles} for each in (one, two)]
    assert [len(each) for each in numbers] == [1, 1]
    assert numbers[0] != numbers[1]
    one.run_forward(10.0)
    two.run_forward(20.0)
    assert one.run_backward() == [10.0, 11.0, 12.0]
    assert two.run_backward() == [20.0, 21.0, 22.0]


def test_every_capture_of_a_backward_compares(side: LazyStreams) -> None:
    """Also one that is captured again, as torch does for other addresses; handles of another replay stop it at the first."""
    both = Several(side)
    first = both.backward
    both.capture_backward(side)
    assert len(both.backward) == len(first) == 4
    old = [handle.clone() for handle in both.handles]
    both.run_forward(1.0)
    for handle, earlier in zip(both.handles, old, strict=True):
        handle.copy_(earlier)
    both.ys[2].fill_(-1.0)
    for backward in (first, both.backward):
        with pytest.raises(RuntimeError, match="later forward has written to"):
            replay(backward)
    assert float(both.ys[2].mean()) == -1.0, "nothing was copied behind the check"


def test_a_capture_is_no_part_of_one_that_is_gone(side: LazyStreams) -> None:
    """A model that is compiled again where its host buffers were given back; one that was given up in the middle."""
    Several(side)
    captured.give_back(KEY)
    again = Several(side)
    again.run_forward(5.0)
    assert again.run_backward() == [5.0, 6.0, 7.0]
    side.captures = True
    OURS.offload_captured(torch.ones(64), KEY, 0)  # torch gives a capture up without telling
    after = Several(side)
    after.run_forward(8.0)
    assert (after.run_backward(), again.run_backward()) == ([8.0, 9.0, 10.0], [5.0, 6.0, 7.0])


def test_a_buffer_that_was_written_again_stops_the_device(side: LazyStreams) -> None:
    """A handle of an earlier replay, as a hook may have copied it: its bytes are gone, and none are handed out."""
    both = Captured(side)
    both.capture_backward(side, both.static)
    both.x.fill_(1.0)
    replay(both.forward)
    both.static.copy_(both.handle)
    replay(both.backward)
    assert torch.equal(both.y, torch.ones(64))
    both.x.fill_(2.0)
    replay(both.forward)
    with pytest.raises(RuntimeError, match="later forward has written to"):
        replay(both.backward)
    assert torch.equal(both.y, torch.ones(64)), "nothing was copied behind the check"


def test_a_reload_outside_of_a_graph(side: LazyStreams) -> None:
    """What torch does not replay finds the bytes by the number in its handle, and sees when they are another replay's."""
    both = Captured(side)
    both.x.fill_(4.0)
    replay(both.forward)
    side.captures = False
    old = both.handle.clone()
    for handle in (both.handle, old):
        y = OURS.reload(handle, KEY, 0, (64,), (1,), torch.float32)
        OURS.wait(y, handle, KEY, 0)
        assert torch.equal(y, torch.full((64,), 4.0))
    replay(both.forward)
    with pytest.raises(RuntimeStateError, match="overwritten by a later replay"):
        OURS.reload(old, KEY, 0, (64,), (1,), torch.float32)


def test_warm_up_runs_the_plain_ops(side: LazyStreams) -> None:
    """Outside of a capture: a buffer from the pool, given back with the handle."""
    side.captures = False
    x = torch.full((64,), 5.0)
    handle = OURS.offload_captured(x, KEY, 0)
    OURS.release_captured(x, handle, KEY, 0)
    y = OURS.reload_captured(handle, KEY, 0, (64,), (1,), torch.float32)
    OURS.wait_captured(y, handle, KEY, 0)
    assert torch.equal(y, x)
    assert not captured._LEDGERS[CPU].forwards
    del handle
    ops.ENTRIES.sweep()
    assert POOL.snapshot().in_use_bytes == 0


@pytest.mark.parametrize("waited", [True, False])
def test_a_capture_takes_the_buffers_of_the_warm_up(side: LazyStreams, waited: bool) -> None:
    """Nothing more is page-locked; but a capture never waits for a copy that compute has not waited for outside of it."""
    side.captures = False
    x = torch.ones(64)
    handle = OURS.offload_captured(x, KEY, 0)
    OURS.release_captured(x, handle, KEY, 0)
    y = OURS.reload_captured(handle, KEY, 0, (64,), (1,), torch.float32)
    if waited:
        OURS.wait_captured(y, handle, KEY, 0)
    del handle
    both = Captured(side)
    side.captures = False
    assert graphoffload.host_memory().held_bytes == (NBYTES if waited else 2 * NBYTES)
    assert both.x.numel() == 64


def test_a_backward_of_a_forward_that_was_not_captured(side: LazyStreams) -> None:
    """Every replay would read the one buffer of the forward that happened to run: refused, with the remedy."""
    side.captures = False
    x = torch.ones(64)
    handle = OURS.offload_captured(x, KEY, 0)
    OURS.release_captured(x, handle, KEY, 0)
    side.captures = True
    with pytest.raises(CaptureError, match=r"its forward was not.*mode=None"):
        OURS.reload_captured(handle.zero_(), KEY, 0, (64,), (1,), torch.float32)


@pytest.mark.parametrize(("id", "plan"), [(1, KEY), (0, "other")])
def test_another_tensors_handle(side: LazyStreams, id: int, plan: str) -> None:
    """A handle of another transfer, or another plan's."""
    both = Captured(side)
    with pytest.raises(CaptureError):
        OURS.reload_captured(both.handle, plan, id, (64,), (1,), torch.float32)


def test_other_memory_at_release_and_wait(side: LazyStreams) -> None:
    """A compiler that passes a temporary is found when the graph is captured."""
    x = torch.ones(64)
    handle = OURS.offload_captured(x, KEY, 0)
    with pytest.raises(RuntimeStateError, match="release was captured with other memory"):
        OURS.release_captured(x.clone(), handle, KEY, 0)
    both = Captured(side)
    y = OURS.reload_captured(both.handle, KEY, 0, (64,), (1,), torch.float32)
    with pytest.raises(RuntimeStateError, match="wait was captured with other memory"):
        OURS.wait_captured(y.clone(), both.handle, KEY, 0)


def test_another_layout(side: LazyStreams) -> None:
    """As outside of a graph: the strides that backward was compiled for, or an error."""
    side.captures = True
    x = torch.arange(12.0).reshape(3, 4).t()
    handle = OURS.offload_captured(x, KEY, 0)
    OURS.release_captured(x, handle, KEY, 0)
    replay(side.taken())
    y = OURS.reload_captured(handle, KEY, 0, (4, 3), (3, 1), torch.float32)
    OURS.wait_captured(y, handle, KEY, 0)
    replay(side.taken())
    assert torch.equal(y, x)
    assert y.stride() == (3, 1)
    with pytest.raises(RuntimeStateError, match="backward asks for"):
        OURS.reload_captured(handle, KEY, 0, (5, 3), (3, 1), torch.float32)


def test_what_is_held_and_given_back(side: LazyStreams) -> None:
    """Buffers belong to the captures until the compiled forward is gone; a replay after that stops."""
    one, two = Captured(side), Captured(side)
    other = Captured(side, id=3, plan="other")
    held = graphoffload.host_memory()
    assert held.in_use_bytes == 3 * NBYTES
    assert held.by_tensor == {"tensor 0": 2 * NBYTES, "tensor 3": NBYTES}
    one.capture_backward(side)
    captured.give_back(KEY)
    assert graphoffload.host_memory().by_tensor == {"tensor 3": NBYTES}
    with pytest.raises(RuntimeError, match="later forward has written to"):
        replay(one.backward)
    captured.give_back(KEY)
    captured.give_back("other")
    assert graphoffload.host_memory().in_use_bytes == 0
    assert two.x.numel() == other.x.numel() == 64


def test_a_forward_of_a_plan_that_is_gone(side: LazyStreams) -> None:
    """It stops before it writes to a buffer that is another's by now."""
    both = Captured(side)
    captured.give_back(KEY)
    side.captures = False
    other = POOL.acquire(NBYTES, pin=True, device=-1)
    other.flat(torch.float32).fill_(7.0)
    with pytest.raises(RuntimeError, match="host buffers were given back"):
        replay(both.forward)
    assert torch.equal(other.flat(torch.float32), torch.full((64,), 7.0))
    POOL.give_back(other)


class Owner:
    """A compiled forward, or the class of its backwards."""


def test_a_plan_has_several_owners(side: LazyStreams) -> None:
    """Two compiles share a plan, and a backward may be pending when both are gone: the last one counts."""
    owners = [Owner(), Owner(), Owner()]
    for owner in (*owners, owners[0]):
        captured.own(KEY, owner)
    del owner
    both = Captured(side)
    side.captures = False
    while owners:
        captured.collect()
        assert captured._LEDGERS[CPU].forwards
        owners.pop()
    side.captures = True
    captured.collect()
    assert captured._LEDGERS[CPU].forwards, "not while something is being captured"
    side.captures = False
    captured.collect()
    assert not captured._LEDGERS[CPU].forwards
    assert both.x.numel() == 64


def test_compiles_own_their_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the backend returns, and the class of its backward, which lives as long as a loss does."""
    owned: dict[str, list[Any]] = {}
    monkeypatch.setattr(captured, "own", lambda key, owner: owned.setdefault(key, []).append(weakref.ref(owner)))
    case = ZOO["attention"]
    module = case.fresh("cpu")
    module.compile(backend=graphoffload.OffloadBackend(policy="offload", min_tensor_bytes=0, mode="reduce-overhead"))
    loss = case.loss(module(*case.example("cpu", seed=0)))
    ((key, owners),) = owned.items()
    assert key == graphoffload.last_plans()[-1].key
    assert len(owners) == 2
    del module
    torch._dynamo.reset()
    gc.collect()
    assert any(owner() is not None for owner in owners), "the loss may still be differentiated"
    del loss
    gc.collect()
    assert all(owner() is None for owner in owners)


def no_host_memory(both: Captured) -> None:
    with mock.patch.object(POOL, "budget_bytes", 1):
        OURS.offload_captured(torch.ones(1000), KEY, 4)


def another_size(both: Captured) -> None:
    OURS.reload_captured(both.handle, KEY, 0, (65,), (1,), torch.float32)


def other_memory_at_release(both: Captured) -> None:
    OURS.release_captured(torch.ones(64), both.handle, KEY, 3)


def other_memory_at_wait(both: Captured) -> None:
    OURS.wait_captured(torch.ones(64), both.handle, KEY, 0)


@pytest.mark.parametrize(
    ("fails", "error"),
    [
        (no_host_memory, HostMemoryError),
        (another_size, RuntimeStateError),
        (other_memory_at_release, RuntimeStateError),
        (other_memory_at_wait, RuntimeStateError),
    ],
)
def test_an_error_in_a_capture(side: LazyStreams, fails: Callable[[Captured], None], error: type[Exception]) -> None:
    """Open branches join, so that torch can end its capture and the error is seen; nothing stays behind."""
    both = Captured(side)
    held, joined = POOL.snapshot().in_use_bytes, len(side.joined)
    OURS.offload_captured(torch.ones(64), KEY, 3)
    OURS.reload_captured(both.handle, KEY, 0, (64,), (1,), torch.float32)
    with pytest.raises(error):
        fails(both)
    assert len(side.joined) == joined + 2
    assert POOL.snapshot().in_use_bytes == held
    assert not captured._OPEN.offloads
    assert not captured._OPEN.reloads
    assert [list(forward.entries) for forward in captured._LEDGERS[CPU].forwards.values()] == [[0]]


def test_an_error_behind_a_capture_that_was_given_up(side: LazyStreams) -> None:
    """torch gives a capture up between an offload and its release, and tells nobody; then another plan's ends in an error.

    What was open is of two captures: nothing is taken out of one because the other has the same id open.
    """
    side.captures = True
    OURS.offload_captured(torch.ones(64), "other", 0)
    x = torch.ones(64)
    handle = OURS.offload_captured(x, KEY, 0)
    OURS.release_captured(x, handle, KEY, 0)
    with pytest.raises(HostMemoryError), mock.patch.object(POOL, "budget_bytes", 1):
        OURS.offload_captured(torch.ones(1000), KEY, 4)
    held = graphoffload.host_memory()
    assert held.in_use_bytes == sum(held.by_tensor.values()) == NBYTES, "else nobody would give it back"
    assert [forward.plan for forward in captured._LEDGERS[CPU].forwards.values()] == [KEY]


def test_an_error_after_a_capture_that_was_given_up_and_given_back(side: LazyStreams) -> None:
    """What was still open of it is closed already; the error that is seen is the capture's own."""
    side.captures = True
    OURS.offload_captured(torch.ones(64), "other", 0)
    captured.give_back("other")
    with pytest.raises(HostMemoryError), mock.patch.object(POOL, "budget_bytes", 1):
        OURS.offload_captured(torch.ones(1000), KEY, 4)
    assert graphoffload.host_memory().in_use_bytes == 0
    assert not captured._OPEN.offloads


def test_hooks_while_a_graph_is_captured(side: LazyStreams) -> None:
    """Those that were not there when it was compiled."""
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        pytest.raises(CaptureError, match="saved-tensor hooks"),
    ):
        OURS.offload_captured(torch.ones(64), KEY, 0)


def test_a_handle_of_no_capture_is_nobodys(side: LazyStreams) -> None:
    """New memory holds what it held, which may have been a number; a handle whose content counts keeps it."""
    side.captures = False
    assert int(OURS.offload_captured(torch.ones(64), KEY, 0)) == -1
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        x = torch.ones(64)
        handle = OURS.offload_captured(x, KEY, 0)
        OURS.release_captured(x, handle, KEY, 0)
    assert int(handle) >= 0
    copied = handle.clone()
    y = OURS.reload_captured(copied, KEY, 0, (64,), (1,), torch.float32)
    OURS.wait_captured(y, copied, KEY, 0)
    assert torch.equal(y, torch.ones(64))


def test_captures_are_counted(side: LazyStreams) -> None:
    """Copies of replays are not: no Python runs."""
    graphoffload.reset_stats()
    replay(Captured(side).forward)
    found = graphoffload.stats()
    assert (found["captured"], found["captured_bytes"], found["offloads"], found["d2h_bytes"]) == (1, NBYTES, 0, 0)


def test_too_many_captures(side: LazyStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before anything is overwritten."""
    ledger = captured._LEDGERS[CPU]
    monkeypatch.setattr(ledger, "_next", max(ledger.rows) + 1)
    with pytest.raises(CaptureError, match="pad them to a few sizes"):
        OURS.offload_captured(torch.ones(64), KEY, 0)


def test_a_model_compiled_without_cuda_graphs(side: LazyStreams) -> None:
    """Nothing was prepared on this device."""
    with mock.patch.dict(captured._LEDGERS, clear=True), pytest.raises(CaptureError, match='mode="reduce-overhead"'):
        OURS.offload_captured(torch.ones(64), KEY, 0)


def test_prepared_while_compiling(side: LazyStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers run under fake tensors; what counts replays is real."""
    side.index = 0
    monkeypatch.setattr(captured, "capture_streams_of", lambda device: side)
    with mock.patch.dict(captured._LEDGERS, clear=True), FakeTensorMode():
        assert captured.prepare(torch.device("meta"))
        (ledger,) = captured._LEDGERS.values()
    assert type(ledger.counts) is type(ledger.flags) is torch.Tensor


@pytest.mark.parametrize("name", captured.NAMES)
def test_inductor_captures_these(name: str) -> None:
    """Asked as Inductor asks: it cuts at the plain op, and not at this one."""
    plain, ours = (torch.fx.Graph().call_function(getattr(OURS, op).default) for op in (name, f"{name}_captured"))
    assert is_cudagraph_unsafe_fx_node(plain)
    assert not is_cudagraph_unsafe_fx_node(ours)


def graph_of_transfers() -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.relu.default, (x,))
    handle = graph.call_function(OURS.offload.default, (y, KEY, 0))
    graph.call_function(OURS.release.default, (y, handle, KEY, 0))
    graph.output((handle,))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def targets(module: torch.fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def test_the_pass_exchanges_ours_alone() -> None:
    """All of them, and nothing else."""
    module = graph_of_transfers()
    assert make_capturable(module) == 2
    relu = torch.ops.aten.relu.default
    assert targets(module) == [relu, OURS.offload_captured.default, OURS.release_captured.default]
    assert make_capturable(module) == 0


class Inner:
    """Stands in for Inductor: says into how many parts it cut."""

    def __init__(self, *parts: int, mutated: frozenset[int] = frozenset()) -> None:
        self.parts = list(parts)
        self.mutated = mutated
        self.seen: list[list[Any]] = []

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        self.seen.append(targets(gm))
        strides = torch._guards.TracingContext.get().output_strides
        assert strides is not None
        assert not strides, "Inductor reports strides once"
        strides.append((1,))
        kwargs["cudagraphs"].value = False  # as Inductor does where it captures nothing
        return types.SimpleNamespace(partition_maps=[None] * self.parts.pop(0), mutated_input_idxs=self.mutated)


@pytest.fixture
def compile_with(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Inner, Any, list[str]]]]:
    """Compile the graph above under a plan for a GPU, as far as there is none: (Inductor, its setting, warnings). Its plan is
    that of no other test."""
    from torch._inductor.utils import BoxedBool

    transfer = Transfer(
        id=0, tensor="y", nbytes=NBYTES, offload_after="y", release_after=None, reload_before="z", wait_before="z", module="m"
    )
    monkeypatch.setattr(inner_compile, "prepare", lambda device: True)
    monkeypatch.setattr(inner_compile, "planned_fusions", mock.MagicMock())

    def run(*parts: int, backward: bool = False, checksum: bool = False, mutated: frozenset[int] = frozenset()) -> Any:
        plan = Plan(
            key=KEY, graph="graph7", decisions=(Decision("y", "offload", "asked"),), transfers=(transfer,), device="cuda:0",
            checksum=checksum,
        )  # fmt: skip
        if not backward:
            registry.register(plan, store=False)
        inner, asked = Inner(*parts, mutated=mutated), BoxedBool(True)
        context = torch._guards.TracingContext(None)
        context.output_strides = []
        with (
            warnings.catch_warnings(record=True) as caught,
            mock.patch("torch._inductor.compile_fx.compile_fx_inner", inner),
            torch._guards.tracing(context),
        ):
            warnings.simplefilter("always")
            session = CompileSession(OffloadConfig(), Limits(), KEY, plan.graph, plan=plan)
            compiled = inner_compile.compile_as_planned(session)(
                graph_of_transfers(), [], cudagraphs=asked, is_backward=backward, static_input_idxs=[0, 1]
            )
        assert compiled is not None
        return inner, asked, [str(item.message) for item in caught if item.category is CudaGraphsWarning]

    with mock.patch.dict(registry._PLANS), mock.patch.dict(registry._RUN):
        yield run


def test_a_graph_in_one_part_is_captured_with_its_copies(compile_with: Any) -> None:
    """Forward and backward, and nothing is said."""
    for backward in (False, True):
        inner, _, said = compile_with(1, backward=backward)
        assert [len(seen) for seen in inner.seen] == [3]
        assert OURS.offload_captured.default in inner.seen[0]
        assert said == []


def test_a_graph_that_something_else_cuts(compile_with: Any) -> None:
    """Compiled again with the plain ops, with CUDA graphs still asked for, and said; its backward is cut as well."""
    inner, asked, (text,) = compile_with(3, 5)
    assert OURS.offload_captured.default in inner.seen[0]
    assert OURS.offload.default in inner.seen[1]
    assert not asked.value, "as the second compile leaves it"
    for part in ("graph7", "between its 1 offloads", "4 calls a step", "something else in it", "min_tensor_bytes"):
        assert part in text
    inner, _, (text,) = compile_with(1, backward=True)
    assert OURS.offload.default in inner.seen[0]
    assert "its forward is cut" in text


def test_a_graph_that_writes_to_its_inputs(compile_with: Any) -> None:
    """torch replays no graph of it, but would capture its backward; parameters and buffers may be written to."""
    inner, _, (text,) = compile_with(1, 5, mutated=frozenset({3}))
    assert OURS.offload.default in inner.seen[1]
    assert "writes to its inputs" in text
    _, _, said = compile_with(1, mutated=frozenset({1}))
    assert said == []


def test_digests_are_compared_outside_of_graphs(compile_with: Any) -> None:
    """verify="checksum" reads results on the host."""
    inner, _, (text,) = compile_with(5, checksum=True)
    assert OURS.offload.default in inner.seen[0]
    assert "checksum" in text


def test_hooks_that_copy_handles(compile_with: Any) -> None:
    """Found by content outside of graphs only."""
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        inner, _, (text,) = compile_with(5)
    assert OURS.offload.default in inner.seen[0]
    assert "saved-tensor hooks" in text
