"""Which variant each call runs: found by the LP bound of the joint program, which takes milliseconds. A plan takes a second.

    graph with 8 calls    | 1 | 1 | 1 | 1 | 1 | 2 | 2 | 2 |      a mix: `count` calls run `high`, the others `low`
                            early      | spread     | late       where the calls of `high` are; here late

The calls that recompute more are late in most plans: early calls have the rest of the forward for their copies, and late ones
have none. They are early where a backward with recomputation needs much memory at once, since later calls' memory is free then.
Calls of one graph differ by their place in the step alone, so a mix of two variants is enough: one of them would be bought for
the next call, if it pays. The time at a budget falls with `count` as long as calls without recomputation wait for copies,
and rises after that. So the best count is bracketed. Graphs are treated one at a time, each given the others.
Wrong when: a mix of three variants is better; the bound is loose, as it is near the least budget. Hence the best mixes
are planned before one is taken (`solve`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from graphoffload.planner.step.facts import StepFacts

Layout = Literal["early", "spread", "late"]
_LAYOUTS: tuple[Layout, ...] = ("late", "spread", "early")
_SWEEPS = 2
ALL_MIXES = 12
"""Calls of a step whose mixes are all looked at."""
_INFINITE = float("inf")

Value = Callable[[tuple[int, ...]], float]
"""A lower bound of what a goal makes small, for a variant for each call; infinite: no plan meets the goal."""


@dataclass(frozen=True, slots=True)
class Mix:
    """The variants of one graph's calls: `count` of them run `high`, the others `low`."""

    low: int
    high: int
    count: int
    layout: Layout = "late"

    def variants(self, calls: int) -> list[int]:
        """One for each call of the graph, in order."""
        if self.layout == "spread":
            return [self.high if (k + 1) * self.count // calls > k * self.count // calls else self.low for k in range(calls)]
        high = range(self.count) if self.layout == "early" else range(calls - self.count, calls)
        return [self.high if k in high else self.low for k in range(calls)]


Mixes = tuple[Mix, ...]


def choose(facts: StepFacts, mixes: Mixes) -> tuple[int, ...]:
    """The variant of each call."""
    variants = [iter(mix.variants(count)) for mix, count in zip(mixes, calls_of(facts), strict=True)]
    return tuple(next(variants[call.graph]) for call in facts.calls)


def calls_of(facts: StepFacts) -> list[int]:
    """How many calls each graph has."""
    counts = [0] * len(facts.graphs)
    for call in facts.calls:
        counts[call.graph] += 1
    return counts


def uniform(facts: StepFacts) -> Iterator[Mixes]:
    """Every call runs the same variant, or the last one of a graph that has fewer; from the least recomputation to the most."""
    for level in range(max(len(variants) for variants in facts.graphs)):
        yield tuple(
            Mix(min(level, len(variants) - 1), min(level, len(variants) - 1), count)
            for variants, count in zip(facts.graphs, calls_of(facts), strict=True)
        )


class MixSearch:
    """Looks for the mixes with the least value. `seen`: all that were looked at, with their values.

    most: values that may be asked for. over: whether the search has to end.
    """

    def __init__(self, facts: StepFacts, value: Value, *, most: int, over: Callable[[], bool] = lambda: False) -> None:
        self.facts, self._value, self._most, self._over = facts, value, most, over
        self._calls = calls_of(facts)
        self._known: dict[tuple[int, ...], float] = {}
        self.seen: dict[Mixes, float] = {}

    def value(self, mixes: Mixes) -> float:
        """The bound of these mixes; infinite once no more values may be asked for."""
        chosen = choose(self.facts, mixes)
        if chosen not in self._known:
            if self._known and (len(self._known) >= self._most or self._over()):
                return _INFINITE
            self._known[chosen] = self._value(chosen)
        self.seen.setdefault(mixes, self._known[chosen])
        return self._known[chosen]

    def best(self) -> list[Mixes]:
        """All with a finite value, the best first; of equal ones, the one with less recomputation."""
        starts = list(uniform(self.facts))
        mixes = min(starts, key=self.value)
        if self.value(mixes) == _INFINITE:
            mixes = starts[-1]
        graphs = sorted(range(len(self._calls)), key=lambda graph: -self._saved_bytes(graph))
        for _ in range(_SWEEPS if len(graphs) > 1 else 1):
            before = self.value(mixes)
            for graph in graphs:
                mixes = min((mixes, self._one(mixes, graph)), key=self.value)
            if not self.value(mixes) < before:
                break
        found = [(value, index, mixes) for index, (mixes, value) in enumerate(self.seen.items()) if value < _INFINITE]
        return [mixes for _, _, mixes in sorted(found, key=lambda item: item[:2])]

    def _saved_bytes(self, graph: int) -> int:
        """Bytes that all calls of a graph save if they recompute nothing."""
        return self._calls[graph] * sum(candidate.nbytes for candidate in self.facts.graphs[graph][0].program.candidates)

    def _one(self, mixes: Mixes, graph: int) -> Mixes:
        """The best mix of one graph, the others as they are: pairs of the best uniform variant and each other one."""
        calls, variants = self._calls[graph], len(self.facts.graphs[graph])
        if not calls or variants == 1:
            return mixes
        if len(self.facts.calls) <= ALL_MIXES:
            return self._every(mixes, graph)
        alone = [_with(mixes, graph, Mix(variant, variant, calls)) for variant in range(variants)]
        values = [self.value(option) for option in alone]
        base = values.index(min(values)) if min(values) < _INFINITE else variants - 1
        found = [alone[base]]
        for other in range(variants):
            if other != base:
                pair = Mix(min(base, other), max(base, other), calls)
                mix = self._count(mixes, graph, pair)
                found += [_with(mixes, graph, replace(mix, layout=layout)) for layout in _LAYOUTS]
        return min((mixes, *found), key=self.value)

    def _every(self, mixes: Mixes, graph: int) -> Mixes:
        """The best mix of one graph, of all pairs and counts. Its three layouts have nearly the same bound: one is computed."""
        calls, variants = self._calls[graph], len(self.facts.graphs[graph])
        found = [_with(mixes, graph, Mix(variant, variant, calls)) for variant in range(variants)]
        for low in range(variants):
            for high in range(low + 1, variants):
                for count in range(1, calls):
                    late = _with(mixes, graph, Mix(low, high, count, "late"))
                    value = self.value(late)
                    found.append(late)
                    for layout in _LAYOUTS:
                        self.seen.setdefault(_with(mixes, graph, Mix(low, high, count, layout)), value)
        return min((mixes, *found), key=self.value)

    def _count(self, mixes: Mixes, graph: int, mix: Mix) -> Mix:
        """The best count, by Fibonacci search; where neither value is finite, more recomputation is needed."""
        low, calls = 0, self._calls[graph]

        def value(count: int) -> float:
            return self.value(_with(mixes, graph, replace(mix, count=count)))

        nearer, width = 1, 2
        while width < calls:
            nearer, width = width, nearer + width
        while width > 2:  # counts from `low` to `low + width`; one of the two looked at is looked at again in what is left
            left, right = low + width - nearer, low + nearer
            if right > calls or value(left) <= value(right) < _INFINITE:
                nearer, width = width - nearer, nearer
            else:
                low, nearer, width = left, width - nearer, nearer
        high = min(low + width, calls)
        return replace(mix, count=min(range(low, high + 1), key=value))


def neighbours(facts: StepFacts, mixes: Mixes, share: float) -> list[Mixes]:
    """The same with another variant for this share of one graph's calls: of a mix its other one, else the next ones."""
    found: list[Mixes] = []
    for graph, (mix, calls) in enumerate(zip(mixes, calls_of(facts), strict=True)):
        change = max(1, round(share * calls))
        if mix.low != mix.high:
            counts = (min(calls, mix.count + change), max(0, mix.count - change))
            found += [_with(mixes, graph, replace(mix, count=count)) for count in counts if count != mix.count]
            continue
        if mix.high + 1 < len(facts.graphs[graph]):
            found.append(_with(mixes, graph, Mix(mix.low, mix.high + 1, min(change, calls))))
        if mix.low:
            found.append(_with(mixes, graph, Mix(mix.low - 1, mix.high, max(0, calls - change))))
    return found


def _with(mixes: Sequence[Mix], graph: int, mix: Mix) -> Mixes:
    return (*mixes[:graph], mix, *mixes[graph + 1 :])
