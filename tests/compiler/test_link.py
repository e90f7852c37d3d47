"""Ranks of a host measure the link at the same time: threads that are ranks, on a store of this process, with a made-up link.

Processes that do so: tests/test_distributed.py; GPUs: tests/gpu/test_two_gpus.py.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("this torch is built without torch.distributed", allow_module_level=True)

from torch.distributed import HashStore

import graphoffload
from graphoffload.compiler import backend, link, ranks
from graphoffload.compiler.device_limits import resolve_limits
from graphoffload.compiler.link import hardware_of, measure_with_ranks
from graphoffload.compiler.ranks import Peers
from graphoffload.errors import PerRankPlanWarning
from graphoffload.hardware import measurement
from graphoffload.hardware.measurement import PHASES, cache_path, cached
from graphoffload.hardware.profile import PROFILES, HardwareProfile
from graphoffload.options.config import OffloadConfig
from graphoffload.torch_internals import processes

MEASURED = dataclasses.replace(PROFILES["h200-sxm"], name="NVIDIA X", both_ways_bytes_per_s=90e9)
SOON_S = 0.4
"""The deadline of a test in which some rank does not come."""
LATE_S = 20.0
"""That of a test in which all come: nobody waits so long."""
TOGETHER_S = 0.5
"""Copies of ranks begin within this; they run in threads on a machine that others load."""


class Thread(threading.local):
    """The rank that a thread is: what it knows of others, its number among those of its host, and its host."""

    peers: Peers | None = None
    local: int = -1
    host: str = "host"


HERE = Thread()


class Meter:
    """The link of each rank, as it would be measured. A rate is shared by those who copy at the same time."""

    def __init__(self) -> None:
        self.lock, self.began, self.alone = threading.Lock(), {phase: [] for phase in PHASES}, []
        self.rates: dict[int, float] = {}
        self.names: dict[int, str] = {}
        self.fails: dict[int, str] = {}
        self.before_s: dict[int, float] = {}

    def __call__(self, module: Any, index: int, start: Callable[[str], None] | None = None) -> HardwareProfile:
        if self.fails.get(index) == "falls back":
            return PROFILES["h100-sxm"]
        if start is None:
            self.alone.append(index)
        time.sleep(self.before_s.get(index, 0.0))
        for phase in PHASES if start is not None else ():
            start(phase)
            with self.lock:
                self.began[phase].append(time.monotonic())
            time.sleep(0.02)
        name, rate = self.names.get(index, MEASURED.name), self.rates.get(index, 50e9)
        matmuls = tuple((dtype, flops / (1 + index)) for dtype, flops in MEASURED.matmul_flops_per_s)
        return dataclasses.replace(MEASURED, name=name, d2h_bytes_per_s=rate, matmul_flops_per_s=matmuls)


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Meter:
    """Rank N has device N. No launcher says anything."""
    made = Meter()
    monkeypatch.setattr(HERE, "peers", None)
    monkeypatch.setattr(measurement, "_measure", made)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: made.names.get(index, MEASURED.name))
    monkeypatch.setattr(ranks, "peers", lambda: HERE.peers)
    monkeypatch.setattr(ranks, "local_rank", lambda: HERE.local)
    monkeypatch.setattr(ranks, "host", lambda: HERE.host)
    monkeypatch.setattr(link, "WAIT_S", LATE_S)
    monkeypatch.setenv("GRAPHOFFLOAD_CACHE_DIR", str(tmp_path))
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        monkeypatch.delenv(name, raising=False)
    return made


@pytest.fixture
def soon(meter: Meter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks wait for a moment only."""
    monkeypatch.setattr(link, "WAIT_S", SOON_S)


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


def run(
    numbers: list[int],
    world: int,
    store: Any = None,
    *,
    hosts: dict[int, str] | None = None,
    local: bool = True,
    after_s: dict[int, float] | None = None,
) -> dict[int, Any]:
    """The profile of each of these ranks; others of the world never come. `local`: the launcher numbers them on their host."""
    store = HashStore() if store is None else store
    found: dict[int, Any] = {}

    def work(rank: int) -> None:
        HERE.peers, HERE.host = Peers(store, rank, world), (hosts or {}).get(rank, "host")
        HERE.local = sorted(r for r in range(world) if (hosts or {}).get(r, "host") == HERE.host).index(rank) if local else -1
        time.sleep((after_s or {}).get(rank, 0.0))
        try:
            measure_with_ranks("measure", f"cuda:{rank}")
            found[rank] = hardware_of("measure", torch.device("cuda", rank))
        except Exception as error:
            found[rank] = error

    started = [threading.Thread(target=work, args=(rank,)) for rank in numbers]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(60.0)
    return found


def texts(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(item.message) for item in caught if item.category is PerRankPlanWarning]


def rates(found: dict[int, Any]) -> set[float]:
    return {profile.d2h_bytes_per_s for profile in found.values()}


@pytest.mark.parametrize("said", ["launcher", "hosts"])
def test_all_copy_at_once_and_plan_with_the_slowest(
    said: str, meter: Meter, caught: list[warnings.WarningMessage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the launcher says how many they are or they count themselves; a rank that is slow to begin holds the others."""
    if said == "launcher":
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    meter.rates, meter.before_s = {1: 36e9}, {2: 2 * TOGETHER_S}
    found = run([0, 1, 2], 3, local=said == "launcher")
    assert len(set(found.values())) == 1, found
    profile = found[0]
    assert (profile.d2h_bytes_per_s, profile.measured_by_ranks) == (36e9, 3)
    assert dict(profile.matmul_flops_per_s)["bfloat16"] == dict(MEASURED.matmul_flops_per_s)["bfloat16"] / 3
    for phase in PHASES:
        assert len(meter.began[phase]) == 3
        assert max(meter.began[phase]) - min(meter.began[phase]) < TOGETHER_S
    assert min(meter.began["h2d"]) >= max(meter.began["d2h"]), "phases do not overlap"
    assert not texts(caught)


def test_what_several_measured_is_kept_for_so_many(meter: Meter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A later process waits for nobody; a profile measured alone is not for several ranks, and the other way round."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    alone = cache_path(MEASURED.name, str(torch.__version__))
    cached(alone, lambda: dataclasses.replace(MEASURED, d2h_bytes_per_s=99e9))
    meter.rates = {0: 36e9}
    assert rates(run([0, 1], 2)) == {36e9}
    together = cache_path(MEASURED.name, str(torch.__version__), 2)
    assert together.name.endswith("-2-ranks.json")
    assert {path.name for path in tmp_path.glob("*.json")} == {alone.name, together.name}
    assert HardwareProfile.from_json(together.read_text()).measured_by_ranks == 2
    begin_s = time.monotonic()
    assert rates(run([1], 2)) == {36e9}, "read, without the other rank"
    assert time.monotonic() - begin_s < LATE_S / 2
    assert len(meter.began["d2h"]) == 2
    HERE.peers = None
    assert hardware_of("measure", "cuda:0").d2h_bytes_per_s == 36e9, "ranks that plan alone share the link all the same"
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert hardware_of("measure", "cuda:0").d2h_bytes_per_s == 99e9, "a single process has its own"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert rates(run([0, 1, 2], 3)) == {36e9}
    assert len(meter.began["d2h"]) == 5, "three ranks are not two"


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("local", [True, False])
def test_a_rank_that_never_comes(
    local: bool, meter: Meter, caught: list[warnings.WarningMessage], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is named after the deadline; the others measure together and go on, and keep nothing on disk."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    begin_s = time.monotonic()
    found = run([0, 2], 3, local=local)
    assert SOON_S <= time.monotonic() - begin_s < LATE_S / 2
    assert [found[rank].measured_by_ranks for rank in (0, 2)] == [2, 2]
    assert len(texts(caught)) == 2
    for text in texts(caught):
        assert "of 3 measured its link to the host without rank 1, which told nothing in 0.4 s" in text
        assert "torchrun --nproc-per-node 3 -m graphoffload hardware" in text
        assert "LOCAL_WORLD_SIZE" not in text
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.usefixtures("soon")
def test_without_local_world_size(meter: Meter, caught: list[warnings.WarningMessage], tmp_path: Path) -> None:
    """Nobody knows how many the ranks of this host are: the one that came measures alone, and the warning says what to set."""
    found = run([1], 2, local=False)
    assert found[1].measured_by_ranks == 1
    assert meter.alone == [1]
    (text,) = texts(caught)
    assert "rank 1 of 2 measured its link to the host without rank 0" in text
    assert "LOCAL_WORLD_SIZE is not set" in text
    assert [path.name for path in tmp_path.glob("*.json")] == [cache_path(MEASURED.name, str(torch.__version__)).name]


@pytest.mark.usefixtures("soon")
def test_a_rank_that_comes_late_takes_what_the_others_have(
    meter: Meter, caught: list[warnings.WarningMessage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    meter.rates = {0: 40e9, 2: 30e9}
    found = run([0, 1, 2], 3, after_s={2: 3 * SOON_S})
    assert rates(found) == {40e9}
    assert found[2].measured_by_ranks == 2
    assert len(meter.began["d2h"]) == 2
    assert len(texts(caught)) == 2


def test_hosts_measure_apart(meter: Meter, caught: list[warnings.WarningMessage], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks numbered from host to host, as torchrun does: those of one host wait for nobody of the other."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("GRAPHOFFLOAD_CACHE_DIR", "/dev/null/none")
    meter.rates = {0: 30e9, 3: 20e9}
    hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
    found = run([0, 1, 2, 3], 4, hosts=hosts)
    assert [found[rank].d2h_bytes_per_s for rank in range(4)] == [30e9, 30e9, 20e9, 20e9]
    found = run([2, 3], 4, hosts=hosts)
    assert rates(found) == {20e9}
    assert not texts(caught)


@pytest.mark.parametrize("said", ["2", ""])
def test_ranks_numbered_across_hosts(
    said: str, meter: Meter, caught: list[warnings.WarningMessage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second one is on this host, as mpirun --map-by node has it: they find each other by what they tell."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", said)
    monkeypatch.setenv("GRAPHOFFLOAD_CACHE_DIR", "/dev/null/none")
    meter.rates = {0: 30e9, 3: 20e9}
    found = run([0, 1, 2, 3], 4, hosts={0: "a", 1: "b", 2: "a", 3: "b"})
    assert [found[rank].d2h_bytes_per_s for rank in range(4)] == [30e9, 20e9, 30e9, 20e9]
    assert {profile.measured_by_ranks for profile in found.values()} == {2}
    assert not texts(caught)


def test_one_rank_a_host_measures_alone(meter: Meter, monkeypatch: pytest.MonkeyPatch) -> None:
    """And asks nobody, if the launcher says so."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    found = run([0], 2, hosts={0: "a", 1: "b"})
    assert found[0].measured_by_ranks == 1
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    found = run([0, 1], 2, hosts={0: "a", 1: "b"})
    assert {profile.measured_by_ranks for profile in found.values()} == {1}


def test_devices_of_two_kinds(meter: Meter, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share the link's figures; what their kernels do is their own."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    meter.names, meter.rates = {1: "NVIDIA Y"}, {1: 20e9}
    found = run([0, 1], 2)
    assert rates(found) == {20e9}
    assert [found[rank].name for rank in (0, 1)] == ["NVIDIA X", "NVIDIA Y"]
    assert found[0].matmul_flops_per_s != found[1].matmul_flops_per_s


def test_a_stage_of_a_pipeline_waits_for_a_moment(
    meter: Meter, caught: list[warnings.WarningMessage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next stage compiles when it receives what this one computes; it takes what this one measured."""
    from torch.distributed.pipelining.stage import PipelineStage

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(link, "STAGE_S", SOON_S)
    assert not processes.has_stage()
    stage = PipelineStage.__new__(PipelineStage)
    store, begin_s = HashStore(), time.monotonic()
    first = run([0], 2, store)
    assert time.monotonic() - begin_s < LATE_S / 2
    (text,) = texts(caught)
    assert f"without rank 1, which told nothing in {SOON_S:g} s, as stages of a pipeline that compile after this one" in text
    assert run([1], 2, store)[1] == first[0]
    del stage
    assert not processes.has_stage()


@pytest.mark.parametrize("fails", ["falls back", "raises"])
def test_a_rank_that_cannot_measure_holds_nobody(
    fails: str, meter: Meter, caught: list[warnings.WarningMessage], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its memory is full, so that it has a datasheet's figures, or it stops for a reason of its own: nothing is kept."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    meter.fails = {1: "falls back"}
    if fails == "raises":
        monkeypatch.setattr(link, "WAIT_S", SOON_S)
        whole = measurement._measure

        def broken(module: Any, index: int, start: Any = None) -> HardwareProfile:
            if index == 1:
                raise OSError("broken")
            return whole(module, index, start)

        monkeypatch.setattr(measurement, "_measure", broken)
    begin_s = time.monotonic()
    found = run([0, 1], 2)
    assert time.monotonic() - begin_s < LATE_S / 2
    assert isinstance(found[1], OSError) == (fails == "raises")
    assert len(texts(caught)) == (fails == "raises"), "one that told its figures is not waited for"
    slowest = min(MEASURED.d2h_bytes_per_s, PROFILES["h100-sxm"].d2h_bytes_per_s, 50e9) if fails == "falls back" else 50e9
    assert found[0].d2h_bytes_per_s == slowest
    assert not list(tmp_path.glob("*.json"))


class Broken:
    """A store that is gone after a number of questions."""

    def __init__(self, store: Any, questions: int) -> None:
        self._store, self._left = store, questions

    def __getattr__(self, name: str) -> Any:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("connection refused")
        return getattr(self._store, name)


@pytest.mark.parametrize("questions", [0, 1, 3, 6, 12, 20])
def test_a_store_that_does_not_answer(
    questions: int, meter: Meter, caught: list[warnings.WarningMessage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any moment: said once, and the rank has a profile in the end."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = run([0, 1], 2, Broken(HashStore(), questions))
    assert all(isinstance(profile, HardwareProfile) for profile in found.values()), found
    said = [text for text in texts(caught) if "does not answer" in text]
    assert 1 <= len(said) <= 2
    assert "measures its link to the host alone: the store of the process group does not answer (RuntimeError" in said[0]


def test_a_rank_that_tells_no_profile(
    meter: Meter, caught: list[warnings.WarningMessage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another release, say."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    store = HashStore()
    other = Peers(store, 1, 2)
    for phase in PHASES:
        other.put(f"link/0/{phase}/1", True)
    other.put("link/0/own/1", '{"name": 3}')
    other.put("link/0/at/1", "host")
    found = run([0], 2, store)
    assert found[0].measured_by_ranks == 1
    (text,) = texts(caught)
    assert "rank 0 of 2 measures its link to the host alone: another rank told a profile that cannot be read" in text


def test_nobody_is_asked_where_nothing_is_measured(meter: Meter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles that are given, devices other than CUDA's, a single process."""
    HERE.peers = Peers(Broken(HashStore(), 0), 0, 2)
    measure_with_ranks("h200-sxm", "cuda:0")
    measure_with_ranks("measure", "cpu")
    measure_with_ranks(MEASURED, "cuda:0")
    assert hardware_of(MEASURED, "cuda:0") is MEASURED
    assert not HERE.peers.broken
    HERE.peers = None
    measure_with_ranks("measure", "cuda:0")
    assert not any(meter.began.values())
    assert meter.alone == []


def test_what_is_asked_before_a_compile_waits_for_nobody(meter: Meter, monkeypatch: pytest.MonkeyPatch) -> None:
    """explain() of one rank: what is on disk for as many ranks as there are; without a file what this one measures alone."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    HERE.peers = Peers(HashStore(), 0, 2)
    begin_s = time.monotonic()
    assert hardware_of("measure", "cuda:0").measured_by_ranks == 1
    together = dataclasses.replace(MEASURED, d2h_bytes_per_s=36e9, measured_by_ranks=2)
    cached(cache_path(MEASURED.name, str(torch.__version__), 2), lambda: together)
    assert hardware_of("measure", "cuda:0") == together
    assert time.monotonic() - begin_s < LATE_S / 2


def test_limits_are_of_the_profile_that_was_measured_together(meter: Meter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every place that plans asks hardware_of."""
    HERE.peers = Peers(HashStore(), 0, 2)
    HERE.peers.hardware[0] = dataclasses.replace(MEASURED, memory_bytes=10**9)
    with torch.device("meta"):
        inputs = [torch.empty(4)]
    monkeypatch.setattr("graphoffload.compiler.device_limits.device_of", lambda inputs: torch.device("cuda", 0))
    monkeypatch.setattr("graphoffload.compiler.device_limits._static_bytes", lambda *given: 0)
    found = resolve_limits(OffloadConfig(device_budget="50%", reserve=0), inputs)
    assert found.device_budget_bytes == 5 * 10**8


def test_the_first_compile_measures_and_explain_does_not(meter: Meter, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled to run is asked for its device before its limits; explain() may be one rank's alone."""
    asked: list[tuple[Any, torch.device]] = []
    monkeypatch.setattr(backend, "measure_with_ranks", lambda *given: asked.append(given))
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    graphoffload.explain(model, OffloadConfig(inner="aot_eager"))(x)
    assert asked == []
    torch._dynamo.reset()
    torch.compile(model, backend=graphoffload.OffloadBackend(inner="aot_eager"))(x).sum().backward()
    assert asked == [("measure", torch.device("cpu"))]
