"""The page's content is that of the table and the pictures; its file holds names safely; what cannot be written is said."""

from __future__ import annotations

import html
import json
import os
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphoffload
from graphoffload.errors import ConfigError
from graphoffload.facts.saved_tensors import SavedTable
from graphoffload.report import dump, predictions
from graphoffload.report.offload_report import OffloadReport
from graphoffload.report.page import html as page_file
from graphoffload.report.page.content import content_of, shown_of
from graphoffload.report.predictions import predicted_of
from graphoffload.report.step_picture import memory_points, picture_of
from graphoffload.report.table import folded_rows, totals
from graphoffload.units import format_bytes
from tests.report.pages import HOSTILE, MIB, planned, report, saved
from tests.report.test_step_report import solved

needs_plotly = pytest.mark.skipif(not page_file.can_draw(), reason="plotly is not installed")


def stop_of(one: OffloadReport) -> dict[str, Any]:
    (graph,) = content_of(shown_of(one.plans, one.calls, one.step))["graphs"]
    (stop,) = graph["stops"]
    return dict(stop)


def written(path: Path) -> dict[str, Any]:
    """The content of a page's file."""
    (text,) = re.findall(r'<script type="application/json" id="content">(.*?)</script>', path.read_text(), re.DOTALL)
    return dict(json.loads(text))


def test_every_tensor_is_in_the_table_once_with_the_tables_own_words() -> None:
    one = report()
    (plan,) = one.plans
    groups = stop_of(one)["groups"]
    rows = [row for group in groups for row in group["rows"]]
    assert [group["name"] for group in groups] == [f"layers.{i}" for i in range(8)]
    assert sorted(row[1] for row in rows) == sorted(tensor.name for tensor in plan.saved.tensors)
    folded = folded_rows(one.plans)
    assert {(row[2], row[3], row[6], row[7]) for row in rows} == {(r.shape, r.dtype, r.action, r.why) for r in folded}
    assert sum(row[4] for row in rows) == sum(row.nbytes for row in folded) == sum(group["bytes"] for group in groups)
    assert groups[0]["amounts"] == [["offload", "3.00 MiB"]]
    assert groups[3]["amounts"] == [["recompute", "3.00 MiB"]]


def test_the_figures_are_those_of_the_line() -> None:
    one = report()
    stop = stop_of(one)
    cards = {name: (value, note) for name, value, note in stop["cards"]}
    assert cards["peak memory"] == (
        format_bytes(one.predicted_peak_bytes), f"budget 30.0 MiB, keep-all {format_bytes(one.keep_peak_bytes)}"
    )  # fmt: skip
    assert cards["step time"][1].startswith("+")
    sums = totals(folded_rows(one.plans))
    for action, (count, nbytes, _) in sums.items():
        assert cards[action][0] == format_bytes(nbytes)
        assert cards[action][1].endswith(f" in {count} tensor{'s' * (count != 1)}")
    assert stop["summary"] == [one.plans[0].summary]
    assert "predicted peak" in stop["summary"][0]


def test_the_memory_is_the_timelines_and_its_parts_add_up() -> None:
    one = report()
    predicted = predicted_of(one.plans[0].key)
    assert predicted is not None
    memory = stop_of(one)["memory"]
    points = list(memory_points(predicted.timeline))
    assert memory["unit"] == "MiB"
    assert memory["ms"] == pytest.approx([second * 1e3 for second, _ in points])
    assert memory["total"] == pytest.approx([nbytes / MIB for _, nbytes in points], abs=1e-4)
    parts = memory["parts"]
    assert sorted(parts) == ["in_flight", "kept", "outside", "rest"]
    assert memory["complete"]
    assert [sum(each) for each in zip(*parts.values(), strict=True)] == pytest.approx(memory["total"], abs=1e-3)
    assert min(min(part) for part in parts.values()) >= 0
    assert max(parts["in_flight"]) > 0
    assert memory["budget"] == pytest.approx(30)
    assert max(memory["keep"]) == pytest.approx(one.keep_peak_bytes / MIB, abs=1e-4)


def test_the_lanes_are_the_pictures_and_say_tensor_module_bytes_and_why() -> None:
    one = report()
    spans = stop_of(one)["spans"]
    kinds = {kind for _, kind, *_ in spans}
    assert kinds == {"layer", "forward", "backward", "recompute", "stall", "D2H", "H2D"}
    (again,) = (span for span in spans if span[1] == "recompute")
    assert again[0] == "compute"
    assert again[3] == pytest.approx(1.0)
    assert again[4] == ["recomputation, 1 ms", "x3, layers.3.mlp, 3.00 MiB", "why: reason <3>"]
    copies = [span for span in spans if span[1] == "D2H"]
    assert copies[0][4] == ["copy to the host, 3 ms", "x0, layers.0.mlp, 3.00 MiB", "why: reason <0>"]
    picture = picture_of(one.plans[0], predicted_of(one.plans[0].key))
    assert sum(span[3] for span in spans if span[1] == "stall") == pytest.approx(sum(e - s for s, e, _ in picture.stalls) * 1e3)
    compute = sorted((span[2], span[2] + span[3]) for span in spans if span[0] == "compute")
    assert compute[0][0] == 0.0
    assert all(before[1] == pytest.approx(after[0]) for before, after in pairwise(compute)), compute


def test_a_step_of_several_calls_finds_module_and_reason_of_a_copy() -> None:
    _, step = solved(8, 0.6)
    (shown,) = shown_of((), (), step)
    assert shown.sums["offload"] == (None, step.offloaded_bytes)
    stop = stop_of(OffloadReport(step=step))
    assert stop["title"].startswith("one step of 8 x graph0")
    assert stop["memory"]["complete"]
    label = next(span[4][1] for span in stop["spans"] if span[1] in ("D2H", "H2D"))
    call, name = re.fullmatch(r"call (\d+): (\w+), .*", label).groups()  # type: ignore[union-attr]
    graph, variant = step.calls[int(call)]
    plan = replace(
        planned()[0], graph=graph, variant=variant, saved=SavedTable((replace(saved(0, "attention.out"), name=name),)),
        decisions=(replace(planned()[0].decisions[0], name=name, reason="because"),),
    )  # fmt: skip
    spans = stop_of(OffloadReport(plans=(plan,), calls=(8,), step=step))["spans"]
    lines = next(span[4] for span in spans if span[4][1:2] == [label])
    assert lines[2:] == ["module: attention.out", "why: because"]


def test_a_graph_of_a_step_says_whose_figures_are_shown() -> None:
    """A plan that was compiled for a step has the step's figures from then on, and a timeline of its own."""
    one = report()
    alone = replace(one.plans[0], variant="light")
    assert stop_of(OffloadReport(plans=(alone,)))["summary"] == [alone.summary]
    amended = replace(alone, prediction=replace(alone.prediction, predicted_time_s=1.0), summary="the step's line")
    said = stop_of(OffloadReport(plans=(amended,)))["summary"]
    assert said[0].startswith("The figures are those of the step")
    assert said[1:] == ["the step's line"]


def test_other_budgets_are_stops_in_order_and_the_reports_own_is_where_it_starts() -> None:
    one, others = report(budget=30 * MIB), [report(offloads=5, budget=22 * MIB), report(offloads=1, budget=60 * MIB)]
    shown = [shown_of(each.plans) for each in (one, *others, one)]
    (graph,) = content_of(shown[0], shown[1:])["graphs"]
    assert [stop["label"] for stop in graph["stops"]] == ["22.0 MiB", "30.0 MiB", "60.0 MiB"], "and none twice"
    assert graph["start"] == 1
    with pytest.raises(ConfigError, match="the 1 graphs of the report and the 2 of other report 1 are not of one model"):
        content_of(shown[0], [[*shown[1], *shown[2]]])


def test_a_budget_far_above_is_not_on_the_axis_and_is_named() -> None:
    memory = stop_of(report(budget=100_000 * MIB))["memory"]
    assert memory["budget"] is None
    assert memory["budget_text"] == "budget 97.7 GiB (far above)"


def test_thousands_of_steps_lose_no_peak() -> None:
    layers = 3000
    one = report(layers=layers, offloads=200, budget=10_000 * MIB)
    stop = stop_of(one)
    assert len(stop["memory"]["ms"]) <= 3 * 2001
    assert max(stop["memory"]["total"]) == pytest.approx(one.predicted_peak_bytes / stop_factor(stop), rel=1e-4)
    assert sum(len(group["rows"]) for group in stop["groups"]) == layers
    assert len(stop["spans"]) < 8000


def stop_factor(stop: dict[str, Any]) -> int:
    return {"GiB": 2**30, "MiB": 2**20}[stop["memory"]["unit"]]


def test_symbolic_sizes_are_named() -> None:
    plan = replace(planned()[0], key="symbolic", saved=SavedTable(tuple(saved(i, "m", None) for i in range(2))), decisions=())
    rows = [row for group in stop_of(OffloadReport(plans=(plan,)))["groups"] for row in group["rows"]]
    assert [(row[2], row[5]) for row in rows] == [("s0xs0*s1", "symbolic"), ("s0xs0*s1", "~3.00 MiB")]


def test_a_plan_without_a_timeline_says_why() -> None:
    plan = replace(planned()[0], key="of another process")
    stop = stop_of(OffloadReport.from_json(OffloadReport(plans=(plan,)).to_json()))
    assert "came from a compile cache or from JSON" in stop["why_empty"]
    assert stop["groups"]
    assert stop["memory"]["ms"] == []


@needs_plotly
def test_the_file_is_one_page_with_everything_in_it(tmp_path: Path) -> None:
    path = report().save_html(tmp_path / "new" / "plan.html")
    text = path.read_text()
    assert path == tmp_path / "new" / "plan.html"
    assert "plotly.js v" in text
    assert not re.search(r"<(script|img|link|iframe)[^>]*\s(src|href)=[\"'](?!data:)", text.partition("plotly.js v")[0])
    assert "default-src 'none'" in text
    assert len(text) < 6_000_000
    assert written(path)["graphs"][0]["name"] == "graph0"
    assert str(report()) == written(path)["text"]


@needs_plotly
def test_names_cannot_leave_the_place_where_they_stand(tmp_path: Path) -> None:
    path = report(modules=HOSTILE).save_html(tmp_path / "plan.html")
    text = path.read_text(encoding="utf-8")
    assert "window.hacked" in text
    for name in HOSTILE:
        assert name not in text
    assert "<script>window" not in text
    assert "<img src=x" not in text
    rows = [row for group in written(path)["graphs"][0]["stops"][0]["groups"] for row in group["rows"]]
    assert {row[0] for row in rows} == set(HOSTILE), "and are whole in the data"
    title = page_file.page_html("<script>1</script>", {"a": "</script>"})
    assert "&lt;script&gt;1" in title
    assert "<script>1" not in title


@needs_plotly
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Permission denied"):
        report().save_html(tmp_path / "plan.html")


@needs_plotly
def test_a_path_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    named = re.escape(str(tmp_path))
    with pytest.raises(ConfigError, match=rf"the page cannot be written to '{named}/file/plan\.html'.*Name a file in a folder"):
        report().save_html(tmp_path / "file" / "plan.html")
    with pytest.raises(ConfigError, match=rf"cannot be written to '{named}': Is a directory \(errno 21\)"):
        report().save_html(tmp_path)
    assert (tmp_path / "file").read_text() == "in the way"
    assert sorted(tmp_path.iterdir()) == [tmp_path / "file"], "nothing half is left"


def test_a_report_without_plans_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing to show: the report has no plan \(nothing was compiled"):
        OffloadReport().save_html(tmp_path / "plan.html")
    with pytest.raises(ConfigError, match=r"no plan \(no gradient is needed\)"):
        OffloadReport(notes=("no gradient is needed",)).save_html(tmp_path / "plan.html")
    assert not list(tmp_path.iterdir())


def test_without_plotly_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_file, "can_draw", lambda: False)
    with pytest.raises(ConfigError, match=r"plotly, which is not installed.*pip install 'graphoffload\[html\]'"):
        report().save_html(tmp_path / "plan.html")
    assert not list(tmp_path.iterdir())


def test_a_notebook_shows_the_page_in_a_frame_or_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    one = report(modules=HOSTILE)
    monkeypatch.setattr("graphoffload.report.offload_report.can_draw", lambda: False)
    shown = one._repr_html_()
    assert shown.startswith("<pre>")
    assert "<script" not in shown
    assert html.unescape(shown[5:-6]) == str(one)
    assert OffloadReport()._repr_html_().startswith("<pre>")
    monkeypatch.undo()
    if page_file.can_draw():
        framed = one._repr_html_()
        assert framed.startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')
        assert framed.count("<") == framed.count(">") == 2, "the page is one attribute"


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def dumped(folder: Path) -> list[str]:
    torch._dynamo.reset()
    model = Layers()
    options = {"policy": "offload", "min_tensor_bytes": 0, "inner": "aot_eager", "dump_dir": str(folder)}
    model.compile(backend="graphoffload", options=options)
    model(torch.randn(32, 64)).backward()
    return sorted(path.name.split(".", 2)[2] for path in folder.iterdir())


@needs_plotly
def test_a_dump_has_the_page(tmp_path: Path) -> None:
    assert "html" in dumped(tmp_path)
    (path,) = tmp_path.glob("*.html")
    (stop,) = written(path)["graphs"][0]["stops"]
    plan = graphoffload.last_plans()[-1]
    predicted = predictions.predicted_of(plan.key)
    assert predicted is not None
    assert not stop["why_empty"]
    assert max(stop["memory"]["total"]) == pytest.approx(predicted.timeline.peak_bytes / 2**10, abs=1e-4)
    assert path.read_text().count("plotly.js v") >= 1


def test_a_dump_without_plotly_goes_on_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dump, "can_draw", lambda: False)
    dump._say_no_page.cache_clear()
    names = dumped(tmp_path / "one")
    assert "html" not in names
    assert "timeline.svg" in names
    dumped(tmp_path / "two")
    assert capsys.readouterr().err.count("dump_dir has no pages, since plotly is not installed") == 1
    dump._say_no_page.cache_clear()
