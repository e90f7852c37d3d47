"""Rounds in which the ranks that run the same step agree on its plan, through the store, and none of them waits inside a step.

    run start    rank 0                                rank 1
    3            tells its facts                       tells its facts
    4            all have told: solves, tells          nothing new: runs on as before
    5            takes the decision, compiles          takes the decision, compiles

    later        has a reason to plan again:           hears of round 1 at its next run start, tells its facts,
                 opens round 1, tells its facts        and so on

Each rank looks once at the start of a run, and runs on with what it has if there is nothing new. So ranks that are one run
apart, one of them in a collective that waits for the other, cannot block each other. Which ranks run this step is what they
list themselves; ranks of a pipeline list others.

    of/RANK                 steps that it runs, versions, its host
    STEP/ROUND/RANK         its facts
    STEP/ROUND/asked        who opened the round, and why (none for round 0)
    STEP/ROUND/claim        counted: the first rank that asks may solve
    STEP/ROUND/decision     what all do

The lowest rank of a round solves. A rank that comes to a round late takes its decision. One that tells nothing by the deadline
is left out, and said; if it was to solve, each of the others plans alone after twice that time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graphoffload.compiler import ranks as of_ranks
from graphoffload.compiler.ranks import Peers

GRACE_RUNS = 2
"""Runs for which a rank that lists other steps may still come to list this one: ranks whose collectives keep them in step are
at most one run apart."""


@dataclass(frozen=True, slots=True)
class Solve:
    """This rank solves. told: what each rank of the round told, this one among them. missing: ranks that told nothing."""

    told: Mapping[int, Any]
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decided:
    """What all do. value: as the rank that solved told it."""

    value: Any


@dataclass(frozen=True, slots=True)
class Opened:
    """Another rank has opened a later round."""

    why: str


@dataclass(frozen=True, slots=True)
class Alone:
    """Nobody has decided in time. missing: the ranks that were waited for."""

    missing: tuple[int, ...]


News = Solve | Decided | Opened | Alone


@dataclass(slots=True)
class Rounds:
    """The rounds of one step as one rank sees them.

    Attributes:
        name: of the step, the same on all ranks. round: the latest that this rank has told something in; -1: none.
        alone: nobody had decided in time in that round.
        told: by rank, what it told in this round; None: it runs other steps, and not this one.
    """

    peers: Peers
    name: str
    round: int = -1
    told: dict[int, Any] = field(default_factory=dict)
    alone: bool = False
    _since_s: float = 0.0
    _looks: int = 0
    _claimed: bool = False

    def tell(self, value: Mapping[str, Any], why: str) -> None:
        """Tell this rank's facts in the latest round that there is, or open the next one. `value`: with "options", and "goal":
        ranks that have another one do not decide yet.

        Raises:
            StoreFailed: the store does not answer.
        """
        before = self.round
        self.round = max(0, self.round)
        while self.peers.has(self._key("asked", self.round + 1)):
            self.round += 1
        if self.round == before:
            self.round += 1
            self.peers.put(self._key("asked"), {"rank": self.peers.rank, "why": why})
        self.told = {self.peers.rank: dict(value)}
        self._since_s, self._looks, self._claimed, self.alone = self.peers.clock(), 0, False, False
        self.peers.put(self._key(self.peers.rank), value)
        self.peers.list(self.name)

    def asked(self) -> str | None:
        """Why there is a later round, if another rank has opened one or should; one question to the store.

        Raises:
            StoreFailed: the store does not answer.
        """
        key = self._key("asked", self.round + 1)
        if not self.peers.has(key):
            return "other ranks have decided since" if self.alone and self.peers.has(self._key("decision")) else None
        found = self.peers.read(key)
        return f"rank {found['rank']} asked for it: {found['why']}"

    def news(self) -> News | None:
        """What has happened since; None: nothing that lets this rank go on. To be asked once at the start of each run.

        Raises:
            StoreFailed: the store does not answer. ConfigError: ranks of this step have different options or versions.
        """
        self._looks += 1
        if (why := self.asked()) is not None:
            return Opened(why)
        if (found := self.peers.read(self._key("decision"))) is not None:
            self.peers.compare(found["rank"], found["options"], self.told[self.peers.rank]["options"])
            return Decided(found["value"])
        spent_s = self.peers.clock() - self._since_s
        late = spent_s > self.peers.deadline_s and self._looks > of_ranks.DEADLINE_RUNS
        solver = self._solver(late)
        if solver == self.peers.rank and not self._claimed:
            present = {rank: told for rank, told in sorted(self.told.items()) if told is not None}
            self._claimed = len({told["goal"] for told in present.values()}) == 1
            if self._claimed and self.peers.first(self._key("claim")):
                missing = self._unknown()
                self.peers.absent.update(missing)
                return Solve(present, tuple(missing))
        if spent_s > 2.0 * self.peers.deadline_s and self._looks > 2 * of_ranks.DEADLINE_RUNS:
            self.alone = True
            others = [rank for rank, told in self.told.items() if told is not None and rank != self.peers.rank]
            return Alone(tuple(others if solver in (None, self.peers.rank) else [solver]))
        return None

    def leave(self) -> None:
        """This rank plans no such step: the others need not wait for it.

        Raises:
            StoreFailed: the store does not answer.
        """
        self.peers.list("")

    def decide(self, value: Any) -> None:
        """Tell what all do.

        Raises:
            StoreFailed: the store does not answer.
        """
        found = {"rank": self.peers.rank, "options": self.told[self.peers.rank]["options"], "value": value}
        self.peers.put(self._key("decision"), found)

    def _key(self, last: object, number: int | None = None) -> str:
        return f"{self.name}/{self.round if number is None else number}/{last}"

    def _unknown(self) -> list[int]:
        """Ranks that have said nothing yet, without those that were waited for in vain before."""
        return [rank for rank in self.peers.others if rank not in self.told and rank not in self.peers.absent]

    def _solver(self, late: bool) -> int | None:
        """The rank that solves: the lowest of this step; None: not known yet.

        A rank reads what the lower ones say until it finds one of this step. Only the lowest reads what all say.
        """
        for rank in range(self.peers.rank):
            self._read(rank, late)
            if self.told.get(rank) is not None:
                return rank
            if rank in self._unknown() and not late:
                return None
        unknown = self._unknown()
        if unknown and not late and not self.peers.has(*(f"of/{rank}" for rank in unknown)):
            return None
        for rank in self.peers.others:
            self._read(rank, late)
        return self.peers.rank if late or not self._unknown() else None

    def _read(self, rank: int, late: bool) -> None:
        """What another rank has told in this round, if that is not known."""
        if rank in self.told or (listed := self.peers.listed(rank)) is None:
            return
        if self.name not in listed["steps"]:
            if late or self._looks > GRACE_RUNS:
                self.told[rank] = None
                if any(_structure(name) == _structure(self.name) for name in listed["steps"]):
                    self.peers.warn_apart(rank)
        elif (value := self.peers.read(self._key(rank))) is not None:
            self.peers.compare(rank, value["options"], self.told[self.peers.rank]["options"])
            self.told[rank] = value
            self.peers.absent.discard(rank)


def _structure(name: str) -> str:
    """What steps of this name run; the rest of a name counts equal ones of a process."""
    return name.rpartition(".")[0]
