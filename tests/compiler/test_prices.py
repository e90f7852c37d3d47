"""A plan is made once more where recomputation turns out dearer than the graph said that it was chosen in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import graphoffload
from graphoffload.analysis.program import Instance
from graphoffload.bench.models import build
from graphoffload.compiler import plan_search as search
from graphoffload.compiler import trial as trials
from graphoffload.compiler.prices import at_prices_of, with_time_to_spare
from graphoffload.compiler.trial import Trial
from graphoffload.hardware.profile import PROFILES
from graphoffload.planner.problem import Step
from tests.compiler.test_trials import Net

Made = list[tuple[Instance, Trial]]


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
        found.append((instance, trial := make(analysis, instance, goal)))
        return trial

    monkeypatch.setattr(trials, "make_trial", noting)
    return found


def plan(budget: int) -> None:
    """Nothing goes to the host, so something is recomputed."""
    graphoffload.explain(Net(), device_budget=budget, host_budget=0, **OPTIONS)(torch.randn(256, 64))


def longer(trial: Trial, seconds: float) -> Trial:
    """The same trial, with a backward that takes longer."""
    program = trial.instance.program
    step = Step("more", seconds)
    steps = (*program.reload_steps, program.reload_steps[-1])
    program = replace(program, backward=(*program.backward, step), reload_steps=steps)
    return replace(trial, instance=replace(trial.instance, program=program))


def test_chains_are_as_dear_as_a_trial_shows(budget: int, made: Made) -> None:
    """Of what a backward takes longer than with everything kept, each chain has its share."""
    plan(budget)
    instance, trial = made[-1]
    saved = {tensor.name for tensor in trial.analysis.table.tensors}
    gone = [one.recompute for one in instance.program.candidates if one.recompute and one.name not in saved]
    own_s, total_s = (
        sum(step.time_s for step in (*of.program.forward, *of.program.backward)) for of in (instance, trial.instance)
    )
    estimated_s, extra_s = sum(chain.time_s for chain in gone), 1.0
    assert estimated_s > 0
    assert at_prices_of(longer(trial, max(0.0, own_s + estimated_s - total_s)), instance) is None, "as dear as estimated"
    priced = at_prices_of(longer(trial, extra_s), instance)
    assert priced is not None
    factor = (total_s + extra_s - own_s) / estimated_s
    for before, after in zip(instance.program.candidates, priced.program.candidates, strict=True):
        if before.recompute is None:
            assert after == before
        else:
            assert after.recompute is not None
            assert after.recompute.time_s == pytest.approx(factor * before.recompute.time_s)


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
    monkeypatch.setattr(search, "_is_far", lambda *_, **__: len(made) < 2)
    monkeypatch.setattr(search, "at_prices_of", lambda _, instance: replace(instance))
    simulated = trials.on

    def other(trial: Trial, hardware: Any) -> Trial:
        found = simulated(trial, hardware)
        slow = hardware.d2h_bytes_per_s < PROFILES["h200-sxm"].d2h_bytes_per_s
        return replace(found, timeline=replace(found.timeline, time_s=9.0 if faster else 0.0)) if slow else found

    monkeypatch.setattr(trials, "on", other)
    taken: list[Trial] = []
    of = search._at_shown_prices

    def noting(*given: Any) -> Trial:
        taken.append(of(*given))
        return taken[-1]

    monkeypatch.setattr(search, "_at_shown_prices", noting)
    plan(budget)
    first, second = (trial for _, trial in made)
    (best,) = taken
    assert best.analysis.pair is (second if faster else first).analysis.pair
    assert best.shown_bound_s == second.decided.lower_bound_s
    assert best.decided.lower_bound_s == first.decided.lower_bound_s, "what no plan is faster than"
    assert best.analysis.hardware == PROFILES["h200-sxm"]


def test_a_slowdown_is_planned_for_again_at_the_prices_that_showed(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same slowdown, before a smaller one, which would buy less."""
    excess, priced = trials.excess_of, list[Instance]()
    too_slow = [0.001, 0.0, 0.002]  # the first, the second on a slower link, and as it is

    def dearer(_: Trial, instance: Instance) -> Instance:
        priced.append(replace(instance))
        return priced[-1]

    monkeypatch.setattr(search, "at_prices_of", dearer)
    monkeypatch.setattr(trials, "excess_of", lambda r, d, t: too_slow.pop(0) if too_slow else excess(r, d, t))
    goals: list[float] = []
    make = search._make

    def noting(analysis: Any, instance: Instance, goal: Any) -> Trial:
        goals.append(getattr(goal, "max_slowdown", 0.0))
        return make(analysis, instance, goal)

    monkeypatch.setattr(search, "_make", noting)
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
    monkeypatch.setattr(search, "at_prices_of", lambda *_: None)
    first = explained(device_budget=budget)
    assert priced.offloaded_bytes > first.offloaded_bytes
    assert priced.predicted_slowdown <= 0.8 * first.predicted_slowdown
