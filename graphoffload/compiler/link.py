"""The link to the host, measured by all ranks of a host at the same time, before the first graph of a process is compiled.

    rank 0   here ─▶ waits ─┬─▶ ready ─▶ copies ─▶ ready ─▶ ... ─▶ its figures ─▶ waits ─▶ the slowest of all
    rank 1      here ───────┴─▶ ready ─▶ copies ─▶ ready ─▶ ... ─▶ its figures ───────────▶ the slowest of all

GPUs of one host share lanes, switches and the memory of the host: each of four may get two thirds of what one gets alone. Plans
that reckon with what one gets alone come late with every copy.

Ranks meet through the store of their group (ranks.py), each wait ends after WAIT_S, and no lock is held meanwhile. What was
measured by all ranks of a host is kept on disk under their number. Later processes find it there and wait for nobody. A rank
that does not come is a PerRankPlanWarning with its number; the others measure without it, and keep nothing. A rank that comes
after that takes what the others have. A stage of a pipeline waits for STAGE_S only: later stages compile when they receive what
it computes.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from pathlib import Path

import torch

from graphoffload.compiler import ranks
from graphoffload.compiler.ranks import Peers, StoreFailed, ranks_text, short
from graphoffload.errors import PerRankPlanWarning, warn
from graphoffload.hardware.measurement import PHASES, cache_path, keep, kept, measure, measure_with_others, resolve_hardware
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.log import say
from graphoffload.torch_internals import processes

WAIT_S = 30.0
"""How long a rank waits for others, each time that it does."""
STAGE_S = 3.0
"""The same for a stage of a pipeline."""
_SAY_S = 3.0
_LOOK_S = 0.01
_LOOK_SOON_S = 0.001


def hardware_of(spec: str | HardwareProfile, device: object = "cpu") -> HardwareProfile:
    """The profile for plans on `device`: what the ranks of this host measured together, if they did; else resolve_hardware's.

    Ranks that compiled nothing yet, and ranks of which each plans alone, take what is on disk for as many ranks.

    Raises:
        ConfigError: `spec` is an unknown name.
    """
    index = _to_measure(spec, device)
    if index is None:
        return resolve_hardware(spec, device)
    peers, count = ranks.peers(), ranks.local_ranks()
    found = None if peers is None else peers.hardware.get(index)
    if found is None and count > 1:
        found = kept(_path(index, count))
    return found or resolve_hardware(spec, device)


def measure_with_ranks(spec: str | HardwareProfile, device: object) -> None:
    """Have a profile of `device` that all ranks of this host have measured at the same time; waits for them, once a process.

    Nothing happens where there are no other ranks, where the profile is given, and where the device is none of CUDA's.
    """
    index, peers = _to_measure(spec, device), ranks.peers()
    if index is None or peers is None or index in peers.hardware:
        return
    try:
        found = _Meeting(peers, index).profile()
    except StoreFailed as error:
        _warn_alone(peers, error)
        found = measure(index)
    peers.hardware[index] = found


def _to_measure(spec: str | HardwareProfile, device: object) -> int | None:
    """The index of the device, if it is to be measured."""
    kind, _, index = str(device).partition(":")
    return int(index or 0) if spec == "measure" and kind == "cuda" else None


def _path(index: int, count: int) -> Path:
    """The file of a profile that so many ranks measured together."""
    return cache_path(torch.cuda.get_device_name(index), str(torch.__version__), count)


def _warn_alone(peers: Peers, error: StoreFailed) -> None:
    """Say that this rank measures without the others."""
    what = "measures its link to the host alone"
    if peers.broken:
        peers.warn_alone(peers.others, what)
        return
    text = f"rank {peers.rank} of {peers.world} {what}: {error}. Run one release of graphoffload on all ranks."
    warn(PerRankPlanWarning, text)


def _profile(text: str) -> HardwareProfile:
    """What a rank told.

    Raises:
        StoreFailed: it is no profile.
    """
    try:
        return HardwareProfile.from_json(text)
    except (ValueError, TypeError, KeyError) as error:
        raise StoreFailed(f"another rank told a profile that cannot be read: {error}") from error


class _Meeting:
    """One rank among those of its host, while they measure.

    What it tells, each under a key with its number: "at", its host; "ready" for each phase; "own", its figures. The key `found`
    belongs to all ranks of a host with such a device: a profile that at least one of them plans with.

    Attributes:
        gone: ranks that were waited for in vain. stage: whether this rank has a stage of a pipeline.
    """

    def __init__(self, peers: Peers, index: int) -> None:
        self.peers, self.index, self.gone = peers, index, set[int]()
        self.stage = processes.has_stage()
        self._key = f"link/{len(peers.hardware)}"
        self._found = f"{self._key}/found/{short(ranks.host() + torch.cuda.get_device_name(index))}"

    def profile(self) -> HardwareProfile:
        """What to plan with; `measure`'s where this is the only rank of its host.

        Raises:
            StoreFailed: the store does not answer.
        """
        said = ranks.local_world_size()
        if said == 1:
            return measure(self.index)
        found = kept(_path(self.index, said)) if said else None
        if found is None:
            here = self._here(said)
            found = self._of_others()
        if found is None and not said and not self.gone and len(here) > 1:
            found = kept(_path(self.index, len(here)))
        if found is None:
            found = self._measured(here) if len(here) > 1 else measure(self.index)
            self._warn(said)
        self._leave(found)
        return found

    def _here(self, said: int) -> list[int]:
        """Ranks of this host, this one among them; waits until they have come."""
        peers, local = self.peers, ranks.local_rank()
        peers.put(self._named("at"), ranks.host())
        first, everybody = peers.rank - local, range(peers.world)
        near = range(first, first + said)
        if not said or local < 0 or first < 0 or near.stop > peers.world:
            near = everybody
        hosts = self._hosts(near)
        if near != everybody and any(host != ranks.host() for host in hosts.values()):  # numbered across hosts
            hosts = self._hosts(everybody)
        here = [rank for rank in everybody if hosts.get(rank) == ranks.host()]
        if said and len(here) >= said:
            self.gone.clear()  # they are other hosts' ranks
        return here

    def _hosts(self, asked: Iterable[int]) -> dict[int, str]:
        self._wait("at", set(asked) - {self.peers.rank}, look_s=_LOOK_S, unless=self._found)
        found = {rank: self.peers.read(self._named("at", rank)) for rank in asked}
        return {rank: host for rank, host in found.items() if host is not None}

    def _of_others(self) -> HardwareProfile | None:
        """What ranks of this host plan with that measured before this one came, or that found a file."""
        found = self.peers.read(self._found)
        return None if found is None else _profile(found)

    def _measured(self, here: Collection[int]) -> HardwareProfile:
        """What these ranks measure at the same time: of each figure the slowest rank's."""
        others = set(here) - {self.peers.rank}
        done = {rank for rank in others if self.peers.has(self._named("own", rank))}  # they copy nothing
        try:
            own = measure_with_others(self.index, len(here) - len(done), lambda phase: self._ready(phase, others - self.gone))
        finally:
            self._pass()
        self.peers.put(self._named("own"), own.to_json())
        self._wait("own", others - self.gone, look_s=_LOOK_S)
        told = [_profile(self.peers.read(self._named("own", rank))) for rank in others - self.gone]
        found = own.slowest(told)
        if not done and not self.gone and all(profile.source == "measured" for profile in (own, *told)):
            keep(_path(self.index, len(here)), found)
        return found

    def _ready(self, phase: str, others: Collection[int]) -> None:
        """Wait until the others are about to copy as well."""
        self.peers.put(self._named(phase), True)
        self._wait(phase, others, look_s=_LOOK_SOON_S)

    def _pass(self) -> None:
        """Let nobody wait for copies of this rank."""
        for phase in PHASES:
            self.peers.put(self._named(phase), True)

    def _leave(self, found: HardwareProfile) -> None:
        """Let nobody wait for this rank. It is seen to be here last, so that whoever sees it finds what it has."""
        self.peers.put(self._found, found.to_json())
        self.peers.put(self._named("own"), found.to_json())
        self._pass()
        self.peers.put(self._named("at"), ranks.host())

    def _named(self, what: str, rank: int | None = None) -> str:
        return f"{self._key}/{what}/{self.peers.rank if rank is None else rank}"

    def _wait(self, what: str, others: Collection[int], *, look_s: float, unless: str = "") -> None:
        """Until these ranks have told this, or the key `unless` is there, or the time is over: who has not told it is gone."""
        keys = {rank: self._named(what, rank) for rank in others}
        begin_s, said, limit_s = self.peers.clock(), False, self._limit_s
        while keys and not self.peers.has(*keys.values()) and not (unless and self.peers.has(unless)):
            waited_s = self.peers.clock() - begin_s
            if waited_s >= limit_s:
                self.gone |= {rank for rank, key in keys.items() if not self.peers.has(key)}
                return
            if not said and waited_s > _SAY_S:
                said = True
                say(f"rank {self.peers.rank} waits for the ranks of its host, to measure the link; {limit_s:.0f} s at most")
            time.sleep(look_s)

    @property
    def _limit_s(self) -> float:
        return min(STAGE_S, WAIT_S) if self.stage else WAIT_S

    def _warn(self, said: int) -> None:
        """Name the ranks that did not come."""
        if not self.gone:
            return
        peers = self.peers
        peers.late |= self.gone
        why = ", as stages of a pipeline that compile after this one" if self.stage else ""
        unset = "" if said else " LOCAL_WORLD_SIZE is not set, so the ranks of all hosts were asked: set it, as torchrun does."
        warn(
            PerRankPlanWarning,
            f"rank {peers.rank} of {peers.world} measured its link to the host without {ranks_text(sorted(self.gone))}, which "
            f"told nothing in {self._limit_s:g} s{why}. The GPUs of a host share its links, so copies may take longer than "
            f"plans say. To measure before training: torchrun --nproc-per-node {said or 'RANKS'} -m graphoffload hardware, "
            f"which keeps the result.{unset}",
        )
