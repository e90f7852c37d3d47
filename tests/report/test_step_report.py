"""The report of a step: its text, its picture in two layers, and the plans of a step that training made."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from graphoffload.facts.goals import MeetBudget
from graphoffload.facts.plan import Decision, Plan, Prediction
from graphoffload.facts.saved_tensors import SavedTable, SavedTensor
from graphoffload.hardware.profile import PROFILES
from graphoffload.planner.step.facts import CallFacts, StepFacts, StepProblem
from graphoffload.planner.step.joint import join
from graphoffload.planner.step.solve import plan_step
from graphoffload.report.ledger import Ledger, fit_lines, ledger_lines
from graphoffload.report.offload_report import OffloadReport
from graphoffload.report.step_line import slow_host
from graphoffload.report.step_picture import trace_json
from graphoffload.report.step_report import StepReport, folded_calls, outside_at, outside_of, report_of_step
from graphoffload.report.step_svg import timeline_svg
from tests.plan.steps import llama

GIB = 2**30
HARDWARE = PROFILES["h200-sxm"]


def solved(count: int = 8, share: float = 0.6) -> tuple[StepFacts, StepReport]:
    """Blocks, planned for a share of keep-all's peak."""
    facts = llama(count)
    keep = plan_step(StepProblem(facts, HARDWARE, MeetBudget(2**60))).keep_timeline.peak_bytes
    budget = int(keep * share)
    solution = plan_step(StepProblem(facts, HARDWARE, MeetBudget(budget)))
    return facts, report_of_step(solution, facts, ["graph0"] * count, "the line", 0, budget, HARDWARE)


def test_calls_are_folded() -> None:
    calls = [*[("graph0", "light")] * 5, *[("graph0", "third")] * 3]
    assert folded_calls(calls) == "8 x graph0: light x 5, third x 3"
    assert folded_calls([("graph1", "keep"), *calls[:2]]) == "graph1: keep; 2 x graph0: light x 2"


def test_every_byte_of_every_call_is_kept_recomputed_or_offloaded() -> None:
    facts, step = solved()
    assert len(step.calls) == len(facts.calls)
    assert step.predicted_peak_bytes <= (step.budget_bytes or 0) < step.keep_peak_bytes
    assert step.lower_bound_time_s is not None
    assert step.keep_time_s <= step.lower_bound_time_s <= step.predicted_time_s
    assert step.offloaded_bytes + step.recomputed_bytes > 0
    everything = sum(c.nbytes for call in facts.calls for c in facts.graphs[call.graph][0].program.candidates)
    assert step.kept_bytes < everything
    text = "\n".join(step.lines())
    assert text.startswith("one step runs 8 x graph0: ")
    assert text.endswith("the line")


def test_the_picture_has_all_calls_and_memory_in_two_layers() -> None:
    facts, step = solved()
    picture = step.picture
    layers = [label for lane, _, _, label in picture.lanes if lane == "layer"]
    assert sorted(int(label.rpartition(".")[2]) for label in layers) == sorted([*range(8), *range(8)])
    assert len(picture.memory_outside) == len(picture.memory_plan)
    for (at_s, outside), (other_s, all_of_it) in zip(picture.memory_outside, picture.memory_plan, strict=True):
        assert at_s == other_s
        assert facts.base_bytes <= outside <= all_of_it
    assert max(nbytes for _, nbytes in picture.memory_plan) == step.predicted_peak_bytes
    svg = timeline_svg(picture)
    assert 'class="outside"' in svg
    assert "outside: peak " in svg
    assert "memory, outside the graphs" in trace_json(picture)
    assert "memory, outside the graphs" not in trace_json(replace(picture, memory_outside=()))


def test_outside_is_what_the_facts_say() -> None:
    program = llama(2).graphs
    calls = (CallFacts(0, 7 * GIB, 9 * GIB), CallFacts(0, 8 * GIB, 10 * GIB))
    facts = StepFacts(program, calls, base_bytes=GIB)
    joined = join(facts, (0, 0))
    half = len(joined.program.forward)
    assert set(outside_at(joined)) == {7 * GIB, 8 * GIB, 9 * GIB, 10 * GIB}
    assert outside_of(facts, (0, 0), 0) == (7 * GIB, 0, False)
    assert outside_of(facts, (0, 0), joined.forward_start[1]) == (8 * GIB, 1, False)
    assert outside_of(facts, (0, 0), half) == (10 * GIB, 1, True)
    assert outside_of(facts, (0, 0), half + joined.backward_start[0]) == (9 * GIB, 0, True)


def test_a_host_that_is_the_limit_is_said() -> None:
    program = llama(2).graphs
    facts = StepFacts(program, (CallFacts(0, GIB, GIB), CallFacts(0, GIB, GIB)))
    one = program[0][0].program
    assert facts.ran_s == pytest.approx(2 * sum(step.time_s for step in (*one.forward, *one.backward)))
    assert slow_host(facts) == "", "nobody timed it"
    assert slow_host(replace(facts, host_s=facts.ran_s)) == "", "a full queue makes the host wait for the GPU"
    said = slow_host(replace(facts, host_s=1.3 * facts.ran_s))
    assert f"took {1.3e3 * facts.ran_s:.1f} ms to issue what the GPU runs in {1e3 * facts.ran_s:.1f} ms" in said


def test_a_report_with_a_step_comes_back_from_json(tmp_path: Path) -> None:
    _, step = solved()
    assert StepReport.from_dict(json.loads(json.dumps(asdict(step)))) == step
    ledger = Ledger(parameters_bytes=1, gradients_bytes=2, optimizer_bytes=None, activations_bytes=3, outside_bytes=4)
    report = OffloadReport(step=step, ledger=ledger, keep_ledger=ledger, budget_bytes=9)
    assert OffloadReport.from_json(report.to_json()) == report
    assert {path.name for path in report.save_pictures(tmp_path)} == {"step.nokey.timeline.svg", "step.nokey.trace.json"}
    old = json.loads(report.to_json())
    for name in ("step", "ledger", "keep_ledger", "budget_bytes"):
        del old[name]
    assert OffloadReport.from_json(json.dumps(old)).step is None, "a report of before"


def variant(name: str, of: Prediction, *, part: bool = False) -> Plan:
    saved = SavedTable((SavedTensor(name="a", views=(), nbytes=8, dtype="", shape=(), strides=(), op=""),))
    plan = Plan(key=name, graph="graph0", saved=saved, decisions=(Decision("a", "recompute", "r"),), prediction=of)
    return replace(plan, variant=name, part=part, summary=f"line {of}")


def prediction(keep_bytes: int, peak_bytes: int, time_s: float, bound_s: float) -> Prediction:
    return Prediction(
        keep_peak_bytes=keep_bytes, predicted_peak_bytes=peak_bytes, keep_time_s=1.0, predicted_time_s=time_s,
        lower_bound_time_s=bound_s,
    )  # fmt: skip


def test_variants_of_a_step_say_its_numbers_once() -> None:
    """Their plans have the prediction of the step in common: a sum over them counted it several times."""
    of_step, alone = prediction(80, 60, 1.1, 1.05), prediction(20, 10, 2.0, 1.5)
    other = Plan(key="other", graph="graph1", prediction=alone, decisions=(Decision("b", "recompute", "r"),))
    first = variant("smallest", replace(alone, predicted_time_s=9.0), part=True)
    whole = replace(first, key="whole", variant="", prediction=replace(alone, predicted_peak_bytes=70, reserve_bytes=5))
    report = OffloadReport(plans=(whole, first, other, variant("light", of_step), variant("third", of_step)))
    assert report.predicted_slowdown == (1.1 + 2.0) / 2.0 - 1.0
    assert report.lower_bound_slowdown == (1.05 + 1.5) / 2.0 - 1.0
    assert (report.predicted_peak_bytes, report.keep_peak_bytes, report.reserve_bytes) == (60, 80, 0)
    text = str(report)
    assert text.count("line Prediction") == 1
    assert "variant smallest" not in text, "it ran before the step was planned"
    before = OffloadReport(plans=(first,))
    assert "variant smallest" in str(before)
    assert before.predicted_peak_bytes == 10


def test_the_ledger_says_what_is_not_counted_and_what_does_not_fit() -> None:
    plan = Ledger(
        parameters_bytes=GIB, gradients_bytes=None, optimizer_bytes=None, activations_bytes=2 * GIB, outside_bytes=GIB
    )
    keep = replace(plan, activations_bytes=8 * GIB)
    text = "\n".join(ledger_lines(plan, keep))
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("optimizer state")] == ["counted"]
    assert "activations and gradients" in text
    assert "\nreserve" not in text
    assert text.splitlines()[-1].split() == ["all", "together", "10.0", "GiB", "4.00", "GiB"]
    assert fit_lines(4 * GIB, 10 * GIB, None) == fit_lines(4 * GIB, 10 * GIB, 10 * GIB) == []
    (line,) = fit_lines(4 * GIB, 10 * GIB, 6 * GIB)
    assert line == (
        "keep-all does not fit: it needs 10.0 GiB, 4.00 GiB more than the 6.00 GiB that there are; the plan fits with 4.00 GiB"
    )
    both = fit_lines(4 * GIB, 10 * GIB, 3 * GIB)
    assert both[1].startswith("the plan does not fit: it needs 4.00 GiB, 1.00 GiB more than the 3.00 GiB that there are: raise")
