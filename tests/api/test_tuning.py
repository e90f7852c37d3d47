"""tune(): plans are corrected by what was measured, and the best one that ran stays compiled."""

from __future__ import annotations

import functools
import io
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console
from torch import nn

import graphoffload
from graphoffload.api import tuning
from graphoffload.errors import BudgetError, ConfigError
from graphoffload.facts.plan import Decision, Plan, Prediction
from graphoffload.hardware.profile import PROFILES
from graphoffload.options.config import OffloadConfig
from graphoffload.report import progress
from graphoffload.torch_internals import dynamo

GIB = 2**30


class Net(nn.Module):
    """Products with a saved activation each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sin(layer(x))
        return x


def test_real_steps_run_the_plan_stays_and_gradients_are_keep_alls() -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(32, 64)
    calls = 0

    def step() -> None:
        nonlocal calls
        calls += 1
        net.zero_grad()
        net(x).square().sum().backward()

    step()
    expected = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    report = graphoffload.tune(
        net, step, max_slowdown=5.0, inner="aot_eager", min_tensor_bytes=0, hardware=PROFILES["h200-sxm"], steps=2, rounds=1
    )
    assert calls >= 2 * (2 + 3)
    assert report.measured_slowdown is not None
    assert len(report.plans) == 1
    assert any(note.startswith("kept: max_slowdown=") for note in report.notes), report.notes
    assert "ms a step" in str(report)
    assert graphoffload.OffloadReport.from_json(report.to_json()) == report
    assert report.offloaded_bytes + report.recomputed_bytes > 0
    step()
    for parameter, wanted in zip(net.parameters(), expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, wanted)


@pytest.mark.long
def test_plans_are_found_behind_a_compile_cache() -> None:
    """The second time torch's cache answers, and no partitioner runs: the report is the same, and so is the one line."""
    net, x = Net(), torch.randn(32, 64)

    def step() -> None:
        net(x).square().sum().backward()

    given: dict[str, Any] = {"max_slowdown": 5.0, "min_tensor_bytes": 0, "hardware": PROFILES["h200-sxm"]}
    first = graphoffload.tune(net, step, steps=1, rounds=0, **given)
    torch._dynamo.reset()
    with mock.patch("graphoffload.compiler.compile_variant.say") as said:
        second = graphoffload.tune(net, step, steps=1, rounds=0, **given)
    assert [plan.key for plan in second.plans] == [plan.key for plan in first.plans] != []
    assert [call.args[0].endswith("(from the compile cache)") for call in said.call_args_list] == [True, True]


def test_an_error_leaves_the_model_as_it_was() -> None:
    """A budget that no plan meets, and a step that fails: the model runs as before."""
    net, x = Net(), torch.randn(32, 64)
    net.compile(backend="eager")
    before = net._compiled_call_impl
    given: dict[str, Any] = {"inner": "aot_eager", "hardware": PROFILES["h200-sxm"], "steps": 1}
    with pytest.raises(BudgetError, match="least feasible"):
        graphoffload.tune(net, lambda: net(x), device_budget="1KiB", **given)
    assert net._compiled_call_impl is before
    with pytest.raises(ZeroDivisionError):
        graphoffload.tune(net, lambda: 1 / 0, device_budget="1GiB", **given)
    assert net._compiled_call_impl is before


def test_many_compiles_of_the_same_code_before() -> None:
    """torch would run the ninth in eager, and that would be measured."""
    x = torch.randn(32, 64)
    torch._dynamo.reset()
    for number in range(torch._dynamo.config.recompile_limit):
        other = Net()
        other.compile(backend=graphoffload.OffloadBackend(inner="aot_eager", policy="keep", min_tensor_bytes=number))
        other(x).sum().backward()
    net = Net()
    report = graphoffload.tune(net, lambda: net(x).sum().backward(), max_slowdown=1.0, inner="aot_eager", steps=1, rounds=0)
    assert len(report.plans) == 1


def test_a_step_that_compiles_nothing_is_an_error() -> None:
    """Such as one of another model; nothing is measured for a plan that is not there."""
    net, other = Net(), Net()
    with pytest.raises(ConfigError, match="nothing was planned"):
        graphoffload.tune(net, lambda: other(torch.randn(32, 64)).sum().backward(), max_slowdown=1.0, inner="aot_eager")
    assert net._compiled_call_impl is None


def test_a_correction_that_cannot_be_planned_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget that the measurement asks for is below the least feasible one: the plan that ran stays."""
    net, x = Net(), torch.randn(32, 64)
    impossible = OffloadConfig(inner="aot_eager", hardware=PROFILES["h200-sxm"], device_budget="1KiB")
    monkeypatch.setattr(tuning._Tuner, "corrected", lambda *_: impossible)
    report = graphoffload.tune(net, lambda: net(x), inner="aot_eager", hardware=PROFILES["h200-sxm"], steps=1, rounds=1)
    assert len(report.notes) == 1


def plan(predicted: int) -> Plan:
    """A plan that offloads something, with a predicted peak."""
    prediction = Prediction(predicted_peak_bytes=predicted)
    return Plan(key="k", graph="g", decisions=(Decision("a", "offload", ""),), prediction=prediction)


class Played:
    """Measurements by budget or slowdown, instead of steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
        self.asked: list[OffloadConfig] = []

        def run(tuner: Any, config: OffloadConfig) -> tuning._Trial:
            step_s, peak, predicted = answer(config)
            if config.policy != "keep":
                self.asked.append(config)
            return tuning._Trial(config, f"compiled {len(self.asked)}", (plan(predicted),), step_s, peak)

        monkeypatch.setattr(tuning._Tuner, "run", run)


def test_a_peak_above_its_budget_is_planned_again_for_as_much_less(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch, lambda c: (1.0, 99 * GIB, 0) if c.policy == "keep" else (
        1.1, int(c.device_budget) + GIB, int(c.device_budget)))  # fmt: skip
    net = Net()
    report = graphoffload.tune(net, lambda: None, device_budget=10 * GIB)
    assert [c.device_budget for c in played.asked] == [10 * GIB, 9 * GIB]
    assert report.measured_peak_bytes == 10 * GIB
    assert net._compiled_call_impl == "compiled 2"
    assert [note.split(":")[0] for note in report.notes] == ["tried", "kept"]


def test_room_below_the_budget_is_used_and_the_faster_plan_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch, lambda c: (1.0, 99 * GIB, 0) if c.policy == "keep" else (
        1.3 - int(c.device_budget) / (100 * GIB), int(c.device_budget) - 2 * GIB, int(c.device_budget)))  # fmt: skip
    report = graphoffload.tune(Net(), lambda: None, device_budget=10 * GIB)
    assert [c.device_budget for c in played.asked] == [10 * GIB, 12 * GIB]
    assert report.measured is not None
    assert report.measured.step_time_s == pytest.approx(1.18)


def test_a_budget_that_no_plan_keeps_is_an_error_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    Played(monkeypatch, lambda c: (1.0, 12 * GIB, 9 * GIB))
    with pytest.raises(BudgetError, match=r"device_budget 10\.0 GiB: the best of 3 .* reaches 12\.0 GiB, 2\.00 GiB too"):
        graphoffload.tune(Net(), lambda: None, device_budget=10 * GIB)


def test_a_step_that_is_too_slow_is_planned_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch, lambda c: (1.0, 99 * GIB, 0) if c.policy == "keep" else (
        1.02 + float(c.max_slowdown or 0), GIB, GIB))  # fmt: skip
    report = graphoffload.tune(Net(), lambda: None, max_slowdown=0.05)
    assert [c.max_slowdown for c in played.asked] == [0.05, pytest.approx(0.03)]
    assert report.measured_slowdown == pytest.approx(0.05)


def test_keep_all_that_does_not_fit_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(config: OffloadConfig) -> tuple[float, int, int]:
        if config.policy == "keep":
            raise torch.OutOfMemoryError
        return 1.0, 10 * GIB, 10 * GIB

    Played(monkeypatch, answer)
    report = graphoffload.tune(Net(), lambda: None, device_budget=10 * GIB)
    assert report.measured_slowdown is None
    assert report.measured_peak_bytes == 10 * GIB


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"steps": 0}, r"tune\(steps=0, rounds=2\): at least one step"),
        ({"policy": "offload"}, r'policy="offload" leaves nothing to plan'),
    ],
)
def test_refuses_what_leaves_nothing_to_do(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        graphoffload.tune(Net(), lambda: None, **given)


@pytest.mark.skipif(not dynamo.isolated(), reason="before torch 2.13 compiles of one forward count together")
def test_tuning_often_leaves_dynamo_room_to_compile() -> None:
    """Dynamo gives up at eight compiles of one forward: steps would be measured in eager, and training would run so."""
    torch._dynamo.reset()
    net, x = Net(), torch.randn(32, 64)

    def step() -> None:
        net(x).square().sum().backward()

    options: dict[str, Any] = {"inner": "aot_eager", "min_tensor_bytes": 0, "hardware": PROFILES["h200-sxm"]}
    for _ in range(5):
        assert graphoffload.tune(net, step, max_slowdown=5.0, steps=1, rounds=0, **options).plans
    graphoffload.offload(net, policy="offload", **options)
    before = graphoffload.stats()["offloads"]
    step()
    assert graphoffload.stats()["offloads"] > before


def test_a_terminal_shows_what_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep-all and the goal, compiled and measured; the bar is gone in the end."""
    screen = io.StringIO()
    console = functools.partial(Console, file=screen, force_terminal=True, width=150)
    monkeypatch.setattr(progress, "terminal", console)
    net, x = Net(), torch.randn(32, 64)
    given: dict[str, Any] = {"inner": "aot_eager", "min_tensor_bytes": 0, "hardware": PROFILES["h200-sxm"], "steps": 2}
    graphoffload.tune(net, lambda: net(x).square().sum().backward(), max_slowdown=5.0, rounds=0, **given)
    shown = screen.getvalue()
    for text in ("tune", "keep-all: compiling", "max_slowdown=5: compiling", "10/10"):
        assert text in shown, text
