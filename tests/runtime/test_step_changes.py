"""What changes while a step is planned: goals, sequences of calls, the state that graphs are compiled in; and what goes with a
model."""

from __future__ import annotations

import copy
import gc
import random
import threading
import warnings
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from lazy import LazyStreams, afresh, clean_slate, forget_steps, once
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphoffload
from graphoffload.compiler import dispatch, step_runs
from graphoffload.compiler.dispatch import GRAPHS
from graphoffload.errors import BudgetError, ConfigError, PlanError, StepNotPlannedWarning
from graphoffload.runtime.step.calls import STEPS
from graphoffload.testing.attention import HIDDEN, Block
from graphoffload.torch_internals import processes
from graphoffload.torch_internals.dynamo import ShapeGuardError
from tests.runtime.stepping import (
    COUNT,
    OPTIONS,
    PLENTY,
    Model,
    Whole,
    Wide,
    assert_equal,
    batch,
    budget_at,
    compiled,
    fresh,
    gradients,
    kept,
    lazy,
    loss_of,
    plan_now,
    step,
)

__all__ = ["afresh", "clean_slate", "lazy", "once"]

CPU = torch.device("cpu")


def offloads(model: nn.Module) -> int:
    """Of one step."""
    before = graphoffload.stats()["offloads"]
    step(model, batch())
    return graphoffload.stats()["offloads"] - before


def train(model: nn.Module, expected: list[Tensor | None]) -> None:
    """Four steps."""
    for _ in range(4):
        assert_equal(step(model, batch()), expected)


def peak() -> int:
    plan = plan_now()
    assert plan is not None
    return plan.solution.timeline.peak_bytes


def test_goals_at_any_time(lazy: LazyStreams) -> None:
    """Each holds from the next step on; a plan that was known costs no compile."""
    model = fresh()
    (expected,) = kept(model, [batch()])
    compiled(model, PLENTY)
    for _ in range(3):
        assert_equal(step(model, batch()), expected)
    for share in (0.1, 0.6):
        graphoffload.set_budget(budget_at(share))
        assert_equal(step(model, batch()), expected)
        assert peak() <= budget_at(share)
    with mock.patch.object(dispatch, "compile_by", side_effect=AssertionError("compiled")):
        for share in (0.1, 0.6, 0.1):
            graphoffload.set_budget(budget_at(share))
            assert_equal(step(model, batch()), expected)
            assert peak() <= budget_at(share)
    graphoffload.set_slowdown(0.02)
    assert_equal(step(model, batch()), expected)
    assert offloads(model) > 0
    graphoffload.set_budget("auto")
    for _ in range(3):
        assert_equal(step(model, batch()), expected)
    assert offloads(model) == 0


def test_a_goal_in_the_middle_of_a_step_and_from_another_thread(lazy: LazyStreams, capfd: pytest.CaptureFixture[str]) -> None:
    """The step that runs ends as it was planned."""
    model = fresh()
    (expected,) = kept(model, [batch()])
    compiled(model, PLENTY)
    for _ in range(3):
        step(model, batch())
    capfd.readouterr()
    loss = loss_of(model, batch())
    thread = threading.Thread(target=graphoffload.set_budget, args=(budget_at(0.1),))
    thread.start()
    thread.join()
    assert "from the next step on, since one is running" in capfd.readouterr().err
    assert_equal(gradients(model, loss), expected)
    assert offloads(model) > 0
    assert peak() <= budget_at(0.1)
    assert_equal(step(model, batch()), expected)


@pytest.mark.parametrize("when", [1, 2, 4])
def test_a_goal_for_a_model_that_is_one_graph(lazy: LazyStreams, when: int) -> None:
    """Also where it was set after the first step, before the second began."""
    torch.manual_seed(0)
    model = Whole()
    model.compile(backend=graphoffload.OffloadBackend(**OPTIONS, device_budget=PLENTY), dynamic=False)
    x = torch.ones(64, HIDDEN)

    def offloaded() -> int:
        before = graphoffload.stats()["offloads"]
        model(x).square().sum().backward()
        return graphoffload.stats()["offloads"] - before

    assert [offloaded() for _ in range(when)] == [0] * when
    (plan,) = graphoffload.last_plans()[-1:]
    graphoffload.set_budget(plan.prediction.keep_peak_bytes * 4 // 5)
    assert offloaded() > 0
    graphoffload.set_budget(PLENTY)
    assert offloaded() == 0


def test_bad_goals(lazy: LazyStreams) -> None:
    """Nothing is changed by them."""
    torch._dynamo.reset()
    gc.collect()
    with pytest.raises(ConfigError, match="nothing can be planned for"):
        graphoffload.set_budget("1GiB")
    model = compiled(fresh(), PLENTY)
    step(model, batch())
    for bad in ("much", -1, 3):
        with pytest.raises(ConfigError):
            graphoffload.set_budget(bad)
    with pytest.raises(ConfigError):
        graphoffload.set_slowdown(-0.5)
    assert step_runs.OVERRIDE.version == 0


def test_a_budget_that_no_plan_meets(lazy: LazyStreams) -> None:
    """The error names the least one, which is met; before and after it the model trains."""
    model = fresh(Block(), Block())  # the search for the least budget takes seconds a block
    (expected,) = kept(model, [batch()])
    compiled(model, "1B")
    for _ in range(2):
        assert_equal(step(model, batch()), expected)
    with pytest.raises(BudgetError, match="no plan of the training step was found that meets it") as info:
        step(model, batch())
    least = info.value.least_bytes
    assert least is not None
    assert f"({least} bytes)" in str(info.value)
    with pytest.warns(StepNotPlannedWarning, match=rf"\({least} bytes\).*That error was caught. The step runs on"):
        assert_equal(step(model, batch()), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StepNotPlannedWarning)
        assert_equal(step(model, batch()), expected)
    graphoffload.set_budget(least)
    for _ in range(2):
        assert_equal(step(model, batch()), expected)
    assert peak() <= least
    graphoffload.set_budget(least // 2)
    with pytest.raises(BudgetError):
        step(model, batch())
    graphoffload.set_budget(2 * least)
    assert_equal(step(model, batch()), expected)
    assert peak() <= 2 * least


class Mixed(Model):
    """The first block in full precision, the others under autocast."""

    def forward(self, words: Tensor) -> Tensor:
        x = self.layers[0](self.embedding(words))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in list(self.layers)[1:]:
                x = layer(x)
        y: Tensor = self.head(x.float())
        return y


@pytest.mark.usefixtures("afresh")
def test_variants_are_compiled_in_the_state_of_their_graphs(lazy: LazyStreams) -> None:
    """A step is planned where its first graph is called, which runs without autocast."""
    torch.manual_seed(0)
    model = Mixed(*(Block() for _ in range(COUNT)))
    (expected,) = kept(model, [batch()])
    compiled(model, budget_at(0.1))
    for _ in range(5):
        assert_equal(step(model, batch()), expected)
    assert plan_now() is not None
    assert graphoffload.stats()["deferred"] > 0


@pytest.mark.usefixtures("afresh")
def test_random_numbers_are_those_of_a_run_without_a_plan(lazy: LazyStreams) -> None:
    """Dropout, in every step; a compile that draws gives back what it drew."""
    torch.manual_seed(0)
    model = Model(*(Block(dropout=0.3) for _ in range(COUNT)))
    twin = compiled(copy.deepcopy(model), "auto", policy="keep")
    compiled(model, budget_at(0.4))
    original = dispatch.compile_by

    def draws(*args: Any) -> Any:
        torch.rand(3)
        random.random()
        return original(*args)

    torch.manual_seed(1)
    expected = [step(twin, batch(seed)) for seed in range(6)]
    torch.manual_seed(1)
    with mock.patch.object(dispatch, "compile_by", draws):
        for seed in range(6):
            assert_equal(step(model, batch(seed)), expected[seed])
    assert plan_now() is not None
    assert graphoffload.stats()["deferred"] > 0


def test_two_sequences_in_turn(lazy: LazyStreams) -> None:
    """Tasks that share their first blocks: each is planned, and each step goes by its plan."""
    model = fresh()
    orders = ([0, 1, 2, 3], [0, 1])
    expected = []
    for order in orders:
        model.order = order
        expected += kept(model, [batch()])
    compiled(model, budget_at(0.3))
    for at in range(14):
        model.order = orders[at % 2]
        assert_equal(step(model, batch()), expected[at % 2])
        run = STEPS.runs[CPU]
        if at > 8:
            assert run.plan is not None
            assert run.plan.sequence == run.sequence
    assert plan_now(2) is not None
    assert plan_now(4) is not None


def test_sequences_that_do_not_come_again(lazy: LazyStreams) -> None:
    """Said once; and only so many are remembered."""
    model = compiled(Model(Block(), Wide(32), Wide(64)), PLENTY)
    draw = random.Random(0)
    with warnings.catch_warnings(record=True) as caught, mock.patch.object(step_runs, "_SEQUENCES", 20):
        warnings.simplefilter("always")
        for _ in range(80):
            model.order = [0, *(draw.randrange(3) for _ in range(6))]
            step(model, batch())
            assert len(step_runs._PLANNER.known) <= 20
    texts = [str(item.message) for item in caught if issubclass(item.category, StepNotPlannedWarning)]
    assert len(texts) == 1
    assert "of the last 64 steps called compiled graphs in another order" in texts[0]
    assert "pad batches to a few shapes, or compile the whole model" in texts[0]


def test_shapes_that_come_again_are_no_reason_to_warn(lazy: LazyStreams) -> None:
    """Ten of them in turn, in any order."""
    model = compiled(Model(Wide(32), Wide(32)), PLENTY)
    draw = random.Random(0)
    with warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=64):
        warnings.simplefilter("error", StepNotPlannedWarning)
        for _ in range(72):
            step(model, batch(0, 2, 8 * draw.randrange(1, 11)))


def test_checkpoints_around_blocks(lazy: LazyStreams) -> None:
    """Gradients are right, and that no step can be planned is said once."""

    class Checkpointed(Model):
        def forward(self, words: Tensor) -> Tensor:
            x = self.embedding(words)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            y: Tensor = self.head(x)
            return y

    torch.manual_seed(0)
    model = Checkpointed()
    (expected,) = kept(model, [batch()])
    compiled(model, budget_at(0.5))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(12):
            assert_equal(step(model, batch()), expected)
    texts = [str(item.message) for item in caught if issubclass(item.category, StepNotPlannedWarning)]
    assert len(texts) == 1
    assert "Checkpoint inside what is compiled, not around it; or compile the whole model." in texts[0]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_what_was_asked_of_a_group_that_is_gone_is_asked_again(lazy: LazyStreams) -> None:
    """A goal that waits for the other ranks of a group waits for those of the next one, and for nobody where there is none."""
    model = compiled(fresh(), budget_at(0.1))
    for _ in range(3):
        step(model, batch())
    groups: list[Any] = [(torch.distributed.HashStore(), 0, 2), (torch.distributed.HashStore(), 0, 2), None]
    wanted, before = budget_at(0.6), plan_now()
    with mock.patch.object(processes, "default_group", side_effect=lambda: groups[0]):
        step(model, batch())
        graphoffload.set_budget(wanted)
        for _ in range(2):
            step(model, batch())
            (known,) = step_runs._PLANNER.known.values()
            assert known.proposal is not None
            assert known.proposal.why == "another goal was set"
            groups.pop(0)
        step(model, batch())
    assert known.proposal is None
    assert known.asked is not None
    assert known.asked.budget_bytes == wanted
    assert known.plan is not None
    assert known.plan is not before


@pytest.mark.usefixtures("afresh")
@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("family_of", ShapeGuardError), ("compile_by", PlanError),
        *(pytest.param(*pair, marks=pytest.mark.long) for pair in (("family_of", PlanError), ("compile_by", ShapeGuardError))),
    ],
)  # fmt: skip
def test_a_graph_that_cannot_be_compiled_again(lazy: LazyStreams, where: str, kind: type[Exception]) -> None:
    """Said once; the model trains on as it was compiled first, and a new goal does not break it."""
    model = fresh()
    (expected,) = kept(model, [batch()])
    compiled(model, budget_at(0.3))
    step(model, batch())
    with (
        mock.patch.object(dispatch, where, side_effect=kind("it asks s0 > 2 of the sizes.")) as tried,
        pytest.warns(StepNotPlannedWarning, match="run as they were compiled first: it asks s0 > 2 of the sizes") as caught,
    ):
        train(model, expected)
    assert tried.call_count == len(caught) == 1
    assert ("Compile with dynamic=False" in str(caught[0].message)) == (kind is ShapeGuardError)
    assert plan_now() is None
    graphoffload.set_budget(budget_at(0.5))
    for _ in range(4):
        assert_equal(step(model, batch()), expected)


class Inside(nn.Module):
    """A checkpoint inside of what is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return y


def test_checkpoints_inside_blocks(lazy: LazyStreams) -> None:
    torch.manual_seed(0)
    model = Model(*(Inside() for _ in range(COUNT)))
    (expected,) = kept(model, [batch()])
    compiled(model, budget_at(0.3))
    for _ in range(5):
        assert_equal(step(model, batch()), expected)
    assert plan_now() is not None


def test_a_block_that_is_replaced(lazy: LazyStreams) -> None:
    """Before the step is planned, and after: the new sequence gets a plan of its own."""
    model = compiled(Model(Wide(32), Wide(48), Wide(32)), PLENTY)
    for steps, width in ((2, 64), (4, 80), (4, 96)):
        for _ in range(steps):
            step(model, batch())
        model.layers[1] = Wide(width)
        model.layers[1].compile(backend=graphoffload.OffloadBackend(**OPTIONS, device_budget=PLENTY), dynamic=False)
        (expected,) = kept(model, [batch()])
        compiled(model, PLENTY)
        assert_equal(step(model, batch()), expected)


def test_graphs_that_are_gone_are_not_planned_again(lazy: LazyStreams) -> None:
    """The first graph is still there, another one is not."""
    model = compiled(Model(Wide(32), Wide(48), Wide(32)), PLENTY)
    for _ in range(4):
        step(model, batch())
    run = STEPS.runs[CPU]
    gone = run.sequence[1]
    graphoffload.set_budget("1MiB")
    with mock.patch.object(step_runs, "GRAPHS", {number: graph for number, graph in GRAPHS.items() if number != gone}):
        step(model, batch())
    assert STEPS.runs[CPU].plan is None


def test_what_goes_with_a_model(lazy: LazyStreams) -> None:
    """Parameters at once, what is known of its graphs with the next step."""
    before = set(GRAPHS)  # what another test still holds
    for _ in range(2):
        model = compiled(fresh(), budget_at(0.3))
        for _ in range(4):
            step(model, batch())
        assert plan_now() is not None
        parameters = [weakref.ref(p) for p in model.parameters()]
        del model
        torch._dynamo.reset()
        gc.collect()
        assert not [ref for ref in parameters if ref() is not None]
        assert set(GRAPHS) <= before
        assert len(step_runs._PLANNER.known) <= 1


def test_threads(lazy: LazyStreams) -> None:
    """Each thread's steps are its own; what one compiled serves all."""
    models = [fresh() for _ in range(3)]
    (expected,) = kept(models[0], [batch()])
    for model in models:
        compiled(model, budget_at(0.2))
        for _ in range(4):
            assert_equal(step(model, batch()), expected)
    errors: list[BaseException] = []

    def run(model: Model) -> None:
        try:
            train(model, expected)
            assert plan_now() is not None
        except BaseException as error:
            errors.append(error)
        finally:
            model.zero_grad()
            forget_steps()

    threads = [threading.Thread(target=run, args=(model,)) for model in models[1:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert_equal(step(models[0], batch()), expected)


@pytest.mark.usefixtures("afresh")
def test_variants_are_compiled_under_dynamos_lock(lazy: LazyStreams) -> None:
    """Tracing writes to state of the process: two threads that trace at once break each other."""
    from torch._dynamo.convert_frame import compile_lock

    original, held = dispatch.compile_by, []

    def compiling(*args: Any) -> Any:
        free: list[bool] = []
        thread = threading.Thread(target=lambda: free.append(compile_lock.acquire(blocking=False)))
        thread.start()
        thread.join()
        held.append(not free[0])
        return original(*args)

    model = compiled(fresh(), budget_at(0.2))
    with mock.patch.object(dispatch, "compile_by", compiling):
        for _ in range(3):
            step(model, batch())
    assert held
    assert all(held)


def test_the_first_block_behind_a_frozen_embedding_is_no_model(lazy: LazyStreams) -> None:
    """As under LoRA: nothing before it is trained, so it looks like a model, and a plan of its own would fill the device."""
    before = set(GRAPHS)
    model = compiled(fresh(Block(), Block(), Block()), PLENTY)
    model.embedding.requires_grad_(False)
    model.layers[0](torch.rand(2, 32, HIDDEN)).sum().backward()
    (graph,) = (graph for number, graph in GRAPHS.items() if number not in before)
    assert graph.is_variant
    (expected,) = kept(model, [batch()])
    for _ in range(3):
        assert_equal(step(model, batch()), expected)
    plan = plan_now()
    assert plan is not None
    assert len(plan.calls) == 3
