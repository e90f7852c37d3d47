"""The ranks of a step by themselves, on a store of this process: who solves, who takes what, and what a deadline does."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("this torch is built without torch.distributed", allow_module_level=True)

from torch.distributed import HashStore, PrefixStore

from graphoffload.compiler import ranks as of_ranks
from graphoffload.compiler.ranks import Peers, StoreFailed, ranks_text
from graphoffload.compiler.rounds import GRACE_RUNS, Alone, Decided, Opened, Rounds, Solve
from graphoffload.errors import ConfigError, PerRankPlanWarning


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def group(world: int, clock: Clock | None = None, store: Any = None) -> list[Peers]:
    """Ranks that share a store."""
    store = PrefixStore("graphoffload", HashStore()) if store is None else store
    return [Peers(store, rank, world, deadline_s=60.0, clock=clock or Clock()) for rank in range(world)]


def facts(rank: int, goal: str = "auto", **options: str) -> dict[str, Any]:
    return {"facts": rank, "goal": goal, "options": {"device_budget": "auto", **options}}


def started(world: int, steps: str = "", clock: Clock | None = None) -> list[Rounds]:
    """Each rank's rounds; `steps`: a letter for the step of each rank, all alike without."""
    return [Rounds(peers, peers.named(steps[peers.rank] if steps else "s")) for peers in group(world, clock)]


def test_the_lowest_rank_solves_and_all_take_it() -> None:
    """Nobody has news before all have told; then one of them solves, and at the next look all of them have it."""
    rounds = started(3)
    for rank in (2, 0):
        rounds[rank].tell(facts(rank), "")
    assert [rounds[0].news(), rounds[2].news()] == [None, None]
    rounds[1].tell(facts(1), "")
    assert [rounds[2].news(), rounds[1].news()] == [None, None]
    solve = rounds[0].news()
    assert isinstance(solve, Solve)
    assert solve.missing == ()
    assert {rank: told["facts"] for rank, told in solve.told.items()} == {0: 0, 1: 1, 2: 2}
    assert rounds[1].news() is None
    rounds[0].decide({"plan": 7})
    assert [each.news() for each in rounds] == [Decided({"plan": 7})] * 3


def test_ranks_with_other_steps_plan_apart() -> None:
    """Stages of a pipeline: the lowest of each step solves for its own, once every rank has said what it runs."""
    rounds = started(4, "abba")
    for rank in (0, 1, 2):
        rounds[rank].tell(facts(rank), "")
    assert [each.news() for each in rounds[:3]] == [None] * 3
    rounds[3].tell(facts(3), "")
    for _ in range(GRACE_RUNS - 1):
        assert [each.news() for each in rounds] == [None] * 4, "they may still come to this step"
    assert rounds[3].news() is None
    first, second = rounds[0].news(), rounds[1].news()
    assert isinstance(first, Solve)
    assert isinstance(second, Solve)
    assert (sorted(first.told), sorted(second.told)) == ([0, 3], [1, 2])
    assert [rounds[2].news(), rounds[3].news()] == [None, None]
    rounds[1].decide("of b")
    assert rounds[2].news() == Decided("of b")
    assert rounds[3].news() is None


def test_a_rank_that_plans_no_step_is_not_waited_for() -> None:
    rounds = started(2)
    rounds[0].tell(facts(0), "")
    assert rounds[0].news() is None
    rounds[1].leave()
    found = [rounds[0].news() for _ in range(GRACE_RUNS)][-1]
    assert isinstance(found, Solve)
    assert list(found.told) == [0]


def test_one_that_compiled_again_alone_is_said() -> None:
    """Its steps have another number; nobody else's rank could tell."""
    one, other = started(2)
    again = Rounds(other.peers, other.peers.named("s"))
    one.tell(facts(0), "")
    again.tell(facts(1), "")
    assert [one.news() for _ in range(GRACE_RUNS)] == [None] * GRACE_RUNS
    with pytest.warns(PerRankPlanWarning, match=r"rank 0 of 2 plans a step without rank 1.*torch._dynamo.reset"):
        assert isinstance(one.news(), Solve)


def decided(rounds: list[Rounds], value: Any) -> None:
    for each in rounds:
        found = each.news()
        if isinstance(found, Solve):
            each.decide(value)
    assert [each.news() for each in rounds] == [Decided(value)] * len(rounds)


def test_a_reason_of_one_rank_is_a_round_of_all() -> None:
    """One question a run while nothing happens; then all tell their facts of now, and the plan is of the same round."""
    rounds = started(2)
    for rank, each in enumerate(rounds):
        each.tell(facts(rank), "")
    decided(rounds, "first")
    assert rounds[0].asked() is None
    rounds[1].tell(facts(11), "more memory outside")
    assert rounds[1].news() is None
    why = rounds[0].asked()
    assert why is not None
    assert "rank 1" in why
    assert "more memory outside" in why
    rounds[0].tell(facts(10), why)
    found = rounds[0].news()
    assert isinstance(found, Solve)
    assert {rank: told["facts"] for rank, told in found.told.items()} == {0: 10, 1: 11}
    rounds[0].decide("second")
    assert [each.news() for each in rounds] == [Decided("second")] * 2
    assert rounds[0].asked() is None


def test_both_have_a_reason_at_once() -> None:
    """It is one round."""
    rounds = started(2)
    for rank, each in enumerate(rounds):
        each.tell(facts(rank), "")
    decided(rounds, "first")
    for rank, each in enumerate(rounds):
        each.tell(facts(rank), "mine")
    assert [each.round for each in rounds] == [1, 1]
    decided(rounds, "second")


def test_another_goal_on_one_rank_waits_for_the_others() -> None:
    """set_budget() in a program whose ranks are a run apart: the round with one goal decides, the one before does not."""
    rounds = started(2)
    for rank, each in enumerate(rounds):
        each.tell(facts(rank), "")
    decided(rounds, "first")
    rounds[0].tell(facts(0, goal="40GiB"), "another goal was set")
    rounds[1].tell(facts(1), "rank 0 asked")
    assert [each.news() for each in rounds] == [None, None]
    rounds[1].tell(facts(1, goal="40GiB"), "another goal was set")
    assert isinstance(rounds[0].news(), Opened)
    rounds[0].tell(facts(0, goal="40GiB"), "")
    decided(rounds, "second")
    assert [each.round for each in rounds] == [2, 2]


def test_a_rank_that_comes_late_takes_what_was_decided() -> None:
    """Its deadline is nobody's: the others have planned without it, and said so."""
    clock = Clock()
    rounds = started(3, clock=clock)
    for rank in (0, 1):
        rounds[rank].tell(facts(rank), "")
    clock.now_s = 61.0
    assert rounds[0].news() is None, "and a number of runs"
    for _ in range(of_ranks.DEADLINE_RUNS - 1):
        assert rounds[0].news() is None
    assert rounds[1].news() is None
    found = rounds[0].news()
    assert isinstance(found, Solve)
    assert found.missing == (2,)
    assert sorted(found.told) == [0, 1]
    rounds[0].decide("without 2")
    assert rounds[1].news() == Decided("without 2")
    rounds[2].tell(facts(2), "")
    assert rounds[2].news() == Decided("without 2")
    rounds[2].tell(facts(2), "it does not hold")
    for rank in (0, 1):
        assert rounds[rank].asked() is not None
        rounds[rank].tell(facts(rank), "asked")
    found = rounds[0].news()
    assert isinstance(found, Solve)
    assert sorted(found.told) == [0, 1, 2], "who was missing is asked again once it tells something"


def test_who_should_solve_is_gone() -> None:
    """Each of the others plans alone after twice the deadline, and takes part in the next round."""
    clock = Clock()
    rounds = started(2, clock=clock)
    for rank, each in enumerate(rounds):
        each.tell(facts(rank), "")
    clock.now_s = 61.0
    for _ in range(2 * of_ranks.DEADLINE_RUNS):
        assert rounds[1].news() is None
    clock.now_s = 121.0
    assert rounds[1].news() == Alone((0,))
    assert rounds[1].asked() is None
    assert isinstance(rounds[0].news(), Solve)
    rounds[0].decide("late")
    assert rounds[1].asked() is not None


def test_one_that_was_missing_is_not_waited_for_again() -> None:
    clock = Clock()
    rounds = started(2, clock=clock)[0]
    rounds.tell(facts(0), "")
    clock.now_s = 61.0
    found = [rounds.news() for _ in range(of_ranks.DEADLINE_RUNS + 1)][-1]
    assert isinstance(found, Solve)
    rounds.decide("one")
    rounds.tell(facts(0), "again")
    assert isinstance(rounds.news(), Solve)


def test_different_options_are_an_error_on_both_ranks() -> None:
    """Both ranks, both values, and what to do."""
    rounds = started(3)
    for rank, each in enumerate(rounds):
        each.tell(facts(rank, device_budget="60GiB" if rank == 2 else "40GiB"), "")
    assert rounds[1].news() is None, "it is like the lowest, and asks no other"
    for each in (rounds[0], rounds[2]):
        with pytest.raises(ConfigError) as info:
            each.news()
        for part in ("ranks 0 and 2", "device_budget: 40GiB and 60GiB", "Give"):
            assert part in str(info.value)


def test_only_one_rank_reads_what_all_say() -> None:
    """With many ranks: the store is asked about as many things as there are ranks, not as many as there are pairs."""
    count = 50
    store = Broken(10**9)
    rounds = [Rounds(peers, peers.named("s")) for peers in group(count, store=store)]
    for rank, each in enumerate(rounds):
        each.tell(facts(rank), "")
    before = store.left
    for each in reversed(rounds):
        each.news()
    assert before - store.left < 12 * count


def test_one_that_comes_late_with_other_options() -> None:
    """What was decided is not for it."""
    one, other = started(2)
    other.peers.list("another step")
    one.tell(facts(0), "")
    found = [one.news() for _ in range(GRACE_RUNS + 1)][-1]
    assert isinstance(found, Solve)
    one.decide("alone")
    other.tell(facts(1, device_budget="1GiB"), "")
    with pytest.raises(ConfigError, match="device_budget: auto and 1GiB"):
        other.news()


def test_different_versions_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the ranks run."""
    rounds = started(2, "ab")
    rounds[0].tell(facts(0), "")
    monkeypatch.setattr(of_ranks, "versions", lambda: {"torch": "2.99", "graphoffload": "source 1"})
    rounds[1].tell(facts(1), "")
    with pytest.raises(ConfigError, match=r"torch: .* and 2.99"):
        rounds[1].news()


class Broken:
    """A store whose server is gone after so many questions."""

    def __init__(self, after: int) -> None:
        self.store, self.left = HashStore(), after

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("Connection reset by peer\nframe #0")

    def set(self, *args: Any) -> None:
        self._count()
        self.store.set(*args)

    def get(self, key: str) -> bytes:
        self._count()
        return self.store.get(key)  # type: ignore[no-any-return]

    def check(self, keys: list[str]) -> bool:
        self._count()
        return self.store.check(keys)

    def add(self, *args: Any) -> int:
        self._count()
        return self.store.add(*args)


@pytest.mark.parametrize("after", range(7))
def test_a_store_that_is_gone(after: int) -> None:
    """One kind of error whatever was asked, at once from then on, and a warning that says why, once."""
    peers = Peers(Broken(after), 0, 2)
    rounds = Rounds(peers, "s.1")
    with pytest.raises(StoreFailed):  # noqa: PT012
        rounds.tell(facts(0), "")
        for _ in range(3):
            rounds.news()
    assert peers.broken == "RuntimeError: Connection reset by peer"
    with pytest.raises(StoreFailed):
        rounds.news()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        peers.warn_alone([], "plans alone")
        peers.warn_alone([], "plans alone")
    assert [item.category for item in caught] == [PerRankPlanWarning]
    for part in ("rank 0 of 2 plans alone", "the store of the process group does not answer", "reset by peer", "LOCAL_WORLD"):
        assert part in str(caught[0].message)


def test_a_value_that_is_no_json() -> None:
    """Somebody else writes there."""
    store = HashStore()
    store.set("x", "no json")
    with pytest.raises(StoreFailed):
        Peers(store, 0, 2).read("x")
    assert Peers(None, 0, 2).broken


def test_one_of_many_threads_solves() -> None:
    """Ranks that look at the same moment, in any order."""
    rounds = started(8)
    solved: list[int] = []
    taken: list[Any] = []

    def run(each: Rounds) -> None:
        each.tell(facts(each.peers.rank), "")
        while True:
            found = each.news()
            if isinstance(found, Solve):
                solved.append(each.peers.rank)
                each.decide({"by": each.peers.rank, "of": sorted(found.told)})
            elif isinstance(found, Decided):
                taken.append(found.value)
                return

    threads = [threading.Thread(target=run, args=(each,)) for each in rounds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert solved == [0]
    assert taken == [{"by": 0, "of": list(range(8))}] * 8


def test_names_of_steps() -> None:
    """The second model of one shape is another step, on every rank."""
    one, other = group(2)
    assert [one.named("s"), one.named("s"), one.named("t")] == [other.named("s"), other.named("s"), other.named("t")]
    assert len({one.named("s"), one.named("s")}) == 2


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([2, 1], "ranks 1 and 2"),
        ([0, 1, 2], "ranks 0, 1 and 2"),
        (range(20), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"),
    ],
)
def test_ranks_in_messages(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text
