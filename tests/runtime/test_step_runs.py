"""Training steps of several graphs that are planned together: never a wrong gradient, whatever a training loop does.

Every copy on the lazy streams comes as late as it may, sources are overwritten when they are released, and host buffers when
they are given back.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from lazy import LazyStreams, afresh, clean_slate, once
from torch import Tensor, nn

import graphoffload
from graphoffload.compiler import step_runs
from graphoffload.runtime import host_memory, ops
from graphoffload.runtime.handles import ENTRIES
from graphoffload.runtime.step.calls import STEPS
from graphoffload.testing.attention import HIDDEN, Block
from graphoffload.testing.faults import Fails
from tests.runtime import stepping
from tests.runtime.stepping import (
    COUNT,
    PLENTY,
    Model,
    Wide,
    assert_equal,
    batch,
    budget_at,
    compiled,
    counted,
    fresh,
    gradients,
    kept,
    lazy,
    loss_of,
    plan_now,
    planned,
    step,
)

__all__ = ["afresh", "clean_slate", "lazy", "once"]


@pytest.mark.parametrize(
    "share", [0.0, 0.3, 1.0, *(pytest.param(share, marks=pytest.mark.long) for share in (0.02, 0.1, 0.6, 0.9))]
)
def test_gradients_and_the_schedule(lazy: LazyStreams, share: float) -> None:
    """At any budget; from the third step on as planned: copies are left to later calls, some come back early, some stay."""
    model, expected = planned(share)
    plan = plan_now()
    assert plan is not None
    graphoffload.reset_stats()
    for _ in range(3):
        assert_equal(step(model, batch()), expected)
    solution = plan.solution
    assert solution.timeline.peak_bytes <= budget_at(share)
    goes = sum(len(call.offloads) for call in solution.calls)
    early = sum(
        (at, name) != item
        for at, call in enumerate(solution.calls)
        for (_, name), items in call.prefetch.items()
        for item in items
    )
    assert counted("offloads") == counted("releases") == counted("deferred") == 3 * goes
    assert counted("prefetches") == counted("prefetch_hits") == 3 * early
    assert counted("reloads") == counted("offloads") + counted("stays")
    if share < 0.9:
        assert goes > early > 0
    if share == 1.0:
        assert goes == 0


@pytest.mark.slow
@pytest.mark.parametrize("share", [None, *(pytest.param(share, marks=pytest.mark.long) for share in (0.1, 0.4))])
def test_gradients_under_inductor(lazy: LazyStreams, share: float | None) -> None:
    """Compiled to kernels: MLPs. With a share, attention, which has three times as many; the zoo has it in every run."""

    def make() -> Model:
        return fresh(*(() if share is not None else (Wide(64) for _ in range(COUNT))))

    budget = budget_at(share) if share is not None else keep_peak(make) * 6 // 10
    model = make()
    expected = kept(model, [batch(seed) for seed in range(5)], inner="inductor")
    compiled(model, budget, inner="inductor")
    for seed in range(5):
        assert_equal(step(model, batch(seed)), expected[seed])
    assert plan_now() is not None
    assert counted("deferred") > 0


@pytest.mark.parametrize("hardware", ["slow", "none"])
def test_variants(lazy: LazyStreams, hardware: str) -> None:
    """Where copies cannot hide, calls differ in what they compute again."""
    model, expected = planned(0.05, hardware=stepping.slow_link(1e7 if hardware == "slow" else 1e3))
    plan = plan_now()
    assert plan is not None
    assert any(plan.solution.chosen), plan.summary
    used = {call.variant for call in STEPS.runs[torch.device("cpu")].calls}
    assert used == set(plan.solution.chosen)
    assert_equal(step(model, batch()), expected)


@pytest.mark.parametrize(("budget", "options"), [(PLENTY, {}), ("auto", {"max_slowdown": 0.01})])
@pytest.mark.parametrize("policy", [{"*up*": "offload"}, {"*up*": "offload", "*norm*": "recompute"}])
def test_a_policy_that_asks_for_copies(
    lazy: LazyStreams, policy: dict[str, str], budget: Any, options: dict[str, Any]
) -> None:
    """Though everything fits, or the copies take longer than is allowed; a slowdown is one of everything kept."""
    model = fresh(*(Wide(64) for _ in range(COUNT)))
    (expected,) = kept(model, [batch()])
    compiled(model, budget, **options, policy=policy, hardware=stepping.slow_link(1e7))
    for _ in range(5):
        assert_equal(step(model, batch()), expected)
    plan = plan_now()
    assert plan is not None
    assert counted("offloads") > 0
    assert plan.solution.timeline.time_s > 1.01 * plan.solution.keep_timeline.time_s, plan.summary
    assert plan.solution.keep_timeline.host_bytes == 0


def test_memory_of_a_step_is_as_predicted(lazy: LazyStreams) -> None:
    """Bytes that the calls hold for backward, counted by the tensors that live, at every moment of forward."""
    model, _ = planned(0.3)
    plan = plan_now()
    assert plan is not None
    held: list[int] = []
    original = step_runs.StepRun.happened

    def counting(run: Any, call: Any, event: Any) -> None:
        original(run, call, event)
        held.append(sum(entry.layout.nbytes for entry in ENTRIES.living() if entry.source is not None))

    with mock.patch.object(step_runs.StepRun, "happened", counting):
        step(model, batch())
    assert 0 < max(held) <= plan.solution.timeline.peak_bytes


def test_dropped_forwards(lazy: LazyStreams) -> None:
    """Whatever part of it: the next step is as planned."""
    model, expected = planned()
    for order in (range(COUNT), [0], [0, 1, 2], range(COUNT), [1, 2]):
        model.order = order
        loss_of(model, batch(1))  # its graph goes at once
        model.order = range(COUNT)
        assert_equal(step(model, batch()), expected)
    assert STEPS.runs[torch.device("cpu")].off is False
    first, second = loss_of(model, batch()), loss_of(model, batch())
    del first
    assert_equal(gradients(model, second), expected)


@pytest.mark.parametrize("where", ["dropped", "forward", "loss", "backward"])
def test_nothing_of_a_forward_that_was_given_up_is_there_when_the_next_run_is_planned(lazy: LazyStreams, where: str) -> None:
    """What stayed on the device would count as memory outside, and budgets that can be met would be refused."""
    model, expected = planned(0.3)
    lazy.headroom = PLENTY
    plan_if_due, left, found = step_runs.plan_if_due, list[int](), list[int]()

    def counting(*args: Any) -> None:
        found.append(held_bytes())
        plan_if_due(*args)

    for _ in range(3):
        step(model, batch())
    if where == "dropped":
        loss_of(model, batch(1))
    else:
        hook = model.layers[-1].register_forward_pre_hook(stop)
        if where != "forward":
            hook.remove()
        with pytest.raises(KeyError):
            broken(model, where)
        hook.remove()
    model.zero_grad()
    left.append(held_bytes())
    with mock.patch.object(step_runs, "plan_if_due", counting):
        assert_equal(step(model, batch()), expected)
    assert left[0] > 0, "nothing stayed"
    assert found == [0]


def held_bytes() -> int:
    """Of device memory, by tensors that were offloaded or stayed."""
    return sum(entry.layout.nbytes for entry in ENTRIES.living() if entry.source is not None or entry.target is not None)


@pytest.mark.parametrize("where", ["forward", "copy", "loss", "backward", "reload"])
def test_an_exception_in_a_planned_step(lazy: LazyStreams, where: str) -> None:
    """The next step is as planned again, and nothing of the broken one is held."""
    model, expected = planned()
    for at in (1, 9, 20):
        with contextlib.ExitStack() as stack:
            if where in ("copy", "reload"):
                name = "_copy_to_host" if where == "copy" else "_copy_to_device"
                stack.enter_context(failing(name, at))
            elif where == "forward":
                hook = model.layers[at % COUNT].register_forward_pre_hook(stop)
                stack.callback(hook.remove)
            with pytest.raises(KeyError):
                broken(model, where)
        model.zero_grad()
        gc.collect()
        ENTRIES.sweep()
        assert not [entry for entry in ENTRIES.living() if entry.source is not None or entry.target is not None]
        assert host_memory().in_use_bytes == 0
        assert_equal(step(model, batch()), expected)
        run = STEPS.runs[torch.device("cpu")]
        assert run.plan is not None
        assert not run.off
        assert len(run.calls) == COUNT


def broken(model: Model, where: str) -> None:
    """A step that may stop in the loss, or before the backward of any block."""
    y = model(batch())
    if where == "loss":
        raise KeyError("in the loss")
    if where == "backward":
        y = Fails.apply(y)
    y.square().sum().backward()


def stop(*_: Any) -> None:
    raise KeyError("stopped")


def failing(name: str, at: int) -> Any:
    """The n-th copy fails."""
    original, calls = getattr(ops, name), itertools.count()

    def fails(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at:
            raise KeyError("stopped")
        return original(*args, **kwargs)

    return mock.patch.object(ops, name, fails)


def test_a_backward_that_stops_in_the_middle(lazy: LazyStreams) -> None:
    """Between two blocks; early copies that nobody asked for go."""
    model, expected = planned()
    for at in range(COUNT):
        hook = model.layers[at].register_full_backward_pre_hook(stop)
        with pytest.raises(KeyError):
            step(model, batch())
        hook.remove()
        assert_equal(step(model, batch()), expected)


@pytest.mark.usefixtures("afresh")
def test_retained_graphs(lazy: LazyStreams) -> None:
    """Second and third backwards of a planned step, also with a step in between."""
    with torch._functorch.config.patch("donated_buffer", False):
        model, expected = planned()
        loss = loss_of(model, batch())
        assert_equal(gradients(model, loss, retain_graph=True), expected)
        assert_equal(gradients(model, loss, retain_graph=True), expected)
        other = loss_of(model, batch())
        assert_equal(gradients(model, loss, retain_graph=True), expected)
        assert_equal(gradients(model, other), expected)
        assert_equal(gradients(model, loss), expected)
        del loss, other
        assert_equal(step(model, batch()), expected)


@pytest.mark.usefixtures("afresh")
def test_part_of_a_backward(lazy: LazyStreams) -> None:
    """Gradients of the last blocks alone, then of all."""
    with torch._functorch.config.patch("donated_buffer", False):
        model, expected = planned()
        last = list(model.layers[-1].parameters())
        for _ in range(2):
            loss = loss_of(model, batch())
            some = torch.autograd.grad(loss, last, retain_graph=True)
            assert_equal(some, [g for p, g in zip(model.parameters(), expected, strict=True) if any(p is q for q in last)])
            assert_equal(gradients(model, loss), expected)


def test_gradient_accumulation_and_microbatches(lazy: LazyStreams) -> None:
    """Forwards and backwards in turn, and two forwards before their backwards."""
    model, expected = planned()
    model.zero_grad()
    for _ in range(2):
        loss_of(model, batch()).backward()
    for found, one in zip(gradients(model), expected, strict=True):
        assert found is not None
        assert one is not None
        assert torch.equal(found, one + one)
    for order in ((0, 1), (1, 0)):
        losses = [loss_of(model, batch()) for _ in order]
        for which in order:
            assert_equal(gradients(model, losses[which]), expected)
    del losses
    assert_equal(step(model, batch()), expected)


def test_evaluation_between_steps(lazy: LazyStreams) -> None:
    """Without gradients, or with graphs that are dropped or held for a while, of larger batches as well."""
    model, expected = planned()
    held = []
    for rows in (2, 4, 2):
        with torch.no_grad():
            model(batch(3, rows))
        model.eval()
        model(batch(3, rows))
        held.append(model(batch(4, rows)))
        model.train()
        assert_equal(step(model, batch()), expected)
    held.clear()
    assert_equal(step(model, batch()), expected)
    assert not STEPS.runs[torch.device("cpu")].off


@pytest.mark.usefixtures("afresh")
@pytest.mark.parametrize("dynamic", [None, *(pytest.param(dynamic, marks=pytest.mark.long) for dynamic in (False, True))])
def test_batches_of_other_shapes(lazy: LazyStreams, dynamic: bool | None) -> None:
    """Each shape has a plan of its own, or with symbolic sizes one plan for all."""
    model = fresh()
    batches = [batch(0, rows, length) for rows, length in ((2, 32), (3, 32), (2, 24))]
    expected = kept(model, batches, dynamic=dynamic)
    compiled(model, budget_at(0.4), dynamic=dynamic)
    for which in (0, 0, 0, 1, 1, 1, 2, 0, 2, 1, 2, 2, 0, 1, 2):
        assert_equal(step(model, batches[which]), expected[which])
    assert counted("deferred") > 0
    assert sum(known.plan is not None for known in step_runs._PLANNER.known.values()) >= (2 if dynamic is False else 1)


def test_two_models_in_turn(lazy: LazyStreams) -> None:
    """Each with its plan; and one that runs inside the other's step."""
    first, expected = planned()
    torch.manual_seed(1)
    second = Model(*(Block() for _ in range(3)))
    (other,) = kept(second, [batch(1)])
    compiled(second, budget_at(0.3), max_inflight_bytes=2**20)
    for _ in range(5):
        assert_equal(step(first, batch()), expected)
        assert_equal(step(second, batch(1)), other)
    assert plan_now(COUNT) is not None
    assert plan_now(3) is not None
    for _ in range(4):  # as a GAN's
        one, two = loss_of(first, batch()), loss_of(second, batch(1))
        assert_equal(gradients(first, one), expected)
        assert_equal(gradients(second, two), other)


class Towers(Model):
    """A decoder reads at each layer what an encoder gave."""

    def __init__(self) -> None:
        super().__init__(Block(), Block(), Cross(), Cross())

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for layer in self.layers[:2]:
            x = layer(x)
        y = self.embedding(words.flip(1))
        for layer in self.layers[2:]:
            y = layer(y, x)
        z: Tensor = self.head(y)
        return z


class Cross(nn.Module):
    """A decoder's block."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.q, self.kv = Block(), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        k, v = self.kv(seen).chunk(2, -1)
        y = torch.nn.functional.scaled_dot_product_attention(self.q(x), k, v)
        z: Tensor = self.block(x + y)
        return z


def shared(*order: int) -> Model:
    """A block that is called several times."""
    model = Model(Block(), Block(), Block())
    model.order = order
    return model


def keep_peak(make: Callable[[], Model]) -> int:
    """The predicted peak of a step with everything kept."""
    model = compiled(make(), PLENTY)
    for _ in range(3):
        step(model, batch())
    model.zero_grad()
    plan = plan_now()
    assert plan is not None
    return plan.solution.keep_timeline.peak_bytes


@pytest.mark.parametrize(
    "model",
    [
        lambda: Model(Wide(32), Wide(96), Wide(32), Wide(96)),
        lambda: shared(0, 1, 1, 1, 2, 0),
        lambda: Model(nn.Sequential(Wide(64), nn.BatchNorm1d(32)), Wide(32), Wide(32)),
        Towers,
    ],
    ids=["two_sizes", "shared", "batchnorm", "encoder_decoder"],
)
def test_models(lazy: LazyStreams, model: Any) -> None:
    """One class in two sizes, blocks that are called several times, buffers that are written to, an encoder and a decoder."""
    torch.manual_seed(0)
    one = model()
    batches = [batch(seed) for seed in range(7)]
    twin = copy.deepcopy(one)
    expected = kept(one, batches)
    compiled(one, keep_peak(model) * 7 // 10)
    for words, gradient in zip(batches, expected, strict=True):
        assert_equal(step(one, words), gradient)
    compiled(twin, "auto", policy="keep")
    for words in batches:
        step(twin, words)
    for (name, buffer), other in zip(one.named_buffers(), twin.buffers(), strict=True):
        assert torch.equal(buffer, other), name
    assert plan_now() is not None
    assert counted("deferred") > 0
