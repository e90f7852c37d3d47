"""A plan is made once more where recomputation turns out dearer than the graph said that it was chosen in."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import graphoffload
from graphoffload.analysis.program import Instance
from graphoffload.bench.models import build
from graphoffload.compiler import one_way, prices
from graphoffload.compiler import plan_search as search
from graphoffload.compiler import trial as trials
from graphoffload.compiler.prices import Prices, at_prices_of, with_time_to_spare
from graphoffload.compiler.trial import Trial
from graphoffload.hardware.profile import PROFILES
from graphoffload.planner.problem import Candidate
from tests.compiler.test_trials import Net
from tests.plan.models import language_model

Made = list[tuple[Instance, Trial]]


CHAINS: list[Any] = []  # of each trial's analysis before it
OPTIONS: dict[str, Any] = {"hardware": PROFILES["h200-sxm"], "min_tensor_bytes": 0, "reserve": 0}


@pytest.fixture
def budget() -> int:
    """Three quarters of the peak with everything kept."""
    return int(0.75 * graphoffload.explain(Net(), policy="keep", **OPTIONS)(torch.randn(256, 64)).keep_peak_bytes)


@pytest.fixture
def made(budget: int, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Every trial for a budget, and what it was chosen from."""
    found: Made = []
    make = trials.make_trial

    def noting(analysis: Any, instance: Instance, goal: Any) -> Trial:
        CHAINS.append(analysis.chains)
        found.append((instance, trial := make(analysis, instance, goal)))
        return trial

    monkeypatch.setattr(trials, "make_trial", noting)
    return found


def plan(budget: int) -> None:
    """Nothing goes to the host, so something is recomputed."""
    graphoffload.explain(Net(), device_budget=budget, host_budget=0, **OPTIONS)(torch.randn(256, 64))


@pytest.mark.parametrize("dearer", [1.0, 30.0, 0.5, 0.01])
def test_chains_are_as_dear_as_a_trial_shows(budget: int, made: Made, monkeypatch: pytest.MonkeyPatch, dearer: float) -> None:
    """Or as cheap: those of one kind, whether this trial computed them again or not; other kinds cost what was estimated. A
    trial that computed something for next to nothing does not make it free."""
    plan(budget)
    instance, trial = made[-1]
    saved = {tensor.name for tensor in trial.analysis.table.tensors}
    kinds = itertools.cycle(("dearer", "as estimated"))
    candidates = tuple(replace(one, group=next(kinds)) for one in instance.program.candidates)
    instance = replace(instance, program=replace(instance.program, candidates=candidates))
    gone = [one for one in candidates if one.recompute and one.name not in saved]
    assert {one.group for one in gone} == {"dearer", "as estimated"}

    def factor(one: Candidate) -> float:
        return dearer if one.group == "dearer" else 1.0

    taken = {one.name: factor(one) * one.recompute.time_s for one in gone if one.recompute}
    monkeypatch.setattr(prices, "_taken", lambda *_: taken)
    assert (at_prices_of(trial, instance, {}) is None) == (dearer <= 1.0), "a slowdown is met at what was estimated"
    of = Prices(instance, {})
    assert math.copysign(1.0, of.learn(trial) - 1.0) == math.copysign(1.0, dearer - 1.0)
    for before, after in zip(instance.program.candidates, of.applied().program.candidates, strict=True):
        if before.recompute is None:
            assert after == before
        else:
            assert after.recompute is not None
            assert after.recompute.time_s == pytest.approx(max(0.3, factor(before)) * before.recompute.time_s)


def test_what_a_trial_shows_is_what_its_backward_takes_more(budget: int, made: Made) -> None:
    """Kernels that compute something again have their surplus divided among it; the others take what they took."""
    plan(budget)
    instance, trial = made[-1]
    saved = {tensor.name for tensor in trial.analysis.table.tensors}
    gone = [one for one in instance.program.candidates if one.recompute and one.name not in saved]
    taken = prices._taken(trial, instance, CHAINS[-1], gone)
    own_s, then_s = (sum(step.time_s for step in of.program.backward) for of in (instance, trial.instance))
    assert set(taken) <= {one.name for one in gone}
    assert sum(taken.values()) == pytest.approx(then_s - own_s, rel=0.2)


class T5(nn.Module):
    """A small T5 with its loss, in mixed precision."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        sizes = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 256}
        self.net = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).train()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: torch.Tensor = self.net(input_ids=ids, labels=labels, use_cache=False).loss
        return loss


@pytest.mark.long
def test_masks_of_attention_are_dear(made: Made) -> None:
    """Random numbers that two kernels of backward read are written to memory, and the sum of a position bias's gradient is one
    of the two. So a plan that computes masks again is slower than it was chosen to be, and is made once more."""
    net, words = T5(), (torch.ones(32, 256, dtype=torch.int64), torch.ones(32, 64, dtype=torch.int64))
    keep = graphoffload.explain(net, policy="keep", **OPTIONS)(*words).keep_peak_bytes
    made.clear()
    report = graphoffload.explain(net, device_budget=int(0.8 * keep), host_budget=0, **OPTIONS)(*words)
    first = made[0][1]
    assert report.predicted_slowdown < 0.9 * (first.timeline.time_s / first.decided.keep_timeline.time_s - 1.0)


@pytest.mark.long
def test_a_plan_that_takes_more_than_was_chosen_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two points of a step, where all recomputation was estimated at three: a Mamba's chunks are dearer to compute again."""
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 1024, "state_size": 128, "num_heads": 32, "head_dim": 64, "n_groups": 1, "num_hidden_layers": 2}
    net, words = language_model("Mamba2", 4, 2048, use_cache=False, **sizes)
    keep = graphoffload.explain(net, policy="keep", **OPTIONS)(**words).keep_peak_bytes

    def slowdown(share: float) -> float:
        report = graphoffload.explain(net, device_budget=int(share * keep), host_budget=0, **OPTIONS)(**words)
        return report.predicted_slowdown

    known = slowdown(0.8)
    assert known <= slowdown(0.7)
    monkeypatch.setattr(Prices, "learn", lambda *_: 1.0)
    assert known <= slowdown(0.8) - 0.01


def test_copies_get_time_to_spare(budget: int, made: Made) -> None:
    plan(budget)
    analysis = made[-1][1].analysis
    careful, hardware = with_time_to_spare(analysis).hardware, analysis.hardware
    assert careful.d2h_bytes_per_s == pytest.approx(0.8 * hardware.d2h_bytes_per_s)
    assert careful.h2d_bytes_per_s == pytest.approx(0.8 * hardware.h2d_bytes_per_s)
    assert careful.matmul_flops_per_s == hardware.matmul_flops_per_s


@pytest.mark.parametrize("faster", [True, False])
def test_the_faster_of_both_is_taken(budget: int, made: Made, monkeypatch: pytest.MonkeyPatch, *, faster: bool) -> None:
    """Chosen at other prices, and judged by what it takes: on the link as it is and on one a fifth slower."""
    monkeypatch.setattr(search, "is_far", lambda *_, **__: False)
    monkeypatch.setattr(one_way, "_is_as_chosen", lambda *_: len(made) >= 2)
    monkeypatch.setattr(Prices, "learn", lambda *_: 2.0)
    monkeypatch.setattr(Prices, "applied", lambda prices: replace(prices.instance))
    simulated = trials.on

    def other(trial: Trial, hardware: Any) -> Trial:
        found = simulated(trial, hardware)
        slow = hardware.d2h_bytes_per_s < PROFILES["h200-sxm"].d2h_bytes_per_s
        return replace(found, timeline=replace(found.timeline, time_s=9.0 if faster else 0.0)) if slow else found

    monkeypatch.setattr(trials, "on", other)
    taken: list[Trial] = []
    of = one_way._at_shown_prices

    def noting(*given: Any) -> Trial:
        taken.append(of(*given))
        return taken[-1]

    monkeypatch.setattr(one_way, "_at_shown_prices", noting)
    plan(budget)
    first, second = (trial for _, trial in made)
    (best,) = taken
    assert best.analysis.pair is (second if faster else first).analysis.pair
    assert best.shown_bound_s == second.decided.lower_bound_s
    assert best.decided.lower_bound_s == first.decided.lower_bound_s, "what no plan is faster than"
    assert best.analysis.hardware == PROFILES["h200-sxm"]


def test_what_is_faster_on_a_slower_link_alone_is_not_taken(
    budget: int, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "is_far", lambda *_, **__: False)
    monkeypatch.setattr(one_way, "_is_as_chosen", lambda *_: len(made) >= 2)
    monkeypatch.setattr(Prices, "learn", lambda *_: 2.0)
    monkeypatch.setattr(Prices, "applied", lambda prices: replace(prices.instance))
    simulated, found = trials.on, list[Trial]()
    of = one_way._at_shown_prices

    def slow(trial: Trial, hardware: Any) -> Trial:
        """The first trial on the slower link, and the second one on the link as it is."""
        at = simulated(trial, hardware)
        return replace(at, timeline=replace(at.timeline, time_s=9.0))

    def noting(*given: Any) -> Trial:
        found.append(of(*given))
        return found[-1]

    monkeypatch.setattr(trials, "on", slow)
    monkeypatch.setattr(one_way, "_at_shown_prices", noting)
    plan(budget)
    assert len(made) == 2
    assert found[0].analysis.pair is made[0][1].analysis.pair


def test_a_bound_is_the_lower_of_both_that_say_anything(budget: int, made: Made) -> None:
    """A plan for outputs that nobody holds may undercut the bound of plans for outputs that are held."""
    plan(budget)
    trial = made[-1][1]
    keep_s = trial.decided.keep_timeline.time_s

    def bound(own_s: float | None, first_s: float | None) -> float | None:
        own, first = (replace(trial, decided=replace(trial.decided, lower_bound_s=s)) for s in (own_s, first_s))
        return one_way.bounded(own, first).decided.lower_bound_s

    assert bound(1.02 * keep_s, 1.05 * keep_s) == 1.02 * keep_s
    assert bound(1.08 * keep_s, 1.05 * keep_s) == 1.05 * keep_s
    assert bound(keep_s, 1.05 * keep_s) == 1.05 * keep_s, "that no step is faster than everything kept"
    assert bound(None, 1.05 * keep_s) == 1.05 * keep_s
    assert bound(1.02 * keep_s, None) is None


def test_a_slowdown_is_planned_for_again_at_the_prices_that_showed(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same slowdown, before a smaller one, which would buy less."""
    excess, priced = trials.excess_of, list[Instance]()
    too_slow = [0.001, 0.0, 0.002]  # the first, the second on a slower link, and as it is

    def dearer(_: Trial, instance: Instance, chains: Any) -> Instance:
        priced.append(replace(instance))
        return priced[-1]

    monkeypatch.setattr(search, "at_prices_of", dearer)
    monkeypatch.setattr(trials, "excess_of", lambda r, d, t: too_slow.pop(0) if too_slow else excess(r, d, t))
    goals: list[float] = []
    make = one_way.make

    def noting(analysis: Any, instance: Instance, goal: Any) -> Trial:
        goals.append(getattr(goal, "max_slowdown", 0.0))
        return make(analysis, instance, goal)

    for module in (one_way, search):
        monkeypatch.setattr(module, "make", noting)
    graphoffload.explain(Net(), max_slowdown=0.05, **OPTIONS)(torch.randn(256, 64))
    assert len(priced) == 1
    assert [instance is priced[0] for instance, _ in made[:3]] == [False, True, True]
    assert goals[:2] == [0.05, 0.05]
    assert goals[2] < 0.05


@pytest.mark.long
def test_a_unet_copies_what_is_dear_to_compute_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group norm that runs again costs four times what it did in forward: a fifth of the slowdown goes."""
    workload = build("unet", torch.device("meta"), {"levels": 2, "image": 64, "batch": 16, "width": 256})
    inputs = {**workload.batch, **workload.constants}

    def explained(**options: Any) -> graphoffload.OffloadReport:
        return graphoffload.explain(workload.module, hardware="h100-sxm", reserve=0, **options)(**inputs)

    keep = explained(policy="keep").keep_peak_bytes
    parameters = sum(parameter.nbytes for parameter in workload.module.parameters())
    budget = parameters + int(0.8 * (keep - parameters))
    priced, used = explained(device_budget=budget), explained(max_slowdown=0.03)
    assert used.predicted_slowdown <= 0.03
    assert used.predicted_peak_bytes <= 0.9 * keep, "0.03 bought nothing where trials were made for less and less"
    monkeypatch.setattr(Prices, "learn", lambda *_: 1.0)
    first = explained(device_budget=budget)
    assert priced.offloaded_bytes > first.offloaded_bytes
    assert priced.predicted_slowdown <= 0.8 * first.predicted_slowdown
