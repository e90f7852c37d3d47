"""Pictures of a step: lanes, stalls, both memory curves and the budget where they belong; and what a report makes of them."""

from __future__ import annotations

import dataclasses
import json
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import graphoffload
from graphoffload.errors import ConfigError
from graphoffload.facts.plan import Decision, Plan, Prediction, Transfer
from graphoffload.facts.saved_tensors import SavedTable, SavedTensor
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.planner.predicted import Predicted
from graphoffload.planner.problem import Candidate, Program, Step
from graphoffload.planner.simulator import simulate
from graphoffload.report import predictions
from graphoffload.report.offload_report import OffloadReport
from graphoffload.report.step_picture import StepPicture, picture_of, trace_json
from graphoffload.report.step_svg import timeline_svg

SVG = "{http://www.w3.org/2000/svg}"
GIB = 2**30
LANES = (
    ("compute", 0.0, 0.010, "forward"),
    ("compute", 0.010, 0.020, "backward"),
    ("D2H", 0.005, 0.015, "relu, mlp, 1 MiB"),
    ("H2D", 0.016, 0.024, "relu, mlp, 1 MiB"),
)
KEEP, PLAN = ((0.0, 4 * GIB), (0.010, 9 * GIB), (0.024, 0)), ((0.0, 4 * GIB), (0.010, 6 * GIB), (0.024, 0))
PICTURE = StepPicture(
    title="graph 0", lanes=LANES, stalls=((0.020, 0.024, "waits for relu"),), memory_keep=KEEP, memory_plan=PLAN,
    budget_bytes=7 * GIB, forward_end_s=0.010, facts=("keep-all 20 ms",),
)  # fmt: skip


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg.encode())


def of_class(svg: str, kind: str) -> list[ElementTree.Element]:
    return [found for found in parsed(svg).iter() if found.get("class") == kind]


def texts(svg: str) -> list[str]:
    return [found.text or "" for found in parsed(svg).iter(f"{SVG}text")]


def number(found: ElementTree.Element, name: str) -> float:
    return float(found.get(name, "nan"))


def test_lanes_stalls_and_key() -> None:
    svg = timeline_svg(PICTURE)
    spans, (stall,) = of_class(svg, "span"), of_class(svg, "stall")
    assert len(spans) == 4
    assert stall.get("y") == spans[0].get("y"), "compute stalls in the compute lane"
    assert number(stall, "width") == pytest.approx(0.4 * number(spans[0], "width"), rel=0.02)
    shown = texts(svg)
    for text in ("graph 0", "keep-all 20 ms", "compute", "D2H", "H2D", "memory", "time (ms)", "0", "10", "20", "4.00 GiB"):
        assert text in shown, text
    assert "keep-all: peak 9.00 GiB at 10 ms" in shown
    assert "plan: peak 6.00 GiB at 10 ms" in shown
    assert "budget 7.00 GiB" in shown
    titles = [found.text for found in parsed(svg).iter(f"{SVG}title")]
    assert "stall, 4 ms: waits for relu" in titles
    assert "relu, mlp, 1 MiB, 8 ms" in titles


def tops(svg: str) -> dict[str, float]:
    """Least y of each curve, smaller is higher."""
    paths = [path for path in parsed(svg).iter(f"{SVG}path") if path.get("class")]
    return {path.get("class", ""): min(float(y) for y in re.findall(r"V([\d.]+)", path.get("d", ""))) for path in paths}


def test_higher_memory_is_drawn_higher_and_the_budget_between() -> None:
    svg = timeline_svg(PICTURE)
    (budget,) = of_class(svg, "budget")
    assert tops(svg)["keep-all"] < number(budget, "y1") < tops(svg)["plan"]
    assert tops(svg)["plan"] - tops(svg)["keep-all"] == pytest.approx(3 * (tops(svg)["plan"] - number(budget, "y1")), abs=0.5)


def test_a_budget_far_above_does_not_squeeze_the_curves() -> None:
    svg = timeline_svg(dataclasses.replace(PICTURE, budget_bytes=139 * GIB))
    assert of_class(svg, "budget") == []
    assert "budget 139.0 GiB, far above" in texts(svg)
    assert tops(svg) == pytest.approx(tops(timeline_svg(PICTURE)))


def test_an_axis_that_does_not_start_at_0_says_so() -> None:
    assert "the axis does not start at 0" not in texts(timeline_svg(PICTURE))
    high = dataclasses.replace(PICTURE, memory_keep=((0.0, 80 * GIB), (0.01, 90 * GIB)), memory_plan=((0.0, 80 * GIB),))
    shown = texts(timeline_svg(high))
    assert "the axis does not start at 0" not in shown, "the budget is below the curves, and on the axis"
    shown = texts(timeline_svg(dataclasses.replace(high, budget_bytes=None)))
    assert "the axis does not start at 0" in shown
    assert "80.0 GiB" in shown
    assert "0 B" not in shown


def test_nothing_overlaps_in_the_key() -> None:
    """Text of the key, as wide as its characters, ends before the next one starts; all on the page."""
    svg = timeline_svg(dataclasses.replace(PICTURE, budget_bytes=1390 * GIB))
    key = [found for found in parsed(svg).iter(f"{SVG}text") if re.match("keep-all: |plan: |budget ", found.text or "")]
    ends = [number(found, "x") + 7.3 * len(found.text or "") for found in key]
    assert len(key) == 3
    assert all(end < number(after, "x") for end, after in zip(ends, key[1:], strict=False))
    assert ends[-1] < 1200


def test_ten_thousand_kernels_stay_small_and_lose_no_time() -> None:
    lanes = tuple(("compute", i * 1e-5, (i + 1) * 1e-5, f"k{i}") for i in range(10_000) if not 5000 <= i < 6000)
    memory = tuple((i * 1e-5, GIB + (7 * GIB if i == 5432 else i)) for i in range(10_000))
    svg = timeline_svg(StepPicture(lanes=lanes, memory_plan=memory))
    spans = of_class(svg, "span")
    assert len(spans) < 1300
    assert len(svg) < 400_000
    ends = [number(span, "x") + number(span, "width") for span in spans]
    gaps = sorted(number(span, "x") - end for span, end in zip(spans[1:], ends, strict=False))
    assert gaps[-1] == pytest.approx(0.1 * (ends[-1] - number(spans[0], "x")), rel=0.05), "the pause is drawn"
    assert gaps[-2] < 1.0, "no other gap is"
    assert "plan: peak 8.00 GiB at 54.3 ms" in texts(svg)
    low = max(float(y) for y in re.findall(r"V([\d.]+)", of_class(svg, "plan")[0].get("d", "")))
    assert low - tops(svg)["plan"] > 200, "a peak of one step is not thinned away"


def test_without_times_the_picture_says_so() -> None:
    assert any("No times" in text for text in texts(timeline_svg(StepPicture())))
    assert not any("No times" in text for text in texts(timeline_svg(PICTURE)))


def test_an_interval_that_ends_before_it_starts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'relu' ends at 1\.0 s, before it starts at 2\.0 s"):
        StepPicture(lanes=(("D2H", 2.0, 1.0, "relu"),))


def test_trace_has_every_span_stall_and_byte_in_microseconds() -> None:
    events = json.loads(trace_json(PICTURE))["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [(lanes[e["tid"]], e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e["ph"] == "X"]
    expected = [*LANES, ("compute", 0.020, 0.024, "stall: waits for relu")]
    assert spans == [
        (lane, pytest.approx(start * 1e6), pytest.approx(end * 1e6), label) for lane, start, end, label in expected
    ]
    counters = [(e["name"], e["ts"], e["args"]["bytes"]) for e in events if e["ph"] == "C"]
    assert counters[:3] == [("memory, keep-all", pytest.approx(s * 1e6), n) for s, n in KEEP]
    assert counters[3:] == [("memory, plan", pytest.approx(s * 1e6), n) for s, n in PLAN]


# From a plan and its timeline


def saved(index: int, layers: int) -> SavedTensor:
    """Its positions in the graphs are not the steps at which it is made and used."""
    return SavedTensor(
        name=f"x{index}", views=(), nbytes=3, dtype="uint8", shape=(3,), strides=(1,), op="aten.mm",
        module=f"layers.{index}.mlp", produced_position=10 + layers - index,
        last_forward_position=30, backward_positions=(40 + index,),
    )  # fmt: skip


def planned(layers: int = 4) -> tuple[Plan, Predicted]:
    """The first two of `layers` tensors of 3 bytes go to the host, over a link of 1 byte a second; steps take a second."""
    steps = [tuple(Step(f"{side}{i}", 1.0) for i in range(layers)) for side in "fb"]
    candidates = tuple(Candidate(f"x{i}", 3, i, i, (layers - 1 - i,)) for i in range(layers))
    program = Program(steps[0], steps[1], candidates=candidates, static_bytes=10)
    link = HardwareProfile(
        name="toy", source="datasheet", memory_bytes=100, d2h_bytes_per_s=1, h2d_bytes_per_s=1, copy_latency_s=0.0,
        compute_slowdown_while_copying=0.0,
    )  # fmt: skip
    keep = simulate(program, ["keep"] * layers, link)
    timeline = simulate(program, ["offload", "offload", *["keep"] * (layers - 2)], link)
    table = tuple(saved(i, layers) for i in range(layers))
    plan = Plan(
        key="toy", graph="g", saved=SavedTable(table), device="cpu",
        decisions=tuple(Decision(t.name, "offload" if i < 2 else "keep", "") for i, t in enumerate(table)),
        transfers=tuple(
            Transfer(id=i, tensor=t.name, nbytes=3, offload_after=t.name, release_after=None,
                     reload_before="b", wait_before="b", module=t.module)
            for i, t in enumerate(table[:2])
        ),
        prediction=Prediction(keep_time_s=keep.time_s, predicted_time_s=timeline.time_s, lower_bound_time_s=keep.time_s),
    )  # fmt: skip
    named = {candidate.name: candidate for candidate in candidates}
    return plan, Predicted(timeline, keep, limit_bytes=20, hardware="toy", candidates=named)


def test_the_timelines_copies_carry_the_plans_names() -> None:
    plan, predicted = planned()
    picture = picture_of(plan, predicted)
    copies = [lane for lane in picture.lanes if lane[0] in ("D2H", "H2D")]
    assert [(name, label) for name, _, _, label in copies] == [
        ("D2H", "x0, layers.0.mlp, 3 B"), ("D2H", "x1, layers.1.mlp, 3 B"),
        ("H2D", "x1, layers.1.mlp, 3 B"), ("H2D", "x0, layers.0.mlp, 3 B"),
    ]  # fmt: skip
    timeline = predicted.timeline
    assert [(start, end) for _, start, end, _ in copies[:2]] == [(1.0, 4.0), (4.0, 7.0)]
    assert picture.title == "g: one step, forward and backward, as predicted for toy"
    assert picture.budget_bytes == 20
    assert picture.facts[0].startswith(f"keep-all 8000 ms, plan {timeline.time_s * 1e3:.0f} ms (+")
    assert "bound +0.0 %" in picture.facts[0]
    assert f"stalls (red) for {timeline.stall_s * 1e3:.0f} ms" in picture.facts[0]
    assert picture.facts[1] == "offloads 6 B in 2 copies: D2H 6000 ms, H2D 6000 ms; recomputes 0 B"


def test_the_drawing_in_the_documents_speaks_as_the_line_does() -> None:
    """In the README both are of the same plan."""
    root = Path(__file__).parents[2]
    (fact,) = (text for text in texts((root / "docs" / "timeline.svg").read_text()) if "D2H" in text and "GiB" in text)
    done, again = r"(offloads \S+ GiB in \d+) copies: D2H \S+ ms, H2D \S+ ms", r"(recomputes \S+ GiB) \(green\) in \S+ ms"
    found = re.fullmatch(f"{done}; {again}", fact)
    assert found, fact
    line = (root / "README.md").read_text()
    assert f"{found[1]} tensors, {found[2]} in" in line


def test_stalls_lie_in_the_gaps_of_compute_and_add_up() -> None:
    plan, predicted = planned()
    picture = picture_of(plan, predicted)
    assert picture.stalls[0] == (4.0, 7.0, "waits at f3 for x1, layers.1.mlp, 3 B")
    assert sum(end - start for start, end, _ in picture.stalls) == pytest.approx(predicted.timeline.stall_s)
    compute = sorted((start, end) for lane, start, end, _ in picture.lanes if lane == "compute")
    everything = sorted([*compute, *((start, end) for start, end, _ in picture.stalls)])
    assert everything[0][0] == 0.0
    assert all(one[1] == pytest.approx(two[0]) for one, two in pairwise(everything)), everything
    assert everything[-1][1] == pytest.approx(predicted.timeline.time_s)
    halves = [label for lane, _, _, label in picture.lanes if lane == "compute"]
    assert halves[0] == "forward"
    assert halves[-1] == "backward"


def test_memory_starts_with_its_step_and_ends_with_the_timeline() -> None:
    plan, predicted = planned()
    picture = picture_of(plan, predicted)
    assert picture.memory_keep == (*((float(i), n) for i, n in enumerate(predicted.keep_timeline.memory)), (8.0, 13))
    assert max(nbytes for _, nbytes in picture.memory_plan) == predicted.timeline.peak_bytes
    assert picture.memory_plan[-1][0] == predicted.timeline.time_s


def test_layers_follow_each_other_down_and_up() -> None:
    plan, predicted = planned()
    layers = [lane for lane in picture_of(plan, predicted).lanes if lane[0] == "layer"]
    assert [label for *_, label in layers] == [f"layers.{i}" for i in (0, 1, 2, 3, 3, 2, 1, 0)]
    assert [(start, end) for _, start, end, _ in layers[:4]] == [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 4.0)]
    assert all(one[2] <= two[1] for one, two in pairwise(layers))
    head = dataclasses.replace(plan, saved=SavedTable(plan.saved.tensors[:1]))
    assert not [lane for lane in picture_of(head, predicted).lanes if lane[0] == "layer"], "one layer needs no lane"


def test_a_plan_without_a_timeline_says_so_and_has_no_trace(tmp_path: Path) -> None:
    plan = dataclasses.replace(planned()[0], key="never planned here")
    (path,) = OffloadReport(plans=(plan,)).save_pictures(tmp_path)
    assert path.name == "g.never_pl.timeline.svg"
    shown = " ".join(texts(path.read_text()))
    assert "it came from a compile cache or from JSON" in shown
    assert "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1" in shown


def test_predictions_are_remembered_by_key_and_the_oldest_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    predicted = planned()[1]
    monkeypatch.setattr(predictions, "_BY_KEY", {})
    monkeypatch.setattr(predictions, "_KEPT", 2)
    for key in ("a", "b", "a", "c"):
        predictions.remember(key, predicted)
    assert predictions.predicted_of("a") is predictions.predicted_of("c") is predicted
    assert predictions.predicted_of("b") is None


# From a model


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def explained() -> OffloadReport:
    options = {"hardware": "h200-sxm", "policy": {"layers.0*": "offload", "*": "keep"}, "min_tensor_bytes": 0}
    return graphoffload.explain(Layers(), options)(torch.randn(128, 64))


def test_explain_makes_pictures(tmp_path: Path) -> None:
    report = explained()
    (plan,) = report.plans
    paths = report.save_pictures(tmp_path / "new")
    stem = f"{plan.graph}.{plan.key[:8]}"
    assert [path.name for path in paths] == [f"{stem}.timeline.svg", f"{stem}.trace.json"]
    svg = paths[0].read_text()
    assert any("as predicted for h200-sxm" in text for text in texts(svg))
    assert len({label.split(",")[0] for label in titles_of(svg) if "layers.0" in label}) >= len(plan.transfers) > 0
    events = json.loads(paths[1].read_text())["traceEvents"]
    there = sum(event.get("cat") == "D2H" for event in events)
    assert there == sum(event.get("cat") == "H2D" for event in events) == len(plan.transfers)
    peaks = {event["name"]: 0 for event in events if event["ph"] == "C"}
    for event in events:
        if event["ph"] == "C":
            peaks[event["name"]] = max(peaks[event["name"]], event["args"]["bytes"])
    prediction = plan.prediction
    assert peaks.pop("memory, keep-all") == prediction.keep_peak_bytes
    assert peaks.pop("memory, plan") == prediction.predicted_peak_bytes
    assert sorted(peaks) == ["memory, in flight", "memory, kept", "memory, outside the graphs"], "what the plan's consists of"
    assert 0 < min(peaks.values()) < max(peaks.values()) < prediction.predicted_peak_bytes


def test_a_plan_for_a_slowdown_has_no_budget_to_meet() -> None:
    x = torch.randn(128, 64)
    for fields, limit_bytes in (({"device_budget": "1GiB", "reserve": "256MiB"}, 768 * 2**20), ({"max_slowdown": 0.1}, None)):
        (plan,) = graphoffload.explain(Layers(), hardware="h200-sxm", **fields)(x).plans
        predicted = predictions.predicted_of(plan.key)
        assert predicted is not None
        assert predicted.limit_bytes == limit_bytes


def titles_of(svg: str) -> list[str]:
    return [found.text or "" for found in parsed(svg).iter(f"{SVG}title")]


def test_what_was_compiled_makes_pictures_and_the_dump_has_them(tmp_path: Path) -> None:
    model = Layers()
    options = {"policy": "offload", "min_tensor_bytes": 0, "inner": "aot_eager", "dump_dir": str(tmp_path / "dump")}
    model.compile(backend="graphoffload", options=options)
    model(torch.randn(128, 64)).backward()
    plan = graphoffload.last_plans()[-1]
    paths = OffloadReport(plans=(plan,)).save_pictures(tmp_path / "pictures")
    assert len(paths) == 2
    assert "No timeline" not in paths[0].read_text()
    for path in paths:
        assert (tmp_path / "dump" / path.name).read_text() == path.read_text()


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        ConfigError, match=rf"folder '{tmp_path}/file' cannot be written: File exists.*Name a folder this process"
    ):
        OffloadReport(plans=(planned()[0],)).save_pictures(tmp_path / "file")
