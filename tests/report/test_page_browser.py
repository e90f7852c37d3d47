"""The page in a real browser without a network: it draws, tells on hovering, sorts, folds, and goes through budgets.

    pip install playwright plotly; a Chromium of the system, or playwright install chromium
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from graphoffload.facts.plan import Plan
from graphoffload.facts.saved_tensors import SavedTable
from graphoffload.report.offload_report import OffloadReport
from tests.report.pages import HOSTILE, MIB, planned, report, saved

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--no-first-run")  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("plotly") is None, reason="plotly is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="playwright is not installed"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, NAMES)), None) or playwright.chromium.executable_path
        if not Path(found).exists():
            pytest.skip(f"no Chromium: none of {', '.join(NAMES)} is on the PATH, and playwright has none")
        launched = playwright.chromium.launch(executable_path=found, args=list(QUIET))
        yield launched
        launched.close()


class Opened:
    """A page as a user sees it, and what the browser complained of or asked a network for."""

    def __init__(self, browser: Browser, path: Path) -> None:
        self.complaints: list[str] = []
        self.asked: list[str] = []
        context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
        self.page: Page = context.new_page()
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_function("document.querySelectorAll('#table tbody tr').length > 0")

    def __call__(self, script: str) -> Any:
        return self.page.evaluate(script)

    def rows(self) -> list[list[str]]:
        rows = "[...document.querySelectorAll('#table tbody tr')]"
        return list(self(f"{rows}.map(row => [...row.cells].map(cell => cell.innerText.trim()))"))

    def sort(self, name: str) -> None:
        self.page.locator("#table th button", has_text=name).click()

    def hover(self, kind: str, number: int = 0) -> str:
        """What is shown when the mouse is in the middle of a bar of the lanes; `kind` as the legend names it."""
        lanes = self.page.locator("#lanes")
        lanes.scroll_into_view_if_needed()
        trace = self(f"document.getElementById('lanes').data.filter(t => t.type === 'bar').findIndex(t => t.name === '{kind}')")
        box = lanes.locator(".barlayer .trace.bars").nth(trace).locator(".point path").nth(number).bounding_box()
        assert box is not None
        self.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        text = lanes.locator(".hoverlayer .hovertext")
        text.first.wait_for()
        lines = "[...document.querySelectorAll('#lanes .hoverlayer .hovertext tspan.line')]"
        return "\n".join(self(f"{lines}.map(line => line.textContent)"))


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Any]:
    """Opens a report's page; afterwards nothing was asked for, and nothing complained."""
    pages: list[Opened] = []

    def opens(one: OffloadReport, *others: OffloadReport) -> Opened:
        pages.append(Opened(browser, one.save_html(tmp_path / f"{len(pages)}.html", others=others)))
        return pages[-1]

    yield opens
    for page in pages:
        page.page.context.close()
        assert page.complaints == []
        assert [url for url in page.asked if not url.startswith(("file:", "data:", "blob:"))] == []


def test_lanes_and_memory_are_drawn(opened: Any) -> None:
    page = opened(report())
    traces = {trace["name"]: trace for trace in page("document.getElementById('lanes').data")}
    assert list(traces) == ["layer", "forward", "backward", "recomputation", "stall", "copy to the host", "copy back"]
    assert traces["stall"]["marker"]["color"] == "#d62728"
    assert {*traces["recomputation"]["y"], *traces["stall"]["y"]} == {"compute"}
    assert len(traces["copy to the host"]["x"]) == 3
    assert page("document.querySelectorAll('#lanes .barlayer .point').length") == sum(len(t["x"]) for t in traces.values())
    curves = [trace["name"] for trace in page("document.getElementById('memory').data")]
    assert [name.partition(",")[0] for name in curves] == [
        "keep-all", "outside: parameters", "kept activations", "activations in flight", "working memory", "plan",
        "budget 30.0 MiB",
    ]  # fmt: skip
    line = page("document.getElementById('memory').data.at(-1)")
    assert line["y"] == [30, 30]
    assert line["line"]["dash"] == "dash"
    assert page.page.locator("#choice").is_hidden(), "one budget needs no slider"
    assert page.page.locator(".card").count() == 6
    assert page.page.title() == "graphoffload: one training step"


def test_hovering_tells_tensor_module_bytes_and_why(opened: Any) -> None:
    page = opened(report())
    assert page.hover("copy to the host") == "copy to the host, 3 ms\nx0, layers.0.mlp, 3.00 MiB\nwhy: reason <0>"
    assert page.hover("recomputation") == "recomputation, 1 ms\nx3, layers.3.mlp, 3.00 MiB\nwhy: reason <3>"
    assert page.hover("stall").startswith("stall, ")
    assert "waits at " in page.hover("stall")
    memory = page.page.locator("#memory .nsewdrag").bounding_box()
    page.page.mouse.move(memory["x"] + memory["width"] * 0.4, memory["y"] + memory["height"] / 2)
    page.page.locator("#memory .hoverlayer .legend").wait_for()
    shown = page.page.locator("#memory .hoverlayer").text_content()
    assert all(name in shown for name in ("kept activations: ", "plan, together: ", "keep-all: ", " MiB")), shown


def test_zooming_one_chart_zooms_the_other(opened: Any) -> None:
    page = opened(report())
    page("Plotly.relayout('lanes', {'xaxis.range': [2, 5]})")
    page.page.wait_for_function("document.getElementById('memory').layout.xaxis.range[0] === 2")
    assert page("document.getElementById('memory').layout.xaxis.range") == [2, 5]
    page("Plotly.relayout('memory', {'xaxis.autorange': true})")
    page.page.wait_for_function("document.getElementById('lanes').layout.xaxis.range[0] === 0")


def test_the_table_folds_sorts_and_is_searched(opened: Any) -> None:
    sizes = tuple(replace(saved(i, f"layers.{i // 10}.{'ab'[i % 2]}"), nbytes=(i * 7 % 40 + 1) * MIB) for i in range(40))
    plan = replace(planned(8)[0], key="sizes", saved=SavedTable(sizes), transfers=())
    page = opened(OffloadReport(plans=(plan,)))
    groups = page.rows()
    assert [row[0] for row in groups] == ["layers.0", "layers.1", "layers.2", "layers.3"], "a long table begins folded"
    assert groups[0][1] == "10 tensors"
    assert "keep " in groups[1][3]
    page.page.locator("tr.group button", has_text="layers.1").click()
    assert [row[1] for row in page.rows()[2:12]] == [f"x{i}" for i in range(10, 20)]
    page.page.locator("tr.group button", has_text="layers.1").click()
    assert page.rows() == groups
    page.page.click("#unfold")
    assert len(page.rows()) == 44
    page.page.click("#fold")
    page.page.uncheck("#grouped")
    assert [row[1] for row in page.rows()] == [f"x{i}" for i in range(40)]
    page.sort("size")
    largest = [row[4] for row in page.rows()]
    assert largest[:2] == ["40.0 MiB", "39.0 MiB"]
    assert largest[-1] == "1.00 MiB"
    page.sort("size")
    assert [row[4] for row in page.rows()] == largest[::-1]
    page.sort("tensor")
    assert [row[1] for row in page.rows()] == [f"x{i}" for i in range(40)], "x2 before x10"
    page.sort("module")
    assert [row[0] for row in page.rows()] == sorted(f"layers.{i // 10}.{'ab'[i % 2]}" for i in range(40))
    page.page.fill("#filter", "LAYERS.3.b keep")
    assert {row[0] for row in page.rows()} == {"layers.3.b"}
    assert page.page.locator("#count").inner_text() == "5 tensors"
    page.page.check("#grouped")
    assert page.rows()[0][1] == "5 of 10 tensors"


def test_groups_are_sorted_by_their_sums(opened: Any) -> None:
    sizes = tuple(replace(saved(i, f"layers.{i}"), nbytes=(2, 9, 4)[i] * MIB) for i in range(3))
    page = opened(OffloadReport(plans=(replace(planned(8)[0], key="sums", saved=SavedTable(sizes), transfers=()),)))
    page.page.click("#fold")
    page.sort("size")
    assert [row[0] for row in page.rows() if "tensor" in row[1]][:3] == ["layers.1", "layers.2", "layers.0"]


def test_the_slider_changes_curves_figures_and_table(opened: Any) -> None:
    page = opened(report(budget=30 * MIB), report(offloads=5, budget=22 * MIB), report(offloads=1, budget=60 * MIB))
    assert page.page.locator("#budget-choice").is_visible()
    assert page("document.getElementById('budget').max") == "2"
    assert page.page.locator("#budget-value").inner_text() == "30.0 MiB"
    seen = []
    for stop in range(3):
        page(f"(b => {{ b.value = {stop}; b.dispatchEvent(new Event('input')); }})(document.getElementById('budget'))")
        total = page("document.getElementById('memory').data.find(t => t.name.startsWith('plan, peak')).y")
        copies = page("document.getElementById('lanes').data.find(t => t.name === 'copy to the host').x.length")
        seen.append((page.page.locator("#budget-value").inner_text(), copies, max(total)))
        assert page.page.locator(".card").first.inner_text().startswith("PEAK MEMORY")
        page.page.locator("#table tbody tr").first.wait_for()
        assert sum("offload" in row[5] for row in page.rows() if len(row) > 5) == copies
    assert [(label, copies) for label, copies, _ in seen] == [("22.0 MiB", 5), ("30.0 MiB", 3), ("60.0 MiB", 1)]
    assert seen[0][2] < seen[2][2]
    page.page.locator("#budgets tbody tr").nth(1).click()
    assert page.page.locator("#budget-value").inner_text() == "30.0 MiB"
    assert page("document.getElementById('budget').value") == "1"


def test_several_graphs_can_be_chosen(opened: Any) -> None:
    first, second = report(layers=8), report(layers=6)
    plans: tuple[Plan, ...] = (first.plans[0], replace(second.plans[0], graph="graph1"))
    page = opened(OffloadReport(plans=plans))
    assert page.page.locator("#budget-choice").is_hidden()
    assert page.page.locator("#graph option").all_inner_texts() == ["graph0", "graph1"]
    page.page.select_option("#graph", "1")
    assert sum("layers" in row[0] and len(row) > 5 for row in page.rows()) == 6


def test_names_with_markup_are_text(opened: Any) -> None:
    page = opened(report(layers=4, offloads=3, modules=HOSTILE))
    assert {row[0] for row in page.rows() if len(row) > 5} >= set(HOSTILE[:3])
    for number, name in enumerate(HOSTILE[:3]):
        lines = page.hover("copy to the host", number)
        assert name in lines.replace("\n", "").replace("  ", ""), lines
    assert page("window.hacked") is None
    assert page.page.locator("main img, #lanes a, #memory a").count() == 0
    assert page("[...document.scripts].length") == 3
    assert "a note with <b>tags</b>" in page.page.locator("#notes").inner_text()


def test_a_plan_without_a_timeline_shows_its_table_and_says_why(opened: Any) -> None:
    page = opened(OffloadReport(plans=(replace(planned()[0], key="of another process"),)))
    assert "it came from a compile cache or from JSON" in page.page.locator("#no-timeline").inner_text()
    assert page.page.locator("#charts").is_hidden()
    assert len(page.rows()) == 16


def test_in_a_notebook_the_page_runs_in_its_frame(browser: Browser, tmp_path: Path) -> None:
    """The frame has no rights but to run scripts, and what is around it keeps its style."""
    (tmp_path / "notebook.html").write_text(f"<!DOCTYPE html><title>cells</title><h1>1</h1>{report()._repr_html_()}")
    context = browser.new_context(offline=True)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto((tmp_path / "notebook.html").as_uri())
    frame = page.frame_locator("iframe")
    frame.locator("#lanes .barlayer .point").first.wait_for()
    frame.locator("tr.group button").first.click()
    assert frame.locator("tr.row").count() == 7
    assert page.evaluate("getComputedStyle(document.body).maxWidth") == "none"
    assert page.evaluate("typeof Plotly") == "undefined"
    context.close()
    assert complaints == []


def test_two_thousand_tensors(opened: Any) -> None:
    page = opened(report(layers=2000, offloads=200, budget=10_000 * MIB))
    assert len(page.rows()) == 2000
    page.page.click("#unfold")
    page.page.wait_for_function("document.querySelectorAll('#table tbody tr').length === 4000")
    page.sort("size")
    assert page("document.querySelectorAll('#lanes .barlayer .point').length") > 200
