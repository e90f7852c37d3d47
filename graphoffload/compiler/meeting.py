"""What all ranks have, exchanged once a process: at the first compile of a graph that is planned alone.

    rank 0   compiles ─▶ tells its limits ─▶ waits for the others, at most MEET_S ─▶ plans with the least of all
    rank 1      compiles ─▶ tells ... ───────────────────────────────────────────▶ plans with the least of all

Ranks of one program compile at the same time, so this takes what they are apart. A rank whose others do not compile waits once.
A rank waits for others here and before, where the link is measured (link.py), and nowhere else. Both are in a compile, not in a
step. A rank that did not come there is not waited for here.

A rank whose graphs are parts of a step says so at its first compile, and waits for nobody. It may be another stage of a
pipeline, which compiles no graph alone: others wait for it for PART_S only, and miss nothing if it does not come.

What a rank has more than the one with the least is taken off at this compile and at every later one: another process on a
device, another model on one rank. Its own free memory at a later compile may be less by then, and counts. What another rank
loses after this is not seen. What is compared is the room: the budget less the reserve, and less what is allocated, so that a
rank that holds more outside counts as one with less. Only ranks whose first graph is the same are compared.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule

from graphoffload.compiler import ranks
from graphoffload.compiler.cache_key import structure_key
from graphoffload.compiler.ranks import Peers, StoreFailed
from graphoffload.facts.limits import Limits
from graphoffload.log import say
from graphoffload.options.config import OffloadConfig

MEET_S = 30.0
"""How long the first compile waits for other ranks."""
PART_S = 3.0
"""How long it waits for a rank that has only compiled parts of a step so far."""
_SAY_S = 3.0
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Met:
    """What came of the exchange: by how much this rank has more than the rank with the least."""

    device_bytes: int = 0
    host_bytes: int = 0


def is_alone() -> bool:
    """Whether there are other ranks, and plans of single graphs are made without knowing of them."""
    peers = ranks.peers()
    return peers is not None and peers.met is None


def meet(limits: Limits, config: OffloadConfig, module: GraphModule) -> Limits:
    """The limits of a graph that is compiled now, with what all ranks have; waits for them at the first call of a process.

    Raises:
        ConfigError: ranks with the same graph have different options or versions.
    """
    peers = ranks.peers()
    if peers is None:
        return limits
    if peers.met is None:
        undivided = limits.host_auto and ranks.local_ranks() == 0
        mine = _told(limits, config, module, undivided)
        found = {peers.rank: mine, **_exchanged(peers, mine)}
        hosts = [each["host"] for each in found.values()]
        peers.local = hosts.count(mine["host"])
        alike = [each for each in found.values() if each["graph"] == mine["graph"]]
        shares = [_share(each, hosts) for each in alike]
        own = _share(mine, hosts)
        rooms = [each["room"] for each in alike]
        peers.met = Met(_more(mine["room"], rooms), _more(own, shares))
        if undivided:
            limits = replace(limits, host_budget_bytes=own)
    return least(limits, config)


def tell_of_parts() -> None:
    """Tell all ranks that this one has compiled a part of a step, once; waits for nobody."""
    peers = ranks.peers()
    if peers is None or peers.met is not None or peers.parts:
        return
    peers.parts = True
    with contextlib.suppress(StoreFailed):  # whoever needs the store says that it does not answer
        peers.put(f"part/{peers.rank}", True)


def least(limits: Limits, config: OffloadConfig) -> Limits:
    """The same, for a compile between two steps: nothing is waited for."""
    peers = ranks.peers()
    if peers is None or peers.met is None:
        return limits
    device, host = limits.device_budget_bytes, limits.host_budget_bytes
    if config.device_budget == "auto" and device is not None:
        limits = replace(limits, device_budget_bytes=max(0, device - peers.met.device_bytes))
    if limits.host_auto and host is not None:
        limits = replace(limits, host_budget_bytes=max(0, host - peers.met.host_bytes))
    return limits


def _told(limits: Limits, config: OffloadConfig, module: GraphModule, undivided: bool) -> dict[str, Any]:
    budget = limits.device_budget_bytes
    return {
        "graph": structure_key([module]),
        "options": ranks.options_of(config),
        "versions": ranks.versions(),
        "host": ranks.host(),
        "room": None if budget is None else budget - limits.static_bytes - limits.reserve_bytes,
        "host_bytes": limits.host_budget_bytes,
        "undivided": undivided,
    }


def _share(told: Mapping[str, Any], hosts: list[str]) -> int | None:
    """A rank's share of its host's memory."""
    nbytes: int | None = told["host_bytes"]
    return nbytes if nbytes is None or not told["undivided"] else nbytes // hosts.count(told["host"])


def _more(own: int | None, all_bytes: list[int | None]) -> int:
    return 0 if own is None else own - min(each for each in all_bytes if each is not None)


def _exchanged(peers: Peers, mine: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """What the others told, by rank; with a warning where some of them told nothing in time."""
    found: dict[int, Mapping[str, Any]] = {}
    missing = peers.others
    try:
        peers.put(f"met/{peers.rank}", mine)
        _wait(peers)
        for rank in peers.others:
            told = peers.read(f"met/{rank}")
            if told is not None:
                peers.compare(rank, told["versions"], mine["versions"])
                if told["graph"] == mine["graph"]:
                    peers.compare(rank, told["options"], mine["options"])
                found[rank] = told
        missing = [rank for rank in peers.others if rank not in found and not peers.has(f"part/{rank}")]
    except StoreFailed:
        pass
    if missing:
        peers.warn_alone(missing, "plans its graphs without knowing what all ranks have", MEET_S)
    return found


def _wait(peers: Peers) -> None:
    """Until all have told something, or the time is over; for those that were waited for in vain a moment ago, no time."""
    awaited = [rank for rank in peers.others if rank not in peers.late]
    begin_s, said = peers.clock(), False
    while awaited and not peers.has(*(f"met/{rank}" for rank in awaited)) and peers.clock() - begin_s < MEET_S:
        if peers.clock() - begin_s > PART_S:
            awaited = [rank for rank in awaited if peers.has(f"met/{rank}") or not peers.has(f"part/{rank}")]
        if awaited and not said and peers.clock() - begin_s > _SAY_S:
            said = True
            say(f"rank {peers.rank} waits at its first compile for the other ranks' limits, {MEET_S:.0f} s at most")
        time.sleep(_LOOK_S)
