"""What surrounds a plan: CUDA graphs that may not reach across its copies. Said by name, and never captured."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.utils import is_cudagraph_unsafe_fx_node

import graphoffload
from graphoffload.errors import CaptureError, CudaGraphsWarning, FallbackWarning, PerRankPlanWarning
from graphoffload.facts.plan import Decision, Plan, Prediction, Transfer
from graphoffload.monitor import caveats as surroundings
from graphoffload.monitor.caveats import host_time_note, warn_of_cuts, warn_of_surroundings
from graphoffload.options.config import OffloadConfig
from graphoffload.runtime.streams import copy_streams as streams
from graphoffload.testing import ZOO, compiled, run_step

CASE = ZOO["attention"]


def plan(device: str = "cuda:0", count: int = 3) -> Plan:
    transfers = tuple(
        Transfer(
            id=i, tensor=f"t{i}", nbytes=8, offload_after=f"t{i}", release_after=None, reload_before="y", wait_before="y",
            module="layer",
        )
        for i in range(count)
    )  # fmt: skip
    decisions = tuple(Decision(f"t{i}", "offload", "asked") for i in range(count))
    return Plan(key="k", graph="graph7", decisions=decisions, transfers=transfers, device=device)


def said(found: Plan, config: OffloadConfig, *, inductor: bool = True) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_surroundings(found, config, inductor=inductor)
    assert all(issubclass(item.category, CudaGraphsWarning) for item in caught)
    return [str(item.message) for item in caught]


def cut(found: Plan, **settings: bool) -> str:
    with inductor_config.patch(settings), pytest.warns(CudaGraphsWarning) as caught:
        warn_of_cuts(found, "its forward is cut")
    return str(caught[0].message)


def test_what_is_not_captured_is_said() -> None:
    """Which graph, how many calls stay outside, and why."""
    text = cut(plan())
    for part in ("graph7", "between its 3 offloads", "12 calls a step", "its forward is cut", "min_tensor_bytes"):
        assert part in text


@pytest.mark.parametrize("setting", [{"graph_partition": False}, {"cpp_wrapper": True}])
def test_without_cuts_nothing_is_captured(setting: dict[str, bool]) -> None:
    """graph_partition=False, or the C++ wrapper, which does not cut."""
    text = cut(plan(), **setting)
    assert "no CUDA graph is captured of a graph with 3 offloaded tensors: its forward is cut" in text
    assert "graph_partition=True" in text


def test_nothing_to_say() -> None:
    """No CUDA graphs asked for, nothing copied, or no GPU."""
    graphs = OffloadConfig(mode="reduce-overhead")
    assert said(plan(), OffloadConfig()) == []
    assert said(plan(), OffloadConfig(mode="max-autotune-no-cudagraphs")) == []
    assert said(plan(count=0), graphs) == []
    assert said(plan(), graphs) == [], "what is cut is only known when Inductor compiles"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_cuts(plan("cpu"), "there are none")


def noted(found: Plan, kernels: int = 168, *, inductor: bool = True, **settings: Any) -> str:
    return host_time_note(found, OffloadConfig(**settings), kernels, inductor=inductor)


def test_a_host_that_may_be_what_limits() -> None:
    """168 kernels and 5 transfers take 5.9 ms: most of a step of 8 ms, little of one of 12 ms, nothing in a CUDA graph."""
    short, long = (replace(plan(count=5), prediction=Prediction(predicted_time_s=seconds)) for seconds in (8e-3, 12e-3))
    text = noted(short)
    for part in ("168 kernels or more and 5 transfers", "about 70 % of the predicted", "reduce-overhead", "min_tensor_bytes"):
        assert part in text
    assert "for about all of" in noted(short, 1000)
    assert not noted(long)
    assert not noted(short, 100)
    assert not noted(short, mode="reduce-overhead")
    assert not noted(short, inductor=False), "there is nothing to capture"
    assert not noted(replace(short, device="cpu"))
    assert not noted(plan(count=5)), "no times are known"
    assert not noted(replace(short, decisions=(), transfers=()), 1000), "nothing is changed"
    recomputes = replace(short, transfers=(), decisions=(Decision("t0", "recompute", "asked"),))
    assert "0 transfers" in noted(recomputes, 200)
    assert "min_tensor_bytes" not in noted(recomputes, 200)


def test_a_mode_without_inductor() -> None:
    """The mode is Inductor's: without it, it does nothing, on any device."""
    (text,) = said(plan("cpu"), OffloadConfig(mode="reduce-overhead", inner="aot_eager"), inductor=False)
    assert "mode='reduce-overhead' has no effect" in text
    config = OffloadConfig(policy="offload", min_tensor_bytes=0, mode="reduce-overhead", inner="aot_eager")
    with pytest.warns(CudaGraphsWarning, match="aot_eager"):
        run_step(compiled(CASE.fresh("cpu"), graphoffload.OffloadBackend(config)), CASE.example("cpu"), CASE.loss)


@pytest.mark.parametrize("op", ["offload", "release", "reload", "wait"])
def test_no_op_may_be_captured(op: str) -> None:
    """The tag by which Inductor cuts its graph, asked as Inductor asks."""
    target = getattr(torch.ops.graphoffload, op).default
    assert torch.Tag.cudagraph_unsafe in target.tags
    assert is_cudagraph_unsafe_fx_node(torch.fx.Graph().call_function(target))
    assert not is_cudagraph_unsafe_fx_node(torch.fx.Graph().call_function(torch.ops.aten.mm.default))


@pytest.fixture
def settings_seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """triton.reorder_for_reducing_graph_partitions in each call of Inductor's inner compile."""
    seen: list[bool] = []
    inner = compile_fx.compile_fx_inner

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(inductor_config.triton.reorder_for_reducing_graph_partitions)
        return inner(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", spy)
    return seen  # type: ignore[return-value]


@pytest.mark.usefixtures("kernels_that_do_nothing")
@pytest.mark.parametrize(("policy", "reordered"), [("offload", False), ("keep", True)])
def test_reloads_stay_where_they_are_planned(settings_seen: list[bool], policy: str, reordered: bool) -> None:
    """With CUDA graphs, Inductor would move all reloads, which depend on nothing but handles, to the start of backward."""
    config = OffloadConfig(policy=policy, min_tensor_bytes=0, mode="reduce-overhead")
    with inductor_config.patch(force_disable_caches=True):
        run_step(compiled(CASE.fresh("cpu"), graphoffload.OffloadBackend(config)), CASE.example("cpu"), CASE.loss)
    assert settings_seen == [reordered, reordered]


@pytest.mark.usefixtures("kernels_that_do_nothing")
def test_a_partitioner_alone_says_what_it_needs() -> None:
    """Inside Inductor, without our backend, nobody sets the setting but the user."""
    partitioner = graphoffload.OffloadPartitioner(OffloadConfig(policy="offload", min_tensor_bytes=0))
    options = {"custom_partitioner_fn": partitioner, "reorder_for_peak_memory": False, "triton.cudagraphs": True}
    module = CASE.fresh("cpu")
    module.compile(options=options)
    with pytest.warns(FallbackWarning, match=r"reorder_for_reducing_graph_partitions is on.*start of backward"):
        run_step(module, CASE.example("cpu"), CASE.loss)


def test_a_copy_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever captures: refused, before anything is issued, with the tensor's name."""
    side = object.__new__(streams.DeviceStreams)
    side.captured = False
    side.d2h = side.h2d = None  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    entry = type("Entry", (), {"name": "mm of layer0"})()
    with pytest.raises(CaptureError) as info:
        side.copy("d2h", entry, (), lambda: None)
    for part in ("mm of layer0", "d2h", "inside the capture of a CUDA graph", "reduce-overhead", 'policy="keep"'):
        assert part in str(info.value)


def test_plans_are_made_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a process, where a plan changes something and no rank was asked: ranks that keep all cannot disagree."""
    for name, value in (("get_world_size", 8), ("get_rank", 3)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    monkeypatch.setattr(surroundings, "_warned_of_ranks", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_surroundings(plan(count=0), OffloadConfig(), inductor=True, alone=True)
        warn_of_surroundings(plan(), OffloadConfig(), inductor=True)
        warn_of_surroundings(replace(plan(), variant="light"), OffloadConfig(), inductor=True, alone=True)
    with pytest.warns(PerRankPlanWarning) as caught:
        warn_of_surroundings(plan(), OffloadConfig(), inductor=True, alone=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_surroundings(plan(), OffloadConfig(), inductor=True, alone=True)
    for part in ("rank 3 of 8", "device_budget", "h200-sxm", "LOCAL_WORLD_SIZE", "slowest rank"):
        assert part in str(caught[0].message)
