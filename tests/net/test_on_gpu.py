"""The runner for a GPU, on a CPU: what it says of architectures, of a process that dies, and of time that is over."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from net import on_gpu, page
from net.runner import load
from net.table import everything

ON_A_CPU = ["--device", "cpu", "--inner", "aot_eager", "--workers", "1", "--commit", "abc1234"]


def test_outcomes_are_stored_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ".:tests")
    results = tmp_path / "found.json"
    only = ["--only", "llama-cache", "--results", str(results)]
    assert on_gpu.main([*ON_A_CPU, *only]) == 0
    row = load(results)["rows"]["llama-cache"]
    assert "cpu" in row["ran"]
    assert row["ran"].endswith("abc1234")
    assert {way: row[way]["outcome"] for way in ("plain", "offload", "budget")} == dict.fromkeys(row.keys() - {"ran"}, "ok")
    text = "\n".join(page.gpu_section(load(results)))
    assert "* offload: 1 of 1 ok" in text
    assert f"not run: {next(iter(everything()))}" in text


def test_a_process_that_dies_is_an_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # which has no net
    results = tmp_path / "found.json"
    assert on_gpu.main([*ON_A_CPU, "--only", "llama", "gpt2", "--results", str(results)]) == 1
    assert {row["process"]["outcome"] for row in load(results)["rows"].values()} == {"error"}


def test_what_is_known_is_not_run_again() -> None:
    options = argparse.Namespace(only=None, changed=None)
    known = {name: {"plain": {"outcome": "skipped"}} for name in list(everything())[1:]}
    assert on_gpu.labels(options, known) == [next(iter(everything()))]
    assert sorted(on_gpu.labels(options, {})) == sorted(everything())
    options.changed = "dynamic"
    assert on_gpu.labels(options, known)[:1] == [next(iter(everything())) + " dynamic"]


def test_a_row_that_was_cut_off_is_run_again() -> None:
    options, name = argparse.Namespace(only=None, changed=None), next(iter(everything()))
    ok = {"outcome": "ok"}
    rows = {"cut off": {"plain": ok, "offload": ok}, "whole": {"plain": ok, "offload": ok, "budget": ok}}
    assert [name in on_gpu.labels(options, {name: row}) for row in rows.values()] == [True, False]
    assert not any(name in on_gpu.labels(options, {name: {"plain": {"outcome": why}}}) for why in ("error", "skipped"))
    assert "* time was over: cut off" in "\n".join(page.gpu_section({"rows": {n: {"ran": "", **r} for n, r in rows.items()}}))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(SystemExit, match="no architecture 'nobody'"):
        on_gpu.main([*ON_A_CPU, "--only", "nobody"])
