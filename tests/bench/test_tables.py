"""Published tables by name, tiny and on a CPU: every variant gives a row, and none hides why it has no figures."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch._dynamo.backends.debugging import aot_eager

from graphoffload.bench import catalogue, page, rivals, tables, variants
from graphoffload.bench.measure import Session
from graphoffload.bench.models import build
from graphoffload.bench.process import parse_process
from graphoffload.bench.recipe import Recipe
from graphoffload.bench.results import Result, load, of_run
from graphoffload.bench.run_options import Options
from graphoffload.bench.runner import Runner
from graphoffload.bench.variants import Eligible, apply, parse
from graphoffload.cli.command_line import main
from graphoffload.errors import ConfigError
from graphoffload.report import progress

LONG = ("module-choices", "nets", "perf-maxing-llama3-1b", "memory-budget", "perf-maxing-qwen3-1.7b", "hf-qwen3-8b")
"""Tables of many variants or models, and two whose models and kinds of variants others have."""
PARTS = LONG[:3]
"""Of these every run has the first two variants of the first model."""


class Uncompiled:
    """In place of Inductor, whose compile takes longer than all of this. Checkpoints are traced, to draw the same numbers."""

    def __init__(self, **functorch: Any) -> None:
        pass

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        again = any(getattr(node.target, "__name__", "") == "tag_activation_checkpoint" for node in graph.graph.nodes)
        return aot_eager(graph, inputs) if again else graph.forward


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch runs what Dynamo traced, and graphoffload has its graphs run by AOTAutograd's eager backend."""
    ours = variants.our_options

    def with_eager_graphs(*args: Any) -> dict[str, Any]:
        return {"inner": "aot_eager", **ours(*args)}

    monkeypatch.setattr(variants, "Inductor", Uncompiled)
    monkeypatch.setattr(variants, "our_options", with_eager_graphs)
    torch._dynamo.reset()


def runner_of(text: str, **options: Any) -> Runner:
    """A process that has run, tiny."""
    process = parse_process(text)
    runner = Runner(process.model, "cpu", process.fill(Options(2, 1, 2, tiny=True, quiet=True, **options)))
    process.measure(runner, 2)
    runner.finish()
    return runner


def statuses(runner: Runner) -> dict[str, str]:
    return {row.variant: row.status for row in runner.rows}


@pytest.mark.usefixtures("quick")
def test_an_eager_step_that_finds_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It left no gradients; the baseline is measured all the same, and others are compared with it."""
    run = Session._run

    def out_of_memory(session: Session) -> torch.Tensor:
        if torch._dynamo.eval_frame._stance.stance == "force_eager":
            raise torch.OutOfMemoryError("no memory")
        return run(session)

    monkeypatch.setattr(Session, "_run", out_of_memory)
    runner = runner_of("llama3-1b,optimizer=adamw@selective")
    assert statuses(runner) == {"keep-all before": "ok", "selective": "ok", "keep-all after": "ok"}
    assert runner.noise is None


# Every table runs


def part_of(table: catalogue.Table) -> catalogue.Table:
    """The first two variants of its first process."""
    model, *variants = table.processes[0].split("@")
    return replace(table, processes=("@".join((model, *variants[:2])),))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("name", "part"),
    [
        *(pytest.param(name, False, id=name, marks=[pytest.mark.long] * (name in LONG)) for name in catalogue.TABLES),
        *(pytest.param(name, True, id=f"a part of {name}") for name in PARTS),
    ],
)
def test_every_table_runs_tiny(
    name: str, part: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row a variant: measured, or with the reason why not; nothing is wrong, and none of ours fails."""
    if part:
        monkeypatch.setitem(catalogue.TABLES, name, part_of(catalogue.find(name)))
    command = ["bench", "table", name, "--tiny", "--steps", "2", "--block", "1", "--at-once", "4"]
    folders = ["--out", str(tmp_path / "out"), "--results", str(tmp_path / "results")]
    assert main([*command, *folders]) == 0, capsys.readouterr().out
    texts = catalogue.find(name).texts(tiny=True)
    results = load(tmp_path / "results")
    assert len(results) == len(texts)
    rows = [row for result in results for row in result.rows]
    asked = [variant for text in texts for variant in text.split("@")[1:]]
    assert {row["variant"] for row in rows} >= set(asked)
    measured = [row for row in rows if row["status"].startswith("ok")]  # "ok (other random numbers)" is torch's checkpointing
    assert all(row["total_bytes"] > row["peak_bytes"] > 0 for row in measured)
    skipped = ("needs ", "jax:", "hf-checkpoint-offload", "trl-offload", "trl offloads")  # by their packages, or without a GPU
    reasons = (*(f"SKIPPED: {name}" for name in skipped), "FAILED: ")
    assert all(row["status"].startswith(reasons) for row in rows if row not in measured)
    ours = [row for row in measured if row["variant"].removeprefix("per-block/").startswith("over:")]
    assert name == "jax-llama3-1b" or ours


@pytest.mark.parametrize(
    "policy", ["everything", "offload", *(pytest.param(name, marks=pytest.mark.slow) for name in ("nothing", "dots"))]
)
def test_jax_trains_the_same_model(policy: str) -> None:
    """Same weights and batch, in float32: loss and gradients are torch's; checkpoints take less than keeping everything."""
    pytest.importorskip("jax")
    runner = runner_of(f"llama3-1b,baseline=eager,layers=4@jax:{policy}", dtype=torch.float32)
    row = next(row for row in runner.rows if row.variant.startswith("jax"))
    assert row.status == "ok"
    assert row.gradient_error is not None
    assert row.gradient_error < 1e-5
    assert row.loss == pytest.approx(runner.reference_loss, rel=1e-5)
    assert row.ratio is not None
    assert row.peak_bytes is not None
    assert (row.peak_bytes > 3_500_000) == (policy == "everything")


def test_jax_says_what_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax")
    said = statuses(runner_of("qwen3-1.7b,baseline=eager@jax:nothing"))
    assert said["jax:nothing"] == "SKIPPED: jax: qwen3-1.7b is no Llama whose loss is taken at once"
    said = statuses(runner_of("llama3-1b,baseline=eager@jax:all"))
    assert said["jax:all"].endswith("jax:all: there are jax:everything, jax:nothing, jax:dots, jax:offload, jax:offload-dots")
    monkeypatch.setattr(sys, "executable", "false")
    said = statuses(runner_of("llama3-1b,baseline=eager@jax:nothing"))
    assert said["jax:nothing"] == "SKIPPED: jax:nothing failed: no output"


def test_tables_are_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "table", "--list"]) == 0
    said = capsys.readouterr().out
    for name, table in catalogue.TABLES.items():
        assert name in said
        assert table.parsed(), "processes are of models, sizes and variants that exist"


def test_budgets_of_a_table_become_shares_where_it_is_tiny() -> None:
    """A model of kilobytes has no step of 21.39 GB."""
    table = catalogue.find("perf-maxing-llama3-1b")
    (real,) = table.parsed()
    assert real.subject == "llama3-1b,optimizer=adamw,precision=cast"
    assert real.variants[:3] == ("total:21.39GB", "total:22.07GB", "total:24.35GB")
    (tiny,) = table.texts(tiny=True)
    assert "@over:66%@over:68%@over:76%@" in tiny
    assert table.texts(sizes={"tokens": 4096})[0].startswith("llama3-1b,optimizer=adamw,precision=cast,tokens=4096@")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["table"], "give a NAME; there are: perf-maxing-llama3-1b"),
        (["table", "hf-qwen-8b"], "unknown table 'hf-qwen-8b'; there are: perf-maxing-llama3-1b"),
        (["table", "hf-qwen-8b"], "Did you mean hf-qwen3-8b?"),
        (["table", "hf-qwen3-8b", "--size", "width=3"], "qwen3-8b has no size ['width']"),
        (["together"], "give processes, or --table NAME"),
        (["together", "--table", "nothing"], "unknown table 'nothing'"),
        (["together", "small,optimizer=lion"], "optimizer 'lion' is not known; there are: none, adamw"),
        (["together", "small@over:much"], "'over:much'"),
        (["--variants", "over:peak(nothing)"], "unknown variant 'nothing'"),
        (["--variants", "compiled/keep"], "only what others ship is compiled so; there are: hf-checkpoint"),
    ],
)
def test_complaints(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], message: str) -> None:
    """One line and status 1."""
    options = ["--out", str(tmp_path)] if "together" in command else ["--tiny"]
    assert main(["bench", *command, *options]) == 1
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


# How it is trained


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("precision", ["pure", "amp", "cast"])
def test_gradients_are_compared_with_an_optimizer_on(precision: str) -> None:
    """Weights stay the same to the bit, gradients do not exist between steps, and its state is what all variants share."""
    runner = runner_of(f"small,optimizer=adamw,precision={precision}@over:60%")
    row = next(row for row in runner.rows if row.variant == "over:60%")
    assert row.status == "ok"
    assert row.gradient_error is not None
    assert row.gradient_error < 0.05
    assert row.baseline
    keep = runner.baseline
    assert keep is not None
    fresh = build("small", "cpu", tiny=True, recipe=Recipe("adamw", precision))
    for trained, start in zip(keep.parameters, fresh.module.parameters(), strict=True):
        assert torch.equal(trained, start), "a learning rate of 0"
        assert trained.dtype == (torch.bfloat16 if precision == "pure" else torch.float32)
        assert keep.optimizer.state[trained]["exp_avg"].dtype == trained.dtype
        assert keep.optimizer.state[trained]["step"] > 8, "variants share it, and it steps in each of their steps"
    beside = runner.session(parse("eager"))
    assert all(p.grad is None for session in (keep, beside) for p in session.parameters)
    assert beside.own_bytes() == row.own_bytes


def test_a_wrong_gradient_is_seen_before_the_next_step_with_an_optimizer_on() -> None:
    """The gradients that are compared are those of the step, not of the last one, and the optimizer left them alone."""
    workload = build("small", "cpu", tiny=True, recipe=Recipe("adamw", "cast"))
    session = Session(workload, apply(parse("eager"), workload, Eligible()))
    session.step()
    reference = session.gradients()
    plain = build("small", "cpu", tiny=True, recipe=Recipe("none", "cast"))
    alone = Session(plain, apply(parse("eager"), plain, Eligible()))
    alone.step()
    assert all(torch.equal(a, b) for a, b in zip(alone.gradients(), reference, strict=True))
    session.step()
    assert session.check(reference, 0.0).error == 0.0
    hooks = [p.register_hook(lambda gradient: gradient * 1.5) for p in session.parameters]
    session.step()
    assert session.check(reference, 0.0).error == pytest.approx(0.5)
    for hook in hooks:
        hook.remove()


def test_parameters_are_cast_where_they_are_used() -> None:
    """Activations between modules are bfloat16, parameters and their gradients float32, and equal modules share a class."""
    workload = build("llama3-1b", "cpu", tiny=True, recipe=Recipe(precision="cast"))
    layers: Any = workload.module.get_submodule("model.model.layers")
    seen: list[torch.dtype] = []
    layers[1].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    workload.loss().backward()
    assert seen == [torch.bfloat16]
    assert {p.grad.dtype for p in workload.module.parameters()} == {torch.float32}
    assert type(layers[0].mlp.up_proj) is type(layers[1].mlp.up_proj)
    assert workload.module.model.lm_head._parameters["weight"] is workload.module.model.model.embed_tokens._parameters["weight"]


def test_everything_that_training_holds_is_counted() -> None:
    """Parameters once where they are tied, their state, and the batch; gradients only where they stay."""
    freed = build("llama3-1b", "cpu", tiny=True, recipe=Recipe("adamw", "cast"))
    kept = build("llama3-1b", "cpu", tiny=True, recipe=Recipe(precision="cast"))
    sizes = [Session(workload, apply(parse("eager"), workload, Eligible())).own_bytes() for workload in (freed, kept)]
    parameters = sum(p.numel() * 4 for p in freed.module.parameters())
    assert 3 * parameters < sizes[0] < 3 * parameters + 60_000, "each small tensor takes 512 bytes"
    assert 2 * parameters < sizes[1] < 2 * parameters + 60_000


# Budgets


@pytest.mark.usefixtures("quick")
def test_a_budget_in_all_is_what_training_holds_and_a_step_needs() -> None:
    """Of it, a process's own bytes come off; one that leaves nothing is refused with both numbers."""
    runner = runner_of("small,optimizer=adamw,precision=cast@over:60%")
    over = runner.rows[1]
    assert over.total_bytes == over.peak_bytes + over.own_bytes
    workload = build("small", "cpu", tiny=True)
    given = {kind: variants.our_options(parse(f"{kind}:1GB"), workload, Eligible(), 1000) for kind in ("over", "total")}
    assert given["over"]["device_budget"] - given["total"]["device_budget"] == 1000
    assert given["total"]["reserve"] == 0
    with pytest.raises(ConfigError, match=r"'total:1MB': 5000000 bytes are allocated between steps"):
        variants.our_options(parse("total:1MB"), workload, Eligible(), 5_000_000)


@pytest.mark.usefixtures("quick")
def test_a_budget_may_be_another_variants_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same turn or before; without that peak the row says so."""
    budgets: list[str] = []
    ours = variants.our_options

    def noting(variant: Any, *args: Any) -> dict[str, Any]:
        budgets.append(variant.argument)
        return ours(variant, *args)

    monkeypatch.setattr(variants, "our_options", noting)
    runner = runner_of("small@checkpoint-eager@over:peak(checkpoint-eager)@over:50%@over:peak(save_on_cpu)+min_tensor_bytes=0")
    keep, checkpoint, *_ = runner.rows
    assert budgets == [str(checkpoint.peak_bytes), str(keep.peak_bytes // 2)]
    said = statuses(runner)
    assert said["over:peak(checkpoint-eager)"] == "ok"
    assert said["over:peak(save_on_cpu)+min_tensor_bytes=0"] == "SKIPPED: save_on_cpu has no peak that could be its budget"


# Rivals, and failures


@pytest.mark.usefixtures("quick")
def test_a_rival_that_raises_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its error's first line; what follows runs, and the call does not fail for it."""

    def broken(workload: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has ...")

    monkeypatch.setitem(rivals.RIVALS, "trl-offload", broken)
    runner = runner_of("llama3-1b@trl-offload@over:peak(trl-offload)@per-block/hf-checkpoint@hf-checkpoint")
    said = statuses(runner)
    assert said["trl-offload"] == "FAILED: OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."
    assert said["over:peak(trl-offload)"] == "SKIPPED: trl-offload has no peak that could be its budget"
    assert said["hf-checkpoint"] == said["per-block/hf-checkpoint"] == "ok"
    assert not any(tables.counts_as_failure(row) for row in runner.rows)


@pytest.mark.usefixtures("quick")
def test_a_rival_that_raises_while_it_is_measured_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What took turns with it is measured again without it."""
    run = Session._run
    steps: list[int] = []

    def failing(session: Session) -> torch.Tensor:
        if session.context is not contextlib.nullcontext:
            steps.append(1)
            if len(steps) > 4:  # it was warm
                raise torch.OutOfMemoryError("CUDA out of memory")
        return run(session)

    monkeypatch.setattr(Session, "_run", failing)
    runner = runner_of("small@save_on_cpu@over:60%")
    rows = {row.variant: row for row in runner.rows}
    assert rows["save_on_cpu"].status == "FAILED: OutOfMemoryError: CUDA out of memory"
    assert rows["over:60%"].status == "ok"
    assert (len(rows["save_on_cpu"].samples), len(rows["over:60%"].samples)) == (0, 2)
    assert rows["over:60%"].ratio is not None


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("trl", "deepspeed", "unsloth_zoo", "jax"):
        for module in [module for module in sys.modules if module.split(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, name, None)
    workload = build("qwen3-1.7b", "cpu", tiny=True)
    for variant, package in (("trl-offload", "trl"), ("deepspeed-checkpoint", "deepspeed"), ("jax", "jax")):
        with pytest.raises(rivals.NotMeasurable, match=rf"needs {package} \(pip install {package}\)"):
            apply(parse(variant), workload, Eligible())
    old: Any = build("qwen3-1.7b", "cpu", tiny=True)
    old.module.model.activation_checkpointing_enable = lambda activation_checkpointing_kwargs=None: None
    with pytest.raises(rivals.NotMeasurable, match=r"needs transformers >= 5\.17"):
        apply(parse("hf-checkpoint-offload"), old, Eligible())
    with pytest.raises(rivals.NotMeasurable, match="needs a model of Transformers; small is none"):
        apply(parse("hf-checkpoint"), build("small", "cpu", tiny=True), Eligible())


@pytest.mark.usefixtures("quick")
def test_checkpoints_by_anothers_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer goes through it, and gradients are right."""
    calls: list[int] = []

    def checkpoint(function: Any, *args: Any, **options: Any) -> Any:
        calls.append(1)
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=True)

    module = types.SimpleNamespace(configure=lambda **options: None, checkpoint=checkpoint)
    monkeypatch.setattr(rivals, "needed", lambda name, package: module)
    runner = runner_of("llama3-1b@deepspeed-checkpoint")
    assert statuses(runner)["deepspeed-checkpoint"] == "ok"
    assert len(calls) % 2 == 0
    assert calls


def test_trl_offloads_with_one_manager_of_the_model_with_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each step adds hooks, and what the head makes is offloaded too, which TRL leaves alone."""
    models: list[Any] = []

    def make(model: Any, warn_if_no_head: bool) -> Any:
        models.append(model)
        return contextlib.nullcontext()

    monkeypatch.setattr(rivals, "needed", lambda name, package: types.SimpleNamespace(get_act_offloading_ctx_manager=make))
    workload = build("qwen3-8b", "cpu", tiny=True)
    with pytest.raises(rivals.NotMeasurable, match="trl offloads from a GPU alone"):
        apply(parse("trl-offload"), workload, Eligible())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    context = apply(parse("trl-offload"), workload, Eligible())
    assert context() is context()
    assert models == [workload.module.model]
    assert hasattr(models[0], "lm_head")


@pytest.mark.usefixtures("quick")
def test_a_compile_that_fails_in_plain_torch_is_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of keep-all its row says so, of ours whether it is the same error; others are compared with what does train."""

    class Broken(Uncompiled):
        def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
            raise NotImplementedError("no kernel for aten.foo\nmore")

    monkeypatch.setattr(variants, "Inductor", Broken)
    backend = variants._Alone

    def ours(config: Any) -> Any:
        return Broken() if config.policy == "keep" else backend(config)

    monkeypatch.setattr(variants, "_Alone", ours)
    runner = runner_of("small@ours-keep@over:1GB", out=tmp_path)
    said = statuses(runner)
    assert said["keep-all before"].startswith("FAILED in plain torch: NotImplementedError: no kernel for aten.foo")
    assert said["checkpoint before"].startswith("FAILED")
    assert said["eager before"] == "ok"
    assert said["ours-keep"].startswith("FAILED as plain torch: NotImplementedError")
    assert said["over:1GB"] == "ok"
    assert not any(tables.counts_as_failure(row) for row in runner.rows)
    result = of_run(json.loads((tmp_path / "small_tiny.json").read_text()))
    assert [row["variant"] for row in result.rows] == ["keep-all", "checkpoint", "eager", "ours-keep", "over:1GB"]
    assert result.facts["baseline"] == "eager"
    assert [row["ratio"] is not None for row in result.rows] == [False, False, True, False, True]


@pytest.mark.usefixtures("quick")
def test_ours_alone_failing_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Uncompiled):
        def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
            raise NotImplementedError("no")

    monkeypatch.setattr(variants, "_Alone", lambda config: Broken())
    runner = runner_of("small@over:1GB")
    assert statuses(runner)["over:1GB"].startswith("FAILED: NotImplementedError: no")
    assert [row.variant for row in runner.rows if tables.counts_as_failure(row)] == ["over:1GB"]


def test_where_nothing_trains_the_error_has_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Session, "_run", broken)
    with pytest.raises(ConfigError, match="small: nothing that others could be compared with trains: keep-all FAILED in plain"):
        runner_of("small@over:1GB")


# The page, and the bar


@pytest.mark.usefixtures("quick")
def test_a_page_has_what_was_published_beside_what_was_measured(tmp_path: Path) -> None:
    """Losses and failures too, in the order of the table."""
    runner = runner_of("llama3-1b,optimizer=adamw,precision=cast@over:60%@trl-offload", out=tmp_path / "out")
    result = of_run({**json.loads((tmp_path / "out" / "llama3-1b_tiny.json").read_text())})
    assert runner.rows
    row = next(row for row in result.rows if row["variant"] == "over:60%")
    failed = next(row for row in result.rows if row["variant"] == "trl-offload")
    rows = (
        result.rows[0], {**row, "variant": "total:21.39GB", "ratio": 1.3, "ratio_low": 1.2, "ratio_high": 1.4},
        {**failed, "variant": "checkpoint", "status": "FAILED: X"},
    )  # fmt: skip
    measured = replace(result, subject="llama3-1b,optimizer=adamw,precision=cast", rows=rows, path=tmp_path / "r" / "a.json")
    lines = page.published(page.Source([measured], tmp_path, tmp_path), "perf-maxing-llama3-1b")
    assert "Published: torchtitan's auto_perf_maxing" in lines[0]
    shown = [line.split("|")[1].strip() for line in lines if line.startswith("| `")]
    assert shown == ["`keep-all`", "`total:21.39GB`", "`checkpoint`"]
    assert "| 1.3000 [1.2000-1.4000] | 1.149 |" in "".join(lines)
    assert "| 1.000; 32.23 GB |" in "".join(lines)
    assert "| FAILED: X | - |" in "".join(lines)
    with pytest.raises(ConfigError, match="no result file has a row of the table memory-budget; run: python -m"):
        page.published(page.Source([measured], tmp_path, tmp_path), "memory-budget")


def test_a_page_has_the_rows_of_all_processes_of_one_subject(tmp_path: Path) -> None:
    """Each from the file that has it, and a ratio to another baseline than the first row's says so."""

    def file(name: str, *variants: str, baseline: str = "keep-all") -> Result:
        rows = tuple({"variant": text, "status": "ok", "steps": 5, "ratio": 1.25} for text in (baseline, *variants))
        facts = {"baseline": baseline}
        return Result("llama3-1b,precision=cast", "steps", "2026", "GPU", "2", "abc", "", rows, facts, path=tmp_path / name)

    files = [file("a", "budget:0.9"), file("b", "budget:0.1"), file("c", "budget:0.2", baseline="checkpoint")]
    lines = page.published(page.Source(files, tmp_path, tmp_path), "memory-budget")
    shown = {line.split("|")[1].strip(): line for line in lines if line.startswith("| `")}
    assert list(shown) == ["`keep-all`", "`budget:0.1`", "`checkpoint`", "`budget:0.2`", "`budget:0.9`"]
    assert [name for name, line in shown.items() if "| 1.2500 of checkpoint |" in line] == ["`checkpoint`", "`budget:0.2`"]
    assert "x keep-all [95 %]" in "".join(lines)


def test_a_page_has_the_rows_of_one_gpu() -> None:
    """Whatever was measured later on another."""
    row = {"variant": "total:24.35GB", "status": "ok", "steps": 5}
    empty = Result("llama3-1b,optimizer=adamw,precision=cast", "steps", "2026", "", "2", "abc", "", (), path=Path())
    device = {"NVIDIA H100 80GB HBM3": 1.5, "NVIDIA H200": 1.25}
    files = [replace(empty, device=name, rows=({**row, "ratio": ratio},)) for name, ratio in device.items()]
    source = page.Source(files, Path(), Path())
    assert "| 1.2500 |" in "".join(page.published(source, "perf-maxing-llama3-1b", "H200"))
    assert "| 1.5000 |" in "".join(page.published(source, "perf-maxing-llama3-1b", "H100"))
    with pytest.raises(ConfigError, match="no result file has a row of the table"):
        page.published(source, "perf-maxing-llama3-1b", "A100")


@pytest.mark.usefixtures("quick")
def test_a_terminal_shows_what_is_being_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar with the variant and how many are done; the table is printed after it is gone."""
    screen = io.StringIO()
    console = functools.partial(Console, file=screen, force_terminal=True, width=150)
    monkeypatch.setattr(progress, "terminal", console)
    command = ["bench", "--model", "small", "--tiny", "--steps", "2", "--block", "1", "--device", "cpu"]
    assert main([*command, "--variants", "over:60%"]) == 0
    shown = screen.getvalue()
    assert "bench small" in shown
    assert "1/2" in shown
    assert "over:60%: compiling" in shown
    assert shown.rindex("gradients of two keep-all steps") < len(shown)
    assert "variant" not in shown.splitlines()[-1]


def test_without_a_terminal_there_is_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    assert progress.terminal() is None
    with progress.progress_bar("bench", 2) as bar:
        bar.doing("compiling")
        bar.advance()
        print("a line")
    assert capsys.readouterr().out == "a line\n"
