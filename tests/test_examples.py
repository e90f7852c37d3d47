"""Every example runs as a user would run it, and every block of the docs that claims to run does, with the output shown."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from forked import python_path, run_script

import graphoffload.report.offload_report

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"

# Small enough for a laptop's two cores, large enough to offload something. An example without a line here is a failure.
ARGUMENTS: dict[str, list[str]] = {
    "train_gpt.py": ["--steps", "12", "--layers", "1", "--width", "64", "--context", "64", "--min-tensor-bytes", "16384"],
    "train_hf_llama.py": ["--steps", "6", "--layers", "2", "--inner", "aot_eager"],
    "hf_trainer.py": ["--steps", "12"],
    "trainers.py": ["all", "--steps", "4"],
    "explain_plan.py": ["--layers", "2", "--device-budget", "4GiB"],
    "write_a_policy.py": [],
    "pareto.py": ["--tiny", "--methods", "ours", "--steps", "2", "--block", "1"],
    "longest.py": ["--tiny", "--methods", "keep,auto"],
}
EXECUTED_DOCS = ["docs/one_tensor.md"]


def run_example(name: str, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1", "COLUMNS": "160"}
    done = run_script(EXAMPLES / name, *arguments, folder=ROOT.parent, environment=environment)
    assert done.returncode == 0, f"{name} {' '.join(arguments)}\n{done.stdout}\n{done.stderr[-4000:]}"
    return done.stdout


def losses_in(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"^step +\d+ +loss ([0-9.]+)", text, re.M)]


def test_every_example_is_listed() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(ARGUMENTS)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_example_has_main_and_help(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    assert re.search(r"^def main\(argv: Sequence\[str\] \| None = None\)", text, re.M)
    assert f"python examples/{name}" in text, "its docstring shows how to run it"


@pytest.mark.slow
@pytest.mark.parametrize("inner", [pytest.param("inductor", marks=pytest.mark.long), "aot_eager"])
def test_train_gpt(inner: str) -> None:
    out = run_example("train_gpt.py", *ARGUMENTS["train_gpt.py"], "--inner", inner)
    assert re.search(r"offload", out), out
    losses = losses_in(out)
    assert losses[-1] < losses[0] - 0.2, f"the loss does not fall: {losses}"
    found = re.search(r"max abs difference ([0-9.e+-]+), relative error ([0-9.e+-]+)", out)
    assert found, out
    if inner == "aot_eager":
        assert float(found[1]) == 0.0, "offloading moves bits, it changes none"
    assert float(found[2]) <= 1e-4


@pytest.mark.slow
def test_train_hf_llama() -> None:
    out = run_example("train_hf_llama.py", *ARGUMENTS["train_hf_llama.py"])
    losses = losses_in(out)
    assert losses[-1] < losses[0], losses
    assert "self_attn" in out
    held = re.search(r"host memory held for activations: (\d+) bytes", out)
    assert held, out
    assert int(held[1]) > 0, "nothing went to the host"


@pytest.mark.slow
@pytest.mark.parametrize("needed", ["", pytest.param("peft", marks=pytest.mark.long)])
def test_hf_trainer(needed: str) -> None:
    """Trainer trains, evaluates and saves what was compiled in place; with an adapter where peft is there, else a refusal.

    test_trainers trains an adapter in every run.
    """
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    if needed and importlib.util.find_spec(needed) is None:
        refused = subprocess.run(
            [sys.executable, EXAMPLES / "hf_trainer.py", "--lora"],
            env={**os.environ, "PYTHONPATH": python_path()}, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert refused.returncode == 2
        assert "--lora needs peft, which is not installed here" in refused.stderr
        return
    out = run_example("hf_trainer.py", *ARGUMENTS["hf_trainer.py"], *(["--lora"] if needed else []))
    found = re.search(r"evaluation loss ([0-9.]+) -> ([0-9.]+) in 12 steps; saved and loaded again ([0-9.]+)", out)
    assert found, out
    before, after, loaded = map(float, found.groups())
    assert after < before - 0.1
    assert loaded == pytest.approx(after, abs=2e-4)
    copied = re.search(r"^offloaded (\d+) bytes in (\d+) copies, reloaded (\d+) bytes", out, re.M)
    assert copied, out
    assert int(copied[1]) == int(copied[3]) > 0, "every microbatch had a backward"


@pytest.mark.slow
@pytest.mark.long
def test_trainers() -> None:
    """Each trainer that is installed trains as a plain loop does, and its activations went to the host."""
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    out = run_example("trainers.py", *ARGUMENTS["trainers.py"])
    lines = {line.split()[0]: line for line in out.splitlines() if "losses" in line}
    found = {name: (line.split("losses ")[1].split(";")[0], int(line.split()[-6])) for name, line in lines.items()}
    assert found["loop"][1] == 0
    assert {"transformers", "accelerate", "regional"} <= set(found), out
    for name, (losses, copied) in found.items():
        assert name == "loop" or copied > 0, out
        if name != "trl":  # which trains an adapter
            assert losses == found["loop"][0], out
    for name, needed in (("trl", "trl"), ("lightning", "lightning"), ("fabric", "lightning")):
        assert (name in found) is (importlib.util.find_spec(needed) is not None), out


def test_explain_plan() -> None:
    out = run_example("explain_plan.py", *ARGUMENTS["explain_plan.py"])
    path = Path(out.rsplit("as JSON: ", 1)[1].strip())
    report = graphoffload.report.offload_report.OffloadReport.from_json(path.read_text())
    path.unlink()
    assert 0 < report.predicted_peak_bytes <= 4 * 2**30 < report.keep_peak_bytes
    assert report.offloaded_bytes + report.recomputed_bytes > 0
    assert "recompute" in out


def page_shows_the_plan(printed: str) -> None:
    """The plan in docs/config.md is what is printed, except for its key, which changes with every line of source. Accept it:

    ACCEPT_GOLDENS=1 pytest tests/test_examples.py -k write_a_policy
    """
    if not torch.__version__.startswith("2.13"):
        return  # other releases decompose differently
    path = ROOT / "docs" / "config.md"
    start = "<!-- plan: printed by examples/write_a_policy.py -->\n```text\n"
    before, _, rest = path.read_text().partition(start)
    shown, _, after = rest.partition("```\n<!-- /plan -->")
    assert after, f"docs/config.md has no plan after {start!r}"
    if os.environ.get("ACCEPT_GOLDENS"):
        path.write_text(f"{before}{start}{printed}```\n<!-- /plan -->{after}")
        return
    without_key = [re.sub(r"key [0-9a-f]+", "key", text) for text in (printed, shown)]
    assert without_key[0] == without_key[1], "docs/config.md shows another plan; see above how to accept this one"


@pytest.mark.slow
def test_write_a_policy() -> None:
    out = run_example("write_a_policy.py")
    first, second = out.split("== policy object")
    for part in (first, second):
        assert "recompute" in part
        assert "offload" in part
    page_shows_the_plan(first[first.index("graph graph0") : first.index("loss ")])
    losses = re.findall(r"^loss ([0-9.]+)", out, re.M)
    assert len(losses) == 2
    assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-5), "a policy moves bytes, not results"


def test_pareto_of_several_processes(tmp_path: Path) -> None:
    """Rows that processes measured side by side come back whole, with one keep-all; a folder without any is an error."""
    from graphoffload.bench.measure import Row, Sample

    sample, alone = Sample(10.0, 1.0, 10**9, 2 * 10**9, 5.5), Sample(8.0, 1.0, 10**9, 2 * 10**9, 5.5)
    for number, name in enumerate(("over:20GB", "slowdown:0.1")):
        row = Row(name, samples=[sample] * 2, baseline=[alone], ratio=1.5, ratio_interval=(1.4, 1.6))
        rows = [Row("keep-all before", samples=[sample]), row, Row("keep-all after", samples=[sample])]
        folder = tmp_path / f"{number}-small"
        folder.mkdir()
        (folder / "small.json").write_text(json.dumps({"model": "small", "rows": [row.to_dict() for row in rows]}))
    run_example("pareto.py", "--model", "small", "--gather", str(tmp_path), "--out", str(tmp_path / "out"))
    lines = (tmp_path / "out" / "pareto_small.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["variant", "keep-all", "over:20GB", "slowdown:0.1"]
    assert lines[1].startswith("keep-all,ok,8.0,1.0,"), "as it alternated with a variant"
    assert lines[2].startswith("over:20GB,ok,10.0,1.5,1.4,1.6,")
    with pytest.raises(AssertionError, match="in any folder of"):
        run_example("pareto.py", "--model", "small", "--gather", str(tmp_path / "out"), "--out", str(tmp_path / "out"))


@pytest.mark.long
@pytest.mark.slow
def test_pareto(tmp_path: Path) -> None:
    run_example("pareto.py", *ARGUMENTS["pareto.py"], "--out", str(tmp_path))
    (table,) = tmp_path.glob("pareto_*.csv")
    rows = list(csv.DictReader(table.open()))
    assert any(row["variant"].startswith("keep-all") and row["status"] == "ok" for row in rows), rows
    assert any(int(row["offloaded_bytes"] or 0) > 0 for row in rows), "no method offloads anything"


@pytest.mark.long
@pytest.mark.slow
def test_longest() -> None:
    out = run_example("longest.py", *ARGUMENTS["longest.py"])
    for method in ("keep", "auto"):
        assert re.search(rf"^{method} +\d+ ", out, re.M), out


# Documents that run: ```python run blocks share one namespace; a ```text block right behind one is what it prints.


@dataclass(frozen=True)
class Block:
    """A block of code with the line it starts on, and what the page says that it prints."""

    line: int
    code: str
    printed: str | None


def blocks_of(text: str) -> list[Block]:
    fence = re.compile(r"^```python run\n(.*?)^```\n(?:\s*^```text\n(.*?)^```$)?", re.M | re.S)
    return [Block(text[: m.start()].count("\n") + 2, m[1], m[2]) for m in fence.finditer(text)]


RUNNER = """
import contextlib, io, json, sys
name, blocks = json.loads(sys.stdin.read())
space, printed = {"__name__": "__main__"}, []
for line, code in blocks:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile("\\n" * (line - 1) + code, name, "exec"), space)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


def printed_by(name: str, blocks: list[Block]) -> list[str]:
    """What each block prints when the page is run from top to bottom in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUNNER],
        input=json.dumps([name, [(block.line, block.code) for block in blocks]]),
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, f"{name}: a block fails\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", EXECUTED_DOCS)
def test_document_runs(name: str) -> None:
    """To accept what a page prints now, once you have checked it: paste the text that the failure shows into the page."""
    blocks = blocks_of((ROOT / name).read_text())
    assert blocks, f"{name} has no ```python run block"
    for block, printed in zip(blocks, printed_by(name, blocks), strict=True):
        if block.printed is not None:
            assert printed == block.printed, f"{name}:{block.line} prints\n{printed}"


def test_document_runner_notices(tmp_path: Path) -> None:
    """A page that lies about its output, and one that fails, are both noticed."""
    page = "# P\n\n```python run\nx = 1\nprint(x)\n```\n\n```text\n2\n```\n\n```python run\nprint(x + 1)\n```\n"
    blocks = blocks_of(page)
    assert [(b.line, b.printed) for b in blocks] == [(4, "2\n"), (13, None)]
    assert printed_by("page", blocks) == ["1\n", "2\n"]
    with pytest.raises(AssertionError, match=r"page\.md(.|\n)*line 3(.|\n)*ZeroDivisionError"):
        printed_by("page.md", [Block(3, "1 / 0", None)])
