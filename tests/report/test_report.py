"""The plan table, the summary line and OffloadReport, on hand-made plans.

Accept changed texts with one command, then read the diff:

    ACCEPT_GOLDENS=1 pytest tests/report/test_report.py
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphoffload
from graphoffload.compiler import decide
from graphoffload.errors import PlanError
from graphoffload.facts.plan import Action, Decision, Plan, Prediction, Transfer
from graphoffload.facts.refusals import Refusal
from graphoffload.facts.saved_tensors import SavedTable, SavedTensor
from graphoffload.report.offload_report import Measured, OffloadReport, plan_table, summary_line
from graphoffload.report.table import folded_rows
from graphoffload.runtime import registry
from graphoffload.units import format_bytes

GOLDEN = Path(__file__).parents[1] / "golden"
MIB, GIB = 2**20, 2**30
ACCEPT = bool(os.environ.get("ACCEPT_GOLDENS"))  # not GRAPHOFFLOAD_*: conftest.py clears those


def saved(name: str, module: str, shape: tuple[int | str, ...], nbytes: int | None, op: str = "aten.mm.default") -> SavedTensor:
    return SavedTensor(
        name=name,
        views=(name,),
        nbytes=nbytes,
        dtype="torch.bfloat16",
        shape=shape,
        strides=(1,) * len(shape),
        op=op,
        module=module,
    )


def transfer(number: int, tensor: SavedTensor, release: str | None, reload: str, wait: str, start: str = "") -> Transfer:
    return Transfer(
        id=number, tensor=tensor.name, nbytes=tensor.nbytes, offload_after=start or tensor.name, release_after=release,
        reload_before=reload, wait_before=wait, module=tensor.module,
    )  # fmt: skip


def llama_plan(layers: int = 8, *, graph: str = "graph_0", key: str = "0123456789abcdef") -> Plan:
    """Norms recomputed, attention offloaded, activation functions offloaded in all but the last two layers, the rest kept."""
    tensors: list[SavedTensor] = []
    decisions: list[Decision] = []
    transfers: list[Transfer] = []
    for i in range(layers):
        path, late = f"model.layers.{i}", i >= layers - 2
        norm = saved(f"mul_{2 * i}", f"{path}.input_layernorm", (1, 4096, 4096), 32 * MIB, "aten.mul.Tensor")
        query = saved(f"mm_{7 * i}", f"{path}.self_attn.q_proj", (4096, 4096), 32 * MIB)
        core = saved(f"_scaled_dot_product_flash_attention_{i}", f"{path}.self_attn", (1, 32, 4096, 128), 32 * MIB, "aten.sdpa")
        act = saved(f"silu_{i}", f"{path}.mlp.act_fn", (1, 4096, 11008), 86 * MIB, "aten.silu.default")
        tensors += [norm, query, core, act]
        decisions += [
            Decision(norm.name, "recompute", "pointwise, cheap to compute again"),
            Decision(query.name, "keep", "the copy window is full"),
            Decision(core.name, "offload", "overlaps with compute"),
            Decision(act.name, "keep", "produced too late to pay")
            if late
            else Decision(act.name, "offload", "overlaps with compute"),
        ]
        transfers.append(transfer(2 * i, core, f"mm_{7 * i + 9}" if i < layers - 1 else None, f"mm_{300 - i}", f"mm_{302 - i}"))
        transfers += (
            [] if late else [transfer(2 * i + 1, act, f"mm_{7 * i + 12}", f"mm_{299 - i}", f"mm_{301 - i}", f"mul_{i}")]
        )
    return Plan(
        key=key, graph=graph, decisions=tuple(decisions), transfers=tuple(transfers), saved=SavedTable(tuple(tensors)),
        prediction=Prediction(
            keep_peak_bytes=int(23.4 * GIB), predicted_peak_bytes=int(17.6 * GIB), keep_time_s=0.5, predicted_time_s=0.502,
            lower_bound_time_s=0.5005, host_bytes=772 * MIB,
        ),
        notes=("checkpoint region relaxed: 1.2 GiB, -3.0 % time",), torch_version="2.13.0", device="cuda:0",
    )  # fmt: skip


def awkward_plan() -> Plan:
    """No hardware numbers, symbolic sizes, brackets, no module, a scalar, a decision without a fact and the reverse."""
    tensors = (
        saved("mm", "blocks[0]['[red]'].a_module_with_a_rather_long_name.and_another_one_below_it", (64, 64), 8192),
        saved("view", "", ("s0", 64), None),
        saved("sum_1", "loss", (), 2),
        saved("relu", "act", (64,), 128),
    )
    decisions = (
        Decision("mm", "offload", "policy 'offload' [all that may go]"),
        Decision("view", "recompute", "policy"),
        Decision("sum_1", "keep", "smaller than min_tensor_bytes"),
        Decision("gone", "keep", "not in the table"),
    )
    return Plan(key="", graph="graph_1", saved=SavedTable(tensors), decisions=decisions)


def small_plan(*, large: bool = True) -> Plan:
    """Tensors below min_tensor_bytes: kept for it, asked to be offloaded all the same, and one that is recomputed."""
    least = {name: Refusal.BELOW_MIN_BYTES.because(nbytes=size, least="1.00 MiB") for name, size in
             {"rsqrt": "2.00 KiB", "amax": "64.0 KiB", "sum": "4 B"}.items()}  # fmt: skip
    tensors = (
        *([saved("mm", "layers.0.up", (1024, 1024), 2 * MIB)] if large else []),
        saved("rsqrt", "layers.0.norm", (1024,), 2048), saved("amax", "", (32768,), 64 * 1024),
        saved("sum", "", (), 4), saved("neg", "layers.0", (8,), 16),
    )  # fmt: skip
    reasons: dict[str, tuple[Action, str]] = {
        "mm": ("keep", "moving it does not lower the peak"),
        "rsqrt": ("keep", f"{least['rsqrt']}; recomputing it would not pay"),
        "amax": ("keep", f'policy="offload" asks to offload: {least["amax"]}'), "sum": ("keep", str(least["sum"])),
        "neg": ("recompute", "0.001 ms again"),
    }  # fmt: skip
    decisions = tuple(Decision(tensor.name, *reasons[tensor.name]) for tensor in tensors)
    return Plan(key="", graph="graph_2", saved=SavedTable(tensors), decisions=decisions)


def empty_plan() -> Plan:
    return Plan(key="k", graph="inference")


def per_block_report() -> OffloadReport:
    """Three compiled blocks and a head that keeps all, with what a step then took."""
    blocks = [
        dataclasses.replace(llama_plan(3, graph=f"block_{i}"), summary=f"block {i}: {summary_line(llama_plan(3))}")
        for i in range(3)
    ]
    logits = saved("logits", "lm_head", (4096, 32000), 250 * MIB)
    head = Plan(
        key="head", graph="head", saved=SavedTable((logits,)),
        decisions=(Decision("logits", "keep", "lives too short to move"),),
        prediction=Prediction(keep_peak_bytes=8 * GIB, predicted_peak_bytes=8 * GIB, keep_time_s=0.1, predicted_time_s=0.1),
        device="cuda:0",
    )  # fmt: skip
    measured = Measured(peak_bytes=int(17.5 * GIB), step_time_s=1.632, keep_step_time_s=1.6)
    return OffloadReport(plans=(*blocks, head), graph_breaks=3, measured=measured)


GOLDENS = {
    "llama": lambda: plan_table(llama_plan()),
    "llama_full": lambda: plan_table(llama_plan(), compact=False),
    "small": lambda: plan_table(small_plan()),
    "llama_narrow": lambda: plan_table(llama_plan(), width=100),
    "awkward": lambda: plan_table(awkward_plan()),
    "empty": lambda: plan_table(empty_plan()),
    "per_block": lambda: str(per_block_report()) + "\n",
}


@pytest.mark.parametrize("name", GOLDENS)
def test_golden(name: str) -> None:
    path, text = GOLDEN / f"report_{name}.txt", GOLDENS[name]()
    if ACCEPT:
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{path.name} changed; accept: ACCEPT_GOLDENS=1 pytest {__file__}"


def test_no_golden_is_left_over() -> None:
    assert {path.name for path in GOLDEN.glob("report_*.txt")} == {f"report_{name}.txt" for name in GOLDENS}


@pytest.mark.parametrize("width", [80, 100, 128, 200])
@pytest.mark.parametrize("plan", [llama_plan(), awkward_plan(), empty_plan()], ids=lambda plan: plan.graph)
def test_lines_keep_to_the_width_in_plain_ascii(plan: Plan, width: int) -> None:
    text = plan_table(plan, width=width)
    assert text.isascii()
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= width
    assert all(line == line.rstrip() for line in text.splitlines())


def test_text_does_not_depend_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plan_table(llama_plan())
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "40", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
    assert plan_table(llama_plan()) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    colored = plan_table(llama_plan(), color=True)
    assert "\x1b[32mrecompute" in colored
    assert "\x1b[33moffload" in colored
    assert "\x1b[34mkeep" in colored


# Folding

actions = st.sampled_from(("keep", "recompute", "offload"))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans over repeated layers with few distinct shapes, decisions and reasons: many rows fold, many nearly do."""
    count = draw(st.integers(0, 24))
    tensors, decisions = [], []
    for number in range(count):
        module = draw(st.sampled_from(("layers.{}.mlp", "layers.{}.attn.{}", "head", "", "h{}"))).format(
            *draw(st.tuples(*[layer] * 2))
        )
        size = draw(st.sampled_from((None, 0, 7, 4096)))
        op = draw(st.sampled_from(("aten.mm.default", "aten.add.Tensor")))
        tensors.append(saved(f"node_{number}", module, (draw(st.sampled_from((3, 4))),), size, op))
        if draw(st.booleans()):
            decisions.append(Decision(f"node_{number}", draw(actions), draw(st.sampled_from(("a", "b")))))
    return Plan(key="k", graph="g", saved=SavedTable(tuple(tensors)), decisions=tuple(decisions))


layer = st.integers(0, 12)


@given(plans())
def test_folding_loses_no_storage_and_no_byte(plan: Plan) -> None:
    rows = folded_rows([plan])
    assert sorted(name for row in rows for name in row.tensors) == sorted(tensor.name for tensor in plan.saved.tensors)
    for action in ("keep", "recompute", "offload"):
        mine = [tensor for tensor in plan.saved.tensors if plan.action(tensor.name) == action]
        assert sum(row.nbytes for row in rows if row.action == action) == sum(tensor.nbytes or 0 for tensor in mine)
        assert sum(row.symbolic for row in rows if row.action == action) == sum(tensor.nbytes is None for tensor in mine)
    reasons = {decision.name: decision.reason for decision in plan.decisions}
    for row in rows:
        for name in row.tensors:
            tensor = plan.saved[name]
            assert (tensor.op, str(tensor.shape[0]), plan.action(name)) == (row.op, row.shape, row.action)
            assert reasons.get(name, row.why) == row.why


@given(plans())
def test_report_counts_what_the_table_counts(plan: Plan) -> None:
    report = OffloadReport(plans=(plan, plan))
    assert report.offloaded_bytes == 2 * plan.offloaded_bytes
    assert report.recomputed_bytes == 2 * plan.recomputed_bytes
    assert report.kept_bytes + report.offloaded_bytes + report.recomputed_bytes == 2 * plan.saved.saved_bytes


def row_of(*modules: str, action: Action = "keep") -> list[str]:
    tensors = tuple(saved(f"mm_{i}", module, (8, 8), 128) for i, module in enumerate(modules))
    decisions = tuple(Decision(tensor.name, action, "why") for tensor in tensors)
    return [row.module for row in folded_rows([Plan(key="", graph="g", saved=SavedTable(tensors), decisions=decisions)])]


@pytest.mark.parametrize(
    ("modules", "folded"),
    [
        ([f"layers.{i}.mlp" for i in range(8)], ["layers.0-7.mlp"]),
        (["layers.0.mlp", "layers.1.mlp", "layers.3.mlp"], ["layers.0-1,3.mlp"]),
        ([f"layers.{i}" for i in range(1, 80, 2)], ["layers.1,3,..,79"]),
        ([f"layers.{i}.experts.{j}" for i in range(4) for j in range(8)], ["layers.0-3.experts.0-7"]),
        (["layers.0.mlp", "layers.0.attn", "layers.1.mlp"], ["layers.0-1.mlp", "layers.0.attn"]),
        (["h10.ln_1", "h9.ln_1"], ["h9-10.ln_1"]),
        (["layers.0", "layers"], ["layers.0", "layers"]),
        (["", ""], ["-"]),
    ],
)
def test_modules_fold_by_their_numbers(modules: list[str], folded: list[str]) -> None:
    assert row_of(*modules) == folded


@pytest.mark.parametrize("field", ["op", "shape", "dtype", "action", "reason"])
def test_what_differs_in_more_than_numbers_stays_apart(field: str) -> None:
    one, two = saved("mm", "layers.0", (8, 8), 128), saved("mm_1", "layers.1", (8, 8), 128)
    first, second = Decision("mm", "keep", "why"), Decision("mm_1", "keep", "why")
    changes: dict[str, object] = {
        "op": "aten.add.Tensor",
        "shape": (8, 9),
        "dtype": "float32",
        "action": "recompute",
        "reason": "x",
    }
    alike = Plan(key="", graph="g", saved=SavedTable((one, two)), decisions=(first, second))
    assert len(folded_rows([alike])) == 1
    if field in ("action", "reason"):
        apart = dataclasses.replace(alike, decisions=(first, dataclasses.replace(second, **{field: changes[field]})))
    else:
        apart = dataclasses.replace(alike, saved=SavedTable((one, dataclasses.replace(two, **{field: changes[field]}))))
    assert len(folded_rows([apart])) == 2


# Summary line

NO_TIMES = Prediction(predicted_peak_bytes=GIB, keep_peak_bytes=2 * GIB)
WITHIN_SLOWDOWN = dataclasses.replace(NO_TIMES, lower_bound_peak_bytes=GIB // 2, keep_time_s=1.0, predicted_time_s=1.02)


def kept_plan(**prediction: object) -> Plan:
    return dataclasses.replace(llama_plan(2), decisions=(), transfers=(), prediction=Prediction(**prediction))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            summary_line(
                kept_plan(predicted_peak_bytes=int(31.2 * GIB)),
                device_bytes=139 * GIB,
                hint="max_slowdown=0.01 would save 13 GiB",
            ),
            "predicted peak 31.2 of 139.0 GiB: kept all; max_slowdown=0.01 would save 13 GiB",
        ),
        (
            summary_line(kept_plan(predicted_peak_bytes=31 * MIB), device_bytes=139 * GIB),
            "predicted peak 31.0 MiB of 139.0 GiB: kept all",
        ),
        (summary_line(kept_plan()), "kept all 364.0 MiB in 8 tensors; no peak predicted"),
        (summary_line(empty_plan()), "kept all 0 B in 0 tensors; no peak predicted"),
        (
            summary_line(llama_plan()),
            "offloads 772.0 MiB in 14 tensors, recomputes 256.0 MiB in 8 tensors, keeps 428.0 MiB: "
            "predicted peak 17.6 GiB (keep-all 23.4 GiB), slowdown +0.4 % (bound +0.1 %)",
        ),
        (
            summary_line(dataclasses.replace(llama_plan(), prediction=NO_TIMES)),
            "offloads 772.0 MiB in 14 tensors, recomputes 256.0 MiB in 8 tensors, keeps 428.0 MiB: "
            "predicted peak 1.00 GiB (keep-all 2.00 GiB), no time predicted",
        ),
        (
            summary_line(dataclasses.replace(llama_plan(), prediction=WITHIN_SLOWDOWN), device_bytes=139 * GIB),
            "offloads 772.0 MiB in 14 tensors, recomputes 256.0 MiB in 8 tensors, keeps 428.0 MiB: "
            "predicted peak 1.00 of 139.0 GiB (keep-all 2.00 GiB, bound 512.0 MiB), slowdown +2.0 %",
        ),
        (
            summary_line(llama_plan(), device_bytes=139 * GIB, budget_bytes=18 * GIB),
            "offloads 772.0 MiB in 14 tensors, recomputes 256.0 MiB in 8 tensors, keeps 428.0 MiB: predicted peak 17.6 of "
            "18.0 GiB budget (keep-all 23.4 GiB, device 139.0 GiB), slowdown +0.4 % (bound +0.1 %)",
        ),
        (
            summary_line(kept_plan(predicted_peak_bytes=31 * MIB), device_bytes=139 * GIB, budget_bytes=64 * MIB),
            "predicted peak 31.0 of 64.0 MiB budget (device 139.0 GiB): kept all",
        ),
        (
            summary_line(kept_plan(predicted_peak_bytes=31 * MIB), budget_bytes=64 * MIB),
            "predicted peak 31.0 of 64.0 MiB budget: kept all",
        ),
        (summary_line(empty_plan(), budget_bytes=GIB), "kept all 0 B in 0 tensors; no peak predicted"),
        (
            summary_line(awkward_plan(), hint="device_budget=\"1MiB\" would do more"),
            "offloads 8.00 KiB in 1 tensor, recomputes 0 B in 1 tensor (1 of symbolic size not counted), keeps 130 B: "
            "no peak predicted, no time predicted; device_budget=\"1MiB\" would do more",
        ),
    ],
)  # fmt: skip
def test_summary_line(line: str, expected: str) -> None:
    assert line == expected


@given(plans())
def test_summary_is_one_line_that_says_what_is_done(plan: Plan) -> None:
    line = summary_line(plan)
    done = {plan.action(tensor.name) for tensor in plan.saved.tensors}
    assert "\n" not in line
    assert ("kept all" in line) == (not done - {"keep"})
    assert ("offloads " in line) == ("offload" in done)
    assert ("recomputes " in line) == ("recompute" in done)


def test_table_ends_with_the_plans_own_summary() -> None:
    plan = dataclasses.replace(llama_plan(), summary="what the backend said")
    assert plan_table(plan).splitlines()[-1] == "what the backend said"


# OffloadReport


def test_json_round_trip() -> None:
    for report in (
        per_block_report(),
        OffloadReport(),
        OffloadReport(plans=(awkward_plan(),)),
        OffloadReport(measured=Measured()),
    ):
        assert OffloadReport.from_json(report.to_json()) == report


def test_json_has_the_figures() -> None:
    report = per_block_report()
    derived = json.loads(report.to_json())["derived"]
    assert derived == {name: getattr(report, name) for name in derived}
    assert derived["offloaded_bytes"] == 3 * llama_plan(3).offloaded_bytes > 0


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"format": 99}', '{"format": 1, "plans": [{}], "graph_breaks": 0, "measured": null}']
)
def test_foreign_json_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=rf"to_json did not write this.*{len(text)} characters.*Write it again"):
        OffloadReport.from_json(text)


def test_figures_of_a_call() -> None:
    report = per_block_report()
    assert report.predicted_peak_bytes == int(17.6 * GIB)
    assert report.keep_peak_bytes == int(23.4 * GIB)
    assert report.predicted_slowdown == pytest.approx((3 * 0.502 + 0.1) / (3 * 0.5 + 0.1) - 1)
    assert report.measured_peak_bytes == int(17.5 * GIB)
    assert report.measured_slowdown == pytest.approx(0.02)
    assert report.lower_bound_slowdown is None, "the head has no bound"
    assert OffloadReport(plans=report.plans[:3]).lower_bound_slowdown == pytest.approx(0.001)


def test_the_bound_on_the_peak_of_a_call() -> None:
    """Of graphs planned for a slowdown the largest bound holds for the call; without such a graph there is none."""
    bounds = (3 * GIB, None, 2 * GIB)
    plans = tuple(
        dataclasses.replace(
            llama_plan(3, graph=f"g{i}"), prediction=dataclasses.replace(NO_TIMES, lower_bound_peak_bytes=least)
        )
        for i, least in enumerate(bounds)
    )
    assert OffloadReport(plans=plans).lower_bound_peak_bytes == 3 * GIB
    assert "peak      predicted 1.00 GiB (keep-all 2.00 GiB, bound 3.00 GiB)" in str(OffloadReport(plans=plans))
    assert OffloadReport(plans=plans[1:2]).lower_bound_peak_bytes is None


def test_nothing_changed_is_exactly_no_slowdown() -> None:
    odd = kept_plan(keep_time_s=0.3, predicted_time_s=0.1 + 0.2)
    assert odd.prediction.predicted_slowdown != 0.0
    assert OffloadReport(plans=(odd,)).predicted_slowdown == 0.0


def test_without_a_run_or_hardware_there_are_no_figures() -> None:
    report = OffloadReport(plans=(awkward_plan(),))
    assert report.measured_peak_bytes is None
    assert report.measured_slowdown is None
    assert report.lower_bound_slowdown is None
    assert report.predicted_slowdown == 0.0
    assert report.predicted_peak_bytes == 0
    assert "measured" not in str(report)
    assert OffloadReport(measured=Measured(step_time_s=1.0)).measured_slowdown is None
    assert "measured a step of 1000.0 ms" in str(OffloadReport(measured=Measured(step_time_s=1.0)))


def test_what_is_below_min_tensor_bytes_is_one_line_and_counted() -> None:
    text, full = plan_table(small_plan()), plan_table(small_plan(), compact=False)
    line = "3 more tensors of less than min_tensor_bytes=1.00 MiB stay: 66.0 KiB together"
    assert line in text
    assert "rsqrt" not in text
    assert "neg" in text, "what is done with a small tensor is told"
    assert "rsqrt" in full
    assert line not in full
    assert "keep      2.06 MiB in 4 tensors" in text
    assert "keep      2.06 MiB in 4 tensors" in full
    alone = Plan(key="", graph="g", saved=SavedTable(small_plan().saved.tensors[1:2]), decisions=small_plan().decisions[1:2])
    assert "\n1 tensor of less than min_tensor_bytes=1.00 MiB stays: 2.00 KiB\n" in plan_table(alone)


def test_tiny_graphs_have_no_table_beside_others() -> None:
    table = SavedTable((saved("sum", "loss", (2,), 8),))
    tiny = Plan(key="t", graph="tiny", saved=table, decisions=(Decision("sum", "keep", ""),))
    assert tiny.is_tiny
    assert not small_plan().is_tiny
    assert not dataclasses.replace(tiny, decisions=(Decision("sum", "recompute", ""),)).is_tiny
    assert not dataclasses.replace(tiny, saved=SavedTable((saved("view", "", ("s0",), None),)), decisions=()).is_tiny
    text = str(OffloadReport(plans=(llama_plan(), tiny)))
    assert "graph tiny" not in text
    assert "all 2 graphs (1 without a table: less than 1.00 KiB saved, all kept)" in text
    assert "keep      428.0 MiB in 11 tensors" in text
    assert "graph tiny" in str(OffloadReport(plans=(tiny,))), "alone it is all there is"


def test_the_notes_name_no_solver() -> None:
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 64))]
    model, x, options = torch.nn.Sequential(*layers), torch.randn(256, 64), {"hardware": "h200-sxm", "min_tensor_bytes": 0}
    keep = graphoffload.explain(model, reserve=0, **options)(x).keep_peak_bytes
    report = graphoffload.explain(model, device_budget=int(0.85 * keep), reserve=0, **options)(x)
    assert report.plans[0].changes_anything
    assert "planned by" not in str(report)


def test_identical_graphs_share_a_table() -> None:
    text = str(per_block_report())
    assert text.count("why\n") == 2
    assert "3 identical graphs, block_0 .. block_2" in text
    assert "graph head" in text
    changed = dataclasses.replace(llama_plan(3), notes=("another note",))
    assert str(OffloadReport(plans=(llama_plan(3), changed))).count("why\n") == 2


# The line after a compile, end to end


class Residual(torch.nn.Module):
    """Layers of a norm, which costs little to compute again, and a product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(3))
        self.products = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, product in zip(self.norms, self.products, strict=True):
            x = x + product(norm(x))
        return x.square().mean()


def explained(**fields: object) -> OffloadReport:
    with torch.device("meta"):
        return graphoffload.explain(Residual(8192).bfloat16(), fields)(torch.empty(8192, 8192, dtype=torch.bfloat16))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hint however slow the machine is."""
    monkeypatch.setattr(decide, "saved_within", functools.partial(decide.saved_within, patience_s=60.0))


@pytest.mark.usefixtures("patient")
def test_keep_all_that_fits_says_what_a_percent_would_buy(capfd: pytest.CaptureFixture[str]) -> None:
    """A named GPU that is not there is the budget; the hint is no promise that the planner cannot keep."""
    (plan,) = explained(hardware="h200-sxm", reserve=0).plans
    found = re.fullmatch(r"predicted peak (\S+) of 139\.0 GiB: kept all; max_slowdown=0\.01 would save (\S+) MiB", plan.summary)
    assert found, plan.summary
    assert plan.summary in capfd.readouterr().err
    (paid,) = explained(hardware="h200-sxm", reserve=0, max_slowdown=0.01).plans
    assert paid.prediction.predicted_slowdown <= 0.01 + 1e-9
    saved_bytes = paid.prediction.keep_peak_bytes - paid.prediction.predicted_peak_bytes
    assert 0 < float(found[2]) <= saved_bytes / MIB + 1
    assert paid.prediction.lower_bound_peak_bytes is not None
    assert 0 < paid.prediction.lower_bound_peak_bytes <= paid.prediction.predicted_peak_bytes
    assert f"bound {format_bytes(paid.prediction.lower_bound_peak_bytes)})" in paid.summary


def test_a_given_budget_and_named_hardware_are_what_is_shown() -> None:
    """Not the device's memory in place of the budget, nor the CPU that planned in place of the GPU that was planned for."""
    report = explained(hardware="h200-sxm", device_budget="4GiB")
    assert " of 4.00 GiB budget (device 139.0 GiB): kept all" in report.plans[0].summary
    assert re.match(r"graph \S+ \(key \w+, cpu, planned for h200-sxm\): ", str(report))
    assert graphoffload.OffloadReport.from_json(report.to_json()) == report
    for here in ({}, {"hardware": "cpu"}):
        assert re.match(r"graph \S+ \(key \w+, cpu\): ", str(explained(**here)))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"policy": "keep", "hardware": "h200-sxm"}, id="nobody wants to know"),
        pytest.param({"offload_fraction": 0.0, "policy": {"*": "keep"}, "hardware": "h200-sxm"}, id="nothing may move"),
        pytest.param({}, id="nothing to fit on a CPU"),
        pytest.param({"hardware": "h200-sxm", "max_slowdown": 0.0}, id="a slowdown was asked for"),
    ],
)
def test_no_hint_where_there_is_nothing_to_say(fields: dict[str, object]) -> None:
    (plan,) = explained(**fields).plans
    assert "would save" not in plan.summary
    assert plan.summary


def test_no_hint_that_was_not_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "saved_within", lambda *args, **kwargs: None)
    (plan,) = explained(hardware="h200-sxm", reserve=0).plans
    assert plan.summary.endswith("of 139.0 GiB: kept all")


def test_no_hint_that_is_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "saved_within", lambda *args, **kwargs: 2 * MIB)
    assert explained(hardware="h200-sxm", reserve=0).plans[0].summary.endswith("kept all")
    monkeypatch.setattr(decide, "saved_within", lambda *args, **kwargs: 200 * MIB)
    assert explained(hardware="h200-sxm").plans[0].summary.endswith("max_slowdown=0.01 would save 200.0 MiB")


@pytest.mark.usefixtures("kernels_that_do_nothing")
def test_a_cache_hit_says_the_same_line(capfd: pytest.CaptureFixture[str]) -> None:
    """The plan carries its line: what the device is and what the hint was."""
    said = []
    for _ in range(2):
        torch._dynamo.reset()
        registry.forget()
        torch.manual_seed(0)
        model, x = Residual(64), torch.randn(32, 64)
        model.compile(backend="graphoffload", options={"hardware": "a100-40g"})
        model(x).backward()
        lines = capfd.readouterr().err.splitlines()
        said += [line for line in lines if line.startswith("graphoffload: ")]  # torch may have warnings of its own
    assert len(said) == 2
    assert "(from the compile cache)" not in said[0]
    assert "(from the compile cache)" in said[1]
    line = said[0].split(": ", 2)[2].strip()
    assert "of 39.0 GiB: kept all" in line
    assert line in said[1]
