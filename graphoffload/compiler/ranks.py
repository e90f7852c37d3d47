"""The other ranks of torch.distributed, and what they tell each other through the group's store. Never a collective.

    put(key, value)     a value that all may read, as JSON
    read(key)           the value; None where nobody has put it yet
    first(key)          whether this rank is the first that asks: one of them does what is to be done once

Nothing here waits. torch's own `get` and `wait` wait for a key, and hold the client's lock meanwhile, which other threads of
the process need (NCCL's watchdog). `check` answers at once.

A group of one process has no peers: nothing is asked, and nothing costs anything.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from graphoffload.compiler.cache_key import source_digest
from graphoffload.errors import ConfigError, PerRankPlanWarning, warn
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.options.config import OffloadConfig
from graphoffload.options.policies import stable_text
from graphoffload.options.switches import is_on
from graphoffload.torch_internals import processes, releases

DEADLINE_S = 60.0
"""How long a plan of a step waits for ranks that have not said anything."""
DEADLINE_RUNS = 4
"""And for how many runs at least: a rank that saves a checkpoint for minutes lets nobody run."""
_OWN = frozenset({"dump_dir"})  # options that each rank may have for itself


class Store(Protocol):
    """What is used of torch.distributed.Store."""

    def set(self, key: str, value: str, /) -> Any:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Its value; waits for a key that is not there."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all of these keys are there."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number that begins with 0; the sum."""


class StoreFailed(Exception):
    """The store did not answer, or with something else than what a rank puts there."""


class Peers:
    """All ranks of a group, as one of them sees them.

    Attributes:
        broken: why the store is not asked any more; "": it is. absent: ranks that were waited for in vain.
        local: ranks on this host, by what they told; 0: not known. met: what came of the exchange at the first compile.
        parts: whether this rank has told that it compiles parts of steps.
        hardware: profiles that the ranks of this host measured together, by device index. late: ranks that did not come then.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        world: int,
        *,
        deadline_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._given, self.rank, self.world, self.clock = store, rank, world, clock
        self.deadline_s = DEADLINE_S if deadline_s is None else deadline_s
        self.broken = "" if store is not None else "it has none"
        self.absent: set[int] = set()
        self.local = 0
        self.met: Any = None
        self.parts = False
        self.hardware: dict[int, HardwareProfile] = {}
        self.late: set[int] = set()
        self._named: Counter[str] = Counter()
        self._listed: set[str] = set()
        self._said = False

    @property
    def others(self) -> list[int]:
        """The other ranks."""
        return [rank for rank in range(self.world) if rank != self.rank]

    @property
    def _store(self) -> Store:
        assert self._given is not None
        return self._given

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        if self.broken:
            raise StoreFailed(self.broken)
        try:
            yield
        except Exception as error:  # each backend of stores raises classes of its own
            self.broken = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
            raise StoreFailed(self.broken) from error

    def put(self, key: str, value: Any) -> None:
        """Tell all ranks.

        Raises:
            StoreFailed: the store does not answer.
        """
        with self._asking():
            self._store.set(key, json.dumps(value))

    def has(self, *keys: str) -> bool:
        """Whether all of these keys are there; one question to the store.

        Raises:
            StoreFailed: the store does not answer.
        """
        with self._asking():
            return bool(self._store.check(list(keys)))

    def read(self, key: str) -> Any:
        """The value of a key; None where it is not there.

        Raises:
            StoreFailed: the store does not answer, or what is there is no JSON.
        """
        with self._asking():
            return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def first(self, key: str) -> bool:
        """Whether no rank has asked this before.

        Raises:
            StoreFailed: the store does not answer.
        """
        with self._asking():
            return int(self._store.add(key, 1)) == 1

    def named(self, structure: str) -> str:
        """A name for one more thing of this structure: ranks that run the same program give the same names."""
        self._named[structure] += 1
        return f"{structure}.{self._named[structure]}"

    def list(self, name: str) -> None:
        """Tell all ranks that this one has steps of this name ("": none), what it runs and where.

        Raises:
            StoreFailed: the store does not answer.
        """
        self._listed |= {name} - {""}
        self.put(f"of/{self.rank}", {"steps": sorted(self._listed), "versions": versions(), "host": host()})

    def listed(self, rank: int) -> Mapping[str, Any] | None:
        """What a rank told of itself; None: nothing so far.

        Raises:
            StoreFailed: the store does not answer. ConfigError: it runs other versions.
        """
        found: Mapping[str, Any] | None = self.read(f"of/{rank}")
        if found is not None:
            self.compare(rank, found["versions"], versions())
        return found

    def compare(self, rank: int, theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
        """Stop where another rank has other options or versions: its plan would be one for something else.

        Raises:
            ConfigError: names both ranks and both values.
        """
        names = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
        if not names:
            return
        (low, one), (high, other) = sorted(((rank, theirs), (self.rank, ours)), key=lambda item: item[0])
        said = "; ".join(f"{name}: {one.get(name, 'none')} and {other.get(name, 'none')}" for name in names)
        raise ConfigError(
            f"ranks {low} and {high} train the same graphs with different options or versions, so that they cannot have one "
            f"plan. Rank {low} and rank {high} have {said}. Give every rank the same, also in its "
            "environment; or set GRAPHOFFLOAD_ACROSS_RANKS=0, and each rank plans alone, as stages of a pipeline may want."
        )

    def warn_alone(self, missing: Sequence[int], what: str, waited_s: float | None = None) -> None:
        """Say that something is planned without some ranks, or without the store, which is said once."""
        if self.broken:
            if self._said:
                return
            self._said = True
            why = f"the store of the process group does not answer ({self.broken})"
        else:
            spent_s = self.deadline_s if waited_s is None else waited_s
            why = f"{ranks_text(missing)} of {self.world} told nothing in {spent_s:g} s"
        share = ""
        if not local_world_size() and self.local < 2:
            share = " LOCAL_WORLD_SIZE is not set, so host_budget takes the memory of the whole host: set it, as torchrun does."
        warn(
            PerRankPlanWarning,
            f"rank {self.rank} of {self.world} {what}: {why}. Gradients are right whatever the others decide, but the slowest "
            "rank sets the pace of all, and the rank with the least memory may run out of it. Train the same graphs on every "
            f"rank, or give device_budget and hardware as fixed values.{share}",
        )

    def warn_apart(self, rank: int) -> None:
        """Say that another rank has compiled the same graphs another number of times."""
        warn(
            PerRankPlanWarning,
            f"rank {self.rank} of {self.world} plans a step without rank {rank}, which has had its graphs another number of "
            "times: one of the two has compiled them again alone. Gradients are right all the same. Call "
            "torch._dynamo.reset() on every rank or on none, and give the batches of all ranks the same sizes.",
        )

    def warn_misfit(self, rank: int, error: Exception) -> None:
        """Say that this rank cannot do what another one decided for all."""
        warn(
            PerRankPlanWarning,
            f"rank {self.rank} of {self.world} plans its step alone, since what rank {rank} decided does not fit here: {error} "
            "Gradients are right all the same. Run the same program with the same batch sizes on every rank.",
        )


def ranks_text(ranks: Sequence[int]) -> str:
    """Such as "rank 3", "ranks 1, 2 and 5"."""
    shown = [str(rank) for rank in sorted(ranks)]
    if len(shown) > 12:
        shown = [*shown[:8], f"{len(shown) - 8} more"]
    text = " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1]))) if shown else "none"
    return f"rank{'s' * (len(shown) != 1)} {text}"


def short(text: str) -> str:
    """A digest for keys."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def versions() -> dict[str, str]:
    """What must be the same on every rank, whatever it trains."""
    return {"torch": str(releases.torch_version()), "graphoffload": f"source {source_digest()[:12]}"}


def options_of(config: OffloadConfig) -> dict[str, str]:
    """Options as texts, for comparison with those of another rank."""
    values = {name: getattr(config, name) for name in config.__dataclass_fields__ if name not in _OWN}
    return {name: value if isinstance(value, str) else stable_text(value) for name, value in values.items()}


def host() -> str:
    """This host: two processes with the same text share its memory."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{platform.node()} {boot}"


class _Group:
    """The peers of the default group, and what they were made for: a reference to its store, its rank and its size."""

    def __init__(self) -> None:
        self.store: weakref.ref[Any] | None = None
        self.found: Peers | None = None
        self.generation = 0

    def is_for(self, store: Any, rank: int, world: int) -> bool:
        """Whether the peers are those of this group."""
        if self.found is None or (self.found.rank, self.found.world) != (rank, world):
            return False
        return (None if self.store is None else self.store()) is store and (self.store is None) == (store is None)


_GROUP = _Group()


def peers() -> Peers | None:
    """The other ranks of the default group as it is now; None where there are none, or where each is to plan alone.

    Raises:
        ConfigError: GRAPHOFFLOAD_ACROSS_RANKS is neither on nor off.
    """
    group = processes.default_group()
    if group is None or not is_on("GRAPHOFFLOAD_ACROSS_RANKS", "have each rank plan alone"):
        return None
    store, rank, world = group
    if not _GROUP.is_for(store, rank, world):
        _GROUP.generation += 1
        own = None if store is None else processes.WithPrefix(store, f"graphoffload/{_GROUP.generation}")
        _GROUP.store, _GROUP.found = None if store is None else weakref.ref(store), Peers(own, rank, world)
    return _GROUP.found


def local_ranks() -> int:
    """Ranks on this host: as torchrun, Open MPI or MPICH say, or as the ranks told each other; 0: not known."""
    said, found = local_world_size(), peers()
    return said or (1 if found is None else found.local)


def local_world_size() -> int:
    """Ranks on this host as the launcher says; 0: it does not."""
    said = _of_launcher("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
    return 0 if said < 0 else max(1, said)


def local_rank() -> int:
    """The number of this rank among those of its host as the launcher says; -1: it does not."""
    return _of_launcher("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


def _of_launcher(*names: str) -> int:
    """The number that torchrun, Open MPI or MPICH gives; -1 without one."""
    return next((int(text) for text in (os.environ.get(name, "") for name in names) if text.isdigit()), -1)
