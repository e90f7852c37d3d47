"""Result files, the pages written from them, and that docs/benchmarks.md and README.md are what their files say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graphoffload.bench import observed, page, together
from graphoffload.bench.measure import Row, Sample
from graphoffload.bench.results import Result, commit_of, export, gpu_name, load, newest_rows, of_run
from graphoffload.cli.command_line import main
from graphoffload.errors import ConfigError
from graphoffload.torch_internals.patching import replaced

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
MOST_LINES = 200
MOST_README_LINES = 150

# The page


def test_page_is_what_its_files_say(capsys: pytest.CaptureFixture[str]) -> None:
    """To accept new result files: python -m graphoffload bench page docs/benchmarks.md --draw"""
    assert main(["bench", "page", str(PAGE), "--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("page", ["published.md", "longest.md"])
def test_other_tables_are_what_their_files_say(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """To accept new result files: python -m graphoffload bench page docs/published.md"""
    assert main(["bench", "page", str(PAGE.parent / page), "--check"]) == 0, capsys.readouterr().out


def test_readme_is_what_the_files_say(capsys: pytest.CaptureFixture[str]) -> None:
    """To accept new result files: python -m graphoffload bench page README.md --results docs/results"""
    arguments = [str(README), "--results", str(PAGE.parent / "results"), "--check"]
    assert main(["bench", "page", *arguments]) == 0, capsys.readouterr().out


def test_readme_is_short_and_its_links_lead_somewhere() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= MOST_README_LINES
    for link, _, section in (found.partition("#") for found in re.findall(r"\]\(([^)]+)\)", text)):
        assert (ROOT / link).exists(), link
        titles = re.findall(r"^#+ (.+)$", (ROOT / link).read_text(), re.M) if section else []
        anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
        assert not section or section in anchors, f"{link} has no section {section}"


def test_page_is_short_and_its_links_lead_somewhere() -> None:
    text = PAGE.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    links = re.findall(r"\]\(([^)#]+)[)#]", text)
    assert len(links) > 50
    missing = {link for link in links if not (PAGE.parent / link).exists()}
    assert not missing


def test_every_file_of_the_project_is_in_its_runs_folder() -> None:
    results = load(PAGE.parent / "results")
    assert len(results) >= 20
    for result in results:
        assert result.path is not None
        assert result.path.parent.name == result.folder
        assert result.source == "measured" or "docs/history/" in result.source
        assert Result.read(result.path).to_json() == result.path.read_text(), f"{result.path} is not as to_json writes it"


# A run becomes a file, and a file a row


def run_content(step_ms: float = 10.0, **changed: Any) -> dict[str, Any]:
    """What a Runner writes: keep-all, a budget, and a failure."""
    kept = [Sample(8.0, 1.0, 10**9, 4 * 10**9, 5.5)] * 2
    plan = {
        "prediction": {"predicted_peak_bytes": 3 * 10**9 + 10, "predicted_time_s": 0.009}, "predicted_slowdown": 0.02,
        "lower_bound_slowdown": 0.01, "offloaded_bytes": 7, "recomputed_bytes": 5,
    }  # fmt: skip
    samples = [Sample(step_ms, 1.0, 10**9, 2 * 10**9, 5.5)] * 2
    rows = [
        Row("keep-all before", samples=[Sample(99.0, 1.0, 10**9, 4 * 10**9, 5.5)], peak_bytes=4 * 10**9, gradient_error=0.001),
        Row("over:2GB", samples=samples, baseline=kept, ratio=step_ms / 8, ratio_interval=(1.2, 1.3), gradient_error=0.01,
            peak_bytes=2 * 10**9, ours={"plans": [plan], "per_step": {"d2h_bytes": 7}, "twin_error": 0.0}),
        Row("checkpoint", status="FAILED: RuntimeError: no"),
        Row("keep-all after", samples=kept),
    ]  # fmt: skip
    noted = {
        "model": "small", "subject": "small", "date": "2026-11-23T10:00:00Z", "device": "NVIDIA H200, 139.8 GiB",
        "torch": "2.11.0", "commit": "abc1234", "command": "python -m graphoffload bench", "eager_noise": 0.04,
        "repeat_noise": 0.001,
    }  # fmt: skip
    return {**noted, **changed, "rows": [row.to_dict() for row in rows]}


def write_run(folder: Path, **changed: Any) -> None:
    folder.mkdir(parents=True)
    (folder / "small.json").write_text(json.dumps(run_content(**changed)))


def test_a_run_becomes_a_result() -> None:
    """Keep-all as it alternated with the variants; predictions over static; a failure is a row."""
    result = of_run(run_content())
    keep, budget, failed = result.rows
    assert (keep["variant"], keep["step_ms"], keep["ratio"]) == ("keep-all", 8.0, 1.0)
    assert (budget["keep_ms"], budget["ratio"], budget["ratio_low"], budget["steps"]) == (8.0, 1.25, 1.2, 2)
    assert (budget["peak_bytes"], budget["predicted_peak_bytes"], budget["predicted_ms"]) == (2 * 10**9, 2 * 10**9 + 10, 9.0)
    assert (budget["predicted_ratio"], budget["bound_ratio"], budget["copied_bytes"]) == (1.02, 1.01, 7)
    assert (failed["status"], failed["ratio"], failed["steps"]) == ("FAILED: RuntimeError: no", None, 0)
    assert result.folder == "2026-11-23-abc1234-h200"
    assert result.facts["eager_noise"] == 0.04


def test_a_step_is_predicted_once() -> None:
    """Its variants have one prediction in common; graphs that are planned alone have one each."""
    content = run_content()
    (plan,) = content["rows"][1]["ours"]["plans"]
    for variants, expected_ms, ratio in ((("keep", "blocks"), 9.0, 1.02), (("", ""), 18.0, None)):
        content["rows"][1]["ours"]["plans"] = [{**plan, "variant": variant} for variant in variants]
        row = of_run(content).rows[1]
        assert (row["predicted_ms"], row["predicted_ratio"]) == (expected_ms, ratio)


def test_plans_that_ran_no_more_are_none_of_a_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph's own plan, once its step is planned; and a variant of an earlier plan of the step."""

    def plan(graph: str, variant: str, *, part: bool = False) -> Any:
        prediction = SimpleNamespace(__dataclass_fields__=(), predicted_slowdown=0.0, lower_bound_slowdown=0.0)
        own: dict[str, Any] = {"offloaded_bytes": 0, "recomputed_bytes": 0, "transfers": (), "notes": (), "summary": ""}
        own |= {"saved": SimpleNamespace(saved_bytes=0), "prediction": prediction}
        return SimpleNamespace(graph=graph, variant=variant, part=part, **own)

    plans = [plan("a", ""), plan("a", "light"), plan("a", "keep", part=True), plan("b", ""), plan("c", "keep", part=True)]
    monkeypatch.setattr(observed.registry, "last_plans", lambda: plans)
    assert [(found["graph"], found["variant"]) for found in observed.our_plans()] == [("a", "light"), ("b", ""), ("c", "keep")]


def test_export_and_load(tmp_path: Path) -> None:
    """Two processes of one subject are two files; what is no run is passed over; the commit can be given."""
    write_run(tmp_path / "out" / "0-small")
    write_run(tmp_path / "out" / "1-small", step_ms=11.0)
    (tmp_path / "out" / "cache.json").write_text('{"rows": [1]}')
    (tmp_path / "out" / "broken.json").write_text("{")
    paths = export(tmp_path / "out", tmp_path / "results", commit="fff0000")
    folder = tmp_path / "results" / "2026-11-23-fff0000-h200"
    assert paths == [folder / "small.json", folder / "small-2.json"]
    first, second = sorted(load(tmp_path / "results"), key=lambda result: result.rows[1]["step_ms"])
    assert (first.rows[1]["step_ms"], second.rows[1]["step_ms"]) == (10.0, 11.0)
    assert replace(first, path=None, commit="abc1234") == of_run(run_content())
    assert export(tmp_path / "out", tmp_path / "results", commit="fff0000") == paths, "again is the same files"


def test_a_newer_run_replaces_what_it_measured(tmp_path: Path) -> None:
    """A folder more and one command: rows of its variants are its own, others stay, a failure hides nothing."""
    (tmp_path / "page.md").write_text(
        "# P\n\n<!-- results: steps small -->\n<!-- /results -->\n\n"
        "<!-- results: prediction small -->\nold\n<!-- /results -->\n"
    )
    write_run(tmp_path / "old")
    export(tmp_path / "old", tmp_path / "results")
    assert main(["bench", "page", str(tmp_path / "page.md")]) == 0
    before = (tmp_path / "page.md").read_text()
    measured = "1.2500 [1.2000-1.3000] | 1.0100 | 0.01 | [abc1234](results/2026-11-23-abc1234-h200/small.json) |"
    assert f"| `over:2GB` | 2.000 | 2.000 | 2 | 10.0 | 9.0 | {measured}" in before
    assert "| `checkpoint` | - | - | 0 | - | - | FAILED: RuntimeError: no |" in before
    assert "| small | 1 of 1 | 0.00 | -0.0 to -0.0 | -10.0 % to -10.0 % | [abc1234]" in before
    assert "old" not in before
    newer = of_run(run_content(step_ms=12.0, date="2026-11-24T00:00:00Z", commit="def5678"))
    (over,) = [row for row in newer.rows if row["variant"] == "over:2GB"]
    newer = replace(newer, rows=({**over, "variant": "over:1GB", "ratio": None, "status": "FAILED"}, over))
    (tmp_path / "results" / newer.folder).mkdir()
    (tmp_path / "results" / newer.folder / "small.json").write_text(newer.to_json())
    assert main(["bench", "page", str(tmp_path / "page.md"), "--check"]) == 1
    assert main(["bench", "page", str(tmp_path / "page.md")]) == 0
    after = (tmp_path / "page.md").read_text()
    again = "1.5000 [1.2000-1.3000] | 1.0100 | 0.01 | [def5678](results/2026-11-24-def5678-h200/small.json) |"
    assert f"| `over:2GB` | 2.000 | 2.000 | 2 | 12.0 | 9.0 | {again}" in after
    assert "| `keep-all` | 4.000 | - | 2 | 8.0 | - | 1.0000 | - | 0.001 | [abc1234]" in after
    rows = newest_rows([replace(newer, rows=({**over, "ratio": None},)), of_run(run_content())], "small")
    assert rows[0][1].commit == "abc1234", "a failed attempt hides no measurement"


def test_views_of_models_sequences_and_ops(tmp_path: Path) -> None:
    tried = {"method": "auto", "tokens": 4096, "tokens_per_s": 10.0, "step_ms": 2000.0, "steps": 1, "peak_bytes": 10**9}
    missed = {**tried, "tokens": 8192, "tokens_per_s": None, "why": "out of memory"}
    base = of_run(run_content())
    budget = base.rows[1]
    rows = ({**budget, "variant": "checkpoint", "ratio": 1.4}, budget, {**budget, "variant": "over:9GB", "ratio": 3.0})
    results = [
        replace(base, rows=rows, path=tmp_path / "results" / "a" / "small.json"),
        replace(base, subject="longest-x", kind="longest", rows=(missed, tried), path=tmp_path / "results" / "a" / "x.json"),
        replace(base, subject="ops", kind="op-cost", rows=({"variant": "loop", "offload_us": 12.3},), path=tmp_path / "o.json",
                source="copied from a log"),
    ]  # fmt: skip
    source = page.Source(results, tmp_path, tmp_path)
    assert page.peers(source, "small")[-1] == (
        "| small | 8.0 | 1.4000 [1.2000-1.3000] | 2.000 | **1.2500 [1.2000-1.3000]** | 2.000 | 2.000 | "
        "[abc1234](results/a/small.json) |"
    ), "the budget nearest to checkpointing's peak"
    assert page.longest(source, "longest-x")[-1] == (
        "| x | **graphoffload** | 4,096 | 10 | 2.0 | 1 | 1.0 | 8,192: out of memory | [abc1234](results/a/x.json) |"
    )
    slower = {**tried, "method": "checkpoint", "tokens": 2048, "tokens_per_s": 5.0}
    failed = {**missed, "method": "checkpoint", "tokens": 4096, "why": "OutOfMemoryError: CUDA out of memory. Tried 8 GiB"}
    at_its_longest = {**tried, "tokens": 2048, "tokens_per_s": 12.0}
    never = {**missed, "method": "keep", "why": "OutOfMemoryError: CUDA out of memory."}
    more = replace(results[1], rows=(tried, slower, at_its_longest, failed, {**tried, "tokens": 1024}, never))
    lines = page.longest(page.Source([more], tmp_path, tmp_path), "longest-x")[2:]
    assert [line.split(" | ")[1:4] + line.split(" | ")[-2:-1] for line in lines] == [
        ["keep-all", "0", "-", "8,192: out of memory"],
        ["full checkpointing", "2,048", "5", "4,096: out of memory"],
        ["**graphoffload**", "2,048", "12", "longer ones do"],
        ["**graphoffload**", "4,096", "10", "not tried"],
    ], "ours is in the table at the longest of the other one too"
    assert page.op_cost(source, "ops")[-1] == "| loop | 12.3 | - | - | - | - | - | [abc1234, copied](o.json) |"
    assert page.pick(source, "small@over:2*")[-1].startswith("| small | `over:2GB` | 2.000 |")
    assert page.figure(source, "small", "a.png", "A", "title")[0] == "![step time against peak memory: A title](a.png)"


# What goes wrong


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "has no <!-- results"),
        ("<!-- results: stairs small -->\n<!-- /results -->", "no view 'stairs'; there are: steps"),
        ("<!-- results: steps big -->\n<!-- /results -->", "no result file has a steps row of big; there are: small"),
        ("<!-- results: steps small over:7* -->\n<!-- /results -->", "no result file has a steps row of small (over:7*)"),
    ],
)
def test_bad_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    """One line and status 1; the page stays as it is."""
    (tmp_path / "page.md").write_text(text)
    write_run(tmp_path / "out")
    export(tmp_path / "out", tmp_path / "results")
    assert main(["bench", "page", str(tmp_path / "page.md")]) == 1
    assert message in capsys.readouterr().err
    assert (tmp_path / "page.md").read_text() == text


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["export", "."], "holds no run; give the folder"),
        (["page", "no.md"], "holds no result file"),
        (["--model", "small", "--variants", "nothing"], "unknown variant 'nothing'; known: eager"),
        (["--variants", 'ours:{"policy"'], "give a JSON object of options"),
        (["--variants", "slowdown:much"], "could not convert"),
        (["--size", "tokens"], "is no NAME=N"),
        (["--model", "gpt5"], "invalid choice: 'gpt5'"),
        (["--modle", "small"], "--modle is no argument of bench run. Did you mean --model?"),
        (["measure"], "invalid choice: 'measure'"),
        (["together", "gpt5"], "unknown model 'gpt5'; known: llama4k"),
        (["together", "small,tokens"], "a process is MODEL[,SIZE=N...]"),
        (["together", "small@nothing"], "unknown variant 'nothing'"),
        (["plans"], "give --write FILE"),
    ],
)
def test_complaints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str], message: str
) -> None:
    """One line on stderr and status 1, before anything is built."""
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *command]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("text", ['{"format": 2}', "[]", '{"format": 1, "kind": "steps"}', "{"])
def test_files_that_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match=r"a\.json is no result file of format 1"):
        Result.read(tmp_path / "a.json")


# The rest


def test_variants_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    assert "over:11.5GB" in capsys.readouterr().out


def test_names_of_gpus_and_commits(tmp_path: Path) -> None:
    assert gpu_name("NVIDIA H200, 139.8 GiB") == "h200"
    assert gpu_name("NVIDIA GeForce RTX 4090, 23.6 GiB") == "rtx-4090"
    assert gpu_name("cpu") == "cpu"
    assert commit_of(tmp_path) == "unknown"
    assert commit_of(tmp_path / "missing") == "unknown"


def test_what_is_replaced_comes_back() -> None:
    """Also where it was inherited, and after an error."""

    class A:
        x = 1

    class Slots:
        __slots__ = ("x",)

    one, two = A(), Slots()
    two.x = 1

    def fail() -> None:
        with replaced(one, x=2), replaced(two, x=3):
            assert (one.x, two.x) == (2, 3)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (one.x, two.x, vars(one)) == (1, 1, {})


def test_a_process_past_the_deadline_is_ended(capsys: pytest.CaptureFixture[str]) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert together._ended(process, "small", time.monotonic() + 0.1) == 1
    assert process.returncode is not None
    assert "small: ended after --wall-s" in capsys.readouterr().out


def test_import_of_the_package_leaves_the_bench_out() -> None:
    code = "import sys, graphoffload; print([name for name in sys.modules if name.startswith('graphoffload.bench')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_ids_that_an_ended_run_left_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever measures stops every process that its folder names."""
    (tmp_path / "running0").mkdir()
    (tmp_path / "running0" / "12345").touch()
    seen: list[list[str]] = []

    def begun(number: int, text: str, visible: list[str], given: Any) -> Any:
        seen.append([path.name for path in (tmp_path / "running0").glob("*")])
        return subprocess.Popen([sys.executable, "-c", ""])

    monkeypatch.setattr(together, "_begun", begun)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert main(["bench", "together", "small", "--out", str(tmp_path)]) == 0
    assert seen == [[]]
