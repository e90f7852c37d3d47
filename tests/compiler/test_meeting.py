"""What ranks tell each other once, at their first compile: threads that are ranks, on a store of this process."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("this torch is built without torch.distributed", allow_module_level=True)

from torch.distributed import HashStore, PrefixStore
from torch.fx import GraphModule, symbolic_trace

import graphoffload
from graphoffload.compiler import meeting, ranks
from graphoffload.compiler.ranks import Peers, StoreFailed
from graphoffload.errors import ConfigError, PerRankPlanWarning
from graphoffload.facts.limits import Limits
from graphoffload.options.config import OffloadConfig
from graphoffload.torch_internals import processes

GB = 10**9
LIMITS = Limits(
    device_budget_bytes=70 * GB, static_bytes=20 * GB, reserve_bytes=2 * GB, host_budget_bytes=64 * GB, host_auto=True
)
CONFIG = OffloadConfig(hardware="h200-sxm")


_TRACING = threading.Lock()


def graph(layers: int = 1) -> GraphModule:
    """One thread at a time: torch's mark that it is tracing is the process's, and two threads can leave it set for good."""
    with _TRACING:
        return symbolic_trace(torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(layers))))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class Threads(threading.local):
    """The rank that a thread is."""

    peers: Peers | None = None


HERE = Threads()


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads are ranks; no launcher says how many of them are on a host."""
    monkeypatch.setattr(ranks, "peers", lambda: HERE.peers)
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        monkeypatch.delenv(name, raising=False)


def met(work: list[Callable[[], Any]], world: int | None = None, store: Any = None) -> list[Any]:
    """What each rank returns or raises; ranks beyond those with work tell nothing."""
    store = HashStore() if store is None else store
    found: list[Any] = [None] * len(work)

    def run(rank: int) -> None:
        HERE.peers = Peers(store, rank, world or len(work))
        try:
            found[rank] = work[rank]()
        except Exception as error:
            found[rank] = error

    started = [threading.Thread(target=run, args=(rank,)) for rank in range(len(work))]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(60.0)
    return found


def meets(limits: Limits, config: OffloadConfig = CONFIG, layers: int = 1) -> Callable[[], Limits]:
    return lambda: meeting.meet(limits, config, graph(layers))


def test_the_least_room_of_all() -> None:
    """One has another process on its device, one has an EMA beside its model: both come off the third one's budget."""
    small = replace(LIMITS, device_budget_bytes=66 * GB)
    ema = replace(LIMITS, static_bytes=25 * GB)
    found = met([meets(LIMITS), meets(small), meets(ema)])
    rooms = [limits.device_budget_bytes - limits.static_bytes - limits.reserve_bytes for limits in found]
    assert rooms == [43 * GB] * 3
    assert found[2].device_budget_bytes == 70 * GB


def test_a_rank_that_did_not_come_to_measure_is_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was waited for when the link was measured, a moment ago. One that has told its limits meanwhile counts."""
    monkeypatch.setattr(meeting, "MEET_S", 60.0)

    def at_once() -> Limits:
        assert HERE.peers is not None
        HERE.peers.late |= {1, 2}
        HERE.peers.put("met/2", meeting._told(replace(LIMITS, device_budget_bytes=66 * GB), CONFIG, graph(), False))
        return meeting.meet(LIMITS, CONFIG, graph())

    begin_s = time.monotonic()
    with pytest.warns(PerRankPlanWarning, match="rank 1 of 3 told nothing"):
        (found,) = met([at_once], 3)
    assert time.monotonic() - begin_s < 10.0
    assert found.device_budget_bytes == 66 * GB


def test_later_compiles_take_off_as_much() -> None:
    """Of what is free then; nobody waits a second time."""

    def twice() -> list[Limits]:
        first = meeting.meet(LIMITS, CONFIG, graph())
        later = replace(LIMITS, device_budget_bytes=60 * GB, static_bytes=21 * GB)
        return [first, meeting.meet(later, CONFIG, graph(2)), meeting.least(later, CONFIG)]

    other = meets(replace(LIMITS, device_budget_bytes=66 * GB))
    (first, later, between), _ = met([twice, other])
    assert first.device_budget_bytes == 66 * GB
    assert later.device_budget_bytes == between.device_budget_bytes == 56 * GB


def test_numbers_that_were_given_stay() -> None:
    """A budget of bytes is met by each rank; only what is "auto" follows the others."""
    config = OffloadConfig(hardware="h200-sxm", device_budget="70GB", host_budget="64GB")
    given = replace(LIMITS, explicit=True, host_auto=False)
    found = met([meets(given, config), meets(replace(given, static_bytes=30 * GB, host_budget_bytes=GB), config)])
    assert [limits.device_budget_bytes for limits in found] == [70 * GB] * 2
    assert [limits.host_budget_bytes for limits in found] == [64 * GB, GB]


def test_host_memory_is_shared_by_the_ranks_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """LOCAL_WORLD_SIZE is not set: three ranks here and one elsewhere, which has less for itself."""
    names = threading.local()
    monkeypatch.setattr(ranks, "host", lambda: names.host)

    def of(host: str, nbytes: int) -> Callable[[], Any]:
        def work() -> Any:
            names.host = host
            return meeting.meet(replace(LIMITS, host_budget_bytes=nbytes), CONFIG, graph()), ranks.local_ranks()

        return work

    found = met([of("a", 60 * GB), of("a", 60 * GB), of("a", 60 * GB), of("b", 15 * GB)])
    assert [limits.host_budget_bytes for limits, _ in found] == [15 * GB] * 4
    assert [local for _, local in found] == [3, 3, 3, 1]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = met([of("a", 30 * GB), of("a", 32 * GB)])
    assert [limits.host_budget_bytes for limits, _ in found] == [30 * GB] * 2, "divided already"


def test_ranks_with_other_graphs_share_nothing_but_the_host() -> None:
    """Stages of a pipeline."""
    found = met([meets(LIMITS), meets(replace(LIMITS, device_budget_bytes=30 * GB), layers=3)])
    assert [limits.device_budget_bytes for limits in found] == [70 * GB, 30 * GB]
    assert [limits.host_budget_bytes for limits in found] == [32 * GB] * 2


def test_a_rank_that_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for once, for so long; then it is said, with what to do about the host's memory."""
    monkeypatch.setattr(meeting, "MEET_S", 0.5)
    monkeypatch.setattr(meeting, "_SAY_S", 0.1)

    def twice() -> list[float]:
        spent = []
        for _ in range(2):
            begin = time.monotonic()
            assert meeting.meet(LIMITS, CONFIG, graph()) == LIMITS
            spent.append(time.monotonic() - begin)
        return spent

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ((first, second),) = met([twice], world=3)
    assert 0.5 <= first < 5.0
    assert second < 0.1
    (text,) = [str(item.message) for item in caught if item.category is PerRankPlanWarning]
    for part in ("rank 0 of 3", "ranks 1 and 2 of 3 told nothing in 0.5 s", "LOCAL_WORLD_SIZE is not set"):
        assert part in text


def test_a_rank_that_compiles_parts_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other stage of a pipeline: it is waited for a moment, without a warning. One that comes after all counts."""
    monkeypatch.setattr(meeting, "MEET_S", 60.0)
    monkeypatch.setattr(meeting, "PART_S", 0.2)

    def beside_parts() -> Limits:
        assert HERE.peers is not None
        HERE.peers.put("part/1", True)
        return meeting.meet(LIMITS, CONFIG, graph())

    begin_s = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = met([beside_parts], world=2)
    assert found == LIMITS
    assert 0.2 <= time.monotonic() - begin_s < 10.0

    def parts_first() -> Limits:
        meeting.tell_of_parts()
        return meeting.meet(replace(LIMITS, device_budget_bytes=66 * GB), CONFIG, graph())

    monkeypatch.setattr(meeting, "PART_S", 30.0)
    assert [limits.device_budget_bytes for limits in met([meets(LIMITS), parts_first])] == [66 * GB] * 2


def test_a_store_that_raises() -> None:
    """At once, and training goes on."""
    store = mock.Mock()
    store.set.side_effect = RuntimeError("gone")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (found,) = met([meets(LIMITS)], world=2, store=store)
    assert found == LIMITS
    assert [item.category for item in caught] == [PerRankPlanWarning]
    assert "RuntimeError: gone" in str(caught[0].message)


def test_different_options() -> None:
    """An error on both, with both ranks and values; not for what is each rank's own."""
    one = OffloadConfig(hardware="h200-sxm", dump_dir="one")
    found = met([meets(LIMITS, one), meets(LIMITS, OffloadConfig(hardware="h200-sxm", dump_dir="two"))])
    assert all(isinstance(each, Limits) for each in found), found
    found = met([meets(LIMITS), meets(LIMITS, OffloadConfig(hardware="h200-sxm", policy="keep"))])
    for error in found:
        assert isinstance(error, ConfigError)
        for part in ("ranks 0 and 1", "policy: auto and keep", "Give every rank the same"):
            assert part in str(error)


def test_different_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of ranks with other graphs."""
    versions = threading.local()
    monkeypatch.setattr(ranks, "versions", lambda: {"torch": versions.torch})

    def of(torch_version: str, layers: int) -> Callable[[], Any]:
        def work() -> Any:
            versions.torch = torch_version
            return meeting.meet(LIMITS, CONFIG, graph(layers))

        return work

    for error in met([of("2.13", 1), of("2.14", 2)]):
        assert isinstance(error, ConfigError)
        assert "torch: 2.13 and 2.14" in str(error)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="no backend for a group of one")
def test_one_process_has_no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked, nor said; and a new group is another one."""
    monkeypatch.undo()
    assert ranks.peers() is None
    assert processes.default_group() is None
    assert meeting.meet(LIMITS, CONFIG, graph()) is LIMITS
    assert not meeting.is_alone()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        assert ranks.peers() is None
    finally:
        dist.destroy_process_group()


def test_a_group_that_is_destroyed_lets_its_store_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that lives on holds the group's port, and gives the next group there the addresses of the last one: that hangs."""
    monkeypatch.undo()
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port, group = store.port, [(PrefixStore("group", store), 0, 2)]
    monkeypatch.setattr(processes, "default_group", lambda: group[0] if group else None)
    peers = ranks.peers()
    assert peers is not None
    assert ranks.peers() is peers
    peers.put("key", 1)
    assert peers.read("key") == 1
    group.clear()
    del store
    again = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    with pytest.raises(StoreFailed, match="destroyed"):
        peers.put("key", 2)
    group.append((again, 0, 3))
    new = ranks.peers()
    assert new is not None
    assert new is not peers
    assert new.world == 3
    assert new.read("key") is None


def test_an_error_of_the_exchange_reaches_the_user_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as a fault of the backend."""
    peers = Peers(HashStore(), 0, 2)
    monkeypatch.setattr(ranks, "peers", lambda: peers)
    peers.put("met/1", {**meeting._told(LIMITS, CONFIG, graph(), False), "versions": {"torch": "0.1"}})
    model = Net()
    model.compile(backend=graphoffload.OffloadBackend(inner="aot_eager"))
    with pytest.raises(ConfigError, match=r"torch: .* and 0.1"):
        model(torch.ones(2, 4)).sum().backward()
