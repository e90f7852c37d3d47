"""python -m graphoffload: what it prints, what it writes, and every complaint with its text and exit status."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from made_up_gpus import ALONE, made_up_gpus

from graphoffload.cli import explain as explain_command
from graphoffload.cli import output as cli
from graphoffload.cli.command_line import main
from graphoffload.cli.fields import field_help
from graphoffload.hardware.measurement import cache_path, keep
from graphoffload.hardware.profile import PROFILES
from graphoffload.log import log
from graphoffload.options.config import OffloadConfig
from graphoffload.report.offload_report import OffloadReport
from graphoffload.report.page.html import can_draw

SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, x, scale=1.0):
        return (self.down(torch.relu(self.up(x))) * scale).square().mean()

def build():
    return Net(), (torch.randn(256, 64),)

def with_kwargs():
    return Net(), [torch.randn(256, 64)], {"scale": 2.0}

def only_kwargs():
    return Net(), {"x": torch.randn(256, 64)}

def says_where():
    print(torch.empty(1).device)
    return build()

def lone_tensor(): return Net(), torch.randn(256, 64)
def nothing(): return None
def four(): return 1, 2, 3, 4
def no_model(): return 3, (1,)
def a_class(): return Net, (torch.randn(256, 64),)
def bad_kwargs(): return Net(), (torch.randn(256, 64),), {1: 2}
def raises(): return {}["missing"]
def leaves(): raise SystemExit(3)
def wrong_shape(): return Net(), (torch.randn(256, 65),)
def frozen(): return Net().requires_grad_(False), (torch.randn(256, 64),)

class Looks(Net):
    def forward(self, x):
        return (2 if x.sum().item() > 0 else 3) * super().forward(x)

def looks(): return Looks().to("meta"), (torch.randn(256, 64, device="meta"),)
"""
QUICK = ["--hardware", "h200-sxm", "--inner", "aot_eager", "--min-tensor-bytes", "0"]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of one command."""
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


# explain


def test_explain_prints_the_report_and_what_it_leaves_out(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "explain", f"{script}:build", *QUICK)
    assert status == 0
    assert "saved for backward" in out
    assert "kept all" in out
    assert "of 139.0 GiB" in out, "the named GPU's memory is the budget"
    parameters = 64 * 512 * 2 + 512 + 64
    assert f"not counted: {(8 * parameters + 512 * 5) / 1024:.1f} KiB of optimizer state" in out
    assert f"gradients that stay from one backward to the next ({4 * parameters / 1024:.1f} KiB where" in " ".join(out.split())
    assert "kept all" not in err, "the report ends with the line; it is not said twice"
    without = run(capsys, "explain", f"{script}:build", *QUICK, "--reserve", "0")[1]
    assert "reserved" not in without
    assert "not counted" not in without
    assert "No GPU here and none named" in run(capsys, "explain", script, "--inner", "aot_eager")[1]


def test_blocks_and_the_optimizer(script: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Blocks that the script compiles are one step; the optimizer's state is counted, and one picture is written."""
    script.write_text(script.read_text() + """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

def blocks():
    model = nn.Sequential(*(Block() for _ in range(3)))
    for block in model:
        block.compile(backend="graphoffload")
    return model, (torch.randn(256, 64),)
""")
    status, out, _ = run(capsys, "explain", f"{script}:blocks", *QUICK, "--optimizer", "adamw", "--out", tmp_path / "out")
    assert status == 0
    assert re.search(r"one step runs graph\d+: keep; 2 x graph\d+: keep x 2", out), "the first block's input needs no gradient"
    assert "optimizer state" in out
    assert "of optimizer state (reserve=" not in out
    names = {path.name.partition(".")[0] for path in (tmp_path / "out").iterdir()}
    assert names == {"report", "step"}
    status, _, err = run(capsys, "explain", f"{script}:blocks", *QUICK, "--optimizer", "lion")
    assert status == 1
    assert "optimizer='lion' is not known" in err


def test_every_option_arrives(script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[OffloadConfig] = []

    def explain(model: object, config: OffloadConfig) -> object:
        seen.append(config)
        raise AssertionError("enough")

    monkeypatch.setattr(explain_command, "explain", explain)
    given = {
        "device-budget": "40GiB", "reserve": "1GiB", "policy": '{"*norm*": "recompute"}', "offload-modules": "a, b",
        "min-tensor-bytes": "64KiB", "offload-fraction": "50%", "host-budget": "100GiB", "max-inflight-bytes": "2GiB",
        "hardware": "l40s", "verify": "off", "dump-dir": "d", "inner": "aot_eager", "mode": "none",
        "inductor-options": '{"max_autotune": true}',
    }  # fmt: skip
    options = [part for name, value in given.items() for part in (f"--{name}", value)]
    run(capsys, "explain", script, *options)
    run(capsys, "explain", script, "--max-slowdown=2%")
    assert seen[0] == OffloadConfig(
        device_budget="40GiB", reserve="1GiB", policy={"*norm*": "recompute"}, offload_modules=("a", "b"),
        min_tensor_bytes="64KiB", offload_fraction=0.5, host_budget="100GiB", max_inflight_bytes="2GiB",  # type: ignore[arg-type]
        hardware="l40s", verify="off", dump_dir="d", inner="aot_eager", mode=None,
    )  # fmt: skip
    assert seen[0].inductor_options == (("max_autotune", True),)
    assert seen[1].max_slowdown == 0.02
    assert {name.replace("-", "_") for name in given} | {"max_slowdown"} == {f.name for f in dataclasses.fields(OffloadConfig)}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(OffloadConfig)])
def test_every_field_is_an_option_with_help(field: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert field_help(field), f"OffloadConfig's docstring says nothing of {field}"
    with pytest.raises(SystemExit) as ended:
        main(["explain", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"--{field.replace('_', '-')} VALUE" in shown
    assert " ".join(field_help(field).replace("%%", "%").split()[:3]) in " ".join(shown.split())


def test_help_without_docstrings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under -OO a dataclass has its signature for a docstring: no help of an option."""
    monkeypatch.setattr(OffloadConfig, "__doc__", "OffloadConfig(*, verify: 'str' = 'graph', mode: 'str | None' = None)")
    assert field_help("verify") == ""


def test_the_environment_counts_and_options_win(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHOFFLOAD_HARDWARE", "l40s")
    assert "of 44.0 GiB" in run(capsys, "explain", script, "--inner", "aot_eager")[1]
    assert "of 139.0 GiB" in run(capsys, "explain", script, *QUICK)[1]


@pytest.mark.parametrize("function", ["", ":build", ":with_kwargs", ":only_kwargs"])
def test_every_form_that_build_may_return(function: str, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "explain", f"{script}{function}", *QUICK)
    assert status == 0, err
    assert "relu" in out


def test_on_the_meta_device_no_memory_is_taken(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "explain", f"{script}:says_where", *QUICK, "--meta")
    assert status == 0
    assert out.startswith("meta\n")
    kept = run(capsys, "explain", f"{script}:says_where", *QUICK)[1]
    assert kept.startswith("cpu\n")
    assert kept.splitlines()[2:-1] == out.splitlines()[2:-1], "the plan is the same"


def test_files_beside_the_script_can_be_imported_and_argv_is_its_own(
    tmp_path: Path, script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_the_script.py").write_text(script.read_text())
    script.write_text("import sys\nfrom beside_the_script import build\nprint(sys.argv, __name__ == '__main__')")
    argv = list(sys.argv)
    status, out, _ = run(capsys, "explain", script, *QUICK)
    assert status == 0
    assert out.splitlines()[0] == f"['{script}'] False"
    assert sys.argv == argv


def test_json_is_the_report_and_nothing_else(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "explain", script, *QUICK, "--json", "--policy", "offload")
    report = OffloadReport.from_json(out)
    assert status == 0
    assert report.offloaded_bytes > 0


def test_out_has_the_report_and_the_pictures(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "folder"
    status, out, _ = run(capsys, "explain", script, *QUICK, "--policy", "offload", "--out", folder)
    assert status == 0
    names = sorted(path.name for path in folder.iterdir())
    assert names[-2:] == ["report.json", "report.txt"]
    assert [name.split(".", 2)[2] for name in names[:-2]] == ["timeline.svg", "trace.json"]
    assert all(f"wrote {folder / name}" in out for name in names)
    assert (folder / "report.txt").read_text() in out
    (plan,) = OffloadReport.from_json((folder / "report.json").read_text()).plans
    trace = json.loads((folder / names[1]).read_text())["traceEvents"]
    assert sum(event.get("cat") == "H2D" for event in trace) == len(plan.transfers) > 0
    assert "No timeline" not in (folder / names[0]).read_text()


def test_a_budget_that_cannot_be_met_is_status_2_with_the_numbers(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "explain", script, *QUICK, "--device-budget", "300KiB")
    assert status == cli.OVER_BUDGET == 2
    assert out == ""
    assert err.startswith("error: device_budget 300.0 KiB: no plan")
    assert "The least feasible one found is " in err
    assert "Raise device_budget to that" in err


FORMS = r"(model, args), (model, args, kwargs) or (model, kwargs), with args a tuple or list and kwargs a dict"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nowhere.py:build", ["nowhere.py does not exist", "such as train.py:build"]),
        (".:build", [". is a folder"]),
        ("train.py:biuld", ["train.py has no function 'biuld'", "Net, build, with_kwargs", f"returns {FORMS}"]),
        ("train.py:torch", ["has no function 'torch'"]),
        ("train.py:nothing", ["train.py:nothing() returned a NoneType; it must return", FORMS]),
        ("train.py:four", ["returned a tuple of 4 (int, int, int, int)", FORMS]),
        ("train.py:no_model", ["returned a int for the model", FORMS]),
        ("train.py:a_class", ["returned a class (Net) for the model", FORMS]),
        ("train.py:lone_tensor", ["returned a Tensor for args", "Write (model, (tensor,))"]),
        ("train.py:bad_kwargs", ["returned a dict for kwargs", FORMS]),
        ("train.py:raises", ["train.py:raises() failed: KeyError: 'missing'", 'def raises(): return {}["missing"]']),
        ("train.py:leaves", ["ended the process (SystemExit: 3)", '__name__ == "__main__"']),
        (
            "train.py:wrong_shape",
            ["tracing Net with these inputs failed", "65", 'train.py", line 11, in forward', "run in eager"],
        ),
        ("train.py:frozen", ["nothing to plan: no graph of Net needs a gradient", "frozen"]),
        ("train.py:looks", ["explain() plans nothing", "asks for a value", "train.py:", "last_plans()"]),
        ("broken.py", ["importing broken.py failed: ZeroDivisionError: division by zero", "line 2", "1 / 0"]),
        ("syntax.py", ["importing syntax.py failed: SyntaxError"]),
        ("exits.py", ["importing exits.py ended the process (SystemExit: None)"]),
        ("text.txt", ["text.txt is no Python file"]),
    ],
)
def test_what_is_wrong_with_a_script_is_said(
    target: str, words: list[str], script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(script.parent)
    for name, text in {"broken": "x = 1\n1 / 0", "syntax": "def f(:", "exits": "import sys\nsys.exit()"}.items():
        Path(f"{name}.py").write_text(text)
    Path("text.txt").write_text("build")
    status, out, err = run(capsys, "explain", target, *QUICK)
    assert status == cli.FAILED == 1
    assert out == ""
    last = err[err.index("error: ") :]
    assert all(word in last for word in words), err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["the following arguments are required: COMMAND", "--help"]),
        (["plan"], ["invalid choice: 'plan'", "hardware"]),
        (["explain"], ["required: SCRIPT.py[:FUNCTION]", "graphoffload explain --help"]),
        (["explain", "train.py", "--devise-budget", "3"], ["--devise-budget is no argument of", "mean --device-budget?"]),
        (["explain", "train.py", "--device-budget=lots"], ["device_budget='lots' does not parse as a size", '"40GiB"']),
        (["explain", "train.py", "--device-budget"], ["--device-budget: expected one argument"]),
        (["explain", "train.py", "--max-slowdown=fast"], ["max_slowdown='fast'", "no number"]),
        (["explain", "train.py", "--max-slowdown=0.1", "--device-budget=1GiB"], ["max_slowdown=0.1 beside device_budget"]),
        (["explain", "train.py", "--hardware=h200"], ["hardware='h200' is unknown; known: measure, h200-sxm", "Did you mean"]),
        (["explain", "train.py", "--policy={bad"], ["policy='{bad' is no JSON"]),
        (["explain", "train.py", "--policy=offlaod"], ["policy='offlaod'", "offload"]),
        (["explain", "train.py", "--inductor-options=[1]"], ["inductor_options='[1]' is no JSON", '{"max_autotune": true}']),
        (["explain", "train.py", "--inductor-options={\"max_autotone\": 1}"], ["max_autotone", "max_autotune"]),
        (["explain", "train.py", "--out", "train.py"], ["--out train.py: File exists", "can be made and written"]),
        (["explain", "train.py", "--offload-modules=no.such", "--policy=offload"], ["no.such", "matches no module"]),
        (["hardware", "h2000"], ["hardware='h2000' is unknown; known:", "Did you mean 'h200-sxm'?"]),
        (["hardware", "--device", "x"], ["--device: invalid int value: 'x'"]),
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_arguments_is_said(
    arguments: list[str], words: list[str], script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(script.parent)
    status, out, err = run(capsys, *arguments)
    assert status == 1
    assert out == ""
    assert "Traceback" not in err
    assert all(word in err[err.index("error: ") :] for word in words), err


@pytest.mark.skipif(not can_draw(), reason="plotly is not installed")
def test_html_is_a_page_with_the_budgets_that_were_asked_for(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "plan.html"
    budgets = ["4MiB", "2MiB", "50KiB"]
    status, out, err = run(
        capsys, "explain", script, *QUICK, "--device-budget", "2100KiB", "--html", path, "--what-if", *budgets
    )
    assert status == 0, err
    assert out.endswith(f"\nwrote {path}\n")
    (text,) = re.findall(r'id="content">(.*?)</script>', path.read_text())
    page = json.loads(text)
    (graph,) = page["graphs"]
    assert [stop["label"] for stop in graph["stops"]] == ["2.00 MiB", "2.05 MiB", "4.00 MiB"]
    assert graph["start"] == 1
    assert any(re.match(r"no plan meets a budget of 50KiB; the least is \d", note) for note in page["notes"])
    assert page["text"].partition("\nno plan meets")[0] in out, "the printed report is that of the budget that was given"


def test_a_page_that_cannot_be_made_is_refused_before_anything_is_planned(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphoffload.cli.explain._report", lambda *_: pytest.fail("it planned"))
    (tmp_path / "file").write_text("in the way")
    with monkeypatch.context() as patched:
        patched.setattr("graphoffload.report.page.html.can_draw", lambda: False)
        without = run(capsys, "explain", script, *QUICK, "--html", tmp_path / "plan.html")
    assert without[0] == 1
    assert "error: --html is drawn with plotly, which is not installed" in without[2]
    assert "pip install 'graphoffload[html]'" in without[2]
    monkeypatch.setattr("graphoffload.report.page.html.can_draw", lambda: True)
    for given, words in (
        (["--html", tmp_path], f"--html {tmp_path} is a folder. Name a file, such as {tmp_path}/plan.html"),
        (["--html", tmp_path / "file" / "plan.html"], f"--html {tmp_path}/file: File exists"),
        (["--what-if", "1GiB"], "--what-if compares budgets on the page, and no page was asked for. Add --html FILE."),
        (["--html", tmp_path / "a.html", "--what-if", "many"], "device_budget='many' does not parse as a size"),
    ):
        status, out, err = run(capsys, "explain", script, *QUICK, *given)
        assert (status, out) == (1, "")
        assert words in err, err


def test_a_report_that_cannot_be_written_is_said(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out" / "report.json").mkdir(parents=True)
    status, _, err = run(capsys, "explain", script, *QUICK, "--out", tmp_path / "out")
    assert status == 1
    assert f"{tmp_path}/out/report.json cannot be written: Is a directory" in err


def test_logging_is_as_before(script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert log.level == logging.NOTSET
    run(capsys, "explain", script, *QUICK)
    assert log.level == logging.NOTSET
    monkeypatch.setattr(log, "level", logging.INFO)
    run(capsys, "hardware", "l40s")
    assert log.level == logging.INFO, "what was set up stays"


# hardware


def test_a_named_profile(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "hardware", "a100-80g")
    assert status == 0
    assert out.splitlines() == PROFILES["a100-80g"].table_lines()
    assert run(capsys, "hardware", "a100-80g", "--json")[1] == PROFILES["a100-80g"].to_json() + "\n"


def test_the_list_names_every_profile(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "hardware", "--list")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == ["name", *PROFILES]
    assert len({line.rindex("  ") for line in out.splitlines()}) == 1, "columns line up"


def test_without_a_gpu_it_says_so_and_lists_profiles(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, out, _ = run(capsys, "hardware")
    assert status == 0
    assert out.startswith("No CUDA device here: there is nothing to measure")
    assert out.endswith(run(capsys, "hardware", "--list")[1])


def test_with_a_gpu_it_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """By this process alone; then what is kept for two, which says nothing of one."""
    with made_up_gpus(tmp_path) as asked:
        status, out, _ = run(capsys, "hardware", "--device", "1")
        assert (status, asked) == (0, [1])
        assert out.startswith("NVIDIA X [measured]\n")
        assert "4.0 us          measured on this device" in out
        assert "link measured by         1 local rank    alone" in out
        assert "both ways at once        90.0 GB/s       measured on this device" in out
        assert "  1       D2H 55.3 GB/s, H2D 55.5 GB/s, both ways at once 90.0 GB/s\n" in out
        assert "torchrun --nproc-per-node 2 -m graphoffload hardware measures with 2" in out
        assert "  cuda:0  NUMA node 1 (CPUs 4-7)\n  cuda:1  unknown: memory is allocated on any\n" in out
        assert "hardware-5-NVIDIA-X-" in out.splitlines()[-1]
        assert "delete it to measure again" in out
        two = dataclasses.replace(ALONE, d2h_bytes_per_s=36e9, measured_by_ranks=2)
        keep(cache_path(ALONE.name, str(torch.__version__), 2), two)
        _, out, _ = run(capsys, "hardware")
        assert asked == [1], "read from the file"
        assert "  1       D2H 55.3 GB/s, " in out
        assert "  2       D2H 36.0 GB/s, " in out
        assert "torchrun" not in out
        status, _, err = run(capsys, "hardware", "--device", "2")
        assert status == 1
        assert "--device 2: this machine has CUDA devices 0 to 1." in err


def test_hardware_of_ranks_is_that_of_their_own_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is wrong is said before processes wait for each other."""
    for name, value in (("RANK", "2"), ("WORLD_SIZE", "3"), ("LOCAL_RANK", "2")):
        monkeypatch.setenv(name, value)
    with made_up_gpus(tmp_path) as asked:
        status, _, err = run(capsys, "hardware", "--device", "0")
        assert (status, asked) == (1, [])
        assert "each process measures the GPU of its LOCAL_RANK. Leave it out under torchrun." in err
        status, _, err = run(capsys, "hardware")
        assert (status, asked) == (1, [])
        assert "LOCAL_RANK=2: this machine has CUDA devices 0 to 1." in err


def test_as_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The real thing, once: `python -m` and its exit status."""
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "graphoffload", "hardware", "l40"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.endswith("Did you mean 'l40s'?\n")
    assert "Traceback" not in done.stderr
    monkeypatch.setattr(sys, "argv", ["graphoffload", "hardware", "l40s"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(root / "graphoffload" / "__main__.py"), run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("l40s [datasheet]\n")
