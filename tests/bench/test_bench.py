"""The measuring tools themselves; these run anywhere."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from graphoffload.bench import measure, together, variants, where
from graphoffload.bench.measure import Row, Sample, bootstrap_ratio, compare_gradients
from graphoffload.bench.models import MODELS, build
from graphoffload.bench.observed import heard
from graphoffload.bench.results import row_record
from graphoffload.bench.run_options import Options
from graphoffload.bench.runner import Runner
from graphoffload.bench.table import progress_line, show_table
from graphoffload.bench.variants import parse, split_names
from graphoffload.errors import ConfigError
from graphoffload.log import log, say
from graphoffload.torch_internals import allocator


def test_names_of_variants() -> None:
    """A comma inside JSON belongs to its name; options follow a plus."""
    assert split_names('keep, ours:{"policy": "offload", "verify": "off"},budget:0.5') == [
        "keep",
        'ours:{"policy": "offload", "verify": "off"}',
        "budget:0.5",
    ]
    variant = parse("offload:5.8GB+max_inflight_bytes=2GiB+min_tensor_bytes=0")
    assert (variant.kind, variant.argument) == ("offload", "5.8GB")
    assert dict(variant.options) == {"max_inflight_bytes": "2GiB", "min_tensor_bytes": 0}
    assert dict(parse('ours:{"max_slowdown": 0.02}').options) == {"max_slowdown": 0.02}
    blocks = parse("per-block/offload:5.8GB")
    assert (blocks.kind, blocks.argument, blocks.per_block, variant.per_block) == ("offload", "5.8GB", True, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "unknown variant 'nothing'; known: eager"),
        ("offload", "offload needs a size"),
        ("keep+policy=offload", "only variants of graphoffload take options"),
        ("slowdown:much", "could not convert"),
        ("per-block/eager", "only keep, checkpoint, selective and variants of graphoffload go block by block"),
    ],
)
def test_bad_names(text: str, message: str) -> None:
    """Before anything was compiled."""
    with pytest.raises(ConfigError, match=message):
        parse(text)


def test_gradient_comparison_leaves_gradients_alone() -> None:
    """In float32 a conversion is no copy."""
    a, b = [torch.ones(3), torch.full((2, 2), 2.0)], [torch.ones(3), torch.zeros(2, 2)]
    assert compare_gradients(a, b) == pytest.approx((4.0, 19**0.5, 3**0.5))
    assert compare_gradients(a, a)[0] == 0.0
    assert torch.equal(a[0], torch.ones(3))
    nan = [torch.full((3,), float("nan")), a[1]]
    assert compare_gradients(nan, b)[0] != compare_gradients(nan, b)[0]


def test_interval_of_a_ratio() -> None:
    """It holds the true ratio, and shrinks to it without noise."""
    low, high = bootstrap_ratio([10.2, 10.1, 10.3, 10.15, 10.25], [10.0, 10.1, 9.9, 10.05, 9.95])
    assert low < 1.02 < high
    assert bootstrap_ratio([3.0, 3.0], [2.0, 2.0]) == (1.5, 1.5)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("qwen", "small")])
def test_models_train(name: str) -> None:
    """Every parameter that is trained gets a gradient, and the same seed gives the same loss."""
    losses = []
    for _ in range(2):
        workload = build(name, "cpu", tiny=True, dtype=torch.float32)
        loss = workload.loss()
        loss.backward()
        trained = [parameter for parameter in workload.module.parameters() if parameter.requires_grad]
        assert trained
        assert all(parameter.grad is not None for parameter in trained)
        losses.append(loss.item())
    assert losses[0] == losses[1]
    assert workload.tokens > 0


class Uncompiled:
    """In place of Inductor, whose compile takes longer than all of this."""

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        return graph


def test_variants_in_turns_share_weights_and_a_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has the other's gradients where its own were, so each steps before it is looked at; one that fails is a row."""
    monkeypatch.setattr(variants, "Inductor", Uncompiled)
    ours = 'ours:{"policy": "offload", "min_tensor_bytes": 0, "inner": "aot_eager"}'
    runner = Runner("small", "cpu", Options(steps=4, block=2, tiny=True, dtype=torch.float32, quiet=True))
    runner.start()
    assert runner.baseline is not None
    shared = {p.data_ptr() for p in runner.baseline.parameters} | {p.grad.data_ptr() for p in runner.baseline.parameters}
    seen: list[str] = []
    measured = runner.in_turns

    def watch(session: measure.Session, name: str) -> None:
        assert {p.data_ptr() for p in session.parameters} | {p.grad.data_ptr() for p in session.parameters} == shared
        step = session.step

        def noting() -> measure.Sample:
            seen.append(name)
            return step()

        monkeypatch.setattr(session, "step", noting)

    def watched(lanes: list[tuple[Row, measure.Session]], baseline: measure.Session, *args: Any, **kwargs: Any) -> None:
        for row, session in lanes:
            watch(session, row.variant[:4])
        measured(lanes, baseline, *args, **kwargs)
        for parameter in baseline.parameters:
            parameter.grad.fill_(float("nan"))

    runner.in_turns = watched
    keep, bad, offload = runner.run_in_turns(["keep", "slowdown:much", ours])
    assert seen[:8] == ["keep", "keep", "ours", "ours"] * 2
    assert (keep.status, offload.status) == ("ok", "ok")
    assert bad.status.startswith("FAILED: ConfigError")
    assert [len(row.samples) for row in (keep, bad, offload)] == [4, 0, 4]
    assert keep.baseline == offload.baseline
    assert len(keep.baseline) == 4
    assert offload.ours["per_step"]["d2h_bytes"] > 0
    assert offload.ours["twin_error"] == 0.0, "against its own gradients, not those that another variant left"
    assert keep.predicted_peak_bytes is None
    assert [line for line in row_record(offload)["said"] if "offloads " in line and "predicted peak" in line]
    assert "said" not in keep.ours
    assert "said" not in row_record(keep)


@pytest.mark.parametrize("level", [logging.NOTSET, logging.WARNING])
def test_what_is_said_is_noted(
    level: int, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is silenced; and whoever sees it otherwise sees it as before, now and afterwards."""
    monkeypatch.setattr(log, "propagate", False)  # pytest's own handlers
    before, handlers = log.level, list(log.handlers)
    try:
        log.setLevel(level)
        with heard() as lines:
            say("planned again: copies ran at 3 GB/s")
            log.info("no variants in slices: an error of\nmany lines")
            log.debug("not for people")
        assert (log.level, log.handlers, log.propagate) == (level, handlers, False)
        say("afterwards")
    finally:
        log.setLevel(before)
    assert lines == ["planned again: copies ran at 3 GB/s", "no variants in slices: an error of"]
    shown = [] if level == logging.WARNING else ["planned again: copies ran at 3 GB/s", "afterwards"]
    assert capfd.readouterr().err.splitlines() == [f"graphoffload: {line}" for line in shown]
    monkeypatch.setattr(log, "propagate", True)
    log.setLevel(level)
    try:
        with heard() as lines:
            say("once more")
    finally:
        log.setLevel(before)
    assert lines == ["once more"]
    assert ("once more" in caplog.messages) == (level != logging.WARNING), "who has set up logging sees it there"
    assert not capfd.readouterr().err


def test_kernels_that_were_timed_before_stop_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stops: list[int] = []

    @contextlib.contextmanager
    def alone(folder: Path) -> Iterator[None]:
        stops.append(1)
        yield

    monkeypatch.setattr(together, "alone", alone)
    times = together._alone_for_new(tmp_path, len)
    with FakeTensorMode():
        traced = {size: make_fx(torch.mm)(torch.empty(size, size), torch.empty(size, size)) for size in (8, 16)}
    assert times(iter([traced[8].graph])) == 1
    assert times([traced[8].graph, traced[8].graph]) == 2
    assert len(stops) == 1
    assert times([traced[8].graph, traced[16].graph]) == 2
    assert len(stops) == 2


def test_so_many_measure_at_once(tmp_path: Path) -> None:
    """Two of three do, and the third waits for one of them."""
    running: list[int] = []
    most: list[int] = []
    two = threading.Event()

    def measured(number: int) -> None:
        running.append(number)
        most.append(len(running))
        if len(running) == 2:
            two.set()
        assert two.wait(30)
        time.sleep(0.2)
        running.remove(number)

    process = together._in_a_slot(tmp_path, 2, measured)
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        for finished in [threads.submit(process, number) for number in range(3)]:
            finished.result()
    assert max(most) == 2


def test_unknown_model_and_size() -> None:
    """Both lists are in the message."""
    with pytest.raises(ConfigError, match="known: llama4k"):
        build("gpt5", "cpu")
    with pytest.raises(ConfigError, match="has no size"):
        build("small", "cpu", {"width": 3}, tiny=True)


def test_table_of_failures(capsys: pytest.CaptureFixture[str]) -> None:
    """A variant that failed is a line like any other."""
    good = Row("keep-all before", samples=[Sample(10.0, 1.0, 10**9, 2 * 10**9, 5.5)] * 4, peak_bytes=2 * 10**9)
    bad = Row("budget:0.5", status="FAILED: RuntimeError: no")
    show_table([good, bad], {"model": "small", "torch": "2.11"})
    out = capsys.readouterr().out
    assert "2.000" in out
    assert "FAILED: RuntimeError: no" in out
    assert progress_line(bad) == "budget:0.5: FAILED: RuntimeError: no"


def event(action: str, address: int, nbytes: int, name: str = "f") -> dict[str, Any]:
    """As torch's snapshot has it."""
    frames = [{"filename": "model.py", "line": address, "name": name}]
    return {"action": action, "addr": address, "size": nbytes, "time_us": address, "frames": frames}


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """How the recording of a GPU's allocations was switched, where a snapshot holds three of them and a free."""
    switched: list[dict[str, Any]] = []
    trace = [
        event("alloc", 1, 100, "kept"), event("alloc", 2, 50, "freed"), event("free_requested", 2, 50),
        event("free_completed", 2, 50), event("segment_alloc", 9, 2**21), event("alloc", 3, 80, "late"),
    ]  # fmt: skip
    enabled = lambda: bool(switched) and switched[-1]["enabled"] is not None  # noqa: E731
    for target, name, found in [
        (torch.cuda, "is_available", lambda: True), (torch.cuda, "is_initialized", lambda: True),
        (torch.cuda, "current_device", lambda: 1), (torch._C, "_cuda_isHistoryEnabled", enabled),
        (torch._C, "_cuda_memorySnapshot", lambda _: {"device_traces": [[], trace]}),
        (torch.cuda.memory, "_record_memory_history", lambda **how: switched.append(how)),
    ]:  # fmt: skip
        monkeypatch.setattr(target, name, found, raising=False)
    return switched


def test_what_is_alive_at_the_peak(history: list[dict[str, Any]]) -> None:
    """Of the current device, with who allocated it; recording ends."""
    session: Any = types.SimpleNamespace(step=lambda: None)
    assert where.live_at_peak(session) == (180, [(100, "model.py:1 kept"), (80, "model.py:3 late")], 3)
    assert history == [{"enabled": "all", "context": "alloc", "stacks": "python", "max_entries": 2_000_000}, {"enabled": None}]


def test_nobody_elses_recording_is_ended(history: list[dict[str, Any]]) -> None:
    """There is one recording in a process; the runtime's has no frames, which take time."""
    session: Any = types.SimpleNamespace(step=lambda: None)
    assert allocator.start()
    assert history[-1]["context"] is None
    assert not allocator.start()
    with pytest.raises(ConfigError, match="recorded by somebody else"):
        where.live_at_peak(session)
    assert [change.nbytes for change in allocator.stop(1)] == [100, 50, -50, 80]
    assert [how["enabled"] for how in history] == ["all", None]
