"""Any sequence of what training loops do to a step that is planned, with every copy as late as possible; and faults put into
the runtime on purpose, which the tests must see."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from lazy import LazyStreams, clean_slate, lazy_steps, once
from torch import Tensor

import graphoffload
from graphoffload.compiler import dispatch
from graphoffload.errors import BudgetError
from graphoffload.runtime import host_memory, ops
from graphoffload.runtime.handles import ENTRIES
from graphoffload.runtime.offloaded_tensors import COPYING, ON_HOST, OffloadedTensor
from graphoffload.runtime.step import call as one_call
from graphoffload.runtime.step import calls
from graphoffload.runtime.step.calls import STEPS, StepRun
from graphoffload.runtime.step.early import reload_early
from tests.runtime.stepping import Model, Wide, assert_equal, batch, compiled, gradients, kept, loss_of, plan_now, step

__all__ = ["clean_slate", "once"]
CPU = torch.device("cpu")
ORDERS = ([0, 1, 2], [0, 1, 2, 1, 0], [2, 1])
LENGTHS = (32, 24)
CASES = tuple(itertools.product(range(len(ORDERS)), range(len(LENGTHS))))
Case = tuple[int, int]


def words(case: Case) -> Tensor:
    return batch(case[0], 2, LENGTHS[case[1]])


def trained(budget: int) -> tuple[Model, dict[Case, list[Tensor | None]]]:
    """A model with a budget, and its gradients in each case."""
    torch.manual_seed(0)
    model = Model(Wide(32), Wide(64), Wide(32))
    expected = {}
    for case in CASES:
        model.order = ORDERS[case[0]]
        (expected[case],) = kept(model, [words(case)])
    return compiled(model, budget), expected


LEAST, MOST = 60_000, 140_000


class Loop(RuleBasedStateMachine):
    """A training loop; losses whose backward is still to come."""

    case: Case

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.lazy = self.stack.enter_context(lazy_steps())
        self.stack.enter_context(torch._functorch.config.patch("donated_buffer", False))
        self.model, self.expected = trained(MOST)
        self.waiting: list[tuple[Case, Tensor]] = []
        for case in CASES:
            gradients(self.model, self.loss(case))

    def loss(self, case: Case) -> Tensor:
        """A forward. A budget that no plan meets is said once, and the model trains on."""
        self.model.order = ORDERS[case[0]]
        try:
            return loss_of(self.model, words(case))
        except BudgetError:
            return loss_of(self.model, words(case))

    @rule(case=st.sampled_from(CASES), count=st.integers(1, 4))
    def steps(self, case: Case, count: int) -> None:
        """The usual loop, for a while."""
        for _ in range(count):
            assert_equal(gradients(self.model, self.loss(case)), self.expected[case])

    @rule(case=st.sampled_from(CASES))
    def forward(self, case: Case) -> None:
        """One more microbatch in flight."""
        self.waiting.append((case, self.loss(case)))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), retain=st.booleans())
    def backward(self, data: st.DataObject, retain: bool) -> None:
        """Of any microbatch in flight."""
        at = data.draw(st.integers(0, len(self.waiting) - 1))
        case, loss = self.waiting[at] if retain else self.waiting.pop(at)
        assert_equal(gradients(self.model, loss, retain_graph=retain), self.expected[case])

    @precondition(lambda self: self.waiting)
    @rule()
    def part_of_a_backward(self) -> None:
        """Of the head and the last block that was called."""
        case, loss = self.waiting[-1]
        last = list(self.model.layers[ORDERS[case[0]][-1]].parameters())
        torch.autograd.grad(loss, last, retain_graph=True)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """Outputs go without a backward."""
        self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))

    @rule(case=st.sampled_from(CASES), grad=st.booleans())
    def evaluate(self, case: Case, grad: bool) -> None:
        """With or without gradients."""
        self.model.order = ORDERS[case[0]]
        with torch.set_grad_enabled(grad), suppress(BudgetError):
            self.model(words(case))

    @rule(case=st.sampled_from(CASES), name=st.sampled_from(["_copy_to_host", "_copy_to_device"]), after=st.integers(0, 12))
    def fault(self, case: Case, name: str, after: int) -> None:
        """A copy fails in forward or backward; the step is lost."""
        original, count = getattr(ops, name), itertools.count()

        def fails(*args: Any, **kwargs: Any) -> Any:
            if next(count) == after:
                raise KeyError("stopped")
            return original(*args, **kwargs)

        with mock.patch.object(ops, name, fails), suppress(KeyError, BudgetError):
            gradients(self.model, self.loss(case))
        self.model.zero_grad()

    @rule(budget=st.sampled_from([LEAST, 80_000, 100_000, MOST]))
    def another_budget(self, budget: int) -> None:
        """From the next step on."""
        graphoffload.set_budget(budget)

    @rule(short=st.booleans())
    def memory(self, short: bool) -> None:
        """Where it is short, inputs go to the host in calls that no plan knows."""
        self.stack.enter_context(mock.patch.object(dispatch, "_ROOM_OF_INPUTS", 10**9 if short else 2))

    @invariant()
    def no_copy_ran_on_free_memory(self) -> None:
        """And no more is in flight than a few microbatches."""
        assert self.lazy.complaints == []
        if len(self.waiting) > 3:
            self.waiting.pop(0)

    def teardown(self) -> None:
        """Nothing is held."""
        self.waiting.clear()
        for _ in range(2):
            assert_equal(gradients(self.model, self.loss((0, 0))), self.expected[0, 0])
        self.model.zero_grad()
        gc.collect()
        ENTRIES.sweep()
        assert host_memory().in_use_bytes == 0
        self.stack.close()


def test_any_sequence() -> None:
    """Never a wrong gradient, never a copy on free memory, and at the end nothing is held."""
    run_state_machine_as_test(Loop, settings=settings(max_examples=5, stateful_step_count=25, deadline=None))


@pytest.fixture
def lazy() -> Iterator[LazyStreams]:
    with lazy_steps() as lazy:
        graphoffload.reset_stats()
        yield lazy


def planned() -> tuple[Model, list[Tensor | None]]:
    """A model whose step is planned, with copies in it."""
    model, expected = trained(80_000)
    model.order = ORDERS[0]
    for _ in range(4):
        assert_equal(step(model, words((0, 0))), expected[0, 0])
    plan = plan_now()
    assert plan is not None
    assert graphoffload.stats()["deferred"] > 0
    assert graphoffload.stats()["prefetch_hits"] > 0
    return model, expected[0, 0]


def settles_as_planned(model: Model) -> None:
    """After each event of forward as many copies are settled as the schedule says, and their memory is free."""
    original = StepRun.happened
    wanted = [0]

    def checked(run: StepRun, call: Any, event: Any) -> None:
        original(run, call, event)
        assert call.schedule is not None
        wanted.append(max(wanted[-1], call.schedule.settle.get(event, 0)))
        covered = run.copies[: wanted[-1]]
        assert len(covered) == wanted[-1], event
        assert all(entry.source is None or entry.state is COPYING for entry in covered), "its release has not come"
        assert not any(entry.source is None for entry in run.copies[wanted[-1] :]), event

    with mock.patch.object(StepRun, "happened", checked):
        step(model, words((0, 0)))
    assert wanted[-1] > 0


def test_copies_are_settled_where_the_schedule_says(lazy: LazyStreams) -> None:
    model, _ = planned()
    settles_as_planned(model)


def later(original: Any) -> Any:
    """Each event settles what the one before it should have."""
    last: list[Any] = []

    def happened(run: StepRun, call: Any, event: Any) -> None:
        last.append((call, event))
        if len(last) > 1:
            original(run, *last[-2])

    return happened


@pytest.mark.parametrize(
    "broken", [lambda original: lambda *_: None, later, lambda original: lambda run, *_: run.settle(len(run.copies))]
)
def test_a_schedule_that_is_not_followed_shows(lazy: LazyStreams, broken: Callable[[Any], Any]) -> None:
    """Never settled, too late, or at once."""
    model, expected = planned()
    with mock.patch.object(StepRun, "happened", broken(StepRun.happened)), pytest.raises(AssertionError):
        settles_as_planned(model)
    model.zero_grad()
    gc.collect()
    ENTRIES.sweep()
    assert_equal(step(model, words((0, 0))), expected)


def test_a_source_that_goes_before_its_copy_shows(lazy: LazyStreams) -> None:
    model, expected = planned()
    original = OffloadedTensor.settle

    def careless(entry: OffloadedTensor, *, waited: bool = False) -> Any:
        return original(entry, waited=True)

    with mock.patch.object(OffloadedTensor, "settle", careless):
        found = step(model, words((0, 0)))
        lazy.finish()
    assert lazy.complaints or not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True) if a is not None)
    lazy.complaints.clear()


def test_another_tensor_that_came_early_shows(lazy: LazyStreams) -> None:
    """The copies of two tensors of the same size are swapped."""
    model, expected = planned()
    original, swapped = reload_early, []

    def wrong(entry: OffloadedTensor, copy: Any, ahead: list[OffloadedTensor]) -> bool:
        assert isinstance(entry.call, one_call.StepCall)
        others = [e for call in entry.call.run.calls for e in call.entries.values() if e and e.state is entry.state is ON_HOST]
        for other in others:
            if other is not entry and other.layout.nbytes == entry.layout.nbytes and not swapped:
                entry.host, other.host = other.host, entry.host
                swapped.append(entry.name)
        return original(entry, copy, ahead)

    with mock.patch.object(calls, "reload_early", wrong):
        found = step(model, words((0, 0)))
    assert swapped
    with pytest.raises(AssertionError, match="differs"):
        assert_equal(found, expected)


def test_an_early_copy_that_is_dropped_without_a_wait_shows(lazy: LazyStreams) -> None:
    """Its memory is another's when the copy comes."""
    model, _ = planned()

    def careless(run: StepRun, entry: OffloadedTensor) -> None:
        entry.host.read = None  # type: ignore[union-attr]
        entry.drop_prefetched()
        if entry in run.ahead:
            run.ahead.remove(entry)

    with mock.patch.object(StepRun, "drop", careless), torch._functorch.config.patch("donated_buffer", False):
        loss = loss_of(model, words((0, 0)))
        torch.autograd.grad(loss, list(model.layers[2].parameters()), retain_graph=True)
        run = STEPS.runs[CPU]
        assert run.ahead
        run.finish()
        lazy.finish()
    assert any(complaint.startswith("h2d") for complaint in lazy.complaints)
    lazy.complaints.clear()
    del loss


def test_reloads_on_the_list_are_those_of_the_schedule(lazy: LazyStreams) -> None:
    """What starts early is what the schedule names, each once."""
    model, expected = planned()
    plan = plan_now()
    assert plan is not None
    names = {(at, transfer.id) for at, (compiled_as, _, _) in enumerate(plan.calls) for transfer in compiled_as.plan.transfers}
    started = []
    original = reload_early

    def watched(entry: OffloadedTensor, *rest: Any) -> bool:
        begun = original(entry, *rest)
        if begun:
            started.append((entry.call.index, entry.id))  # type: ignore[union-attr]
        return begun

    with mock.patch.object(calls, "reload_early", watched):
        assert_equal(step(model, words((0, 0))), expected)
    wanted = {item for _, schedule, _ in plan.calls for items in schedule.prefetch.values() for item in items}
    assert len(started) == len(set(started)) > 0
    assert set(started) <= wanted <= names
