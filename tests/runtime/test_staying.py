"""A budget that several graphs share: what fits of what they offload stays on the device, and the peak stays below it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lazy import LazyStreams, afresh, clean_slate, lazy_steps, learned, once
from torch import Tensor, nn

import graphoffload
from graphoffload.errors import NotOffloadedWarning, SharedBudgetWarning
from graphoffload.runtime import ops, twin_copies
from graphoffload.runtime.step import between_graphs as between
from graphoffload.runtime.step.resident import Budget, Share, Staying
from graphoffload.testing import Result, assert_equal_bits, run_step, weighted_loss
from graphoffload.testing.attention import HIDDEN, Block
from graphoffload.testing.faults import Fails

__all__ = ["afresh", "clean_slate", "learned", "once"]
BUDGET = 2**30
SEEDS = (0, 1, 2, 3, 4)


class Model(nn.Module):
    """Four equal blocks behind something in eager, as an embedding is."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.order = list(range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for index in self.order:
            x = self.layers[index](x)
        return x


def batch(seed: int, rows: int = 16) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(2, rows, HIDDEN, generator=generator),)


def step(module: nn.Module, seed: int, rows: int = 16) -> Result:
    return run_step(module, batch(seed, rows), seed=seed)


def per_block(**options: Any) -> Model:
    torch.manual_seed(0)
    model = Model()
    config = {"device_budget": BUDGET, "reserve": 0, "inner": "aot_eager", "min_tensor_bytes": 0, **options}
    for layer in model.layers:
        layer.compile(backend=graphoffload.OffloadBackend(**config), dynamic=False)
    return model


def references(module: nn.Module, rows: int = 16) -> list[Result]:
    with twin_copies():
        return [step(module, seed, rows) for seed in SEEDS]


def assert_gradients(module: nn.Module, expected: Result) -> None:
    """To the bit."""
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.grad, expected.grads[name]), name


def counted(name: str) -> int:
    return graphoffload.stats()[name]


def offered_bytes(module: Model) -> int:
    """What one forward offloads while nothing stays."""
    before = counted("d2h_bytes")
    step(module, 0)
    return counted("d2h_bytes") - before


@pytest.fixture
def lazy() -> Iterator[LazyStreams]:
    with lazy_steps() as lazy:
        lazy.allocated = 0, BUDGET
        yield lazy


@pytest.mark.parametrize(
    ("share", "inner"),
    [*((share, "aot_eager") for share in (0.0, 0.3, 0.5, 1.0)), pytest.param(0.5, "inductor", marks=pytest.mark.long)],
)
def test_gradients_and_how_much_stays(lazy: LazyStreams, inner: str, share: float) -> None:
    """Sources that went are overwritten, so a wrong hand-back shows; what stays is the end of the forward, as much as fits."""
    module = per_block(inner=inner)
    whole = offered_bytes(module)
    expected = references(module)
    room = int(share * whole)
    lazy.allocated = 0, BUDGET - room
    graphoffload.reset_stats()
    for number, seed in enumerate(SEEDS):
        before = counted("stayed_bytes")
        assert_equal_bits(step(module, seed), expected[seed])
        stayed = counted("stayed_bytes") - before
        if number == 0:
            assert stayed == 0, "the first learns"
            continue
        lazy.allocated = 0, BUDGET  # what stayed is part of the peak now
        assert stayed <= room
        assert stayed >= room - whole // 8, "the next tensor would not have fitted"
    assert counted("d2h_bytes") + counted("stayed_bytes") == whole * len(SEEDS)
    assert counted("h2d_bytes") == counted("d2h_bytes")


def test_the_last_tensors_stay(lazy: LazyStreams) -> None:
    """They are needed first, so their copies would hide behind nothing."""
    module = per_block()
    whole = offered_bytes(module)
    step(module, 1)
    lazy.allocated = 0, BUDGET - whole // 2
    step(module, 2)
    found = []
    original = between.stays

    def watched(entry: Any) -> bool:
        found.append(original(entry))
        return found[-1]

    with mock.patch.object(between, "stays", watched):
        step(module, 3)
    first = found.index(True)
    assert 0 < first < len(found)
    assert all(found[first:])
    assert not any(found[:first])


def test_without_a_shared_budget_only_the_last_graphs_tensors_stay(lazy: LazyStreams) -> None:
    """policy="offload" is an order, but for what is needed at once."""
    module = per_block(policy="offload", device_budget="auto")
    lazy.allocated = 0, 0
    for seed in SEEDS:
        step(module, seed)
    assert between._TRACKS.of[torch.device("cpu")].staying.budget is None
    graphoffload.reset_stats()
    step(module, 0)
    assert counted("stays") * (len(module.layers) - 1) == counted("offloads") > 0


def test_plan_and_its_note(afresh: None, lazy: LazyStreams) -> None:
    """The plan says what it cannot know."""
    step(per_block(), 0)
    plan = graphoffload.last_plans()[-1]
    assert plan.transfers
    assert any("shared with the graphs before" in note for note in plan.notes)
    assert {d.reason for d in plan.decisions if d.action == "offload"} == {
        "the budget is shared by several graphs: goes, or stays where it fits"
    }


def test_what_the_host_cannot_hold_is_kept(afresh: None, lazy: LazyStreams) -> None:
    """host_budget is the user's number as well: the rest of a graph is kept, and said, instead of failing in forward."""
    with pytest.warns(NotOffloadedWarning, match="host_budget"):
        step(per_block(host_budget="8KiB"), 0)
    plan = graphoffload.last_plans()[-1]
    assert 0 < plan.offloaded_bytes <= 8 * 1024
    assert any(d.reason.startswith("host memory") for d in plan.decisions if d.action == "keep")


@torch._functorch.config.patch("donated_buffer", False)
def test_retained_graphs_get_copies(afresh: None, lazy: LazyStreams) -> None:
    """What a second backward will need is not given away."""
    module = per_block()
    expected = references(module)
    lazy.allocated = 0, 0
    for seed in SEEDS[:3]:
        step(module, seed)
    graphoffload.reset_stats()
    for _ in range(3):
        losses = [weighted_loss(module(*batch(seed))) for seed in range(2)]
        for seed, retain in ((1, True), (0, True), (1, False), (0, False)):
            module.zero_grad()
            losses[seed].backward(retain_graph=retain)
            assert_gradients(module, expected[seed])
        del losses
    lazy.allocated = 0, 0
    for seed in SEEDS:
        assert_equal_bits(step(module, seed), expected[seed])
    assert counted("stays") > 0


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_microbatches_in_any_order(lazy: LazyStreams, order: tuple[int, ...]) -> None:
    module = per_block()
    expected = references(module)
    lazy.allocated = 0, BUDGET - offered_bytes(module)
    graphoffload.reset_stats()
    for _ in range(5):
        losses = [weighted_loss(module(*batch(seed))) for seed in range(3)]
        for seed in order:
            module.zero_grad()
            losses[seed].backward()
            assert_gradients(module, expected[seed])
        del losses
    assert counted("stays") > 0


@pytest.mark.parametrize("at", range(4))
def test_a_backward_that_stops(lazy: LazyStreams, at: int) -> None:
    """What stayed goes with its handles; trying the same backward again is right or an error, never a wrong gradient."""
    module = per_block()
    expected = references(module)
    lazy.allocated = 0, 0
    for seed in SEEDS[:3]:
        step(module, seed)
    calls: list[None] = []
    module.zero_grad()
    loss = weighted_loss(module(*batch(0)))
    with mock.patch.object(between, "prefetch", side_effect=lambda *_: stopping_once(calls, at)), pytest.raises(KeyError):
        loss.backward()
    module.zero_grad()
    with pytest.raises(RuntimeError, match=r"did not come to its end|a second time"):
        loss.backward()
    del loss
    for seed in SEEDS:
        assert_equal_bits(step(module, seed), expected[seed])


def stopping_once(calls: list[None], at: int) -> None:
    """Raise behind one reload of a backward."""
    calls.append(None)
    if len(calls) == 3 * at + 2:
        raise KeyError("stopped")


def test_an_exception_between_graphs_and_other_orders(lazy: LazyStreams) -> None:
    """Blocks skipped and repeated, a forward that is dropped, evaluation: the next gradients are right."""
    module = per_block()
    expected = references(module)
    lazy.allocated = 0, BUDGET - offered_bytes(module) // 2
    for turn in range(4):
        for seed in SEEDS[:3]:
            assert_equal_bits(step(module, seed), expected[seed])
        module.order = [[0, 1], [3, 1, 0, 2], [0, 1, 2, 3, 0, 1], [2]][turn]
        with twin_copies():
            other = step(module, turn)
        assert_equal_bits(step(module, turn), other)
        module(*batch(7))
        with torch.no_grad():
            module(*batch(8))
        x = module.layers[0](batch(3)[0].requires_grad_() * 1.0)
        with pytest.raises(KeyError):
            Fails.apply(x).sum().backward()
        module.order = list(range(4))
    assert counted("stays") > 0


def test_nothing_stays_beside_an_earlier_forward(lazy: LazyStreams) -> None:
    """A forward inside a backward, as checkpoints run it, or pipelined microbatches: two rooms would be one too many."""
    module = per_block()
    expected = references(module)
    lazy.allocated = 0, 0
    for seed in SEEDS[:3]:
        step(module, seed)
    waiting = weighted_loss(module(*batch(0)))
    graphoffload.reset_stats()
    for turn in range(6):
        following = weighted_loss(module(*batch((turn + 1) % 2)))
        module.zero_grad()
        waiting.backward()
        assert_gradients(module, expected[turn % 2])
        waiting = following
        if turn == 0:
            graphoffload.reset_stats()  # the first two were one forward of twice the length
    assert counted("stays") == 0
    assert counted("offloads") > 0


def test_other_sizes_do_not_stay_on_a_smaller_ones_room(lazy: LazyStreams) -> None:
    """Each sequence of sizes has a share of its own, and it takes two forwards to have one."""
    module = per_block()
    expected = {rows: references(module, rows) for rows in (8, 16)}
    lazy.allocated = 0, 0
    graphoffload.reset_stats()
    stayed = []
    for rows in (8, 8, 8, 16, 16, 16, 8, 16, 8, 8, 8):
        before = counted("stayed_bytes")
        assert_equal_bits(step(module, 0, rows), expected[rows][0])
        stayed.append(counted("stayed_bytes") - before > 0)
    assert stayed == [False, False, True, False, False, True, False, False, False, False, True]


def test_another_stream_gets_a_copy(lazy: LazyStreams) -> None:
    """Memory belongs to the stream that it was allocated on."""
    module = per_block()
    expected = references(module)
    lazy.allocated = 0, 0
    for seed in SEEDS[:3]:
        step(module, seed)
    handed = mock.Mock(wraps=ops._owns_all_of_its_memory)
    home = lazy.stream

    class Other:
        def wait_stream(self, stream: Any) -> None:
            assert stream is home

    with mock.patch.object(ops, "_owns_all_of_its_memory", handed), mock.patch.object(Tensor, "record_stream", create=True):
        loss = weighted_loss(module(*batch(0)))
        lazy.stream = Other()
        module.zero_grad()
        loss.backward()
        lazy.stream = home
    assert handed.call_count == 0
    assert_gradients(module, expected[0])


def test_memory_that_others_see_is_copied() -> None:
    """Backward may write to what it is handed."""
    x = torch.randn(8)
    assert ops._owns_all_of_its_memory(x)
    alias = x.detach()
    assert not ops._owns_all_of_its_memory(x)
    del alias
    assert ops._owns_all_of_its_memory(x)
    assert not ops._owns_all_of_its_memory(torch.randn(16)[:8])


def test_a_budget_that_cannot_be_met_is_said_once(afresh: None, lazy: LazyStreams) -> None:
    """With everything offloaded the peak is above the budget."""
    module = per_block()

    def steps() -> None:
        for number in range(5):
            lazy.allocated = 0, BUDGET + 1000 + number
            step(module, number)

    with pytest.warns(SharedBudgetWarning, match=r"exceeded by \d+ B with all .* offloaded") as caught:
        steps()
    assert len([w for w in caught if w.category is SharedBudgetWarning]) == 1


@given(
    st.integers(0, 1000), st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(0, 1500), st.booleans(),
    st.integers(0, 300), st.data(),
)  # fmt: skip
def test_the_peak_never_passes_the_budget(
    least: int, sizes: list[int], budget: int, resets: bool, older: int, data: st.DataObject
) -> None:
    """A model of memory: what stays raises the peak by none to all of its bytes, more never by less."""
    weights = data.draw(st.lists(st.floats(0, 1), min_size=len(sizes), max_size=len(sizes)))
    staying = Staying()
    staying.set_budget(Budget(budget, 0, 0))
    counter = older if not resets else 0
    peaks = []
    with mock.patch("graphoffload.runtime.step.resident.warn"):
        for number in range(12 + len(sizes)):  # a step may learn no more than that one tensor more stays
            if number:
                staying.begin_forward(("a",), 0, counter, as_before=number > 1)
            stays = [staying.offer(size) for size in sizes]
            peak = least + int(sum(w * size for w, size, stay in zip(weights, sizes, stays, strict=True) if stay))
            peaks.append(peak)
            counter = max(counter, peak)
            staying.end_forward()
            staying.sample(counter)
            if resets:
                counter = 0
    assert max(peaks) <= max(budget, least)
    if older <= budget and all(weights) and not resets:
        unused = budget - max(peaks[-1], older)
        assert unused < max(sizes) or all(stays)


def test_what_a_share_learns() -> None:
    """An old peak that is too high says nothing; one of this step takes back what was given."""
    share = Share()
    assert not share.learn(0, -10, certain=False)
    assert not share.learn(0, 60, certain=True)
    assert share.bytes == 60
    share.learn(50, 0, certain=False)
    assert share.bytes == 60, "a step in which less stayed says less"
    share.learn(50, 40, certain=False)
    assert share.bytes == 90
    assert not share.learn(80, -30, certain=True)
    assert share.bytes == 50
    share.learn(50, -300, certain=True)
    assert share.bytes == 0
    assert share.learn(0, -1, certain=True), "nothing is left to give back"


def test_reserve_is_what_does_not_exist_yet() -> None:
    """Optimizer state that was made since is allocated between steps, and no longer kept free."""
    budget = Budget(device_bytes=100, reserve_bytes=30, static_bytes=20)
    assert [budget.limit_bytes(now) for now in (20, 10, 30, 50, 80)] == [70, 70, 80, 100, 100]
