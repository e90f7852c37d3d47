"""The search of examples/longest.py: how many lengths it tries, where it begins, what a call that is cut off leaves."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphoffload.bench import page
from graphoffload.errors import BudgetError

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "longest.py"
GRAIN = 8192


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("_longest", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def asked(example: ModuleType, answer: int, guess: int, limit: int = 64 * GRAIN) -> tuple[int, list[int]]:
    """What the search finds where `answer` tokens are the most that fit, and the lengths that it asked for."""
    lengths: list[int] = []

    def fits(tokens: int) -> bool:
        lengths.append(tokens)
        return tokens <= answer

    return example.longest(fits, guess=guess, limit=limit, grain=GRAIN), lengths


@pytest.mark.parametrize(
    ("off", "tries"), [(0, [20, 21]), (-1, [19, 20, 21]), (1, [21, 20]), (2, [22, 21, 20]), (-2, [18, 19, 20, 22, 21])]
)
def test_few_lengths_are_tried(example: ModuleType, off: int, tries: list[int]) -> None:
    found, lengths = asked(example, 20 * GRAIN + 100, (20 + off) * GRAIN + 5)
    assert (found, lengths) == (20 * GRAIN, [GRAIN * place for place in tries])


@given(answer=st.integers(0, 70 * GRAIN), guess=st.integers(0, 90 * GRAIN), limit=st.integers(GRAIN, 64 * GRAIN))
def test_longest_is_bracketed(example: ModuleType, answer: int, guess: int, limit: int) -> None:
    found, lengths = asked(example, answer, guess, limit)
    assert found == min(answer, limit) // GRAIN * GRAIN
    assert len(lengths) == len(set(lengths)) <= 14, "a length is tried once"
    assert all(GRAIN <= tokens <= limit and tokens % GRAIN == 0 for tokens in lengths)
    assert found in (0, *lengths), "what is reported was tried"
    assert found + GRAIN in lengths or found + GRAIN > limit, "and so was the next, unless the limit forbids it"


def test_where_peaks_meet_the_cap(example: ModuleType) -> None:
    def peak(tokens: int) -> int:
        looked.append(tokens)
        host = max(0, tokens - 250_000) * 300_000  # what the host has no room for stays
        return max(9_000_000_000 + 100_000 * tokens, 4_000_000_000 + 200_000 * tokens) + host

    for cap, answer in ((40_000_000_000, 180_000), (80_000_000_000, 302_000)):
        looked: list[int] = []
        tokens = example.cross(peak, cap, first=131072, grain=GRAIN, limit=2**20)
        assert tokens == answer // GRAIN * GRAIN
        assert len(looked) == len(set(looked)) <= 4, "each length costs a plan"


def test_line_stays_within_limit_and_grain(example: ModuleType) -> None:
    assert example.cross(lambda tokens: tokens, 10**12, first=GRAIN, grain=GRAIN, limit=5 * GRAIN + 1) == 5 * GRAIN
    assert example.cross(lambda tokens: 10**9 + tokens, 10, first=2 * GRAIN, grain=GRAIN, limit=10 * GRAIN) == GRAIN


def trial(example: ModuleType, answers: dict[str, int], lengths: list[tuple[str, int]], seconds: float = 1.0) -> Any:
    def attempt(method: str, tokens: int, given: Any) -> Any:
        lengths.append((method, tokens))
        if tokens <= answers[method]:
            return example.Tried(method, tokens, 1000.0, 5.0, 3, 8_000_000_000, seconds=seconds)
        return example.Tried(method, tokens, None, why="OutOfMemoryError", seconds=seconds)

    return attempt


def test_table_has_both_ends(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths: list[tuple[str, int]] = []
    monkeypatch.setattr(example, "attempt", trial(example, {"keep": 20000, "auto": 40000}, lengths))
    out = tmp_path / "out.json"
    example.main(["--methods", "keep,auto", "--guess", "keep=16384,auto=40960", "--out", str(out)])
    assert lengths == [("keep", 16384), ("keep", 24576), ("auto", 40960), ("auto", 32768)]
    rows = capsys.readouterr().out.splitlines()[-2:]
    assert rows[0].split() == ["keep", "16384", "1000", "5", "3", "8.0", "24576:", "OutOfMemoryError"]
    assert rows[1].split() == ["auto", "32768", "1000", "5", "3", "8.0", "40960:", "OutOfMemoryError"]
    assert [(row["method"], row["tokens"], row["why"]) for row in json.loads(out.read_text())["rows"]] == [
        ("keep", 16384, ""), ("keep", 24576, "OutOfMemoryError"), ("auto", 40960, "OutOfMemoryError"), ("auto", 32768, "")
    ]  # fmt: skip


def test_call_that_is_cut_off_leaves_its_rows(example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lengths: list[tuple[str, int]] = []
    fine = trial(example, {"keep": 20000}, lengths)

    def attempt(method: str, tokens: int, given: Any) -> Any:
        if method != "keep":
            raise KeyboardInterrupt
        return fine(method, tokens, given)

    monkeypatch.setattr(example, "attempt", attempt)
    out = tmp_path / "out.json"
    with pytest.raises(KeyboardInterrupt):
        example.main(["--methods", "keep,auto", "--guess", "keep=16384,auto=40960", "--out", str(out)])
    assert [row["tokens"] for row in json.loads(out.read_text())["rows"]] == [16384, 24576]


def test_no_attempt_that_would_end_too_late(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths: list[tuple[str, int]] = []
    monkeypatch.setattr(example, "attempt", trial(example, {"keep": 20000}, lengths, seconds=60.0))
    example.main(["--methods", "keep", "--guess", "keep=16384", "--limit-s", "50"])
    printed = capsys.readouterr().out
    assert lengths == [("keep", 16384)]
    assert "out of time, 24576 tokens were not tried" in printed
    assert printed.splitlines()[-1].split()[-1] == "-", "what was not tried is not called too long"


def test_a_method_that_fails_is_a_row_and_the_next_one_runs(example: ModuleType, tmp_path: Path) -> None:
    """For another reason than its length, a package that is not there for example; the file's subject has the cap and sizes."""
    out = tmp_path / "out.json"
    sizes = ["--model", "llama3-8b-lora", "--size", "rank=2", "layers=1", "--gib", "24"]
    assert example.main(["--tiny", *sizes, "--methods", "jax,tiled:16/hf-checkpoint", "--steps", "1", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    failed, trained = found["rows"]
    assert failed["why"].startswith("NotMeasurable: ")
    assert trained["tokens_per_s"] > 0
    assert found["subject"] == "longest-llama3-8b-lora,gib=24,layers=1,rank=2,tiny"


def test_a_page_has_published_lengths_and_methods_that_failed(example: ModuleType, tmp_path: Path) -> None:
    """Beside what was measured, in the order of their lengths."""
    given = example.arguments(["--model", "llama3-8b-lora", "--size", "bits=4", "--gib", "24"])
    attempts = [
        example.Tried("auto", 81920, 4000.0, 20480.0, 1, 24_000_000_000),
        example.Tried("trl-offload", 65536, None, why="NotMeasurable: needs trl (pip install trl)"),
    ]
    noted = {"date": "2026-11-24T12:00:00", "device": "H200", "torch": "2.11.0", "commit": "abc", "command": "x"}
    result = replace(example.result_of(given, noted, attempts), path=tmp_path / "a.json")
    lines = page.longest(page.Source([result], tmp_path, tmp_path), "longest-llama3-8b-lora,bits=4,gib=24")
    shown = [[cell.strip() for cell in line.split("|")[2:4]] for line in lines[2:]]
    assert shown == [
        ["trl-offload", "0"], ["published: Hugging Face and FlashAttention 2", "5,789"], ["published: Unsloth", "78,475"],
        ["**graphoffload**", "81,920"],
    ]  # fmt: skip
    assert "65,536: NotMeasurable: needs trl" in lines[2]
    assert "unsloth.ai/docs/basics/unsloth-benchmarks" in lines[3]


def test_nothing_begins_after_the_calls_time(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths: list[tuple[str, int]] = []
    monkeypatch.setattr(example, "attempt", trial(example, {"keep": 20000, "auto": 20000}, lengths))
    example.main(["--methods", "keep,auto", "--guess", "keep=16384,auto=16384", "--wall-s", "0"])
    assert lengths == []
    assert "keep: out of time, 16384 tokens were not tried" in capsys.readouterr().out


def options(example: ModuleType, *given: str) -> Any:
    return example.arguments(["--tiny", *given])


def test_chunks_of_the_loss_change_nothing(example: ModuleType) -> None:
    torch.manual_seed(0)
    found = []
    for chunk in ("0", "24"):  # the last chunk of 64 tokens is shorter
        workload = example.workload_of(64, "cpu", options(example, "--loss-chunk", chunk))
        workload.module.double()
        loss = workload.loss()
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in workload.module.parameters())])
    whole, chunked = found
    assert len(whole) == len(chunked) > 10
    for a, b in zip(whole, chunked, strict=True):
        torch.testing.assert_close(a, b)


def test_attention_has_no_mask(example: ModuleType) -> None:
    """One of (tokens, tokens) outgrows all else: 4.5 GiB at 49152 tokens. Transformers makes one where it is traced."""
    calls: list[dict[str, Any]] = []

    def look(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        calls.extend(node.kwargs for node in module.graph.nodes if "scaled_dot_product" in str(node.target))
        return module

    workload = example.workload_of(64, "cpu", options(example))
    plain = workload.loss()
    workload.module.compile(backend=look)
    torch.testing.assert_close(workload.loss(), plain)
    assert [(call["attn_mask"], call["is_causal"]) for call in calls] == [(None, True)] * workload.sizes["layers"]


@pytest.mark.parametrize("model", ["llama4k", "qwen"])
def test_layers_of_a_loss_in_chunks_are_checkpointed(example: ModuleType, model: str) -> None:
    """A model looks at its layers while it runs: Qwen's at their attention_type."""
    workload = example.workload_of(64, "cpu", options(example, "--model", model))
    plain = workload.loss()
    ran: list[int] = []
    example.wrap_blocks(workload, selective=False)
    for layer in workload.module.get_submodule(workload.blocks[0]):
        layer.layer.register_forward_pre_hook(lambda *_: ran.append(1))
    loss = workload.loss()
    torch.testing.assert_close(loss, plain)
    loss.backward()
    assert len(ran) == 2 * workload.sizes["layers"]


@pytest.mark.long
def test_plans_know_the_order_of_the_methods(example: ModuleType) -> None:
    """Checkpointing is foreseen from its own graph, graphoffload by its least peak; all count the gradients."""
    given = options(example, "--loss-chunk", "1024")
    tokens = 2048
    keep, checkpoint, auto = (example.foresee(method, tokens, given).peak_bytes for method in ("keep", "checkpoint", "auto"))
    assert auto <= checkpoint < keep
    module = example.workload_of(tokens, "meta", given).module
    assert auto > 2 * sum(p.numel() * p.element_size() for p in module.parameters()), "parameters and gradients"


def test_graphoffload_has_its_default_budget(example: ModuleType) -> None:
    given = options(example, "--gib", "80", "--host-gib", "100")
    assert example.variant_of("auto", "cuda", given) == "auto+reserve=0+host_budget=100.0GiB"
    assert example.variant_of("keep", "cuda", given) == "keep"
    assert example.variant_of("tiled:64/per-block/auto", "cuda", given).startswith("tiled:64/per-block/auto+reserve=0")


def test_what_an_attempt_ran_out_of_is_said(example: ModuleType) -> None:
    """Through what Dynamo wraps it in, number and all; another error is none of it."""
    budget = BudgetError("device_budget 23.5 GiB: no plan can meet it.")
    wrapped = RuntimeError("backend='graphoffload' raised:\nBudgetError: device_budget 23.5 GiB: no plan can meet it.")
    wrapped.__cause__ = budget
    assert example._out_of_room(wrapped) == "RuntimeError: BudgetError: device_budget 23.5 GiB: no plan can meet it."
    assert example._out_of_room(budget).startswith("BudgetError: device_budget 23.5 GiB")
    assert example._out_of_room(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")).endswith("2 GiB")
    assert example._out_of_room(ValueError("shapes")) == ""
