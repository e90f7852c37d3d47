"""From graph to graph: releases that do not wait at the end of forward, reloads that start in the backward before."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from lazy import LazyStreams, afresh, clean_slate, lazy_steps, learned, once
from torch import Tensor, nn

import graphoffload
from graphoffload.errors import ConfigError
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.runtime import host_memory, registry, twin_copies
from graphoffload.runtime.handles import ENTRIES
from graphoffload.runtime.registry import run_plan
from graphoffload.runtime.step import between_graphs as between
from graphoffload.testing import ZOO, Result, assert_equal_bits, compiled, differences, run_step
from graphoffload.testing.attention import HIDDEN, Block
from graphoffload.testing.faults import Fails
from graphoffload.testing.lazy_streams import LazyEvent

__all__ = ["afresh", "clean_slate", "learned", "once"]
SEEDS = (0, 1, 2, 3, 4, 5)
SLOW_LINK = HardwareProfile(
    name="slow link",
    source="datasheet",
    memory_bytes=2**34,
    d2h_bytes_per_s=1e8,
    h2d_bytes_per_s=1e8,
    matmul_flops_per_s=(("float32", 1e13),),
)
"""Copies that take longer than a block: without a window most releases stand at the end."""


class Wide(nn.Module):
    """Another kind of block, with a plan of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(3 * HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.down(torch.nn.functional.silu(self.up(x))))


class Model(nn.Module):
    """Five blocks of two kinds; the order can be changed between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Wide(), Block(), Block(), Wide()])
        self.order = list(range(5))

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return x


def backend(**options: Any) -> graphoffload.OffloadBackend:
    config = {
        "policy": "offload", "inner": "aot_eager", "min_tensor_bytes": 0, "hardware": SLOW_LINK, "max_inflight_bytes": 2**17,
        **options,
    }  # fmt: skip
    return graphoffload.OffloadBackend(graphoffload.OffloadConfig(**config))


def per_block(**options: Any) -> Model:
    """A model whose blocks are compiled one by one."""
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        layer.compile(backend=backend(**options))
    return model


def batch(seed: int) -> tuple[Tensor, ...]:
    return ZOO["three_blocks"].example("cpu", seed=seed)


def step(module: nn.Module, seed: int) -> Result:
    return run_step(module, batch(seed), seed=seed)


def references(module: nn.Module) -> list[Result]:
    """The same compiled graphs with synchronous copies."""
    with twin_copies():
        return [step(module, seed) for seed in SEEDS]


@pytest.fixture
def lazy() -> Iterator[LazyStreams]:
    """Copies are made when somebody waits for them."""
    with lazy_steps() as lazy:
        yield lazy


def counted(name: str) -> int:
    return graphoffload.stats()[name]


def track() -> between.Track:
    return between._TRACKS.of[torch.device("cpu")]


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_gradients_are_the_twins(lazy: LazyStreams, inner: str) -> None:
    """Every copy as late as possible, freed memory overwritten: equal to the bit, with deferred releases and hits."""
    module = per_block(inner=inner)
    expected = references(module)
    graphoffload.reset_stats()
    for seed in SEEDS:
        assert_equal_bits(step(module, seed), expected[seed])
    assert counted("deferred") > 0
    assert counted("prefetch_hits") == counted("prefetches") > 0


def test_what_is_deferred_and_when(lazy: LazyStreams) -> None:
    """From the third step on, at the end of all graphs but the last, and in the middle of those that come after others;
    nothing is pending between forward and backward."""
    module = per_block()
    found = []
    for seed in range(4):
        graphoffload.reset_stats()
        loss = module(*batch(seed)).square().sum()
        found.append(counted("deferred"))
        assert not track().pending
        assert track().pending_bytes == 0
        loss.backward()
        del loss
    runs = [run_plan(key) for key in track()._last]
    calls = [run.transfers if run.downstream else len(run.at_end) for run in runs]
    assert any(run.downstream for run in runs)
    assert found[:2] == [0, 0]
    assert found[2] == found[3] == sum(calls[:-1]) > 0


def test_a_single_graph_waits_as_before(lazy: LazyStreams) -> None:
    """Whole model compiled: nobody follows, whatever the number of microbatches that alternate."""
    module = compiled(ZOO["three_blocks"].fresh("cpu"), backend())
    graphoffload.reset_stats()
    for seed in range(5):
        step(module, seed)
    waiting = module(*batch(0)).square().sum()
    for seed in range(5):
        following = module(*batch(seed)).square().sum()
        waiting.backward()
        waiting = following
    waiting.backward()
    assert counted("deferred") == counted("prefetches") == counted("stays") == 0


def test_the_window_bounds_what_is_pending(lazy: LazyStreams) -> None:
    """max_inflight_bytes, and without it what the largest graph offloads."""
    for window in (None, 20_000, 1):
        between._TRACKS.of.clear()
        module = per_block(max_inflight_bytes=window)
        most = []

        def watched(entry: Any, original: Any = between.defers, most: list[int] = most) -> bool:
            found = original(entry)
            most.append(track().pending_bytes)
            return bool(found)

        with mock.patch.object(between, "defers", watched):
            for seed in range(4):
                step(module, seed)
        limit = window or track().largest_bytes
        assert max(most) <= limit
        assert (max(most) > 0) == (window != 1)


def test_order_of_the_copies(lazy: LazyStreams) -> None:
    """The graph's own reloads first, then what the graph before waits for first; that is not copied again."""
    module = per_block()
    for seed in range(3):
        step(module, seed)
    lazy.log.clear()
    graphoffload.reset_stats()
    step(module, 3)
    copies = [line.removeprefix("h2d ") for line in lazy.log if line.startswith("h2d ")]
    assert len(copies) == counted("offloads") == counted("reloads") - counted("stays")
    assert counted("prefetch_hits") == counted("prefetches") > 0
    assert counted("h2d_bytes") == counted("d2h_bytes")


def test_a_whole_graph_is_prefetched_where_there_is_room(lazy: LazyStreams) -> None:
    """All that the graph before reloads, not only what it waits for first."""
    module = per_block(max_inflight_bytes=2**20)
    expected = references(module)
    for seed in SEEDS[:3]:
        step(module, seed)
    graphoffload.reset_stats()
    assert_equal_bits(step(module, 3), expected[3])
    assert counted("prefetch_hits") == counted("offloads") > 0, "all but what stayed in the last graph"


def test_the_last_graphs_tensors_stay(lazy: LazyStreams) -> None:
    """They are needed at once. From the third step on, as far as they fit into the window, and never without one before."""
    module = per_block(max_inflight_bytes=2**20)
    expected = references(module)
    between._TRACKS.of.clear()
    found = []
    for seed in SEEDS:
        graphoffload.reset_stats()
        assert_equal_bits(step(module, seed), expected[seed])
        found.append((counted("offloads"), counted("stays")))
    last = run_plan(track()._last[-1]).transfers
    (all_of_them, _), *_ = found
    assert found[:2] == [(all_of_them, 0)] * 2
    assert found[2:] == [(all_of_them - last, last)] * (len(SEEDS) - 2)
    for window in (1, 20_000):
        between._TRACKS.of.clear()
        module = per_block(max_inflight_bytes=window)
        for seed in range(4):
            graphoffload.reset_stats()
            step(module, seed)
        assert counted("stayed_bytes") <= window
        assert (counted("stays") > 0) == (window != 1)


def test_the_last_graph_of_a_goal_does_as_planned(lazy: LazyStreams) -> None:
    """A plan that was made for a number counts on its copies."""
    fast = dataclasses.replace(SLOW_LINK, name="fast link", d2h_bytes_per_s=1e14, h2d_bytes_per_s=1e14)
    module = per_block(policy="auto", max_slowdown=0.5, max_inflight_bytes=2**20, hardware=fast)
    graphoffload.reset_stats()
    for seed in SEEDS:
        step(module, seed)
    assert counted("offloads") > 0
    assert counted("stays") == 0


def test_no_headroom_no_prefetch(lazy: LazyStreams) -> None:
    """Not a byte above the peak."""
    module = per_block()
    expected = references(module)
    lazy.headroom = 0
    graphoffload.reset_stats()
    for seed in SEEDS:
        assert_equal_bits(step(module, seed), expected[seed])
    assert counted("prefetches") == 0


def test_memory_that_cannot_be_had_is_no_error(lazy: LazyStreams) -> None:
    """Headroom is an estimate: fragments."""
    module = per_block()
    expected = [step(module, seed) for seed in SEEDS[:3]]
    original = torch.empty_strided

    def fails(*args: Any, **kwargs: Any) -> Tensor:
        if any("prefetch" in frame.name for frame in __import__("traceback").extract_stack()):
            raise torch.OutOfMemoryError("fragments")
        return original(*args, **kwargs)

    graphoffload.reset_stats()
    with mock.patch.object(torch, "empty_strided", fails):
        assert_equal_bits(step(module, 2), expected[2])
    assert counted("prefetches") == 0


@pytest.mark.parametrize("order", [[4, 1, 0, 3, 2], [0, 1], [0, 1, 2, 3, 4, 0, 1], [2]], ids=str)
def test_another_order_of_blocks(lazy: LazyStreams, order: list[int]) -> None:
    """The next forward is another one: blocks skipped, repeated, in another order."""
    module = per_block()
    expected = references(module)
    module.order = order
    other = references(module)
    for turn in range(3):
        for seed in SEEDS[:3]:
            module.order = list(range(5))
            assert_equal_bits(step(module, seed), expected[seed])
        module.order = order
        assert_equal_bits(step(module, turn), other[turn])
    assert counted("deferred") > 0


def test_a_forward_that_ends_early(lazy: LazyStreams) -> None:
    """Another graph was expected, and backward comes: what is pending goes at the first reload."""
    module = per_block()
    for seed in range(3):
        step(module, seed)
    module.order = [0, 1, 2]
    loss = module(*batch(0)).square().sum()
    assert len(track().pending) > 0
    loss.backward()
    assert not track().pending


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_microbatches_in_any_order(lazy: LazyStreams, order: tuple[int, ...]) -> None:
    """Three forwards, then their backwards: the graph before may be another microbatch's."""
    module = per_block()
    expected = references(module)
    for _ in range(4):
        losses = [graphoffload.testing.weighted_loss(module(*batch(seed))) for seed in range(3)]
        for seed in order:
            module.zero_grad()
            losses[seed].backward()
            for name, parameter in module.named_parameters():
                assert torch.equal(parameter.grad, expected[seed].grads[name]), name
        del losses


@torch._functorch.config.patch("donated_buffer", False)
def test_retained_graphs(afresh: None, lazy: LazyStreams) -> None:
    """Two backwards of one forward prefetch twice; a dropped one leaves nothing."""
    module = per_block()
    expected = references(module)
    for _ in range(3):
        losses = [graphoffload.testing.weighted_loss(module(*batch(seed))) for seed in range(2)]
        for seed, retain in ((1, True), (0, True), (1, False), (0, False)):
            module.zero_grad()
            losses[seed].backward(retain_graph=retain)
            for name, parameter in module.named_parameters():
                assert torch.equal(parameter.grad, expected[seed].grads[name]), name
        del losses
    assert counted("prefetch_hits") > 0


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_between_two_graphs(lazy: LazyStreams, at: int, where: str) -> None:
    """What is pending, or prefetched for a backward that never comes, goes; the next steps are right."""
    module = per_block()
    expected = references(module)
    for seed in range(3):
        step(module, seed)

    def interrupted(layer: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
        if where == "forward":
            raise KeyError("interrupted")
        return (Fails.apply(inputs[0]),)

    hook = module.layers[at].register_forward_pre_hook(interrupted)
    module.order = [*range(at), at, *range(at + 1, 5)]
    # The hook changes what is compiled: run that block in eager.
    compiled_call, module.layers[at]._compiled_call_impl = module.layers[at]._compiled_call_impl, None
    with pytest.raises(KeyError):
        step(module, 0)
    hook.remove()
    module.layers[at]._compiled_call_impl = compiled_call
    ENTRIES.sweep()
    assert not track().pending
    assert host_memory().in_use_bytes == 0
    for seed in SEEDS:
        assert_equal_bits(step(module, seed), expected[seed])


def test_evaluation_and_dropped_forwards(lazy: LazyStreams) -> None:
    """Under no_grad nothing is offloaded; with gradients on, outputs are dropped."""
    module = per_block()
    expected = references(module)
    for seed in SEEDS:
        with torch.no_grad():
            module(*batch(9))
        assert_equal_bits(step(module, seed), expected[seed])
        module(*batch(9))
        module.order = [0, 1]
        module(*batch(9))
        module.order = list(range(5))
        assert_equal_bits(step(module, seed), expected[seed])


def test_checksums_and_checkpoints(lazy: LazyStreams) -> None:
    """Checksum mode compares what was prefetched; checkpointed blocks run their forward again inside backward."""
    from torch.utils.checkpoint import checkpoint

    module = per_block(verify="checksum")
    expected = references(module)
    before = counted("checked")
    for seed in SEEDS:
        assert_equal_bits(step(module, seed), expected[seed])
    assert counted("checked") > before
    assert counted("prefetch_hits") > 0

    def again(x: Tensor) -> Tensor:
        for layer in module.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    with twin_copies():
        right = [run_step(again, batch(seed)) for seed in SEEDS]
    for seed in SEEDS:
        assert_equal_bits(run_step(again, batch(seed)), right[seed])


def test_another_stream_does_not_take_it(lazy: LazyStreams) -> None:
    """Memory belongs to the stream that it was allocated on."""
    module = per_block()
    expected = references(module)
    graphoffload.reset_stats()
    original = between.take

    def elsewhere(*args: Any) -> Any:
        home, lazy.stream = lazy.stream, object()
        try:
            return original(*args)
        finally:
            lazy.stream = home

    with mock.patch.object(between, "take", elsewhere):
        for seed in SEEDS:
            assert_equal_bits(step(module, seed), expected[seed])
    assert counted("prefetches") > counted("prefetch_hits") == 0


def test_nothing_is_left_open_while_a_cuda_graph_is_captured(lazy: LazyStreams) -> None:
    """A capture may neither wait for what is outside of it, nor leave a copy behind."""
    module = per_block()
    for seed in range(3):
        step(module, seed)
    graphoffload.reset_stats()
    lazy.captures = True
    step(module, 3)
    assert counted("deferred") == counted("prefetches") == counted("prefetch_hits") == 0


def test_only_linked_plans_take_part(lazy: LazyStreams) -> None:
    """A partitioner inside plain Inductor: buffers are reused there, so every release waits."""
    from functorch.compile import aot_module, make_boxed_compiler

    torch.manual_seed(0)
    partitioner = graphoffload.OffloadPartitioner(backend().config)
    identity = make_boxed_compiler(lambda graph, inputs: graph.forward)
    module = nn.Sequential(*(aot_module(Block(), identity, identity, partition_fn=partitioner) for _ in range(3)))
    before = counted("offloads")
    graphoffload.reset_stats()
    for seed in range(4):
        module(*batch(seed)).square().sum().backward()
    assert counted("offloads") + before > 0
    assert counted("deferred") == counted("prefetches") == 0


def test_threads(lazy: LazyStreams) -> None:
    """Each thread's forwards have an order of their own."""
    module = per_block()
    expected = references(module)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for seed in SEEDS:
                inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in batch(seed)]
                found = torch.autograd.grad(graphoffload.testing.weighted_loss(module(*inputs)), list(module.parameters()))
                for (name, _), grad in zip(module.named_parameters(), found, strict=True):
                    assert torch.equal(grad, expected[seed].grads[name]), name
        except BaseException as error:
            errors.append(error)

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert not errors, errors
    assert between._TRACKS.of.keys() <= {torch.device("cpu")}


def test_a_later_copy_is_not_done_with_an_earlier_one(lazy: LazyStreams) -> None:
    """A compiler may run a graph's own releases in any order: only what earlier calls left is done with them."""
    ops, run = torch.ops.graphoffload, run_plan("two in one call")
    run.link(None)
    run.at_end, run.window_bytes = frozenset({1}), 2**20
    first, second = torch.randn(64), torch.randn(64)
    values = second.clone()
    handles = [ops.offload(x, run.key, id) for id, x in enumerate((first, second))]
    call = track().call
    assert call is not None
    call.followed = True
    ops.release(second, handles[1], run.key, 1)
    ops.release(first, handles[0], run.key, 0)
    assert [entry.id for entry in track().pending] == [1]
    y = ops.reload(handles[1], run.key, 1, (64,), (1,), torch.float32)
    assert not track().pending
    ops.wait(y, handles[1], run.key, 1)
    assert torch.equal(y, values)
    del handles, first, second


@contextlib.contextmanager
def _careless(what: str) -> Iterator[None]:
    original = getattr(between, what)

    def without_waiting(*args: Any) -> Any:
        nothing = mock.Mock(return_value=None)
        with mock.patch.object(LazyEvent, "wait", nothing), mock.patch.object(LazyStreams, "compute_waits_for", nothing):
            return original(*args)

    with mock.patch.object(between, what, without_waiting):
        yield


def test_a_source_that_goes_without_a_wait_shows(lazy: LazyStreams) -> None:
    """The rule broken on purpose: the late copy reads what was written over the source, or free memory."""
    module = per_block(max_inflight_bytes=20_000)
    expected = references(module)
    with _careless("_settle"):
        found = [differences(step(module, seed), expected[seed]) for seed in SEEDS]
    lazy.finish()
    assert any(found) or lazy.complaints
    lazy.complaints.clear()


@torch._functorch.config.patch("donated_buffer", False)
def test_a_prefetch_that_is_given_up_without_a_wait_shows(afresh: None, lazy: LazyStreams) -> None:
    """The late copy writes to free memory."""
    module = per_block()
    for seed in range(3):
        step(module, seed)
    module.order = [3, 0, 1]
    with _careless("_drop"):
        losses = [module(*batch(seed)).square().sum() for seed in range(2)]
        losses[1].backward(retain_graph=True)
        losses[1].backward(retain_graph=True)
        del losses
        ENTRIES.sweep()
    lazy.finish()
    assert lazy.complaints
    lazy.complaints.clear()


def test_it_can_be_switched_off(afresh: None, lazy: LazyStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHOFFLOAD_ACROSS_GRAPHS", "0")
    module = per_block()
    graphoffload.reset_stats()
    for seed in SEEDS:
        step(module, seed)
    stats = graphoffload.stats()
    assert stats["reloads"] > 0
    assert (stats["deferred"], stats["prefetches"]) == (0, 0)


@pytest.mark.parametrize(("text", "on"), [("", True), ("0", False), ("off", False), ("1", True), ("on", True)])
def test_the_switch(monkeypatch: pytest.MonkeyPatch, text: str, on: bool) -> None:
    monkeypatch.setenv("GRAPHOFFLOAD_ACROSS_GRAPHS", text)
    assert registry.across_graphs() is on


def test_a_switch_that_is_neither_on_nor_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHOFFLOAD_ACROSS_GRAPHS", "maybe")
    with pytest.raises(ConfigError, match=r"ACROSS_GRAPHS='maybe' is neither on nor off\. Set it to 0 .* or unset it\."):
        registry.across_graphs()
