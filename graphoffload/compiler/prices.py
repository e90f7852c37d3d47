"""What recomputation costs, as far as trials have shown it.

    chosen among    a chain's own operations, as the forward ran them: 0.1 ms for a group norm of 256 MiB
    the trial       the graph partitioned again: its kernels read the chain's sources once more, others fuse less: 0.4 ms

What the trial shows is what runs. A chain that looks free is chosen over a copy that hides, or over another chain; one that
a kernel of backward computes beside its own work is cheaper than it looks. So the choice is made once more with the prices of
the trial, and again with those of the next. What a kernel of backward takes more than before is the price of the activations
that it computes again, in equal parts. Activations of the same kind, such as the dropout masks of all layers, have one price
for each second that was estimated.

Copies must then hide with time to spare: kernels that are shorter in a step than they are alone, as convolutions are where no
products of matrices heat the GPU, leave less time than planned, and compute waits for the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch.fx import Node

from graphoffload.analysis.chains import Chain
from graphoffload.analysis.fusion import Fusion, fusion_of
from graphoffload.analysis.program import Instance
from graphoffload.analysis.storages import fake, storage_id
from graphoffload.compiler.request import GraphAnalysis
from graphoffload.compiler.trial import Trial
from graphoffload.planner.problem import Candidate

DIFFERS = 1.1
"""Prices that differ by less than this factor lead to about the same choice."""
_LEAST = 0.3  # of what was estimated: what one trial's kernels compute on the way, those of another may not
_LINK = 0.8


@dataclass
class Prices:
    """What trials have shown of the candidates of one instance.

    seconds, estimated_s: by kind of activation, over all that were computed again: what they took, and what was estimated.
    """

    instance: Instance
    chains: Mapping[str, Chain]
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    estimated_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def learn(self, trial: Trial) -> float:
        """Add what a trial has shown; how much dearer that was than it would have been taken for: 2.0 for twice as dear."""
        saved = {tensor.name for tensor in trial.analysis.table.tensors}
        again = [one for one in self.instance.program.candidates if one.recompute and one.name not in saved]
        taken_for_s = sum(map(self.price_s, again))
        taken = _taken(trial, self.instance, self.chains, again)
        for one in again:
            assert one.recompute is not None
            self.seconds[one.group] += taken.get(one.name, 0.0)
            self.estimated_s[one.group] += one.recompute.time_s
        return sum(map(self.price_s, again)) / taken_for_s if taken_for_s else 1.0

    def price_s(self, candidate: Candidate) -> float:
        """What candidates of its kind have shown, or else what was estimated."""
        assert candidate.recompute is not None
        estimated_s, kind = candidate.recompute.time_s, candidate.group
        known = self.seconds[kind] / self.estimated_s[kind] if self.estimated_s.get(kind) else 1.0
        return estimated_s * max(_LEAST, known)

    def applied(self) -> Instance:
        """The instance with these prices."""
        program = self.instance.program
        return replace(self.instance, program=replace(program, candidates=tuple(map(self._priced, program.candidates))))

    def _priced(self, candidate: Candidate) -> Candidate:
        if candidate.recompute is None:
            return candidate
        return replace(candidate, recompute=replace(candidate.recompute, time_s=self.price_s(candidate)))


def at_prices_of(trial: Trial, instance: Instance, chains: Mapping[str, Chain]) -> Instance | None:
    """`instance` at the prices that one trial has shown; None if they are no dearer than what was estimated."""
    prices = Prices(instance, chains)
    return prices.applied() if prices.learn(trial) > DIFFERS else None


def with_time_to_spare(analysis: GraphAnalysis) -> GraphAnalysis:
    """`analysis` with a link that is a fifth slower."""
    return replace(analysis, hardware=analysis.hardware.scaled(link=_LINK))


def _taken(trial: Trial, instance: Instance, chains: Mapping[str, Chain], again: list[Candidate]) -> Mapping[str, float]:
    """Seconds that kernels of a trial's backward take more than those of `instance`, by activation that is computed again."""
    graph = trial.analysis.pair.backward.graph
    fusion = fusion_of(graph, fuses=trial.analysis.fuses, unfused_bytes=trial.analysis.unfused_bytes)
    own, then = ({step.name: step.time_s for step in of.program.backward} for of in (instance, trial.instance))
    parts = defaultdict[str, list[str]](list)
    for one in again:
        for name in {one.name, *chains[one.name].nodes}:
            parts[name].append(one.name)
    kernels = defaultdict[tuple[int, int], list[Node]](list)
    for node, span in fusion.spans.items():
        kernels[span].append(node)
    found = defaultdict[str, float](float)
    for nodes in kernels.values():
        more_s = sum(then.get(node.name, 0.0) - own.get(node.name, 0.0) for node in nodes)
        names = {name for node in _computed(nodes, fusion) for name in parts.get(node.name, ())}
        for name in names:
            found[name] += more_s / len(names)
    return found


def _computed(nodes: list[Node], fusion: Fusion) -> Iterator[Node]:
    """The nodes of a kernel, with those that it computes without writing their values."""
    pending, seen = list(nodes), set(nodes)
    while pending:
        node = pending.pop()
        yield node
        for source in node.all_input_nodes:
            value = fake(source)
            if source in seen or value is None or source.op != "call_function":
                continue
            if fusion.kinds[source] == "view" or fusion.read_for(storage_id(value), node) != {storage_id(value)}:
                seen.add(source)
                pending.append(source)
