"""Two processes whose steps are planned together (gloo on the CPU): equal plans, no hang, gradients as with everything kept.

Each case trains blocks that are compiled one by one. Ranks under FSDP2 wait for each other in every block; ranks without it
are as far apart as they happen to be. A rank's memory, speed and link are what a case says.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch is built without torch.distributed or gloo", allow_module_level=True)

from forked import server
from lazy import lazy_steps
from ranks import Place, in_a_group, spawned
from torch import nn
from torch.distributed.fsdp import fully_shard

import graphoffload
from graphoffload.compiler import device_limits, meeting, ranks, recipes, step_again, step_plan, step_planning
from graphoffload.compiler.dispatch import GRAPHS
from graphoffload.errors import ConfigError, GraphOffloadWarning, PerRankPlanWarning
from graphoffload.runtime import registry
from graphoffload.runtime.streams.copy_times import CopyTimes
from graphoffload.testing.attention import Block
from graphoffload.testing.lazy_streams import LazyStreams
from tests.plan.test_step_together import slowed
from tests.runtime.stepping import (
    Model,
    batch,
    compiled,
    fresh,
    loss_of,
    plan_now,
    slow_link,
)

PLACE = Place("cpu", 32, 64, 150.0)
SOON_S = 1.0
"""The deadline of a test in which some rank tells nothing."""
MIB = 2**20
BATCHES = 3
KEPT: dict[tuple[int, bool], dict[int, list[torch.Tensor]]] = {}
"""Gradients of a process with everything kept, by number of blocks and batch."""


def gradients_of(model: nn.Module, rank: int, seed: int) -> list[torch.Tensor]:
    """Of one step, with a batch of this rank's own."""
    model.zero_grad()
    loss_of(model, batch(10 * seed + rank)).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [(grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone() for grad in grads]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


class Training:
    """A model of blocks on one rank, its twin with everything kept, and what was seen."""

    def __init__(self, rank: int, *blocks: nn.Module, parallel: bool = True, **options: Any) -> None:
        self.rank, self.step, self.equal, self.planned, self.error = rank, 0, True, [False], ""
        plain = fresh(*blocks)
        self.twin = self.wrapped(compiled(copy.deepcopy(plain), "auto", policy="keep"), parallel)
        self.kept = KEPT.setdefault((len(plain.layers), parallel), {})
        self.model = self.wrapped(compiled(plain, options.pop("device_budget", "auto"), **options), parallel)

    def wrapped(self, model: Model, parallel: bool) -> nn.Module:
        """Under FSDP2, whose collectives wait for the other rank before and after each block."""
        if parallel:
            for layer in model.layers:
                fully_shard(layer)
            fully_shard(model)
        return model

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step += 1
            seed = self.step % BATCHES
            if seed not in self.kept:
                self.kept[seed] = gradients_of(self.twin, self.rank, seed)
            found = gradients_of(self.model, self.rank, seed)
            self.equal = self.equal and same(found, self.kept[seed])
            self.planned.append(plan_now() is not None)

    def until(self, done: Callable[[], bool], limit_s: float = 60.0) -> float:
        """Train until then; the seconds that it took."""
        begin_s = time.monotonic()
        while not done():
            assert time.monotonic() - begin_s < limit_s, "it never came"
            self.steps(1)
            time.sleep(0.02)
        return time.monotonic() - begin_s

    def seen(self) -> dict[str, Any]:
        plan = plan_now()
        shown: dict[str, Any] = {"equal": self.equal, "planned": self.planned.index(True) if any(self.planned) else None}
        if plan is not None:
            solution = plan.solution
            shown["schedule"] = [
                [list(c.offloads), sorted(map(repr, c.settle.items())), sorted(map(repr, c.prefetch.items()))]
                for c in solution.calls
            ]
            shown["ids"] = [[sorted(schedule.goes), variant] for _, schedule, variant in plan.calls]
            shown["chosen"], shown["actions"] = solution.chosen, solution.actions
            shown["peak"] = solution.timeline.peak_bytes
            used = {compiled.key for compiled, _, _ in plan.calls}
            shown["decisions"] = sorted(
                [found.graph, found.variant, [[d.name, d.action] for d in found.decisions]]
                for found in registry.last_plans()
                if found.key in used
            )
            graphs = {number: GRAPHS[number] for number in plan.sequence}
            shown["family"] = [recipe.identity for graph in graphs.values() for recipe in graph.family.recipes]
        return shown


def has_plan() -> bool:
    return plan_now() is not None


@contextlib.contextmanager
def one_rank(budget_bytes: int | None = None, slow: float = 1.0, link: float = 1.0) -> Iterator[None]:
    """A rank with this much memory, kernels that take this much longer, and this share of a link."""
    with contextlib.ExitStack() as stack:
        if budget_bytes is not None:
            budget = device_limits._device_budget
            stack.enter_context(
                mock.patch.object(
                    device_limits,
                    "_device_budget",
                    lambda config, *given: budget_bytes if config.device_budget == "auto" else budget(config, *given),
                )
            )
        if slow != 1.0:
            facts_of = step_planning.facts_of
            stack.enter_context(
                mock.patch.object(step_planning, "facts_of", lambda *given: slowed(facts_of(*given), slow))
            )
        if link != 1.0:
            resolve = step_plan.hardware_of
            stack.enter_context(
                mock.patch.object(step_plan, "hardware_of", lambda *given: resolve(*given).scaled(link=link))
            )
        yield


def case_equal(rank: int, budgets: list[int]) -> Iterator[Training]:
    """Rank 1 has less memory, is slower and has half the link."""
    with one_rank(budgets[rank], slow=(1.0, 1.5)[rank], link=(1.0, 0.5)[rank]):
        training = Training(rank)
        training.steps(7)
        yield training


def case_variants(rank: int, budgets: list[int]) -> Iterator[Training]:
    """Rank 1 finds other variants of the same graphs, as other measured times would have it."""
    shares = (recipes._SHARES, (("third", 0.15), ("two thirds", 0.45)))[rank]
    with one_rank(budgets[rank]), mock.patch.object(recipes, "_SHARES", shares):
        training = Training(rank, hardware=slow_link(1e7))
        training.steps(6)
        yield training


def case_delayed(rank: int, budgets: list[int]) -> Iterator[Training]:
    """Rank 1 takes a while before each step, and before what it tells; rank 0 waits for it in collectives alone."""
    tell = step_planning.tell

    def slowly(*given: Any) -> None:
        time.sleep(0.5)
        tell(*given)

    with one_rank(budgets[rank]), mock.patch.object(step_planning, "tell", slowly if rank else tell):
        training = Training(rank)
        for _ in range(7):
            time.sleep(0.1 * rank)
            training.steps(1)
        yield training


def case_again(rank: int, budgets: list[int]) -> Iterator[Training]:
    """Once a plan is there, rank 1 has more outside than it was made with; then both set another budget."""
    with one_rank(budgets[0]), mock.patch.object(step_again, "_SAME_BYTES", 0):
        training = Training(rank)
        training.steps(6)
        yield training
        outside = (budgets[0] - budgets[1]) if rank else 0
        plan = plan_now()
        with mock.patch.object(LazyStreams, "allocated_bytes", return_value=(outside, outside)):
            training.until(lambda: agreed(plan_now() is not plan))
            training.steps(3)
            yield training
        graphoffload.set_budget(budgets[2])
        plan = plan_now()
        training.until(lambda: agreed(plan_now() is not plan))
        training.steps(2)
        yield training


def case_copies(rank: int, budgets: list[int]) -> Iterator[Training]:
    """The copies of rank 1 take five times what the plan says, in each direction."""
    rates = {"d2h": (1e9, 2e8)[rank], "h2d": (1e9, 2e8)[rank]}
    with one_rank(budgets[0]), mock.patch.object(CopyTimes, "rates", return_value=rates):
        training = Training(rank, hardware=slow_link(1e9))
        training.until(lambda: agreed(has_plan()))
        plan = plan_now()
        training.until(lambda: agreed(plan_now() is not plan))
        training.steps(8)
        yield training
        plan = plan_now()
        training.steps(8)
        assert plan_now() is plan
        yield training


def agreed(done: bool) -> bool:
    """Whether it is so on both ranks: a test under FSDP2 makes as many steps on each."""
    found = torch.tensor([int(done)])
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return bool(found)


def case_absent(rank: int, budgets: list[int]) -> Iterator[Training]:
    """Rank 1 evaluates only."""
    with mock.patch.object(ranks, "DEADLINE_S", SOON_S), mock.patch.object(meeting, "MEET_S", SOON_S), one_rank(budgets[0]):
        training = Training(rank, parallel=False)
        if rank:
            with torch.no_grad():
                loss_of(training.model, batch())
        else:
            training.planned.append(training.until(has_plan) < 8 * SOON_S)
            training.steps(2)
        yield training
        dist.barrier()  # the store lives until both are done


def case_killed(rank: int, budgets: list[int]) -> Iterator[Training]:
    """Rank 0, which would have solved, is gone once it has told its facts; its store lives on."""
    with mock.patch.object(ranks, "DEADLINE_S", SOON_S), mock.patch.object(meeting, "MEET_S", SOON_S), one_rank(budgets[0]):
        training = Training(rank, parallel=False)
        if rank:
            training.until(has_plan)
            training.steps(2)
            yield training
            Path(os.environ["TEST_FOLDER"], "done").write_text("")
        else:
            training.steps(3)
            yield training
            deadline = time.monotonic() + 60.0
            while not Path(os.environ["TEST_FOLDER"], "done").exists() and time.monotonic() < deadline:
                time.sleep(0.05)


def case_no_store(rank: int, budgets: list[int]) -> Iterator[Training]:
    """The process that serves the store ends in the middle of training."""
    with one_rank(budgets[0]):
        training = Training(rank, parallel=False)
        training.steps(2)
        dist.barrier()
        if rank == 0:
            yield training
            os._exit(0)
        time.sleep(0.5)
        training.until(has_plan)
        training.steps(2)
        yield training


def case_stages(rank: int, budgets: list[int]) -> Iterator[Training]:
    """Each rank has another number of blocks, as a pipeline's stages do, and more memory."""
    with one_rank(budgets[0] + rank * MIB // 8):
        training = Training(rank, *(Block() for _ in range(3 + 2 * rank)), parallel=False)
        training.until(has_plan)
        yield training
        dist.barrier()  # the store lives until both are done


def case_options(rank: int, budgets: list[int]) -> Iterator[Training]:
    """Two budgets."""
    training = Training(rank, parallel=False, device_budget=budgets[rank])
    try:
        for _ in range(6):
            training.steps(1)
            dist.barrier()  # what keeps ranks in step, as collectives do
    except ConfigError as error:
        training.error = str(error)
    yield training
    dist.barrier()


CASES: dict[str, Callable[[int, list[int]], Iterator[Training]]] = {
    name.removeprefix("case_"): value for name, value in globals().items() if name.startswith("case_")
}


def run_case(rank: int, port: int, folder: str, place: Place, case: str, budgets: list[int]) -> None:
    """One rank of a case; what it saw goes to a file."""
    os.environ.update(GRAPHOFFLOAD_CACHE_DIR=f"{folder}/cache{rank}", TEST_FOLDER=folder)
    in_a_group(rank, port, place)
    seen: dict[str, Any] = {"parts": [], "error": ""}
    torch._dynamo.reset()
    registry.forget()
    with warnings.catch_warnings(record=True) as caught, lazy_steps():
        warnings.simplefilter("always")
        for training in CASES[case](rank, budgets):
            ours = [item for item in caught if issubclass(item.category, GraphOffloadWarning)]
            seen["warnings"] = [str(item.message) for item in ours if item.category is PerRankPlanWarning]
            seen["other"] = [str(item.message) for item in ours if item.category is not PerRankPlanWarning]
            seen["parts"].append(training.seen())
            seen["error"] = training.error
            Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    os._exit(0)  # a group whose other rank is gone cannot be destroyed


@pytest.fixture(scope="module")
def budgets() -> list[int]:
    """From roomy to tight, of what four blocks save."""
    torch._dynamo.reset()
    registry.forget()  # what tests before this one compiled
    kept = compiled(fresh(), "auto", policy="keep")
    loss_of(kept, batch()).backward()
    each = max(plan.prediction.keep_peak_bytes for plan in graphoffload.last_plans())
    torch._dynamo.reset()
    return [int(share * len(kept.layers) * each) for share in (0.5, 0.3, 0.4)]


Seen = list[dict[str, Any]]


def seen_in(case: str, folder: Path, budgets: list[int]) -> Seen:
    """What both ranks saw; their gradients were always those of keep-all, and nothing else was warned of."""
    server()
    found = spawned(run_case, folder, PLACE, case, budgets, method="forkserver")
    for seen in found:
        assert all(part["equal"] for part in seen["parts"]), (case, seen)
        assert seen["other"] == [], (case, seen)
    return found


@pytest.fixture
def run_both(tmp_path: Path, budgets: list[int]) -> Callable[[str], Seen]:
    """Both ranks of a case."""
    return lambda case: seen_in(case, tmp_path, budgets)


SAME = ("schedule", "ids", "chosen", "actions", "decisions", "family")


def assert_equal_plans(found: list[dict[str, Any]], part: int = 0) -> None:
    one, other = (seen["parts"][part] for seen in found)
    for name in SAME:
        assert one[name] == other[name], (name, one, other)


def test_plans_are_equal(run_both: Callable[[str], Seen], budgets: list[int]) -> None:
    """Where one rank has less memory, is slower and has half the link: as tight as the one with the least."""
    found = run_both("equal")
    assert_equal_plans(found)
    assert [seen["warnings"] for seen in found] == [[], []]
    (first,), (second,) = (seen["parts"] for seen in found)
    assert first["planned"] <= 6
    assert first["peak"] == second["peak"] <= budgets[1]
    assert any(action == "offload" for actions in first["actions"] for action in actions)


def test_variants_that_one_rank_finds(run_both: Callable[[str], Seen]) -> None:
    """The other one compiles by them as well."""
    found = run_both("variants")
    assert_equal_plans(found)
    assert [seen["warnings"] for seen in found] == [[], []]
    assert {name for part in found[1]["parts"] for name in part["family"]} == set(found[0]["parts"][0]["family"])
    assert any(found[0]["parts"][0]["chosen"])


def test_planned_again_on_all_ranks(run_both: Callable[[str], Seen], budgets: list[int]) -> None:
    """For a reason of one, and for a budget that the program sets on each."""
    found = run_both("again")
    for part in range(3):
        assert_equal_plans(found, part)
    peaks = [part["peak"] for part in found[0]["parts"]]
    assert peaks[1] < peaks[0] <= budgets[0]
    assert peaks[1] < peaks[2] <= budgets[2]
    assert [seen["warnings"] for seen in found] == [[], []]


def test_slow_copies_of_one_rank(run_both: Callable[[str], Seen]) -> None:
    """Both plan again for them, once."""
    found = run_both("copies")
    assert_equal_plans(found)
    assert found[0]["parts"][0]["schedule"] == found[0]["parts"][1]["schedule"]
    assert [seen["warnings"] for seen in found] == [[], []]


def test_stages_of_a_pipeline(run_both: Callable[[str], Seen]) -> None:
    """Each has a plan of its own at once, with no warning: what other ranks run is no concern of it."""
    found = run_both("stages")
    assert [len(seen["parts"][0]["chosen"]) for seen in found] == [3, 5]
    assert [seen["warnings"] for seen in found] == [[], []]


def test_different_options(run_both: Callable[[str], Seen], budgets: list[int]) -> None:
    """An error on both ranks, with both ranks and both values."""
    for seen in run_both("options"):
        for part in ("ranks 0 and 1", f"device_budget: {budgets[0]} and {budgets[1]}", "Give every rank the same"):
            assert part in seen["error"]


@pytest.mark.long
def test_a_rank_that_is_slow(run_both: Callable[[str], Seen]) -> None:
    """At each step, and in what it tells: the other one waits in collectives alone, and then has the same plan."""
    found = run_both("delayed")
    assert_equal_plans(found)
    assert [seen["warnings"] for seen in found] == [[], []]


@pytest.mark.parametrize(
    ("case", "rank", "parts"),
    [
        ("absent", 0, ("rank 0 of 2 plans its step without some ranks", "rank 1 of 2 told nothing in 1 s")),
        pytest.param("killed", 1, ("rank 1 of 2 plans its step alone", "rank 0 of 2 told nothing"), marks=pytest.mark.long),
        ("no_store", 1, ("rank 1 of 2 plans alone", "the store of the process group does not answer")),
    ],
)
def test_a_rank_that_is_not_there(
    run_both: Callable[[str], Seen], budgets: list[int], case: str, rank: int, parts: tuple[str, ...]
) -> None:
    """The other one goes on alone, in bounded time, and says so."""
    found = run_both(case)
    assert found[rank]["parts"][0]["planned"] is not None
    said = "\n".join(found[rank]["warnings"])
    for part in parts:
        assert part in said
    assert found[rank]["parts"][0]["peak"] <= budgets[0]
